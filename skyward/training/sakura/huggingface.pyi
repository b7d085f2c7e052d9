"""Sakura's module path of `SakuraHFCallback`."""

from ..frameworks.hf.evaluation import SakuraHFCallback as SakuraHFCallback
