"""Control of a running training: look at it, save, stop or abort it, from another process.

    from skyward.training.control import find

    run = find("my-run")          # by the id that TrainerControlCallback(job_id=) gave it
    print(run.status().global_step)
    run.save_and_stop(wait_s=60)

Standard library only, and nothing of it is loaded before it is used.
"""

from ..._lazy import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__, extra="training")
