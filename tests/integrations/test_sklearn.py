"""scikit-learn on a pool gives the same results as here, to the last bit."""

from __future__ import annotations

import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import sklearn
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier, StackingClassifier
from sklearn.experimental import enable_halving_search_cv  # noqa: F401
from sklearn.feature_selection import RFECV
from sklearn.inspection import permutation_importance
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import (
    GridSearchCV,
    HalvingGridSearchCV,
    RandomizedSearchCV,
    cross_val_score,
    cross_validate,
    learning_curve,
)
from sklearn.multioutput import MultiOutputRegressor
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils.parallel import Parallel, delayed

import skyward as sky
from skyward.errors import NoCapacity
from skyward.integrations.joblib import sklearn_backend
from skyward.integrations.pools import ScikitLearnPool
from tests.few_modules import lean_frameworks

from .test_joblib import NoMachines

pytestmark = pytest.mark.sklearn_behaviours

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module", autouse=True)
def pool() -> Iterator[sky.ComputePool]:
    with lean_frameworks(), sky.ComputePool(sky.Local(), nodes=2, logs=False) as opened:
        yield opened


@pytest.fixture(scope="module")
def digits() -> tuple[Array, Array]:
    x, y = load_digits(return_X_y=True)
    return x[:400], y[:400]


def assert_same(mine: Any, theirs: Any, path: str = "") -> None:
    """Compare to the last bit, through dicts, sequences and arrays. Times are not compared."""
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        for key in mine:
            if "time" not in str(key):
                assert_same(mine[key], theirs[key], f"{path}.{key}")
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(theirs), path
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert_same(a, b, f"{path}[{i}]")
    else:
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs), err_msg=path)


def search_results(search: Any) -> Any:
    return search.cv_results_, search.best_params_, search.best_score_


def grid(x: Array, y: Array) -> Any:
    pipeline = make_pipeline(StandardScaler(), SVC())
    return search_results(GridSearchCV(pipeline, {"svc__C": [0.1, 1, 10], "svc__gamma": [0.01, 0.1]}, cv=3).fit(x, y))


def randomized(x: Array, y: Array) -> Any:
    tree = DecisionTreeClassifier(random_state=0)
    choices = {"max_depth": list(range(2, 12)), "min_samples_leaf": [1, 2, 4]}
    return search_results(RandomizedSearchCV(tree, choices, n_iter=6, cv=3, random_state=1, n_jobs=-1).fit(x, y))


def halving(x: Array, y: Array) -> Any:
    tree = DecisionTreeClassifier(random_state=0)
    return search_results(HalvingGridSearchCV(tree, {"max_depth": [2, 4, 8, 16]}, cv=3, random_state=2).fit(x, y))


def forest(x: Array, y: Array) -> Any:
    fitted = RandomForestClassifier(20, random_state=3, n_jobs=-1).fit(x, y)
    return fitted.predict_proba(x), fitted.feature_importances_


def feature_elimination(x: Array, y: Array) -> Any:
    fitted = RFECV(DecisionTreeClassifier(random_state=4), step=16, cv=3, n_jobs=-1).fit(x, y)
    return fitted.ranking_, fitted.cv_results_


def stacking(x: Array, y: Array) -> Any:
    layers = [("bayes", GaussianNB()), ("tree", DecisionTreeClassifier(random_state=5))]
    return StackingClassifier(layers, GaussianNB(), cv=3, n_jobs=-1).fit(x, y).predict_proba(x)


def several_outputs(x: Array, y: Array) -> Any:
    return MultiOutputRegressor(Ridge(), n_jobs=-1).fit(x[:, :32], x[:, 32:]).predict(x[:, :32])


def importance(x: Array, y: Array) -> Any:
    fitted = GaussianNB().fit(x[:, :12], y)
    return dict(permutation_importance(fitted, x[:, :12], y, n_repeats=3, random_state=6, n_jobs=-1))


WORK: list[Callable[[Array, Array], Any]] = [
    grid,
    randomized,
    halving,
    forest,
    feature_elimination,
    stacking,
    several_outputs,
    importance,
    lambda x, y: cross_val_score(make_pipeline(PCA(10), GaussianNB()), x, y, cv=4),
    lambda x, y: cross_validate(GaussianNB(), x, y, cv=3, scoring=["accuracy", "f1_macro"], return_train_score=True),
    lambda x, y: learning_curve(GaussianNB(), x, y, cv=3, train_sizes=[0.3, 0.6, 1.0]),
]
NAMES = [
    *("grid", "randomized", "halving", "forest", "rfecv", "stacking", "multi-output", "permutation"),
    *("cross_val_score", "cross_validate", "learning_curve"),
]


@pytest.mark.parametrize("work", WORK, ids=NAMES)
def test_results_are_those_of_this_process(
    pool: sky.ComputePool, digits: tuple[Array, Array], work: Callable[[Array, Array], Any]
) -> None:
    here = work(*digits)
    with sklearn_backend(pool):
        there = work(*digits)
    assert_same(there, here)


class WhereFitted(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    def fit(self, x: Array, y: Array) -> WhereFitted:
        self.classes_ = np.unique(y)
        return self

    def score(self, x: Array, y: Array) -> float:
        return float(os.getpid())


def test_fits_run_on_the_slots(pool: sky.ComputePool, digits: tuple[Array, Array]) -> None:
    with sklearn_backend(pool):
        pids = cross_val_score(WhereFitted(), *digits, cv=10)
    assert os.getpid() not in set(pids)
    assert len(set(pids)) == 2


class Picky(GaussianNB):  # type: ignore[misc]  # scikit-learn ships no types
    def __init__(self, mood: str = "good") -> None:
        super().__init__()
        self.mood = mood

    def fit(self, x: Array, y: Array, sample_weight: Any = None) -> Any:
        if self.mood == "bad":
            raise ArithmeticError("not today")
        return super().fit(x, y, sample_weight)


def test_a_failing_fit_raises_its_own_error(pool: sky.ComputePool, digits: tuple[Array, Array]) -> None:
    search = GridSearchCV(Picky(), {"mood": ["good", "bad"]}, cv=3, error_score="raise")
    with pytest.raises(ArithmeticError, match="not today"), sklearn_backend(pool):
        search.fit(*digits)


def test_a_failing_fit_may_be_scored_instead(pool: sky.ComputePool, digits: tuple[Array, Array]) -> None:
    search = GridSearchCV(Picky(), {"mood": ["good", "bad"]}, cv=3, error_score=-1.0)
    with sklearn_backend(pool), pytest.warns(sklearn.exceptions.FitFailedWarning, match="3 fits failed"):
        search.fit(*digits)
    assert search.best_params_ == {"mood": "good"}
    assert search.cv_results_["mean_test_score"][1] == -1.0


# Settings that travel with the tasks
# -----------------------------------------------------------------------------------


def config(_: int) -> Any:
    return sklearn.get_config()["assume_finite"]


def filter_count(_: int) -> int:
    return len(warnings.filters)


def test_the_configuration_applies_on_the_slots_for_the_call_only(pool: sky.ComputePool) -> None:
    with sklearn_backend(pool):
        with sklearn.config_context(assume_finite=True):
            assert all(Parallel()(delayed(config)(i) for i in range(6)))
        assert not any(Parallel()(delayed(config)(i) for i in range(6)))


def test_the_callers_warning_filters_apply_on_the_slots(pool: sky.ComputePool) -> None:
    mine = list(warnings.filters)
    with sklearn_backend(pool):
        assert set(Parallel()(delayed(filter_count)(i) for i in range(6))) == {len(mine)}
    assert warnings.filters == mine


def test_filters_for_classes_that_the_node_does_not_have_are_left_out(
    pool: sky.ComputePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("only_here")
    module.OnlyHereWarning = type("OnlyHereWarning", (UserWarning,), {"__module__": "only_here"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "only_here", module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", module.OnlyHereWarning)
        mine = list(warnings.filters)
        with sklearn_backend(pool):
            found = set(Parallel()(delayed(filter_count)(i) for i in range(6)))
        assert warnings.filters == mine
    assert found == {len(mine) - 1}


def test_one_list_of_filters_is_sent_whatever_the_size_of_the_batch(pool: sky.ComputePool) -> None:
    with sklearn_backend(pool):
        values = Parallel(batch_size=50)(delayed(filter_count)(i) for i in range(200))
    assert len(set(values)) == 1


# ScikitLearnPool ------------------------------------------------------------------------------------------------------


def test_a_pool_for_scikit_learn_runs_the_calls_in_its_block(digits: tuple[Array, Array]) -> None:
    with ScikitLearnPool(sky.Local(), nodes=2, logs=False) as pool:
        assert pool.is_active
        pids = set(cross_val_score(WhereFitted(), *digits, cv=4))
    assert os.getpid() not in pids
    assert set(cross_val_score(WhereFitted(), *digits, cv=2, n_jobs=1)) == {os.getpid()}


def test_scikit_learn_is_added_to_the_image_in_the_client_s_release() -> None:
    provider = NoMachines()
    with (
        pytest.raises(NoCapacity),
        ScikitLearnPool(provider, image=sky.Image(pip=["pandas"], env={"A": "1"}), joblib_version="1.4.2"),
    ):
        pass
    image = provider.asked[0].image
    assert image.pip == ("pandas", f"scikit-learn=={sklearn.__version__}", "joblib==1.4.2")
    assert image.env == {"A": "1"}


def test_the_logistic_regression_of_a_large_array_is_the_same(pool: sky.ComputePool) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(20_000, 30))  # 4.8 MB: it crosses beside the frames
    y = (x[:, 0] + random.normal(size=len(x)) > 0).astype(int)
    here = cross_val_score(LogisticRegression(), x, y, cv=3)
    with sklearn_backend(pool):
        assert_same(cross_val_score(LogisticRegression(), x, y, cv=3), here)
