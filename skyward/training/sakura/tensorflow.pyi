"""Sakura's name of the module with `SakuraKerasCallback`."""

from .keras import SakuraKerasCallback as SakuraKerasCallback
