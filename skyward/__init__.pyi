"""The one list of the public names, from which `__init__.py` loads them when they are first used."""

from . import accelerators as accelerators
from . import errors as errors
from . import events as events
from . import integrations as integrations
from . import training as training
from ._version import __version__ as __version__
from .accelerators import Accelerator as Accelerator
from .allocation import AllocationStrategy as AllocationStrategy
from .call_options import CallOptions as CallOptions
from .calls import ComputeFunction as ComputeFunction
from .calls import PendingCompute as PendingCompute
from .calls import PendingComputeGroup as PendingComputeGroup
from .calls import compute as compute
from .calls import gather as gather
from .futures import Future as Future
from .image import DEFAULT_IMAGE as DEFAULT_IMAGE
from .image import Image as Image
from .logs import LogFiles as LogFiles
from .machine import LogLine as LogLine
from .output import silent as silent
from .output import stderr as stderr
from .output import stdout as stdout
from .pool import ComputePool as ComputePool
from .pool import NodeTarget as NodeTarget
from .providers.aws import AWS as AWS
from .providers.local import Local as Local
from .providers.ssh import SSH as SSH
from .providers.ssh import SSHHost as SSHHost
from .secret import Secret as Secret
from .slot.runtime import instance_info as instance_info
from .slot.runtime import is_head as is_head
from .slot.runtime import once as once
from .slot.sharding import shard as shard
from .topology import InstanceInfo as InstanceInfo

__all__: list[str]
