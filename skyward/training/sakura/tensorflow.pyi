"""Module path of `SakuraKerasCallback` in Sakura."""

from ..frameworks.keras.evaluation import SakuraKerasCallback as SakuraKerasCallback
