# Makes what a node lacks. What is there is kept, so it may be interrupted anywhere and run again.
# From the client: ours, user (names of environments), uv (path, or empty: it came along), uv_version,
# python (path, or empty: to be downloaded), wanted_python, folder, code, objects, limit_s, limit_kib.
gone() { # WHAT: the client has not sent it, as it was here when that asked
    fail "$1 was removed a moment ago: was the cache cleared? Try again"
}

find_uv() {
    if [ -n "$uv" ]; then
        [ -x "$uv" ] || gone "$uv"
        return 0
    fi
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
        UV_OVERRIDE='' "$uv" pip install --quiet --no-deps --python "$1/bin/python" -r ours.txt
}

make_user() {
    "$uv" venv --quiet --python "$python" "$1" &&
        { [ ! -s user.txt ] || "$uv" pip install --python "$1/bin/python" -r user.txt; }
}

# Made in its place, not under another name: paths stand in what packages install. Without its marker it is not there.
environment() { # NAME KIND PHASE MAKE
    target=$platform/$1
    lock "$1"
    if is_whole "$target"; then
        is_ready "$3"
    else
        [ -e ours.txt ] || gone "$target"
        find_uv
        find_python
        phase "$3"
        was_made=1
        rm -rf "$target"
        "$4" "$target" || fail "$target cannot be made"
        env -u PYTHONPATH -u PYTHONHOME "$target/bin/python" -c "$describe" >"$target/ready.tmp" ||
            fail "the Python of $target does not run"
        mv -f "$target/ready.tmp" "$target/ready.json"
    fi
    say_environment "$target" "$2"
    exec 8>&-
}

# Little is free: all that nobody uses goes at once, rather than that this fails.
make_room() {
    free=$(df -Pk "$platform" | awk 'NR == 2 { print $4 }')
    [ "${free:-$low_kib}" -ge "$low_kib" ] || bound_cache 0 1
}

keep_code() {
    has_code "$code" "$objects" && return 0
    phase code
    mkdir -p "$root/code/objects" || fail "$root/code cannot be made"
    for object in $objects; do
        kept=$root/code/objects/$object
        if [ -e "$kept" ]; then continue; fi
        [ -e "objects/$object" ] || gone "$kept"
        [ "$(sha256sum "objects/$object" | cut -d ' ' -f 1)" = "$object" ] ||
            fail "a file was changed while it was read: try again"
        mv "objects/$object" "$kept" || fail "$kept cannot be written"
    done
    mv -f code.tar.gz "$root/code/$code.tar.gz" || fail "$root/code cannot be written"
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
# As a variable: the option's name has changed between versions of uv.
export UV_OVERRIDE="$PWD/overrides.txt"
export UV_CACHE_DIR="$platform/uv-cache" UV_NO_PROGRESS=1 UV_PYTHON_DOWNLOADS=manual
# Where a company has certificates of its own, they are in the system's store and not in uv's.
store=/etc/ssl/certs/ca-certificates.crt
if [ -z "$SSL_CERT_FILE" ] && [ -s "$store" ]; then export SSL_CERT_FILE="$store"; fi
low_kib=1048576
make_room
environment "$ours" ours skyward make_ours
environment "$user" "user:$user" packages make_user
keep_code
make_folder "$folder" || exit 1
unpack_code "$code" "$base/$folder" || {
    rm -rf "${base:?}/$folder"
    fail "the code cannot be unpacked to $base/$folder"
}
say unpacked ok
[ -z "$was_made" ] || bound_cache "$limit_kib" 15
say end ok
