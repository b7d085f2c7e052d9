"""The one list of the integrations, from which `__init__.py` loads them when they are first used."""

from .accelerate import accelerate as accelerate
from .diloco import diloco as diloco
from .jax import jax as jax
from .joblib import joblib_backend as joblib_backend
from .joblib import sklearn_backend as sklearn_backend
from .keras import keras as keras
from .lightning import lightning as lightning
from .pools import JoblibPool as JoblibPool
from .pools import ScikitLearnPool as ScikitLearnPool
from .ray_cluster import ray_cluster as ray_cluster
from .tensorflow import tensorflow as tensorflow
from .torch import torch as torch
from .transformers import transformers as transformers

REGISTRY: dict[str, str]
__all__: list[str]
