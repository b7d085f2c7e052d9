# Leaves nothing of nodes that were begun here: their folders, and all that carries their names in its environment.
# From the client: nodes.
for node in $nodes; do
    # The folder first: a start of its agent that did not come so far finds none, and gives up.
    is_base_ours && rm -rf "${base:?}/$node"
    # Until there are none: what is killed may have been about to fork.
    for round in 1 2 3 4 5 6 7 8 9 10; do
        found=
        for file in $(grep -slF "SKYWARD_NODE=$node" /proc/[0-9]*/environ); do
            pid=${file#/proc/}
            kill -9 "${pid%/environ}" 2>/dev/null && found=1
        done
        [ -n "$found" ] || break
    done
    is_base_ours && rm -rf "${base:?}/$node"
done
say end ok
