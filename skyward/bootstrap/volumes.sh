# Lists or removes volumes, whose layout skyward/state/volumes.py describes. From the client: action, name.
data=${XDG_DATA_HOME:-}
case $data in
/*) ;;
*) data=$HOME/.local/share ;;
esac
folders=$data/skyward/volumes
locks=$data/skyward/volume-locks

if ! command -v flock >/dev/null; then
    say refused "the program flock is missing, so nobody can tell which volumes are in use; install util-linux"
    exit 1
fi
rm -rf "$folders"/.removed-* # what an interrupted removal left

list() {
    for folder in "$folders"/*; do
        [ -d "$folder" ] && [ ! -L "$folder" ] || continue
        lock=$locks/${folder##*/}
        used=-
        [ ! -e "$lock" ] || used=$(date -r "$lock" +%F)
        state=free
        (flock -n -x 9 || exit 1) 9>>"$lock" || state=used
        say volume "$(du -sk "$folder" | cut -f 1) $used $state $folder"
    done
}

remove() {
    folder=$folders/$name
    if [ ! -d "$folder" ] || [ -L "$folder" ]; then
        say missing "$name"
        return
    fi
    exec 9>>"$locks/$name"
    if ! flock -n -x 9; then
        say used "$name"
        return
    fi
    old=$folders/.removed-$name-$$
    size=$(du -sk "$folder" | cut -f 1)
    mv "$folder" "$old" || return
    exec 9>&- # a pool may make the volume again
    rm -rf "$old" && say removed "$size - free $folder"
}

mkdir -p "$locks"
"$action"
say end ok
