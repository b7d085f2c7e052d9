"""Runs that are remembered: a tracking server that speaks MLflow's protocol, and the client that feeds it.

    from skyward import hub

    with hub.start_run(run_name="first", experiment="digits") as run:
        run.log_params({"lr": 3e-4})
        run.log_metrics({"loss": 0.5}, step=1)

Names are imported when they are first used. The client needs the standard library only; the server needs the extra
`hub`.
"""

from collections.abc import Callable as _Callable

from .._lazy import lazy_names as _lazy_names
from ..console.announcer import EventStream as _EventStream
from ..console.announcer import observers as _observers
from ..wire.task_channel import TaskChannel as _TaskChannel
from ..wire.task_channel import services as _services

__getattr__, __dir__, __all__ = _lazy_names(
    __name__, __file__, apart=("map",), extra={"OptunaStorage": "hpo", "optuna_storage": "hpo"}
)


def _forward(channel: _TaskChannel) -> None:
    """Send the requests of a pool's task on. The part that does is imported when the first task asks."""
    from .client.forward import serve

    serve(channel)


_services["skyward.hub"] = _forward


def _record(stream: _Callable[[], _EventStream]) -> None:
    """Record a pool that starts, if this program has a hub."""
    from .client.pools import record_pool

    record_pool(stream)


_observers["skyward.hub"] = _record
