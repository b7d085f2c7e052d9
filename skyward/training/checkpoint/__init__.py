"""Checkpoints of a run: each component declares which ranks share it, and a commit covers all ranks or none.

    from skyward.training.checkpoint import CheckpointCoordinator, RNGState, SharingPattern, StateComponent

    coordinator = CheckpointCoordinator(
        [
            StateComponent("model", model, SharingPattern.REPLICATED, validate_replication=True),
            StateComponent("optimizer", optimizer, SharingPattern.REPLICATED),
            StateComponent("rng", RNGState(), SharingPattern.PER_RANK, required=False),
        ],
        output_dir="out",
    )
    coordinator.save_checkpoint(checkpoint_id="100")
    coordinator.load_checkpoint()

Names are loaded on first use, so importing this package imports no framework.
"""

from ..._lazy import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__, extra="training")
