# Removes what is kept for the next pool, of all platforms that share this home.
for platform in "$root"/*-*-*; do
    [ -d "$platform" ] || continue
    for folder in "$platform"/ours-* "$platform"/user-*; do
        [ -d "$folder" ] || continue
        if is_used "$folder" || is_recent "$folder/used" 15; then
            say kept "$folder"
            continue
        fi
        say removed "$(du -sk "$folder" | cut -f 1) $folder"
        remove_environment "$folder"
    done
    # The interpreter of an environment that stays may be one that uv has downloaded.
    if ! ls -d "$platform"/ours-* "$platform"/user-* >/dev/null 2>&1; then
        say removed "$(du -sk "$platform" | cut -f 1) $platform"
        rm -rf "$platform"
    fi
done
for folder in "$root/code" "$root/client"; do
    if [ -d "$folder" ]; then
        say removed "$(du -sk "$folder" | cut -f 1) $folder"
        rm -rf "$folder"
    fi
done
rmdir "$root/tmp" "$root" 2>/dev/null
say end ok
