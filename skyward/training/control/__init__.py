"""Control of a running training from another process: inspect it, save, stop or abort it.

    from skyward.training.control import find

    run = find("my-run")          # the id that TrainerControlCallback(job_id=) gave it
    print(run.status().global_step)
    run.save_and_stop(wait_s=60)

It needs the standard library only, and loads each part on first use.
"""

from ..._lazy import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__, extra="training")
