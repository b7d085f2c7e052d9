"""Starts a driver on a machine of a Ray cluster, so that it outlives the login; its files come by standard input.

    python -c "..." < {"name": ..., "before": ..., "files": {PATH: TEXT}, "order": {...}}     prints one line of JSON

It runs as text of its own, before there is a file of skyward's.
"""

import json
import os
import shutil
import signal
import subprocess
import sys

_BASE = "/tmp/skyward-%d"
_PROGRAM = "from skyward.bootstrap.ray.driver import main; main()\n"


def main() -> None:
    start = json.load(sys.stdin)
    base = _BASE % os.getuid()
    os.umask(0o077)
    os.makedirs(base, exist_ok=True)
    if os.path.islink(base) or os.stat(base).st_uid != os.getuid():
        raise SystemExit(base + ": belongs to another user; remove it")
    if start["before"]:
        shutil.rmtree(os.path.join(base, start["before"]), ignore_errors=True)  # of a driver that was killed
    folder = os.path.join(base, start["name"])
    for name, text in start["files"].items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    program = os.path.join(folder, "driver.py")
    with open(program, "w", encoding="utf-8") as file:
        file.write(_PROGRAM)
    log = open(os.path.join(folder, "driver.log"), "ab+")  # noqa: SIM115  # as long as this program
    process = subprocess.Popen(
        [sys.executable, program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        cwd="/",
        start_new_session=True,
    )
    order = dict(start["order"], socket=os.path.join(folder, "driver.sock"))
    try:
        process.stdin.write(json.dumps(order).encode() + b"\n")  # type: ignore[union-attr]
        process.stdin.close()  # type: ignore[union-attr]
    except BrokenPipeError:  # it has ended; its log says why
        pass
    line = process.stdout.readline()  # type: ignore[union-attr]
    log.seek(0)
    said = log.read()[-4000:].decode(errors="replace")
    answer = json.loads(line or b"{}")
    if "listens" not in answer:
        if not line and process.wait() == -signal.SIGALRM:
            answer["problem"] = "took no driver in time"
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
    answer["log"] = said
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
