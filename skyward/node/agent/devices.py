"""Devices of this machine, and the variables by which a process sees only some of them.

NVIDIA's GPUs are listed by `nvidia-smi`, in a process of its own: a driver that hangs must not hang the agent, and a
vendor's library must not crash it, or the client of `sky.Local()`. Without that program, and for other makers, device
files and sysfs tell. Nothing here loads a driver.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace

from ...core.records import dataclass
from ...values.devices import NO_GRANT, Device, Grant, Maker, share
from .limit_groups import LimitGroup

_SMI_LIMIT_S = 15.0
"""Seconds for `nvidia-smi`. Without its persistence mode the driver initialises every GPU first."""
_SMI_FIELDS = "index,uuid,name,memory.total"
_NONE = "-1"
"""Value that hides all devices. HIP takes an empty variable for one that is not set."""
_GIB = 1024**3
_MPS_FOLDER = "/tmp/nvidia-mps"
"""Source: NVIDIA, Multi-Process Service, CUDA_MPS_PIPE_DIRECTORY."""

_TPU_VENDOR = "0x1ae0"
_TPUS = {  # Source: jax/_src/hardware_utils.py. 0x0027 is a v2 too.
    "0x0027": "TPUv3",
    "0x005e": "TPUv4",
    "0x0062": "TPUv5p",
    "0x0063": "TPUv5e",
    "0x006f": "TPUv6",
}
_TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}
"""Shape of the chips of one process. Source: Cloud TPU documentation, several processes on one host."""
_NEURON_CORES = 2
"""Cores of a Trainium1 or Inferentia2 chip, where the driver does not tell. Source: AWS Neuron documentation."""

_RENDER_NODE = "render" + "D"  # joined here, because spelling checkers stumble over it

_CHOOSING = {
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "amd": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    "google": ("TPU_VISIBLE_CHIPS",),
    "aws": ("NEURON_RT_VISIBLE_CORES",),
}
"""Variables that choose among the devices of a maker. HIP counts only the devices that ROCr has left."""

CHOOSING_VARIABLES = frozenset(name for names in _CHOOSING.values() for name in names)
"""Variables by which a user chooses devices."""


@dataclass(frozen=True, kw_only=True)
class NodePart:
    """Part of a node that a process gets: its own devices, the number of visible ones, the variables, and its group."""

    grant: Grant = NO_GRANT
    devices: tuple[Device, ...] = ()
    visible: int = 0
    env: tuple[tuple[str, str], ...] = ()
    group: LimitGroup | None = None
    """Control group that limits it."""


NO_PART = NodePart()


@dataclass(frozen=True, kw_only=True)
class NodeDevices:
    """Devices that the processes of a node may use, all of one maker."""

    devices: tuple[Device, ...] = ()
    names: tuple[str, ...] = ()
    """Names of the devices in the maker's variable: an index, or an identifier."""
    cores: int = _NEURON_CORES
    """Neuron cores of each device."""

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def product(self) -> str:
        """Name of the first device; empty without devices."""
        return self.devices[0].name if self.devices else ""

    def of(self, grant: Grant, part: int, parts: int) -> Grant:
        """Return a grant that names its devices. Without any, they are the share of a process among `parts`."""
        everything = tuple(range(len(self.devices)))
        if grant.devices is None:
            return replace(grant, devices=share(everything, part, parts))
        return replace(grant, devices=tuple(index for index in grant.devices if index < len(self.devices)))

    def part_of(self, grant: Grant, visible: tuple[int, ...], env: Mapping[str, str]) -> NodePart:
        """Return a process's part of the node.

        Args:
            grant: Grant that names its devices.
            visible: Indexes of the devices that the process sees, in the order in which it counts them.
            env: Environment of the node's processes.
        """
        own = tuple(self.devices[index] for index in grant.devices or ())
        variables = {**self.environment(visible, env), **mps_environment(grant, env)}
        return NodePart(grant=grant, devices=own, visible=len(visible), env=tuple(variables.items()))

    def environment(self, visible: tuple[int, ...], env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a process that sees only these devices.

        Args:
            visible: Indexes of the devices, in the order in which the process counts them.
            env: Environment of the node's processes.
        """
        if not self.devices:
            return {}
        names = [self.names[index] for index in visible]
        is_all = visible == tuple(range(len(self.devices)))
        chosen = ",".join(names) or _NONE
        match self.devices[0].kind:
            # A process sees one MIG instance at most, and only if the variable names it.
            case "nvidia" if not is_all or any(name.startswith("MIG-") for name in names):
                # nvidia-smi counts by bus, and CUDA by speed unless it is told otherwise.
                order = {} if "CUDA_VISIBLE_DEVICES" in env else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
                return {"CUDA_VISIBLE_DEVICES": chosen, **order}
            case "amd" if not is_all:
                counted = ",".join(map(str, range(len(names)))) or _NONE
                return {"ROCR_VISIBLE_DEVICES": chosen, "HIP_VISIBLE_DEVICES": counted}
            case "google" if not is_all:
                if not names:
                    return {"TPU_VISIBLE_CHIPS": "", "JAX_PLATFORMS": "cpu"}
                shape = _TPU_BOUNDS.get(len(names))
                bounds = {"TPU_CHIPS_PER_PROCESS_BOUNDS": shape, "TPU_PROCESS_BOUNDS": "1,1,1"} if shape else {}
                return {"TPU_VISIBLE_CHIPS": ",".join(names), **bounds}
            case "aws" if not is_all and "NEURON_RT_VISIBLE_CORES" not in env:
                cores = [core for index in visible for core in range(index * self.cores, (index + 1) * self.cores)]
                return {"NEURON_RT_VISIBLE_CORES": ",".join(map(str, cores))}
        return {}

    def part(self, node: int, nodes: int, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of one of several nodes on this machine. With too few devices, nodes share them."""
        return self.environment(share(tuple(range(len(self.devices))), node, nodes), env)


def find_devices(env: Mapping[str, str], root: str | os.PathLike[str] = "/") -> NodeDevices:
    """Find the devices that a process with `env` sees.

    Args:
        env: Environment of the user's processes: its PATH leads to `nvidia-smi`, and its variables choose devices.
        root: Folder of the machine's files.
    """
    root = os.fspath(root)
    finders: tuple[Callable[[], NodeDevices], ...] = (
        lambda: _from_smi(env),
        lambda: _from_files(root, "nvidia", "dev/nvidia[0-9]*", _nvidia_name(root)),
        lambda: _neuron(root),
        lambda: _tpus(root),
        lambda: _amd(root),
    )
    found = next((devices for find in finders if (devices := find())), NodeDevices())
    if not found:
        return found
    for variable in _CHOOSING[found.devices[0].kind]:
        found = _chosen(found, env.get(variable))
    return replace(found, devices=tuple(replace(device, index=at) for at, device in enumerate(found.devices)))


def mps_environment(grant: Grant, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hold a process to its share of a GPU; none where no MPS daemon runs."""
    folder = env.get("CUDA_MPS_PIPE_DIRECTORY") or _MPS_FOLDER
    if grant.gpu_share >= 1 or not os.path.exists(os.path.join(folder, "control")):
        return {}
    return {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(max(1, round(grant.gpu_share * 100)))}


# NVIDIA ---------------------------------------------------------------------------------------------------------------


def _from_smi(env: Mapping[str, str]) -> NodeDevices:
    program = _program("nvidia-smi", env)
    if program is None:
        return NodeDevices()
    text = _output([program, f"--query-gpu={_SMI_FIELDS},mig.mode.current", "--format=csv,noheader,nounits"], env)
    if not text:  # drivers before MIG do not know that field
        text = _output([program, f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits"], env)
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) >= 4 and row[0].isdecimal()]
    slices = _slices(_output([program, "-L"], env)) if any("Enabled" in row[4:] for row in rows) else {}
    devices: list[Device] = []
    names: list[str] = []
    for number, uuid, product, mib, *_ in rows:
        parts = slices.get(number, [])
        for part_name, part_id in parts or [("", uuid)]:
            size = re.search(r"(\d+)gb", part_name)
            gib = float(size[1]) if size else float(mib) / 1024 if mib.isdecimal() else 0.0
            name = f"{product} {part_name}".rstrip()
            devices.append(Device(index=len(devices), id=part_id, kind="nvidia", name=name, memory_gib=gib))
            names.append(part_id if part_name else number)
    return NodeDevices(devices=tuple(devices), names=tuple(names))


def _program(name: str, env: Mapping[str, str]) -> str | None:
    """Do what `shutil.which` does, without its imports: every agent comes here."""
    folders = env.get("PATH", os.defpath).split(os.pathsep)
    paths = (os.path.join(folder, name) for folder in folders)
    return next((path for path in paths if os.access(path, os.X_OK) and os.path.isfile(path)), None)


def _slices(listing: str) -> dict[str, list[tuple[str, str]]]:
    """Return (profile, UUID) of the MIG instances in the listing of `nvidia-smi -L`, by the number of their GPU."""
    slices: dict[str, list[tuple[str, str]]] = {}
    gpu = ""
    for line in listing.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            gpu = match[1]
        elif match := re.match(r"\s+(MIG \S+)\s+Device\s+\d+:\s+\(UUID: (MIG-[^)]+)\)", line):
            slices.setdefault(gpu, []).append((match[1], match[2]))
    return slices


def _output(command: list[str], env: Mapping[str, str]) -> str:
    """Return what a command prints, or "" if it fails or does not end. It may never end: the kernel can hold it."""
    import subprocess  # only here: most machines have no such command

    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: value for name, value in env.items() if name != "CUDA_VISIBLE_DEVICES"},
            start_new_session=True,
        )
    except OSError:  # not a program that runs here
        return ""
    try:
        output, _ = process.communicate(timeout=_SMI_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the driver holds it
            process.wait(1)
        return ""
    return output.decode(errors="replace") if process.returncode == 0 else ""


def _nvidia_name(root: str) -> str:
    for path in _paths(root, "proc/driver/nvidia/gpus/*/information"):
        for line in _read(path).splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return "NVIDIA"


# Other makers ---------------------------------------------------------------------------------------------------------


def _neuron(root: str) -> NodeDevices:
    found = _from_files(root, "aws", "dev/neuron[0-9]*", "Neuron")
    cores = _read(os.path.join(root, "sys/devices/virtual/neuron_device/neuron0/core_count"))
    return replace(found, cores=int(cores)) if found and cores.isdecimal() else found


def _tpus(root: str) -> NodeDevices:
    """Find TPUs on the bus, or by their files where the bus cannot be read."""
    vendors = sorted(_paths(root, "sys/bus/pci/devices/*/vendor"))
    chips = [os.path.dirname(path) for path in vendors if _read(path) == _TPU_VENDOR]
    kinds = [_TPUS[kind] for chip in chips if (kind := _read(os.path.join(chip, "device"))) in _TPUS]
    if not kinds:
        return _from_files(root, "google", "dev/accel[0-9]*", "TPU")
    from ...accelerators import Accelerator  # only here: its tables are needed on TPU machines alone

    gb = Accelerator.from_name(kinds[0]).memory_gb or 0.0
    paths = [f"tpu{number}" for number in range(len(kinds))]
    return _listed("google", kinds[0], paths, gb * 1e9 / _GIB)


def _amd(root: str) -> NodeDevices:
    """Find AMD's GPUs in the kernel driver's topology, in the order in which ROCm counts them."""
    identities = _paths(root, "sys/class/kfd/kfd/topology/nodes/*/gpu_id")
    nodes = [os.path.dirname(path) for path in identities if _read(path) not in ("", "0")]
    devices = []
    for at, node in enumerate(sorted(nodes, key=lambda node: int(os.path.basename(node)))):
        facts = _fields(os.path.join(node, "properties"))
        banks = [_fields(path) for path in _paths(node, "mem_banks/*/properties")]
        size = sum(int(bank.get("size_in_bytes", 0)) for bank in banks if bank.get("heap_type") in ("1", "2"))
        minor = facts.get("drm_render_minor", "")
        card = f"sys/class/drm/{_RENDER_NODE}{minor}/device/product_name"
        unique = int(facts.get("unique_id", 0))
        identity = f"GPU-{unique:016x}" if unique else f"{_boot()}/{os.path.relpath(node, root)}"
        name = _read(os.path.join(root, card)) or "AMD"
        devices.append(Device(index=at, id=identity, kind="amd", name=name, memory_gib=size / _GIB))
    return NodeDevices(devices=tuple(devices), names=tuple(map(str, range(len(devices)))))


def _fields(path: str) -> dict[str, str]:
    lines = [line.split() for line in _read(path).splitlines()]
    return {line[0]: line[1] for line in lines if len(line) == 2}


def _from_files(root: str, maker: Maker, pattern: str, name: str) -> NodeDevices:
    paths = sorted(glob.glob(pattern, root_dir=root), key=_by_number)
    return _listed(maker, name, paths, 0.0)


def _listed(maker: Maker, name: str, paths: list[str], memory_gib: float) -> NodeDevices:
    """Return devices that have no identifier of their own. Within one boot of a machine no two share a path."""
    boot = _boot() if paths else ""
    devices = [
        Device(index=at, id=f"{boot}/{path}", kind=maker, name=name, memory_gib=memory_gib)
        for at, path in enumerate(paths)
    ]
    return NodeDevices(devices=tuple(devices), names=tuple(map(str, range(len(devices)))))


# The user's choice ----------------------------------------------------------------------------------------------------


def _chosen(found: NodeDevices, choice: str | None) -> NodeDevices:
    """Keep the devices that a variable chooses, in its order. As in CUDA, an unknown one hides all that follow it."""
    if choice is None:
        return found
    places: list[int] = []
    names: list[str] = []
    for part in choice.split(","):
        name = part.strip()
        place = _place(found, name)
        if place is None and name.startswith(("GPU-", "MIG-")) and "/" in found.devices[0].id:
            place = len(places)  # without nvidia-smi nobody knows which one it is
        if place is None or place in places or place >= len(found):
            break
        places.append(place)
        # An index does not name an instance of MIG to CUDA, but its identifier does.
        names.append(found.names[place] if found.names[place].startswith("MIG-") else name)
    return replace(found, devices=tuple(found.devices[place] for place in places), names=tuple(names))


def _place(found: NodeDevices, name: str) -> int | None:
    """Return the place of the device with this index or identifier, of which the beginning is enough."""
    if name.isdecimal():
        return int(name) if int(name) < len(found) else None
    return next((at for at, device in enumerate(found.devices) if name and device.id.startswith(name)), None)


def _by_number(path: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", path)]


def _boot() -> str:
    return _read("/proc/sys/kernel/random/boot_id") or socket.gethostname()


def _paths(root: str, pattern: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(root), pattern))


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:  # no such file, so another kind of machine
        return ""
