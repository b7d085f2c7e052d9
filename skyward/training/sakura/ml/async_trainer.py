"""Sakura's name of the module with `AsyncTrainer`."""

from ..plain import AsyncTrainer

__all__ = ["AsyncTrainer"]
