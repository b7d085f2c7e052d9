# Lists or removes volumes, whose layout skyward/state/volumes.py describes. From the client: action, name.
data=${XDG_DATA_HOME:-}
case $data in
/*) ;;
*) data=$HOME/.local/share ;;
esac
folders=$data/skyward/volumes
caches=$data/skyward/volume-caches
locks=$data/skyward/volume-locks

if ! command -v flock >/dev/null; then
    say refused "the program flock is missing, so nobody can tell which volumes are in use; install util-linux"
    exit 1
fi
rm -rf "$folders"/.removed-* # what an interrupted removal left

show() { # FOLDER LOCK NAME
    used=-
    [ ! -e "$2" ] || used=$(date -r "$2" +%F)
    state=free
    (flock -n -x 9 || exit 1) 9>>"$2" || state=used
    say volume "$(du -sk "$1" | cut -f 1) $used $state $3 $1"
}

list() {
    for folder in "$folders"/*; do
        if [ -d "$folder" ] && [ ! -L "$folder" ]; then show "$folder" "$locks/${folder##*/}" "${folder##*/}"; fi
    done
    for folder in "$caches"/*; do
        if [ -s "$folder/source" ]; then show "$folder" "$locks/caches-${folder##*/}" "$(cat "$folder/source")"; fi
    done
}

remove() {
    folder=$folders/$name
    lock=$locks/$name
    case $name in
    *://*) # the cache of an object store
        for folder in "$caches"/* ""; do
            [ "$(cat "$folder/source" 2>/dev/null)" != "$name" ] || break
        done
        lock=$locks/caches-${folder##*/}
        ;;
    esac
    if [ ! -d "$folder" ] || [ -L "$folder" ]; then
        say missing "$name"
        return
    fi
    exec 9>>"$lock"
    if ! flock -n -x 9; then
        say used "$name"
        return
    fi
    old=$folders/.removed-${folder##*/}-$$
    size=$(du -sk "$folder" | cut -f 1)
    mkdir -p "$folders"
    mv "$folder" "$old" || return
    exec 9>&- # a pool may make the volume again
    rm -rf "$old" && say removed "$size - free $name $folder"
}

mkdir -p "$locks"
"$action"
say end ok
