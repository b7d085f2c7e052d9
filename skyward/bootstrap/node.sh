# What every script on a node begins with. POSIX sh: nothing here may need bash, or Python, which the node may lack.
# Variables that come from the client are assigned ahead of this text.
umask 077
export LC_ALL=C
root=${XDG_CACHE_HOME:-$HOME/.cache}/skyward

libc() {
    version=$(getconf GNU_LIBC_VERSION 2>/dev/null) || version=
    for loader in /lib64/ld-linux-*.so.* /lib/ld-linux-*.so.*; do # it says its version, where there is no getconf
        [ -z "$version" ] && [ -x "$loader" ] || continue
        version=$("$loader" --version 2>/dev/null | sed -n '1s/.* \([0-9][0-9.]*[0-9]\)\.*$/\1/p')
    done
    if [ -n "$version" ]; then
        echo "glibc${version#glibc }"
    elif ls /lib/ld-musl-* >/dev/null 2>&1; then
        echo musl
    else
        echo unknown
    fi
}

system=$(uname -s)
machine=$(uname -m)
libc=$(libc)
# A home may be shared by machines that are not alike.
platform=$root/$system-$machine-$libc

# An environment is whole when its marker is there: it is written last. The python in it is a link, and what it
# points to may have been removed since.
is_whole() {
    [ -s "$1/ready.json" ] && [ -x "$1/bin/python" ]
}

# Where there is no flock nobody is kept out. Asked again and again: busybox's has no time limit.
get_lock() { # -s (with others that say so) or -x (alone), FD, SECONDS
    command -v flock >/dev/null || return 0
    waited=0
    until flock "$1" -n "$2"; do
        [ "$waited" -lt "$3" ] || return 1
        waited=$((waited + 1))
        sleep 1
    done
}

# Who uses what is kept here waits while somebody clears it, and he for them. The folder around it is the lock, so
# that none stays. It ends with the script.
hold_cache() { # -s or -x, SECONDS
    mkdir -p "${root%/*}" 2>/dev/null
    [ -r "${root%/*}" ] || return 0
    exec 7<"${root%/*}"
    get_lock "$1" 7 "$2"
}

say() { # NAME TEXT: a fact for the client, on a line of its own
    printf '\001%s %s\n' "$1" "$2"
}

say_environment() { # FOLDER KIND
    touch "$1/used"
    say "$2" "$(cat "$1/ready.json")"
}

variable() { # NAME COMMAND: what the command prints; newlines cannot stand in a line
    value=$(timeout 20 sh -c "$2" </dev/null 2>/dev/null)
    say "variable:$1" "$? $(printf '%s' "$value" | tr '\n' '\002')"
}

base=/tmp/skyward-$(id -u)

# Whose are the folders of nodes here? As skyward.core.ownership asks on the client.
is_base_ours() {
    [ -d "$base" ] && [ -O "$base" ] && [ ! -L "$base" ] && [ -z "$(find "$base" -prune -perm -2)" ]
}

# The folder of one pool's node: short (a socket's path has 108 bytes at most), and nobody else's.
make_folder() { # NAME
    if ! mkdir -m 700 "$base" 2>/dev/null && [ ! -e "$base" ] && [ ! -L "$base" ]; then
        say problem "$base cannot be made: /tmp must be writable, with room left"
        return 1
    fi
    if ! is_base_ours; then
        say problem "$base belongs to another user, is a link, or everybody may write to it; remove it"
        return 1
    fi
    if ! chmod 700 "$base" || ! mkdir -p "$base/$1"; then
        say problem "$base/$1 cannot be made: /tmp must be writable, with room left"
        return 1
    fi
    say folder "$base/$1"
}

has_code() { # NAME OBJECTS: is all of the user's code here?
    [ -z "$1" ] && return 0
    [ -s "$root/code/$1.tar.gz" ] || return 1
    for object in $2; do
        if [ ! -e "$root/code/objects/$object" ]; then return 1; fi
    done
}

copy() { # FROM TO: blocks are shared until one of them is written to, where the file system can
    cp --reflink=auto "$1" "$2" 2>/dev/null || cp "$1" "$2"
}

# A copy for this pool alone: its tasks may write there.
unpack_code() { # NAME FOLDER
    rm -rf "$2/code" "$2/unpacking" && mkdir "$2/unpacking" || return 1
    if [ -n "$1" ]; then
        touch "$root/code/$1.tar.gz"
        tar -xzmf "$root/code/$1.tar.gz" -C "$2/unpacking" || return 1
        while read -r object mode path; do
            into=$2/unpacking/$path
            touch "$root/code/objects/$object"
            mkdir -p "${into%/*}" && copy "$root/code/objects/$object" "$into" && chmod "$mode" "$into" || return 1
        done <"$2/unpacking/.objects"
    fi
    mkdir -p "$2/unpacking/work" && mv "$2/unpacking" "$2/code"
}

# Which of the image's Debian packages are not installed.
missing_apt() {
    for package in $apt; do
        version=
        case $package in *=*) version=${package#*=} ;; esac
        got=$(dpkg-query -W -f '${db:Status-Abbrev}${Version}' "${package%%[=/]*}" 2>/dev/null)
        case $got in
        ii*) [ -z "$version" ] || [ "${got#ii }" = "$version" ] || echo "$package" ;;
        *) echo "$package" ;;
        esac
    done
}
