"""The one list of the public names, from which `__init__.py` loads them when they are first used."""

from ..evaluation.adaptive import AdaptiveCompute as AdaptiveCompute
from .hf import SakuraHFCallback as SakuraHFCallback
from .keras import SakuraKerasCallback as SakuraKerasCallback
from .lightning import SakuraLightningCallback as SakuraLightningCallback
from .plain import AsyncTrainer as AsyncTrainer
from .trainer import SakuraTrainer as SakuraTrainer
