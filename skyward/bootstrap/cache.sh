# Cache on a node for the next pools, and its limit. From the client: limit_kib.

# The arguments of agents and slots contain their interpreter and path. The pattern comes by standard input, because grep
# would find its own arguments.
is_used() { # FOLDER
    printf '%s/\n' "$1" | grep -qF -f - /proc/[0-9]*/cmdline 2>/dev/null
}

# A pool that has just found an environment may not have started its agent yet, so recent use counts too.
is_recent() { # FILE
    [ -n "$(find "$1" -mmin -"$2" 2>/dev/null)" ]
}

size_kib() { # in one run of du, which counts files once that uv's cache shares with the environments by hard links
    total=$(du -skc "$platform" "$root/code" 2>/dev/null | tail -n 1)
    echo "${total%%[!0-9]*}"
}

remove_environment() { # FOLDER: the marker goes first, so that a half-removed environment does not count as complete
    rm -f "$1/ready.json" && mv "$1" "$1.removed" 2>/dev/null
    rm -rf "$1.removed" "$1"
}

# Remove the least recently used environments until the total is below the limit.
bound_cache() { # LIMIT_KIB MINUTES: keep environments that were used within these minutes
    find "$root/tmp" -mindepth 1 -maxdepth 1 -mmin +1440 -exec rm -rf {} + 2>/dev/null
    [ "$(size_kib)" -gt "$1" ] || return 0
    for mark in $(ls -1tr "$platform"/*/used 2>/dev/null); do
        folder=${mark%/used}
        [ "$folder" != "$platform/$ours" ] && [ "$folder" != "$platform/$user" ] || continue
        if is_recent "$mark" "$2" || is_used "$folder"; then continue; fi
        echo "removing $folder, last used $(date -r "$mark" +%F)"
        remove_environment "$folder"
        [ "$(size_kib)" -gt "$1" ] || return 0
    done
    find "$root/code" -type f -mmin +"$2" -exec rm -f {} + 2>/dev/null
    [ "$(size_kib)" -gt "$1" ] || return 0
    echo "removing the downloads of uv"
    rm -rf "$platform/uv-cache"
}
