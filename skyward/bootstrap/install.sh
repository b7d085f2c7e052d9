# Makes what a node lacks. What is there is kept, so it may be interrupted anywhere and run again.
# From the client: ours, user (names of environments), uv (path, or empty: it came along), uv_version,
# python (path, or empty: to be downloaded), wanted_python, folder, limit_s.
phase() { say phase "$1"; }
is_ready() { say ready "$1"; }
fail() {
    say problem "$1"
    exit 1
}

lock() { # NAME: one at a time on this machine; another pool's bootstrap may be at the same
    exec 8>"$platform/lock-$1" || fail "$platform is not writable"
    ! command -v flock >/dev/null || flock -w "$limit_s" 8 ||
        fail "another bootstrap has held $platform/lock-$1 for $limit_s s; end it, or remove the file"
}

find_uv() {
    [ -z "$uv" ] || return 0
    uv=$platform/uv-$uv_version
    if [ -x "$uv" ]; then return 0; fi
    phase uv
    [ -s uv.gz ] || fail "there is no uv for this platform; install it there (https://docs.astral.sh/uv/)"
    gzip -dc uv.gz >"$uv.$$" && chmod 700 "$uv.$$" && mv -f "$uv.$$" "$uv" || fail "$uv cannot be written"
    "$uv" --version || fail "the uv that came along does not run here"
}

find_python() {
    [ -z "$python" ] || return 0
    phase python
    export UV_PYTHON_INSTALL_DIR="$platform/python" UV_PYTHON_PREFERENCE=only-managed UV_PYTHON_INSTALL_BIN=0
    for version in $wanted_python; do
        if "$uv" python install "$version" && python=$("$uv" python find "$version"); then
            unset UV_PYTHON_PREFERENCE
            return 0
        fi
    done
    fail "this node has no Python ${wanted_python##* }, and none can be downloaded; install it there"
}

make_ours() {
    "$uv" venv --quiet --python "$python" "$1" &&
        "$uv" pip install --quiet --no-deps --python "$1/bin/python" -r ours.txt
}

make_user() {
    "$uv" venv --quiet --python "$python" "$1" &&
        { [ ! -s user.txt ] || "$uv" pip install --python "$1/bin/python" --overrides overrides.txt -r user.txt; }
}

# Made in its place, not under another name: paths stand in what packages install. Without its marker it is not there.
environment() { # NAME KIND PHASE MAKE
    target=$platform/$1
    lock "$1"
    if is_whole "$target"; then
        is_ready "$3"
    else
        phase "$3"
        rm -rf "$target"
        "$4" "$target" || fail "$target cannot be made"
        env -u PYTHONPATH -u PYTHONHOME "$target/bin/python" -c "$describe" >"$target/ready.tmp" ||
            fail "the Python of $target does not run"
        mv -f "$target/ready.tmp" "$target/ready.json"
    fi
    say_environment "$target" "$2"
    exec 8>&-
}

describe='
import json, os, platform, sys
print(json.dumps({
    "python": os.path.join(sys.prefix, "bin", "python"),
    "version": platform.python_version(),
    "path": [entry for entry in sys.path if entry],
}))
'

mkdir -p "$platform" || fail "$platform cannot be made: the home of $(id -un) must be writable"
export UV_CACHE_DIR="$platform/uv-cache" UV_NO_PROGRESS=1 UV_PYTHON_DOWNLOADS=manual
# Where a company has certificates of its own, they are in the system's store and not in uv's.
store=/etc/ssl/certs/ca-certificates.crt
if [ -z "$SSL_CERT_FILE" ] && [ -s "$store" ]; then export SSL_CERT_FILE="$store"; fi
find_uv
find_python
environment "$ours" ours skyward make_ours
environment "$user" "user:$user" packages make_user
make_folder "$folder" || exit 1
say end ok
