"""MLflow's model registry: versions, aliases, tags, stages, searches, and models loaded by name.

The arguments are folders of packages; with skyward's among them, MLflow finds its plugin.
"""

import sys
import tempfile
from pathlib import Path

sys.path.extend(sys.argv[1:])

import mlflow
from mlflow import MlflowClient
from sklearn.linear_model import LogisticRegression

client = MlflowClient()
mlflow.set_experiment("registry")
model = LogisticRegression().fit([[0.0], [1.0]], [0, 1])

with mlflow.start_run() as run:
    mlflow.log_param("depth", 3)
    first = mlflow.sklearn.log_model(model, "first", registered_model_name="iris", pip_requirements=["scikit-learn"])
    mlflow.log_text("plain", "weights/a.txt")
again = mlflow.register_model(f"runs:/{run.info.run_id}/first", "iris", tags={"kind": "again"})
assert (int(again.version), again.run_id, again.tags) == (2, run.info.run_id, {"kind": "again"}), again
plain = client.create_model_version("iris", f"runs:/{run.info.run_id}/weights", run.info.run_id)
assert (int(plain.version), plain.run_id) == (3, run.info.run_id), plain

client.set_registered_model_alias("iris", "champion", "1")
client.set_registered_model_tag("iris", "team", "vision")
client.set_model_version_tag("iris", "1", "checked", "yes")
client.update_registered_model("iris", "flowers")
client.update_model_version("iris", "1", "the first")
client.transition_model_version_stage("iris", "1", "Production")

registered = client.get_registered_model("iris")
assert (registered.description, registered.tags["team"]) == ("flowers", "vision"), registered
assert {name: int(version) for name, version in registered.aliases.items()} == {"champion": 1}, registered.aliases
champion = client.get_model_version_by_alias("iris", "champion")
assert (int(champion.version), champion.description, champion.tags["checked"]) == (1, "the first", "yes"), champion
assert champion.current_stage == "Production"
found = client.search_model_versions("name = 'iris'", order_by=["version_number ASC"])
assert [int(version.version) for version in found] == [1, 2, 3], found
assert [found.name for found in client.search_registered_models("tag.team = 'vision'")] == ["iris"]

for uri in ("models:/iris@champion", "models:/iris/1", "models:/iris/2", "models:/iris/Production"):
    assert list(mlflow.pyfunc.load_model(uri).predict([[0.0], [1.0]])) == [0, 1], uri
assert mlflow.sklearn.load_model("models:/iris@champion").predict([[1.0]])[0] == 1
with tempfile.TemporaryDirectory() as folder:
    path = Path(mlflow.artifacts.download_artifacts("models:/iris/3", dst_path=folder))
    assert (path / "a.txt").read_text() == "plain"

copied = client.copy_model_version("models:/iris@champion", "copies")
assert (copied.name, int(copied.version), copied.run_id) == ("copies", 1, run.info.run_id), copied
client.rename_registered_model("copies", "renamed")
client.delete_model_version("renamed", "1")
client.delete_registered_model("renamed")
client.delete_registered_model_alias("iris", "champion")
client.delete_registered_model_tag("iris", "team")
assert [found.name for found in client.search_registered_models()] == ["iris"]
