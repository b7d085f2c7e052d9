# What is kept on a node for the next pool, and how it stays bounded. From the client: limit_kib.

# Agents and slots name their interpreter and path in their arguments. The pattern comes by standard input: as an
# argument grep would find itself.
is_used() { # FOLDER
    printf '%s/\n' "$1" | grep -qF -f - /proc/[0-9]*/cmdline 2>/dev/null
}

# A pool that has just been told of an environment may not have started its agent yet.
is_recent() { # FILE
    [ -n "$(find "$1" -mmin -"$2" 2>/dev/null)" ]
}

size_kib() { # one count for what is linked twice, as between uv's cache and the environments
    total=$(du -skc "$platform" "$root/code" 2>/dev/null | tail -n 1)
    echo "${total%%[!0-9]*}"
}

remove_environment() { # FOLDER: its marker first, so that it is whole or not there
    rm -f "$1/ready.json" && mv "$1" "$1.removed" 2>/dev/null
    rm -rf "$1.removed" "$1"
}

# The least recently used ones, until all together are below the limit.
bound_cache() { # LIMIT_KIB MINUTES: leave what was used within these
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
    echo "removing what uv has downloaded"
    rm -rf "$platform/uv-cache"
}
