"""The one list of the public names, from which `__init__.py` loads them when they are first used."""

from .algorithm import DelayedNesterov as DelayedNesterov
from .algorithm import OuterOptimizer as OuterOptimizer
from .algorithm import OuterSGD as OuterSGD
from .callback import DiLoCoCallback as DiLoCoCallback
from .sampler import DiLoCoSampler as DiLoCoSampler
from .server import DiLoCoServer as DiLoCoServer
from .torch_outer import TorchOuter as TorchOuter
from .worker import DiLoCoWorker as DiLoCoWorker
