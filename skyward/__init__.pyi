"""Public names of skyward. `__init__.py` reads this list and loads each name on first use."""

import builtins

from . import accelerators as accelerators
from . import errors as errors
from . import events as events
from . import hub as hub
from . import integrations as integrations
from . import training as training
from ._version import __version__ as __version__
from .accelerators import Accelerator as Accelerator
from .calls.actor import ActorBase as ActorBase
from .calls.actor import ActorClass as ActorClass
from .calls.actor import ActorOptions as ActorOptions
from .calls.actor import PendingActor as PendingActor
from .calls.actor import actor as actor
from .calls.actor_handle import ActorHandle as ActorHandle
from .calls.batching import batched as batched
from .calls.compute import ComputeFunction as ComputeFunction
from .calls.compute import PendingCompute as PendingCompute
from .calls.compute import PendingComputeGroup as PendingComputeGroup
from .calls.compute import compute as compute
from .calls.compute import gather as gather
from .calls.futures import Future as Future
from .calls.options import CallOptions as CallOptions
from .calls.output import silent as silent
from .calls.output import stderr as stderr
from .calls.output import stdout as stdout
from .console.logs import LogFiles as LogFiles
from .node.slot.channels import channel as channel
from .node.slot.runtime import instance_info as instance_info
from .node.slot.runtime import is_head as is_head
from .node.slot.runtime import once as once
from .node.slot.sharding import shard as shard
from .node.slot.shared.names import barrier as barrier
from .node.slot.shared.names import counter as counter
from .node.slot.shared.names import dict as dict
from .node.slot.shared.names import event as event
from .node.slot.shared.names import list as list
from .node.slot.shared.names import lock as lock
from .node.slot.shared.names import queue as queue
from .node.slot.shared.names import semaphore as semaphore
from .node.slot.shared.names import set as set
from .node.slot.volumes import VolumeFolder as VolumeFolder
from .node.slot.volumes import volume as volume
from .pool.file_transfer import Transfer as Transfer
from .pool.forwarding import ForwardedPort as ForwardedPort
from .pool.pool import ComputePool as ComputePool
from .pool.pool import NodeTarget as NodeTarget
from .providers.aws import AWS as AWS
from .providers.local import Local as Local
from .providers.ssh import SSH as SSH
from .providers.ssh import SSHHost as SSHHost
from .values.allocation import AllocationStrategy as AllocationStrategy
from .values.image import DEFAULT_IMAGE as DEFAULT_IMAGE
from .values.image import Image as Image
from .values.launch import RankValues as RankValues
from .values.machine import LogLine as LogLine
from .values.nodes import Nodes as Nodes
from .values.pip_index import PipIndex as PipIndex
from .values.ref import Ref as Ref
from .values.secret import Secret as Secret
from .values.topology import InstanceInfo as InstanceInfo
from .values.volume import Volume as Volume
from .wire.task_channel import TaskChannel as TaskChannel

__all__: builtins.list[str]
