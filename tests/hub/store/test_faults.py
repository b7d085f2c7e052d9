"""Processes that die and disks that fill up: what was acknowledged is there, once."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skyward.hub.store.database import Database
from skyward.hub.store.history import read_history

ROUNDS = 50
WRITER = """
import asyncio, os, sys
from skyward.hub.model.points import PointColumns
from skyward.hub.store import points
from skyward.hub.store.database import Database

def log(tx, step):
    columns = PointColumns()
    columns.append("loss", step, step, float(step))
    points.append(tx, 1, 1, columns)

async def write(database, first, line):
    async def one(step):
        await database.write(log, step)
        os.write(line, b"%d\\n" % step)
    step = first
    while True:
        await asyncio.gather(*(one(number) for number in range(step, step + 20)))
        step += 20

url = sys.argv[1]
for request in sys.stdin:  # a fork for each round: importing takes longer than a round
    child = os.fork()
    if child == 0:
        asyncio.run(write(Database(url), int(request), 1))
    os.write(2, b"%d\\n" % child)
    os.waitpid(child, 0)
    os.write(1, b"dead\\n")
"""


def test_every_acknowledged_point_of_a_killed_writer_is_there_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/hub.db"
    pauses = random.Random(17)
    acknowledged: list[int] = []
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as zygote:
        assert zygote.stdin is not None
        assert zygote.stdout is not None
        assert zygote.stderr is not None
        for number in range(ROUNDS):
            zygote.stdin.write(f"{number * 1_000_000}\n")
            child = int(zygote.stderr.readline())
            first = zygote.stdout.readline()
            acknowledged.append(int(first))
            time.sleep(pauses.uniform(0, 0.05))  # not for luck: any instant will do
            os.kill(child, signal.SIGKILL)
            for line in zygote.stdout:
                if line == "dead\n":
                    break
                acknowledged.append(int(line))
        zygote.stdin.close()
    database = Database(url)
    history, _ = database.read_and_wait(read_history, 1, 1, "loss")
    points = "SELECT points FROM tail UNION ALL SELECT points FROM chunk"  # the sealer was at work in some rounds
    stored = sum(count for (count,) in database.read_and_wait(lambda s: s.execute(points).fetchall()))
    database.close()
    steps = list(history.steps)
    assert len(steps) == len(set(steps)) == stored
    assert set(acknowledged) <= set(steps)
    assert len(acknowledged) > ROUNDS


FILLER = """
import sys
from pathlib import Path
from skyward.hub.model.refusal import Refusal
from skyward.hub.store.database import Database
from skyward.hub.store.folder_blobs import FolderBlobs
database = Database(sys.argv[1])
def add(tx, number):
    tx.execute("INSERT INTO project (organization, name, created_at) VALUES (1, ?, 0)", (str(number) + "x" * 50_000,))
kept = 0
try:
    for number in range(1000):
        database.write_and_wait(add, number)
        kept += 1
except Refusal as refusal:
    print(refusal.reason.name, refusal.message)
print(kept, database.read_and_wait(lambda s: s.execute("SELECT count(*) - 1 FROM project").fetchone())[0])
database.close()
blobs = FolderBlobs(Path(sys.argv[2]))
writer = blobs.writer()
try:
    for _ in range(8):
        writer.write(bytes(1 << 20))
except Refusal as refusal:
    print(refusal.reason.name, refusal.message)
writer.abort()
print(sum(path.is_file() for path in Path(sys.argv[2]).rglob("*")))
"""


def test_a_full_disk_refuses_writes_in_words_and_reads_go_on(tmp_path: Path) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, 4_000_000))

    child = subprocess.run(
        [sys.executable, "-c", FILLER, f"sqlite:///{tmp_path}/hub.db", str(tmp_path / "blobs")],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    refusal, counts, of_blob, left = child.stdout.splitlines()
    kept, found = counts.split()
    assert refusal.startswith("UNAVAILABLE database: the hub's d")
    assert refusal.endswith("try again later")
    assert int(kept) == int(found) > 0
    assert of_blob.startswith("UNAVAILABLE blob: the hub cannot write it now")
    assert left == "0"


@pytest.mark.parametrize("lock", ["hub.db.lock"])
def test_the_lock_of_a_dead_process_holds_nobody_up(tmp_path: Path, lock: str) -> None:
    (tmp_path / lock).write_text("1\n")

    Database(f"sqlite:///{tmp_path}/hub.db").close()
