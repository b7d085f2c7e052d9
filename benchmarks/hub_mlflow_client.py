"""MLflow's client, timed: run by MLflow's Python with an address as `MLFLOW_TRACKING_URI`. Prints JSON.

Arguments: calls of `log_metric`, calls of `log_batch` with 100 metrics, points to drain, and a folder of packages that
has skyward's plugin, or nothing.
"""

import json
import site
import sys
import time

if len(sys.argv) > 4:
    site.addsitedir(sys.argv[4])

import mlflow
from mlflow.entities import Metric

calls, batches, points = (int(text) for text in sys.argv[1:4])
client = mlflow.MlflowClient()
mlflow.set_experiment("client")
figures = {}
with mlflow.start_run() as run:
    mlflow.log_metric("warm", 1.0, step=0)
    began, cpu = time.perf_counter(), time.thread_time()
    for step in range(calls):
        mlflow.log_metric("loss", 0.1234567 * step, step=step)
    figures["metric_us"] = (time.perf_counter() - began) / calls * 1e6
    figures["metric_cpu_us"] = (time.thread_time() - cpu) / calls * 1e6
    began = time.perf_counter()
    for step in range(calls):
        client.log_metric(run.info.run_id, "loss2", 0.1234567 * step, timestamp=step, step=step)
    figures["client_metric_us"] = (time.perf_counter() - began) / calls * 1e6
    began = time.perf_counter()
    for step in range(batches):
        client.log_batch(run.info.run_id, [Metric(f"m{number}", step / 7, step, step) for number in range(100)])
    figures["batch_us"] = (time.perf_counter() - began) / batches * 1e6
    if points:
        client.get_run(run.info.run_id)  # waits for all records before
        began = time.perf_counter()
        for first in range(0, points, 1000):
            numbers = range(first, first + 1000)
            client.log_batch(run.info.run_id, [Metric("many", n / 7, n, n) for n in numbers])
        client.get_run(run.info.run_id)
        figures["drained_per_s"] = points / (time.perf_counter() - began)
print(json.dumps(figures))
