# Installs Debian packages. From the client: apt, limit_s.
phase apt
lock apt
missing=$(missing_apt)
if [ -z "$missing" ]; then # another pool's bootstrap has just done it
    say end ok
    exit 0
fi
command -v apt-get >/dev/null || fail "Image.apt: apt-get is missing, so this is not a Debian system; leave out Image.apt"
as_root=
if [ "$(id -u)" != 0 ]; then
    sudo -n true || fail "Image.apt: $(id -un) is not root and cannot use sudo without a password; \
install the packages there once: sudo apt-get install $(echo $missing)"
    as_root="sudo -n"
fi

# A machine that has just booted updates itself and holds the lock of dpkg for a while.
apt_get() {
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get -y -qq -o DPkg::Lock::Timeout="$limit_s" "$@" </dev/null
}
# After an interrupted run, dpkg refuses to work until this repairs its state.
[ -z "$(dpkg --audit 2>/dev/null)" ] || $as_root dpkg --configure -a

# Package lists may be missing on a new machine, and outdated on an old one: then update them and try again.
apt_get install --no-install-recommends $missing ||
    { apt_get update && apt_get install --no-install-recommends $missing; } ||
    fail "apt-get cannot install $(echo $missing); check the names, and the package servers"
say end ok
