# Creates what a node lacks and keeps what it has, so it can be interrupted anywhere and run again.
# From the client: ours, user (names of environments), uv (path, or empty: in the stream), uv_version,
# python (path, or empty: to be downloaded), wanted_python, folder, beside, code, objects, limit_s, limit_kib.
gone() { # WHAT: it existed at the time of the probe, so the client did not send it
    fail "$1: removed since the probe, perhaps because the cache was cleared; try again"
}

find_uv() {
    if [ -n "$uv" ]; then
        [ -x "$uv" ] || gone "$uv"
        return 0
    fi
    uv=$platform/uv-$uv_version
    if [ -x "$uv" ]; then return 0; fi
    phase uv
    [ -s uv.gz ] || fail "uv is not available for this platform; install it there (https://docs.astral.sh/uv/)"
    gzip -dc uv.gz >"$uv.$$" && chmod 700 "$uv.$$" && mv -f "$uv.$$" "$uv" || fail "cannot write $uv; free disk space there"
    "$uv" --version || fail "the uploaded uv does not run here; install uv there"
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
    fail "Python ${wanted_python##* } is missing on this node and cannot be downloaded; install it there"
}

make_ours() {
    "$uv" venv --quiet --python "$python" "$1" &&
        UV_OVERRIDE='' "$uv" pip install --quiet --no-deps --python "$1/bin/python" -r ours.txt
}

make_user() {
    "$uv" venv --quiet --python "$python" "$1" &&
        install_user "$1/bin/python" &&
        { [ ! -s setup.txt ] || run_setup "$1"; }
}

# A lock has every package, so it takes neither overrides nor dependencies that it does not name.
install_user() { # PYTHON
    if [ -s pylock.toml ]; then
        UV_OVERRIDE='' "$uv" pip install --python "$1" -r pylock.toml
    elif [ -s locked.txt ]; then
        UV_OVERRIDE='' "$uv" pip install --python "$1" --require-hashes --no-deps -r locked.txt
    elif [ -s pyproject.toml ]; then
        "$uv" pip install --python "$1" -r pyproject.toml -r user.txt
    elif [ -s user.txt ]; then
        "$uv" pip install --python "$1" -r user.txt
    fi
}

# The commands of Image.run. Their processes end with this script's time limit, as those of a package build do.
run_setup() { # FOLDER
    phase setup
    while IFS= read -r command <&6; do
        (
            VIRTUAL_ENV=$1 PATH=$1/bin:$PATH
            export VIRTUAL_ENV PATH
            cd "$1" && exec sh -c "$command" </dev/null 6<&- 7<&- 8>&-
        )
        outcome=$? # not `code`, which names the code of the user
        [ "$outcome" = 0 ] || fail "Image.run: \`$command\` exited with code $outcome; mend it"
    done 6<setup.txt
}

# Create an environment under its final name, because installed packages contain its path. It counts only once its marker
# is written, which is the last step.
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
        "$4" "$target" || fail "cannot create $target; mend what the last output says"
        env -u PYTHONPATH -u PYTHONHOME "$target/bin/python" -c "$describe" >"$target/ready.tmp" ||
            fail "cannot run the Python of $target; install another one there"
        mv -f "$target/ready.tmp" "$target/ready.json"
    fi
    say_environment "$target" "$2"
    exec 8>&-
}

# With little free space, remove everything that is not in use instead of failing.
make_room() {
    free=$(df -Pk "$platform" | awk 'NR == 2 { print $4 }')
    [ "${free:-$low_kib}" -ge "$low_kib" ] || bound_cache 0 1
}

keep_code() {
    has_code "$code" "$objects" && return 0
    phase code
    mkdir -p "$root/code/objects" || fail "cannot create $root/code; free disk space there"
    for object in $objects; do
        kept=$root/code/objects/$object
        if [ -e "$kept" ]; then continue; fi
        [ -e "objects/$object" ] || gone "$kept"
        [ "$(sha256sum "objects/$object" | cut -d ' ' -f 1)" = "$object" ] ||
            fail "a file of the user's code changed while it was read; try again"
        mv "objects/$object" "$kept" || fail "cannot write $kept; free disk space there"
    done
    mv -f code.tar.gz "$root/code/$code.tar.gz" || fail "cannot write $root/code; free disk space there"
}

describe='
import json, os, platform, sys
print(json.dumps({
    "python": os.path.join(sys.prefix, "bin", "python"),
    "version": platform.python_version(),
    "path": [entry for entry in sys.path if entry],
}))
'

mkdir -p "$platform" || fail "$platform: cannot create the folder; the home of $(id -un) must be writable"
# Set as a variable, because the name of the option differs between versions of uv.
export UV_OVERRIDE="$PWD/overrides.txt"
export UV_CACHE_DIR="$platform/uv-cache" UV_NO_PROGRESS=1 UV_PYTHON_DOWNLOADS=manual
# A company's own certificates are in the system's store, but not in that of uv.
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
    fail "cannot unpack the code to $base/$folder; free disk space there"
}
say unpacked ok
[ -z "$was_made" ] || bound_cache "$limit_kib" 15
say end ok
