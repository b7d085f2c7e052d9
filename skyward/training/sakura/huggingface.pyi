"""Module path of `SakuraHFCallback` in Sakura."""

from ..frameworks.hf.evaluation import SakuraHFCallback as SakuraHFCallback
