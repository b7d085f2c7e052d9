# Runs task.sh, and ends it with all its processes on timeout or when the client is gone.
# From the client: limit_s. The script owns the folder that it is in, and removes it at the end.
work=$(dirname "$0")
cd "$work" || exit 1
trap 'rm -rf "$work"' EXIT
exec 2>&1

# timeout runs its command in a process group, so it also ends the compilers of a package that is being built.
timeout -k 5 "$limit_s" sh ./task.sh </dev/null &
task=$!
trap 'kill "$task" 2>/dev/null' HUP INT PIPE TERM
# Heartbeat: a write to a closed link fails, and then the client has given up on this task.
(
    trap '' PIPE
    while sleep 2 </dev/null >/dev/null 2>&1; do
        printf '\001alive\n' || { kill "$task"; exit; }
    done
) &
heartbeat=$!
while :; do
    wait "$task" # a signal interrupts it, so check below whether the task has really ended
    code=$?
    kill -0 "$task" 2>/dev/null || break
done
kill "$heartbeat" 2>/dev/null
exit "$code"
