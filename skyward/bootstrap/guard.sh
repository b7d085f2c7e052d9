# Runs task.sh, and ends it with everything it started when the time is up or nobody listens any more.
# From the client: limit_s. The folder that this script lies in is its own, and is removed in the end.
work=$(dirname "$0")
cd "$work" || exit 1
trap 'rm -rf "$work"' EXIT
exec 2>&1

# timeout makes a process group of what it runs, so it can end a build of a package with its compilers.
timeout -k 5 "$limit_s" sh ./task.sh </dev/null &
task=$!
trap 'kill "$task" 2>/dev/null' HUP INT PIPE TERM
# Written to a link that is gone, this fails: what the client cannot see it has given up.
(
    trap '' PIPE
    while sleep 2 </dev/null >/dev/null 2>&1; do
        printf '\001alive\n' || { kill "$task"; exit; }
    done
) &
heartbeat=$!
while :; do
    wait "$task" # a signal ends it early
    code=$?
    kill -0 "$task" 2>/dev/null || break
done
kill "$heartbeat" 2>/dev/null
exit "$code"
