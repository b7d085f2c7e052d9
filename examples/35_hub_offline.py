"""Log on a machine without a network, copy the folder, and send it to a hub later.

python examples/35_hub_offline.py
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from skyward import hub
from skyward.testing.hub import HubServer


def train(spool: Path) -> None:
    """Log a run where no hub can be reached: the run is a folder."""
    hub.connect(None, spool=spool)
    with hub.start_run("night shift", experiment="cluster") as run:
        run.log_params({"nodes": 64})
        for step in range(100):
            run.log_metrics({"loss": 1 / (step + 1)}, step=step)
        run.log_text("notes.txt", "the cluster has no way out\n")
    hub.disconnect()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(folder / "cluster")
        shutil.copytree(folder / "cluster", folder / "laptop")  # rsync or scp, in life

        with HubServer(folder / "hub") as server:
            for turn in ("first", "second"):  # sending again sends nothing twice
                for synced in hub.sync(folder / "laptop", url=server.url, token=server.token):
                    print(f"{turn} time: {synced.sent} records sent, {synced.unsent} left")
            hub.connect(server.url, token=server.token)
            for run in hub.runs(experiment="cluster"):
                print(f"{run.name}: {run.status}, {len(run.history('loss').values)} points, {run.params}")


if __name__ == "__main__":
    main()
