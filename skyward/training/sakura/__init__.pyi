"""List of the public names, which `__init__.py` imports when they are first used."""

from ..evaluation.adaptive import AdaptiveCompute as AdaptiveCompute
from ..frameworks.hf.evaluation import SakuraHFCallback as SakuraHFCallback
from ..frameworks.keras.evaluation import SakuraKerasCallback as SakuraKerasCallback
from ..frameworks.lightning.evaluation import SakuraLightningCallback as SakuraLightningCallback
from ..frameworks.lightning.trainer import SakuraTrainer as SakuraTrainer
from .ml.async_trainer import AsyncTrainer as AsyncTrainer
