"""A grid search of 105 fits on a pool: the search is scikit-learn's own, and so are its results.

python examples/07_grid_search.py
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.ensemble import GradientBoostingClassifier, RandomForestClassifier
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

import skyward as sky

# 6 + 6 + 9 = 21 candidates, of three kinds of model.
GRID: list[dict[str, list[Any]]] = [
    {
        "model": [RandomForestClassifier(random_state=0)],
        "model__n_estimators": [5, 10, 20],
        "model__max_features": ["sqrt", 0.25],
    },
    {
        "model": [GradientBoostingClassifier(max_features="sqrt", subsample=0.5, random_state=0)],
        "model__n_estimators": [2, 4],
        "model__learning_rate": [0.05, 0.1, 0.3],
    },
    {
        "model": [SVC()],
        "model__C": [1, 10, 100],
        "model__gamma": [0.0005, 0.001, 0.01],
    },
]


def make_search() -> GridSearchCV:
    pipeline = Pipeline([("scale", StandardScaler()), ("model", SVC())])
    return GridSearchCV(pipeline, GRID, cv=5, n_jobs=-1)


def without_times(results: dict[str, Any]) -> dict[str, list[Any]]:
    # Masked arrays: a candidate without a parameter has no value there.
    return {name: np.ma.asarray(column).tolist() for name, column in results.items() if "time" not in name}


def main() -> None:
    x, y = load_digits(return_X_y=True)
    slots = max(1, (os.cpu_count() or 2) // 2)

    # Inside the block, n_jobs=-1 is every slot of the pool. Nothing else changes.
    with sky.integrations.ScikitLearnPool(sky.Local(), nodes=2, concurrency=slots) as pool:
        started = time.perf_counter()
        there = make_search().fit(x, y)
        took_s = time.perf_counter() - started
    candidates = len(there.cv_results_["params"])
    print(f"{candidates} candidates x 5 folds on {pool.total_slots} slots of {pool.nodes} nodes: {took_s:.1f} s")

    # After the block, joblib is as it was: processes of its own, one for each core.
    started = time.perf_counter()
    here = make_search().fit(x, y)
    print(f"the same search without skyward: {time.perf_counter() - started:.1f} s")

    print(f"best: {there.best_params_}, accuracy {there.best_score_:.3f}")
    print("best_params_ equal:", there.best_params_ == here.best_params_)
    print("cv_results_ equal:", without_times(there.cv_results_) == without_times(here.cv_results_))


if __name__ == "__main__":
    main()
