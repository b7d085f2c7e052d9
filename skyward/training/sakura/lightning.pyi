"""Sakura's module path of `SakuraLightningCallback` and `SakuraTrainer`."""

from ..frameworks.lightning.evaluation import SakuraLightningCallback as SakuraLightningCallback
from ..frameworks.lightning.trainer import SakuraTrainer as SakuraTrainer
