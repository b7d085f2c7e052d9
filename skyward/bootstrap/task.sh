# For scripts that change a node: what their phases say, and one at a time.
phase() { say phase "$1"; }
is_ready() { say ready "$1"; }
fail() {
    say problem "$1"
    exit 1
}

lock() { # NAME: another pool's bootstrap may be at the same
    mkdir -p "$platform" && : >"$platform/lock-$1" ||
        fail "$platform cannot be written: the home of $(id -un) must be writable"
    exec 8>"$platform/lock-$1" # a shell ends when this fails
    get_lock -x 8 "$limit_s" ||
        fail "another bootstrap has held $platform/lock-$1 for $limit_s s; end it, or remove the file"
}

hold_cache -s "$limit_s" || fail "${root%/*} was locked by another process for $limit_s s"
