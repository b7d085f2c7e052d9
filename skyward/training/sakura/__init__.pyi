"""What `__init__.py` loads when it is first used, as imports: for checkers and editors."""

from ..evaluation.adaptive import AdaptiveCompute as AdaptiveCompute
from .hf import SakuraHFCallback as SakuraHFCallback
from .keras import SakuraKerasCallback as SakuraKerasCallback
from .lightning import SakuraLightningCallback as SakuraLightningCallback
from .plain import AsyncTrainer as AsyncTrainer
from .trainer import SakuraTrainer as SakuraTrainer
