"""Make the MLflow assets of these tests. Run it once with each version, in an environment of that version:

    python -m venv m2 && m2/bin/pip install mlflow==2.22.0 'sqlalchemy<2.1'
    m2/bin/python tests/hub/assets/make_mlflow.py sqlite:////absolute/mlflow-2.22.0.db
    m2/bin/python tests/hub/assets/make_mlflow.py mlruns
    python -m venv m3 && m3/bin/pip install mlflow==3.17.2
    m3/bin/python tests/hub/assets/make_mlflow.py sqlite:////absolute/mlflow-3.17.2.db

Artifacts are written to `artifacts-VERSION` in the working folder. Each database is kept as the SQL of `.dump`, each
folder as an archive. In both, /mlflow-assets stands for the folder in which they were made.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag


def main(uri: str) -> None:
    client = MlflowClient(uri)
    location = None
    if uri.startswith("sqlite"):
        location = f"artifacts-{mlflow.__version__}"
    first = client.create_experiment("digits", artifact_location=location, tags={"team": "vision"})
    start = 1_700_000_000_000
    for number in range(2):
        run = client.create_run(first, start_time=start + number, run_name=f"run {number}", tags={"mlflow.user": "ada"})
        points = [Metric("loss", 1.0 / (step + 1), start + step, step) for step in range(20)]
        points += [Metric("odd", value, start + n, n) for n, value in enumerate((math.nan, math.inf, -math.inf, 2.5))]
        client.log_batch(run.info.run_id, points, [Param("lr", f"0.{number}")], [RunTag("kind", "small")])
        for name, text in (("notes.txt", "hello"), ("deep/er/table.csv", "a,b\n1,2\n")):
            folder, _, file = name.rpartition("/")
            path = Path(tempfile.mkdtemp(), file)
            path.write_text(text)
            client.log_artifact(run.info.run_id, str(path), folder or None)
        client.set_terminated(run.info.run_id, "FINISHED" if number else "FAILED", start + 60_000)
    second = client.create_experiment("binned", artifact_location=None if location is None else f"{location}/binned")
    gone = client.create_run(second, start_time=start)
    client.delete_run(gone.info.run_id)
    client.delete_experiment(second)


main(sys.argv[1])
