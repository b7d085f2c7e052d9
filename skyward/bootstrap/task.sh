# Common part of scripts that change a node: reports of their phases, and locks.
phase() { say phase "$1"; }
is_ready() { say ready "$1"; }
fail() {
    say problem "$1"
    exit 1
}

lock() { # NAME: keeps out other pools that prepare the same thing
    mkdir -p "$platform" && : >"$platform/lock-$1" ||
        fail "$platform: cannot write; the home of $(id -un) must be writable"
    exec 8>"$platform/lock-$1" # a shell ends when this fails
    get_lock -x 8 "$limit_s" ||
        fail "$platform/lock-$1: held by another bootstrap for $limit_s s; stop it, or remove the file"
}

hold_cache -s "$limit_s" || fail "${root%/*}: locked by another process for $limit_s s; try again later"
