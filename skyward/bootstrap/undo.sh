# Removes nodes: their folders, and all processes with their names in the environment.
# From the client: nodes.
for node in $nodes; do
    # Remove the folder first: a start of the agent that is still under way then finds none and gives up.
    is_base_ours && rm -rf "${base:?}/$node"
    # Repeat until there are none, because a killed process may have forked just before.
    for round in 1 2 3 4 5 6 7 8 9 10; do
        is_any=
        for file in $(grep -slF "SKYWARD_NODE=$node" /proc/[0-9]*/environ); do
            pid=${file#/proc/}
            kill -9 "${pid%/environ}" 2>/dev/null && is_any=1
        done
        [ -n "$is_any" ] || break
    done
    is_base_ours && rm -rf "${base:?}/$node"
    # The groups of the node, and those of its calls below them.
    find /sys/fs/cgroup -depth -type d \( -name "skyward.*.*.$node" -o -path "*/skyward.*.*.$node/*" \) \
        -exec rmdir {} + 2>/dev/null || :
done
say end ok
