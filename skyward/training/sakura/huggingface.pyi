"""Sakura's name of the module with `SakuraHFCallback`."""

from .hf import SakuraHFCallback as SakuraHFCallback
