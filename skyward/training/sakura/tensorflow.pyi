"""Sakura's module path of `SakuraKerasCallback`."""

from ..frameworks.keras.evaluation import SakuraKerasCallback as SakuraKerasCallback
