"""Make the MLflow assets of these tests. Run it once with each version, in an environment of `make mlflow`:

    M2=.make/mlflow-2.22.0/bin/python M3=.make/mlflow-3.17.2/bin/python SCRIPT=tests/hub/assets/make_mlflow.py
    $M2 $SCRIPT sqlite:////absolute/mlflow-2.22.0.db
    $M2 $SCRIPT mlruns
    $M3 $SCRIPT sqlite:////absolute/mlflow-3.17.2.db
    MLFLOW_ALLOW_FILE_STORE=true $M3 $SCRIPT mlruns-3

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
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

START = 1_700_000_000_000


def main(uri: str) -> None:
    mlflow.set_tracking_uri(uri)  # the registry asks it for logged models
    client = MlflowClient(uri)
    location = None
    if uri.startswith("sqlite"):
        location = f"artifacts-{mlflow.__version__}"
    first = client.create_experiment("digits", artifact_location=location, tags={"team": "vision"})
    start = START
    made = []
    for number in range(2):
        run = client.create_run(first, start_time=start + number, run_name=f"run {number}", tags={"mlflow.user": "ada"})
        points = [Metric("loss", 1.0 / (step + 1), start + step, step) for step in range(20)]
        points += [Metric("odd", value, start + n, n) for n, value in enumerate((math.nan, math.inf, -math.inf, 2.5))]
        client.log_batch(run.info.run_id, points, [Param("lr", f"0.{number}")], [RunTag("kind", "small")])
        for name, text in (("notes.txt", "hello"), ("deep/er/table.csv", "a,b\n1,2\n"), ("model/weights", str(number))):
            folder, _, file = name.rpartition("/")
            client.log_artifact(run.info.run_id, written(file, text), folder or None)
        dataset = Dataset("digits", "0a1b2c", "http", '{"url": "https://data.example/digits"}', "[]", '{"rows": 9}')
        client.log_inputs(run.info.run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])
        made.append(run.info)
        client.set_terminated(run.info.run_id, "FINISHED" if number else "FAILED", start + 60_000)
    second = client.create_experiment("binned", artifact_location=None if location is None else f"{location}/binned")
    gone = client.create_run(second, start_time=start)
    client.delete_run(gone.info.run_id)
    client.delete_experiment(second)
    source, more = f"{made[0].artifact_uri}/model", {}
    if mlflow.__version__ >= "3":
        model_id = log_models(client, first, made)
        source, more = f"models:/{model_id}", {"model_id": model_id}
    register(client, made, source, more)


def written(name: str, text: str) -> str:
    """Write a file in a folder of its own, and return its path."""
    path = Path(tempfile.mkdtemp(), name)
    path.write_text(text)
    return str(path)


def log_models(client: MlflowClient, experiment: str, made: list[mlflow.entities.RunInfo]) -> str:
    """Make a logged model with parameters, tags, metrics and a file, which a run reads. Return its id."""
    from mlflow.entities import LoggedModelInput, LoggedModelOutput, LoggedModelStatus

    maker, reader = made
    model = client.create_logged_model(
        experiment, "net", source_run_id=maker.run_id, tags={"size": "small"}, params={"depth": "3"}, model_type="net"
    )
    client.log_model_artifact(model.model_id, written("weights", "logged"))
    points = [("accuracy", 0.9, {"dataset_name": "digits", "dataset_digest": "0a1b2c"}), ("recall", math.nan, {})]
    client.update_run(maker.run_id, status="RUNNING")
    for key, value, dataset in points:
        client.log_metric(maker.run_id, key, value, START, 3, model_id=model.model_id, **dataset)
    client.log_outputs(maker.run_id, [LoggedModelOutput(model.model_id, step=3)])
    client.log_inputs(reader.run_id, models=[LoggedModelInput(model.model_id)])
    client.set_terminated(maker.run_id, "FAILED", START + 60_000)
    client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    unused = client.create_logged_model(experiment, "unused")
    client.delete_logged_model(unused.model_id)
    return str(model.model_id)


def register(client: MlflowClient, made: list[mlflow.entities.RunInfo], source: str, more: dict[str, str]) -> None:
    """Register a model with versions of each kind of source, the last one deleted, and a prompt."""
    client.create_registered_model("digits", tags={"task": "vision"}, description="Reads digits.")
    client.create_model_version(
        "digits", source, made[0].run_id, tags={"best": "yes"}, description="The first.", **more
    )
    client.create_model_version("digits", f"{made[1].artifact_uri}/model", made[1].run_id)
    client.create_model_version("digits", f"runs:/{made[1].run_id}/model", made[1].run_id)
    client.create_model_version("digits", "s3://weights/of/digits", run_link="https://elsewhere.example/run")
    client.create_model_version("digits", "models:/digits/2")
    client.create_model_version("digits", "s3://weights/gone")
    client.delete_model_version("digits", "6")
    client.transition_model_version_stage("digits", "2", "Production")
    client.set_registered_model_alias("digits", "champion", "2")
    client.register_prompt("greeting", "Hello {{name}}", tags={"tone": "warm"})


main(sys.argv[1])
