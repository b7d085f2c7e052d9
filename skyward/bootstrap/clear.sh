# Removes the cache of all platforms that share this home. From the client: patience_s.
if ! hold_cache -x "$patience_s"; then
    say busy "$root"
    exit 1
fi
for platform in "$root"/*-*-*; do
    [ -d "$platform" ] || continue
    is_kept=
    for folder in "$platform"/ours-* "$platform"/user-*; do
        [ -d "$folder" ] || continue
        if is_used "$folder" || is_recent "$folder/used" 15; then
            say kept "$folder"
            is_kept=1
            continue
        fi
        say removed "$(du -sk "$folder" | cut -f 1) $folder"
        remove_environment "$folder"
    done
    # An environment that stays may use an interpreter from this folder.
    if [ -z "$is_kept" ]; then
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
