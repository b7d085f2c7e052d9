"""Download the files of each version of a model whose versions were imported. Prints a line for each."""

from __future__ import annotations

import sys
from pathlib import Path

import mlflow

for model_uri in sys.argv[1:]:
    folder = Path(mlflow.artifacts.download_artifacts(model_uri))
    print(model_uri, (folder / "weights").read_text())
