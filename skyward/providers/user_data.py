"""What a rented machine runs of ours first, at its first boot: the watchdog of its lease.

It has no secrets and needs no packages and no network.

A machine powers itself off when `/run/skyward/lease` was not touched for `lease_s` seconds; the provider made it so
that to power off is to terminate. Whoever holds the lease touches the file: bring-up, then the agent. Time is that
of /proc/uptime: a clock that is set, forwards or backwards, changes nothing.
"""

from __future__ import annotations

__all__ = ["LEASE_FILE", "PREEMPTED_FILE", "boot_script"]

LEASE_FILE = "/run/skyward/lease"
PREEMPTED_FILE = "/run/skyward/preempted"
"""Is there once the provider has announced that it takes the machine back; holds what it said."""

# The age of the file is not computed from its time stamp, which is of a clock that may be set: the loop notices THAT
# the stamp changed, and counts from then by uptime. The first lease starts with the loop, so the grace of the boot is
# one lease. Three ways to the end, and none waits for another: a service manager may hang, and on a disk that hangs
# neither sync returns nor poweroff, which syncs too.
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
    if [ $((now - last)) -gt "$lease_s" ]; then
        echo "skyward: no contact for $lease_s s, powering off" >/dev/console 2>/dev/null
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

# By /bin/sh, not by path: /run may be mounted noexec. cloud-init runs user data at the first boot only, and what it
# finds in this folder at each.
_AT_EVERY_BOOT = """\
again=/var/lib/cloud/scripts/per-boot
if [ -f "$0" ] && [ "$0" != "$again/skyward" ]; then
    mkdir -p "$again" && cp "$0" "$again/skyward" && chmod 755 "$again/skyward"
fi"""


def boot_script(*, lease_s: float, notices: str = "") -> str:
    """Return a shell script for the provider's user data. Running it twice changes nothing that matters.

    notices: the cloud's own script that writes `PREEMPTED_FILE`; "": there is none to run.
    """
    lines = [
        "#!/bin/sh",
        _AT_EVERY_BOOT,
        # Whoever logs in renews the lease, and that is not root.
        f"mkdir -p /run/skyward && chmod 755 /run/skyward && touch {LEASE_FILE} && chmod 666 {LEASE_FILE}",
        _file("/run/skyward/watchdog", _WATCHDOG),
        _START + f"start skyward-lease '/bin/sh /run/skyward/watchdog {int(lease_s)}'",
    ]
    if notices:
        lines += [_file("/run/skyward/notices", notices), "start skyward-notices '/bin/sh /run/skyward/notices'"]
    return "\n".join(lines) + "\n"


def _file(path: str, text: str) -> str:
    return f"cat >{path} <<'END'\n{text}END\nchmod 755 {path}"
