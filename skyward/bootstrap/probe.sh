# Reports all facts about a node at once. Changes only the time of last use of what it finds.
# From the client: ours, user (names of environments), minor (of Python), uv_version, folder (of this pool's node), eval_vars,
# code and objects (names of the user's code and of its large files), apt, beside (a node's folder, or empty).
say system "$system"
say machine "$machine"
say libc "$libc"
say root "$root"
say platform "$platform"
say uid "$(id -u)"
say cores "$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)"
say memory_kib "$(sed -n 's/^MemTotal: *\([0-9]*\).*/\1/p' /proc/meminfo 2>/dev/null)"

mkdir -p "$platform" || say problem "$platform: cannot create the folder; the home of $(id -un) must be writable"
for tool in tar gzip timeout; do
    command -v "$tool" >/dev/null || say problem "\`$tool\` is missing; install it on the machine, or in the image of its container"
done
say free_kib "$(df -Pk "$platform" 2>/dev/null | awk 'NR == 2 { print $4 }')"

eval_vars # defined by the client: one `variable` for each of the image's shell_vars

hold_cache -s 20 || say problem "${root%/*}: locked by another process for 20 s; try again later"

is_cold=
if is_whole "$platform/$ours"; then say_environment "$platform/$ours" ours; else is_cold=1; fi
has_user=
for environment in "$platform/$user"*; do
    if is_whole "$environment"; then
        has_user=1
        say_environment "$environment" "user:${environment##*/}"
    fi
done
[ -n "$has_user" ] || is_cold=1

has_code "$code" "$objects" || is_cold=1
for object in $objects; do
    [ -e "$root/code/objects/$object" ] || say missing "$object"
done
missing=$(missing_apt | tr '\n' ' ')
if [ -n "$missing" ]; then
    is_cold=1
    say apt "$missing"
fi

if [ -z "$is_cold" ]; then
    make_folder "$folder" && if unpack_code "$code" "$base/$folder"; then say unpacked ok; fi
else
    for uv in "$platform/uv-$uv_version" "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv" "$(command -v uv)"; do
        if [ -x "$uv" ] && version=$("$uv" --version </dev/null 2>/dev/null); then
            version=${version#uv }
            say uv "${version%% *} $uv"
        fi
    done
    # A shell without a terminal may have a short PATH, so look at the usual places too.
    for python in "$(command -v "python$minor")" /usr/bin/python3 /usr/local/bin/"python$minor" \
        "$HOME/.local/bin/python$minor" "$HOME"/.pyenv/versions/"$minor".*/bin/python3 "$(command -v python3)" \
        "$HOME"/.local/share/uv/python/cpython-"$minor".*/bin/python3 "$platform"/python/cpython-"$minor".*/bin/python3; do
        [ -x "$python" ] || continue
        version=$("$python" -I -S -c 'import sys
print(sys.implementation.name, "%d.%d.%d" % sys.version_info[:3], sys.executable)' </dev/null 2>/dev/null) || continue
        say python "$version"
    done
fi
# A line cannot contain NUL or newline, so replace them.
say environ "$(cat /proc/$$/environ 2>/dev/null | tr '\000\n' '\003\002')"
say end ok
