# Installs Debian packages. From the client: apt, limit_s.
phase apt
lock apt
missing=$(missing_apt)
if [ -z "$missing" ]; then # another pool's bootstrap has just done it
    say end ok
    exit 0
fi
command -v apt-get >/dev/null || fail "Image.apt: this is no Debian: it has no apt-get"
as_root=
if [ "$(id -u)" != 0 ]; then
    sudo -n true || fail "installing packages needs root, and $(id -un) may not use sudo without a password; \
install them there once: sudo apt-get install $(echo $missing)"
    as_root="sudo -n"
fi

# A machine that has just booted updates itself, and holds the lock of dpkg for a while.
apt_get() {
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get -y -qq -o DPkg::Lock::Timeout="$limit_s" "$@" </dev/null
}
# Interrupted in the middle, dpkg refuses everything until this is done.
[ -z "$(dpkg --audit 2>/dev/null)" ] || $as_root dpkg --configure -a

# The lists of a new machine are empty, those of an old one name versions that are gone.
apt_get install --no-install-recommends $missing ||
    { apt_get update && apt_get install --no-install-recommends $missing; } ||
    fail "apt-get cannot install $(echo $missing)"
say end ok
