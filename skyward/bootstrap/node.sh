# Common part of all scripts for nodes. POSIX sh only, because the node may have neither bash nor Python.
# The client assigns variables before this text.
umask 077
export LC_ALL=C
root=${XDG_CACHE_HOME:-$HOME/.cache}/skyward

libc() {
    version=$(getconf GNU_LIBC_VERSION 2>/dev/null) || version=
    for loader in /lib64/ld-linux-*.so.* /lib/ld-linux-*.so.*; do # the loader prints its version, for systems without getconf
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
# Machines of different platforms may share a home.
platform=$root/$system-$machine-$libc

# An environment is complete once it has its marker, which is written last. Its python is a link, and the target may have
# been removed since.
is_whole() {
    [ -s "$1/ready.json" ] && [ -x "$1/bin/python" ]
}

# Without flock there is no locking. Polls, because the flock of busybox has no timeout.
get_lock() { # -s (shared) or -x (exclusive), FD, SECONDS
    command -v flock >/dev/null || return 0
    waited=0
    until flock "$1" -n "$2"; do
        [ "$waited" -lt "$3" ] || return 1
        waited=$((waited + 1))
        sleep 1
    done
}

# Users of the cache take a shared lock, and a script that clears it takes an exclusive one. The lock is on the parent
# folder, so no lock file is left behind. It is released when the script ends.
hold_cache() { # -s or -x, SECONDS
    mkdir -p "${root%/*}" 2>/dev/null
    [ -r "${root%/*}" ] || return 0
    exec 7<"${root%/*}"
    get_lock "$1" 7 "$2"
}

say() { # NAME TEXT: report a fact to the client in one line
    printf '\001%s %s\n' "$1" "$2"
}

say_environment() { # FOLDER KIND
    touch "$1/used"
    say "$2" "$(cat "$1/ready.json")"
}

variable() { # NAME COMMAND: report the command's exit code and output, with newlines replaced
    value=$(timeout 20 sh -c "$2" </dev/null 2>/dev/null)
    say "variable:$1" "$? $(printf '%s' "$value" | tr '\n' '\002')"
}

base=/tmp/skyward-$(id -u)

# Do the folders of nodes belong to this user alone? The same check as skyward.core.ownership on the client.
is_base_ours() {
    [ -d "$base" ] && [ -O "$base" ] && [ ! -L "$base" ] && [ -z "$(find "$base" -prune -perm -2)" ]
}

# Creates the private folder of one pool's node. Its path is short, because that of a socket is at most 108 bytes.
make_folder() { # NAME
    if ! mkdir -m 700 "$base" 2>/dev/null && [ ! -e "$base" ] && [ ! -L "$base" ]; then
        say problem "$base: cannot create the folder; /tmp must be writable and not full"
        return 1
    fi
    if ! is_base_ours; then
        say problem "$base: belongs to another user, is a link, or is writable for everybody; remove it"
        return 1
    fi
    if ! chmod 700 "$base" || ! mkdir -p "$base/$1"; then
        say problem "$base/$1: cannot create the folder; /tmp must be writable and not full"
        return 1
    fi
    # A folder beside a node goes with it. The node may have ended while this one was made.
    if [ -n "${beside-}" ] && [ ! -d "$base/$beside" ]; then
        rm -rf "${base:?}/$1"
        say problem "$base/$beside: the node has ended; open the pool again"
        return 1
    fi
    say folder "$base/$1"
}

has_code() { # NAME OBJECTS: does the node have all of the user's code?
    [ -z "$1" ] && return 0
    [ -s "$root/code/$1.tar.gz" ] || return 1
    for object in $2; do
        if [ ! -e "$root/code/objects/$object" ]; then return 1; fi
    done
}

copy() { # FROM TO: without copying blocks, if the file system supports that
    cp --reflink=auto "$1" "$2" 2>/dev/null || cp "$1" "$2"
}

# Unpacks a private copy, because the pool's tasks may write there.
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
    # Without -p: it would make a folder again that was removed with its node.
    [ -d "$2/unpacking/work" ] || mkdir "$2/unpacking/work" || return 1
    mv "$2/unpacking" "$2/code"
}

# Prints the Debian packages of the image that are not installed.
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
