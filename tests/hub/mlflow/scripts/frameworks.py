"""Hugging Face's Trainer and Lightning's logger of MLflow. The argument is a folder of packages that has both."""

import sys
from typing import Any

sys.path.append(sys.argv[1])

import lightning
import mlflow
import torch
from lightning.pytorch.loggers import MLFlowLogger
from transformers import Trainer, TrainingArguments
from transformers.integrations import MLflowCallback

mlflow.set_experiment("frameworks")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
        y = self.layer(x)
        return {"loss": ((y - labels) ** 2).mean(), "logits": y}


rows: Any = [{"x": torch.ones(2), "labels": torch.zeros(1)} for _ in range(8)]
arguments = TrainingArguments("out", max_steps=4, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no")
Trainer(Net(), arguments, train_dataset=rows, callbacks=[MLflowCallback()]).train()
mlflow.end_run()
(first,) = mlflow.search_runs(experiment_names=["frameworks"], output_format="list")
assert first.info.status == "FINISHED", first.info
assert first.data.params["max_steps"] == "4"
assert len(mlflow.MlflowClient().get_metric_history(first.info.run_id, "loss")) == 4


class Module(lightning.LightningModule):  # type: ignore[misc]  # mypy does not read it
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.save_hyperparameters({"width": 2})

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.net(**batch)["loss"]
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


logger = MLFlowLogger(experiment_name="lightning", tracking_uri=mlflow.get_tracking_uri(), log_model=True)
trainer = lightning.Trainer(
    max_steps=4, logger=logger, accelerator="cpu", log_every_n_steps=1, enable_progress_bar=False
)
trainer.fit(Module(), torch.utils.data.DataLoader(rows, batch_size=2))
second = mlflow.get_run(logger.run_id)
assert second.info.status == "FINISHED", second.info
assert second.data.params["width"] == "2"
assert len(mlflow.MlflowClient().get_metric_history(logger.run_id, "loss")) == 4
assert mlflow.MlflowClient().list_artifacts(logger.run_id), "no checkpoint"
