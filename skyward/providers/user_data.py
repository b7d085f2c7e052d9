"""First script of a rented machine, run at its first boot: the watchdog of its lease.

It contains no secrets and needs no packages and no network.

A machine powers itself off when nobody has touched `/run/skyward/lease` for `lease_s` seconds, or at once when there is
text in that file. The provider's options make powering off terminate the machine. The holder of the lease touches the
file: first the setup, then the agent. The head of a detached pool writes into it at its end. Time comes from
/proc/uptime, so a clock that is set forwards or backwards changes nothing.
"""

from __future__ import annotations

LEASE_FILE = "/run/skyward/lease"
PREEMPTED_FILE = "/run/skyward/preempted"
"""File that exists once the provider has announced a preemption; holds the announcement."""

# The file's age is not computed from its time stamp, because the wall clock may be set. The loop only notices THAT the
# stamp has changed, and counts from then by uptime. The first lease starts with the loop, so a boot gets one lease of
# grace. There are three ways to power off, and none waits for another: a service manager may hang, and on a disk that
# hangs neither sync nor poweroff returns, because poweroff syncs too. Then the kernel's sysrq key does it.
_WATCHDOG = """\
#!/bin/sh
lease_s=$1
file=/run/skyward/lease
up() { cut -d. -f1 /proc/uptime; }
last=$(up)
stamp=
while sleep 2; do
    now=$(up)
    new=$(stat -c %y "$file" 2>/dev/null)
    if [ "$new" != "$stamp" ]; then stamp=$new; last=$now; fi
    if [ -s "$file" ] || [ $((now - last)) -gt "$lease_s" ]; then
        echo "skyward: no contact for $lease_s s, or told to end, powering off" >/dev/console 2>/dev/null
        (sleep 30; poweroff -f & sleep 15; echo o >/proc/sysrq-trigger) &
        sync &
        systemctl poweroff 2>/dev/null || poweroff
        sleep 60
    fi
done
"""

_START = """\
start() {  # name, command: a transient unit where there is systemd, a session of its own elsewhere
    if [ -d /run/systemd/system ]; then
        systemd-run --quiet --unit="$1" --property=Restart=always --property=StartLimitIntervalSec=0 \\
            --property=OOMScoreAdjust=-1000 $2 && return
    fi
    setsid $2 </dev/null >/dev/null 2>&1 &
}
"""

# Run by /bin/sh instead of by path, because /run may be mounted noexec. cloud-init runs user data at the first boot
# only, but the scripts in this folder at every boot.
_AT_EVERY_BOOT = """\
again=/var/lib/cloud/scripts/per-boot
if [ -f "$0" ] && [ "$0" != "$again/skyward" ]; then
    mkdir -p "$again" && cp "$0" "$again/skyward" && chmod 755 "$again/skyward"
fi"""


def boot_script(*, lease_s: float, notices: str = "") -> str:
    """Build the shell script for the provider's user data. Running it twice is harmless.

    Args:
        lease_s: seconds without contact after which the machine powers itself off.
        notices: the cloud's script that writes `PREEMPTED_FILE`; empty for none.
    """
    lines = [
        "#!/bin/sh",
        _AT_EVERY_BOOT,
        # World-writable, because the login user renews the lease, and that is not root.
        f"mkdir -p /run/skyward && chmod 755 /run/skyward && touch {LEASE_FILE} && chmod 666 {LEASE_FILE}",
        _file("/run/skyward/watchdog", _WATCHDOG),
        _START + f"start skyward-lease '/bin/sh /run/skyward/watchdog {int(lease_s)}'",
    ]
    if notices:
        lines += [_file("/run/skyward/notices", notices), "start skyward-notices '/bin/sh /run/skyward/notices'"]
    return "\n".join(lines) + "\n"


def _file(path: str, text: str) -> str:
    return f"cat >{path} <<'END'\n{text}END\nchmod 755 {path}"
