"""Module path of `SakuraLightningCallback` and `SakuraTrainer` in Sakura."""

from ..frameworks.lightning.evaluation import SakuraLightningCallback as SakuraLightningCallback
from ..frameworks.lightning.trainer import SakuraTrainer as SakuraTrainer
