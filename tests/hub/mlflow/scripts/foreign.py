"""Parts of MLflow that a hub does not have. Prints for each call its name, the error code and the message."""

import mlflow
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

client = MlflowClient()


def register_prompt() -> None:
    register = mlflow.genai.register_prompt if mlflow.__version__ >= "3" else mlflow.register_prompt
    register("greeting", "Hello {{name}}")


def traces() -> None:
    client.search_traces(experiment_ids=["0"])


def scorers() -> None:
    from mlflow.genai.scorers import list_scorers

    list_scorers(experiment_id="0")


def webhooks() -> None:
    client.list_webhooks()


calls = [register_prompt, traces]
if mlflow.__version__ >= "3":
    calls += [scorers, webhooks]
for call in calls:
    try:
        call()
    except MlflowException as error:
        print(f"=== {call.__name__}: {error.message}")
    else:
        print(f"=== {call.__name__}: succeeded")
