"""What `__init__.py` loads when it is first used, as imports: for checkers and editors."""

from .hf import SakuraHFCallback as SakuraHFCallback
from .lightning import SakuraLightningCallback as SakuraLightningCallback
from .trainer import SakuraTrainer as SakuraTrainer
