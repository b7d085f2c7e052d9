"""Runs that are remembered: a tracking server that speaks MLflow's protocol, and the client that feeds it.

    from skyward import hub

    with hub.start_run(run_name="first", experiment="digits") as run:
        run.log_params({"lr": 3e-4})
        run.log_metrics({"loss": 0.5}, step=1)

Names are imported when they are first used. The client needs the standard library only; the server needs the extra
`hub`.
"""

from .._lazy import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__, extra="hub")
