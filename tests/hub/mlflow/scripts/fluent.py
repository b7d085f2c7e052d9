"""MLflow's fluent API, the autologger of scikit-learn, and MLflow's commands.

Prints the id of the autologged run, then the output of two commands. They run here, by the function that the program
`mlflow` calls, because to import MLflow takes seconds.
"""

import mlflow
from mlflow import MlflowClient
from mlflow.cli import cli
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

mlflow.set_experiment("clients")
with mlflow.start_run(run_name="by hand") as run:
    mlflow.log_param("lr", 0.1)
    mlflow.log_params({"depth": 3, "kind": "small"})
    for step in range(5):
        mlflow.log_metric("loss", 1 / (step + 1), step=step)
    mlflow.log_metrics({"acc": 0.5, "odd": float("nan")}, step=1)
    mlflow.set_tag("team", "vision")
    mlflow.log_text("hello", "notes/a.txt")
found = MlflowClient().get_run(run.info.run_id)
assert found.info.status == "FINISHED", found.info
assert found.data.params == {"lr": "0.1", "depth": "3", "kind": "small"}, found.data.params
assert found.data.metrics["loss"] == 0.2, found.data.metrics
assert found.data.tags["team"] == "vision"
assert len(MlflowClient().get_metric_history(run.info.run_id, "loss")) == 5
assert mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/notes/a.txt") == "hello"
assert len(mlflow.search_runs(experiment_names=["clients"], filter_string="params.kind = 'small'")) >= 1

mlflow.sklearn.autolog(log_models=False)
features, labels = load_iris(return_X_y=True)
LogisticRegression(max_iter=200).fit(features, labels)
trained = mlflow.last_active_run()
assert trained.data.params["max_iter"] == "200", trained.data.params
assert trained.data.metrics["training_score"] > 0.9, trained.data.metrics
print("=== run", trained.info.run_id)
print("=== mlflow experiments search", flush=True)
cli.main(["experiments", "search"], prog_name="mlflow", standalone_mode=False)
print("=== mlflow runs list", flush=True)
cli.main(["runs", "list", "--experiment-id", trained.info.experiment_id], prog_name="mlflow", standalone_mode=False)
