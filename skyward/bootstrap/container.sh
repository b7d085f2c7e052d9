# Finds a container runtime, gets the image once, and reports how to run commands in it.
# From the client: image, folder (of this pool's node), lease_file, volumes and is_detached (each empty for none), limit_s.
end=$(($(date +%s) + limit_s))
left_s() { # for timeout(1), which takes 0 for no limit
    left=$((end - $(date +%s)))
    [ "$left" -gt 0 ] || left=1
    echo "$left"
}

find_runtime() {
    why=
    for runtime in podman docker; do
        command -v "$runtime" >/dev/null || continue
        if why=$("$runtime" version 2>&1 >/dev/null); then return 0; fi
    done
    if [ -z "$why" ] && [ -n "$lease_file" ] && install_podman; then
        runtime=podman
        return 0
    fi
    say problem "podman and docker are ${why:+not usable by $(id -un) ($(printf %s "$why" | tail -n 1))}${why:-missing on this machine}; install podman there"
    exit 1
}

# Only on a rented machine, which has a lease and ends with the pool. Its boot image may have neither.
install_podman() {
    as_root=
    [ "$(id -u)" = 0 ] || as_root="sudo -n"
    # With what podman recommends: without root, it needs newuidmap.
    why=$(timeout "$(left_s)" $as_root sh -c '
        export DEBIAN_FRONTEND=noninteractive
        apt-get update && apt-get install -y -o DPkg::Lock::Timeout=300 podman' 2>&1 </dev/null | tail -n 1)
    command -v podman >/dev/null && podman version >/dev/null 2>&1
}

id_of_image() {
    "$runtime" image inspect --format '{{.Id}}' "$image" 2>/dev/null | head -n 1
}

# Nodes that share a host wait for the one that pulls.
get_image() {
    id=$(id_of_image)
    [ -z "$id" ] || return 0
    exec 8>"$root/lock-container"
    get_lock -x 8 "$(left_s)" || {
        say problem "another node of this host has pulled it for $limit_s s; see what holds $root/lock-container there"
        exit 1
    }
    id=$(id_of_image)
    if [ -z "$id" ]; then
        why=$(timeout "$(left_s)" "$runtime" pull "$image" 2>&1 8>&- | tail -n 3 | tr '\n' ' ')
        id=$(id_of_image)
    fi
    exec 8>&-
    [ -n "$id" ] && return 0
    [ "$(left_s)" -gt 1 ] || why="no end within $limit_s s${why:+ ($why)}"
    say problem "$runtime cannot pull it: $why; log in there, or pull it by hand"
    exit 1
}

# systemd ends the containers of an ordinary user's podman with the last login, unless the user lingers.
ends_with_login() {
    [ "$runtime" = podman ] && [ "$(id -u)" != 0 ] &&
        [ "$(loginctl show-user "$(id -un)" --property=Linger --value 2>/dev/null </dev/null)" = no ]
}

check_lingering() {
    ends_with_login || return 0
    # Only on a rented machine, which nobody else uses.
    [ -z "$lease_file" ] || sudo -n loginctl enable-linger "$(id -un)" >/dev/null 2>&1 </dev/null
    ends_with_login || return 0
    say problem "containers of $(id -un) end with the last login, and so would a detached pool; run \`sudo loginctl enable-linger $(id -un)\` there"
    exit 1
}

word() { say word "$1"; }
mounted() { word "--volume=$1:$1"; }

find_runtime
mkdir -p "$root" || say problem "$root: cannot create the folder; the home of $(id -un) must be writable"
make_folder "$folder" || exit 1
get_image
[ -z "$is_detached" ] || check_lingering
say runtime "$runtime"
say id "${id#sha256:}"
# The processes stay visible on the host, as those of other nodes. So the cache knows which environments are in use.
for option in --network=host --pid=host --ipc=host --entrypoint=sh --workdir=/ --security-opt=label=disable; do
    word "$option"
done
word "--label=skyward=$folder"
for name in HOME XDG_CACHE_HOME XDG_DATA_HOME SSH_CONNECTION; do
    eval "value=\$$name"
    [ -z "$value" ] || word "--env=$name=$value"
done
if [ "$runtime" = docker ]; then
    word "--user=$(id -u):$(id -g)"
elif [ "$(id -u)" != 0 ]; then
    word --userns=keep-id
fi
# Folders of the host in the container, under the same paths.
mounted "$root"
mounted "$base"
[ -z "$lease_file" ] || mounted "${lease_file%/*}"
if [ -n "$volumes" ]; then # skyward/state/volumes.py makes the folders of volumes there
    case ${XDG_DATA_HOME:-} in
    /*) data=$XDG_DATA_HOME/skyward ;;
    *) data=$HOME/.local/share/skyward ;;
    esac
    mkdir -p "$data" || say problem "$data: cannot create the folder of volumes; the home of $(id -un) must be writable"
    mounted "$data"
fi
if [ -e /dev/nvidiactl ]; then
    if [ "$runtime" = docker ]; then word --gpus=all; else word --device=nvidia.com/gpu=all; fi
fi
for device in /dev/kfd /dev/dri; do
    if [ -e /dev/kfd ] && [ -e "$device" ]; then word "--device=$device"; fi
done
say end ok
