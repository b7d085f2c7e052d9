"""Studies of Optuna in a hub: Optuna's own suite for storages, and what it does not cover."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterator

import optuna
import pytest
from optuna.testing.pytest_storages import StorageTestCase
from optuna.trial import TrialState

from skyward import errors, hub
from skyward.hub.client.optuna_storage import OptunaStorage
from tests.hub.http.server_processes import owner_token
from tests.hub.http.warm_server import WarmServer
from tests.hub.postgres import PostgresServer

optuna.logging.set_verbosity(optuna.logging.WARNING)
forked = multiprocessing.get_context("fork")


@pytest.fixture(params=["sqlite", "postgresql"])
def storage(request: pytest.FixtureRequest) -> Iterator[OptunaStorage]:
    """Storage without studies."""
    url, token = request.getfixturevalue(f"{request.param}_hub")
    made = hub.optuna_storage(url, token)
    yield made
    for study in made.get_all_studies():
        made.delete_study(study._study_id)
    made.remove_session()


class TestStorage(StorageTestCase):
    """Optuna's suite: what it demands of each storage."""


def square(trial: optuna.Trial) -> float:
    return trial.suggest_float("x", -1, 1) ** 2


def work(storage: OptunaStorage, trials: int) -> None:
    """Work on the study "shared" as one of its workers."""
    study = optuna.load_study(study_name="shared", storage=storage, sampler=optuna.samplers.RandomSampler())
    study.optimize(square, n_trials=trials)


def run_workers(storage: OptunaStorage, workers: int, trials: int) -> None:
    processes = [forked.Process(target=work, args=(storage, trials)) for _ in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * workers


def test_workers_of_several_processes_number_trials_without_a_gap_and_take_each_waiting_one_once(
    storage: OptunaStorage,
) -> None:
    study = optuna.create_study(study_name="shared", storage=storage)
    for number in range(12):
        study.enqueue_trial({"x": number / 100})
    run_workers(storage, workers=4, trials=6)
    trials = study.get_trials()
    assert [trial.number for trial in trials] == list(range(24))
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert [trial.params["x"] for trial in trials[:12]] == [number / 100 for number in range(12)]
    assert all(trial.value == trial.params["x"] ** 2 for trial in trials)


def test_values_of_other_workers_reach_a_pruner(storage: OptunaStorage) -> None:
    study = optuna.create_study(
        study_name="shared", storage=storage, pruner=optuna.pruners.MedianPruner(n_startup_trials=1)
    )
    other = optuna.load_study(study_name="shared", storage=pickle.loads(pickle.dumps(storage)))
    good = other.ask()
    for step in range(3):
        good.report(0.1, step)
    other.tell(good, 0.1)
    bad = study.ask()
    bad.report(9.0, 0)
    bad.report(9.0, 1)
    assert bad.should_prune()
    study.tell(bad, state=TrialState.PRUNED)
    (pruned,) = other.get_trials(states=[TrialState.PRUNED])
    assert (pruned.value, pruned.intermediate_values) == (9.0, {0: 9.0, 1: 9.0})


def hang(storage: OptunaStorage, started: str) -> None:
    def objective(trial: optuna.Trial) -> float:
        with open(started, "w") as file:
            file.write(str(trial.number))
        threading.Event().wait(120)
        return 0.0

    optuna.load_study(study_name="shared", storage=storage).optimize(objective, n_trials=1)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_the_trial_of_a_killed_worker_fails_and_is_run_again_by_another(
    sqlite_hub: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    retries = optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=1)
    storage = hub.optuna_storage(*sqlite_hub, heartbeat_interval_s=1, grace_period_s=2, on_stale_trial=retries)
    study = optuna.create_study(study_name="shared", storage=storage)
    started = tmp_path_factory.mktemp("marks") / "started"
    worker = forked.Process(target=hang, args=(storage, str(started)))
    worker.start()
    while not started.exists():
        worker.join(0.05)
        assert worker.is_alive()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    while study.trials[0].state is TrialState.RUNNING:  # the test's time limit ends this
        study.optimize(square, n_trials=1)
    assert study.trials[0].state is TrialState.FAIL
    assert [retries.retried_trial_number(trial) for trial in study.trials].count(0) == 1
    storage.delete_study(study._study_id)


def test_a_hub_that_is_killed_costs_workers_no_trial(
    postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    url = postgres.new_database()
    token = owner_token(url)
    with WarmServer(url, tmp_path_factory.mktemp("hub")) as server:
        storage = hub.optuna_storage(server.url, token)
        study = optuna.create_study(study_name="shared", storage=storage)
        workers = [forked.Process(target=work, args=(storage, 40)) for _ in range(2)]
        for worker in workers:
            worker.start()
        for kills in range(1, 6):
            while len(study.get_trials(deepcopy=False)) < 10 * kills:
                assert all(worker.exitcode in (None, 0) for worker in workers)
            server.restart()
        for worker in workers:
            worker.join(120)
        trials = study.get_trials()
        assert [worker.exitcode for worker in workers] == [0, 0]
        assert [trial.number for trial in trials] == list(range(80))
        assert {trial.state for trial in trials} == {TrialState.COMPLETE}
        storage.remove_session()
    postgres.drop_database(url)


def test_a_hub_that_stays_away_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyward.hub.client.repeated.RETRY_S", 0.2)
    with pytest.raises(errors.HubUnreachable, match="url='http://127.0.0.1:1': the hub does not answer"):
        optuna.create_study(storage=hub.optuna_storage("http://127.0.0.1:1", "sky_1_secret"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"url=None: no hub is named; pass url=, call hub.connect, or set SKYWARD_HUB_URL"),
        (
            {"url": "http://a", "heartbeat_interval_s": 0},
            "heartbeat_interval_s=0: is out of range; give an integer from 1",
        ),
        (
            {"url": "http://a", "heartbeat_interval_s": 30, "grace_period_s": 30},
            "grace_period_s=30: is out of range; give an integer from 31",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(errors.UsageError, match=message):
        hub.optuna_storage(**options)  # type: ignore[arg-type]
