"""Accelerators by name: `sky.accelerators.H100(memory="80GB", form_factor="SXM", count=8)`.

Each name is one row of the tables below, and the factories are generated from the rows. `count` counts devices as the
driver lists them, and `memory` is the memory of one device. A board with two GPUs, such as the K80, is two devices.
Memory is in the vendor's gigabytes, as printed in the data sheet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, field, replace

from .core.frozenmap import FrozenMap
from .core.records import dataclass
from .core.signatures import checked_options
from .core.spellings import suggestion
from .errors import UsageError

# Memory of one device by product; the first size is the default. Source, unless noted: the vendor's data sheet or
# product page of that name.

_NVIDIA_DATACENTRE = {
    "K80": "12GB",  # 24 GB a board, of two GPUs
    "M60": "8GB",  # 16 GB a board, of two GPUs
    "P4": "8GB",
    "P40": "24GB",
    "P100": "16GB 12GB",
    "V100": "16GB 32GB",
    "T4": "16GB",
    "T4G": "16GB",  # source: AWS, EC2 g5g
    "A2": "16GB",
    "A10": "24GB",
    "A10G": "24GB",  # source: AWS, EC2 g5
    "A16": "16GB",  # 64 GB a board, of four GPUs
    "A30": "24GB",
    "A40": "48GB",
    "A100": "80GB 40GB",
    "A800": "80GB 40GB",
    "L4": "24GB",
    "L20": "48GB",
    "L40": "48GB",
    "L40S": "48GB",
    "H20": "96GB 141GB",
    # 94 GB is the NVL board. No board has 40 GB: that is a MIG slice (3g.40gb), kept for programs that ask for it.
    "H100": "80GB 94GB 40GB",
    "H200": "141GB",
    "H800": "80GB",
    "GH200": "96GB 144GB",  # HBM3, HBM3e; the Grace CPU's own memory does not count
    "B100": "192GB",
    "B200": "180GB 192GB",  # HGX: 1.4 TB for 8; 192 GB as announced
    "B300": "288GB 270GB",  # HGX: 2.3 TB for 8 as announced, 2.1 TB usable
    "GB200": "186GB 192GB",  # NVL72: 13.4 TB for 72 GPUs; one superchip has two
    "GB300": "288GB 278GB",  # NVL72: 20.7 TB for 72 GPUs as announced, 20 TB usable
}
_NVIDIA_CONSUMER = {
    "GTX_1060": "6GB 3GB",
    "GTX_1070": "8GB",
    "GTX_1070_Ti": "8GB",
    "GTX_1080": "8GB",
    "GTX_1080_Ti": "11GB",
    "GTX_1660": "6GB",
    "GTX_1660_Super": "6GB",
    "GTX_1660_Ti": "6GB",
    "Titan_Xp": "12GB",
    "Titan_V": "12GB",
    "Titan_RTX": "24GB",
    "RTX_2060": "6GB 12GB",
    "RTX_2060_Super": "8GB",
    "RTX_2070": "8GB",
    "RTX_2070_Super": "8GB",
    "RTX_2080": "8GB",
    "RTX_2080_Super": "8GB",
    "RTX_2080_Ti": "11GB",
    "RTX_3050": "8GB 6GB",
    "RTX_3060": "12GB 8GB",
    "RTX_3060_Laptop": "6GB",
    "RTX_3060_Ti": "8GB",
    "RTX_3070": "8GB",
    "RTX_3070_Ti": "8GB",
    "RTX_3080": "10GB 12GB",
    "RTX_3080_Ti": "12GB",
    "RTX_3090": "24GB",
    "RTX_3090_Ti": "24GB",
    "RTX_4060": "8GB",
    "RTX_4060_Ti": "8GB 16GB",
    "RTX_4070": "12GB",
    "RTX_4070_Super": "12GB",
    "RTX_4070_Ti": "12GB",
    "RTX_4070_Ti_Super": "16GB",
    "RTX_4080": "16GB",
    "RTX_4080_Super": "16GB",
    "RTX_4090": "24GB",
    "RTX_4090D": "24GB",
    "RTX_5060": "8GB",
    "RTX_5060_Ti": "16GB 8GB",
    "RTX_5070": "12GB",
    "RTX_5070_Ti": "16GB",
    "RTX_5080": "16GB",
    "RTX_5090": "32GB",
    "RTX_5090D": "32GB",
}
_NVIDIA_WORKSTATION = {
    "Quadro_P4000": "8GB",
    "Quadro_RTX_4000": "8GB",
    "Quadro_RTX_5000": "16GB",
    "Quadro_RTX_6000": "24GB",
    "Quadro_RTX_8000": "48GB",
    "RTX_A2000": "12GB 6GB",
    "RTX_A4000": "16GB",
    "RTX_A4500": "20GB",
    "RTX_A5000": "24GB",
    "RTX_A6000": "48GB",
    "RTX_4000_Ada": "20GB",
    "RTX_4500_Ada": "24GB",
    "RTX_5000_Ada": "32GB",
    "RTX_5880_Ada": "48GB",
    "RTX_6000_Ada": "48GB",
    "RTX_PRO_4000": "24GB",
    "RTX_PRO_4500": "32GB",
    "RTX_PRO_5000": "48GB 72GB",
    "RTX_PRO_6000": "96GB",
}
_AMD = {
    "Instinct_MI25": "16GB",
    "MI50": "16GB 32GB",
    "MI60": "32GB",
    "MI100": "32GB",
    "MI210": "64GB",
    "MI250": "128GB",  # one module; the driver shows its two dies as devices of 64 GB
    "MI250X": "128GB",  # the same
    "MI300A": "128GB",  # shared by CPU and GPU
    "MI300X": "192GB",
    "MI325X": "256GB",
    "MI350X": "288GB",
    "MI355X": "288GB",
    "RadeonPro_V520": "8GB",
    "RadeonPro_V620": "32GB",
    "RadeonPro_V710": "28GB",
}
_AWS = {  # Source: AWS Neuron documentation, architecture pages, memory of one chip.
    "Inferentia1": "8GB",
    "Inferentia2": "32GB",
    "Trainium1": "32GB",
    "Trainium2": "96GB",
    "Trainium3": "144GB",
}
_INTEL = {"Gaudi": "32GB", "Gaudi2": "96GB", "Gaudi3": "128GB"}
_GOOGLE = {  # Source: Cloud TPU documentation, system architecture, HBM of one chip.
    "TPUv2": "16GB",
    "TPUv3": "32GB",
    "TPUv4": "32GB",
    "TPUv5e": "16GB",
    "TPUv5p": "95GB",
    "TPUv6": "32GB",  # v6e, Trillium
}

# Chips of a slice. Google's number in the name counts TensorCores up to v4 and in v5p (two a chip), chips in v5e.
# Source: Cloud TPU documentation, pages of the versions.
_TPU_SLICES = {"TPUv2_8": 4, "TPUv3_8": 4, "TPUv3_32": 16, "TPUv4_64": 32, "TPUv5e_4": 4, "TPUv5p_8": 4}

_BY_VENDOR = {
    "nvidia": _NVIDIA_DATACENTRE | _NVIDIA_CONSUMER | _NVIDIA_WORKSTATION,
    "amd": _AMD,
    "aws": _AWS,
    "intel": _INTEL,
    "google": _GOOGLE | {slice_: _GOOGLE[slice_.split("_")[0]] for slice_ in _TPU_SLICES},
}

# Form factors by product, with the memory that each comes with.
_FORM_FACTORS = {
    "P100": {"SXM": "16GB", "PCIe": "16GB 12GB"},
    "V100": {"SXM": "16GB 32GB", "PCIe": "16GB 32GB"},
    "A100": {"SXM": "80GB 40GB", "PCIe": "80GB 40GB"},
    "A800": {"SXM": "80GB", "PCIe": "80GB 40GB"},
    "H100": {"SXM": "80GB 40GB", "PCIe": "80GB 40GB", "NVL": "94GB"},
    "H800": {"SXM": "80GB", "PCIe": "80GB"},
    "H200": {"SXM": "141GB", "NVL": "141GB"},
}


@checked_options
@dataclass(frozen=True)
class Accelerator:
    """Accelerators of each node: `count` devices of one kind. A value: frozen, hashable, picklable.

    Args:
        name: Product, such as "A100", "RTX 4090" or "H100-NVL". Any text is allowed for products outside the tables.
        memory: Memory of one device, such as "80GB"; "" for any.
        count: Devices per node, >= 1.
        metadata: Facts that providers match on: `vendor`, `form_factor`, `chips` (of one TPU slice), `cuda_min`,
            `cuda_max`.

    Raises:
        UsageError: A value is illegal.

    Example:
        >>> Accelerator("A100", memory="80GB").with_count(8)
        Accelerator(name='A100', memory='80GB', count=8, metadata={})
    """

    name: str
    _: KW_ONLY
    memory: str = ""
    count: int = 1
    metadata: Mapping[str, object] = field(default_factory=FrozenMap)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise _illegal("name", self.name, 'a name such as "A100"')
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise _illegal("count", self.count, "a whole number >= 1")
        object.__setattr__(self, "memory", _memory(self.memory))
        object.__setattr__(self, "metadata", FrozenMap(self.metadata))

    @classmethod
    def from_name(cls, name: str, *, memory: str = "", form_factor: str | None = None, count: int = 1) -> Accelerator:
        """Look up an accelerator by the name that a user, a vendor, a driver or a cloud uses.

        Case and separators do not matter: "A100", "rtx 4090", "H100-NVL", "A100-80GB", "NVIDIA A100-SXM4-40GB", "Tesla
        T4".

        Args:
            name: The name. May contain memory and form factor.
            memory: Memory of one device; overrides the name.
            form_factor: Form factor, such as "SXM"; overrides the name.
            count: Devices per node, >= 1.

        Raises:
            UsageError: No product matches; the message lists the nearest names. Use `Custom` for products outside the
                tables.

        Example:
            >>> Accelerator.from_name("NVIDIA A100-SXM4-40GB").memory
            '40GB'
        """
        parsed = _parse(name)
        factory = _BY_KEY.get(parsed.key)
        if factory is None:
            raise _unknown(name)
        return factory(memory=memory or parsed.memory, form_factor=form_factor or parsed.form_factor, count=count)

    def is_met_by(self, kind: str, count: int) -> bool:
        """Return whether `count` devices that their driver calls `kind` satisfy this request.

        Memory and form factor are not compared, because not every driver reports them. A `kind` of one word, such as
        "AMD", names only the vendor and matches any product.

        Example:
            >>> Accelerator("A10").is_met_by("NVIDIA A100-SXM4-80GB", 1)
            False
        """
        wanted, has = _parse(self.name).key, _parse(kind).key
        # Names outside the tables, such as "NVIDIA RTX PRO 6000 Blackwell Server Edition", match by substring. Names in
        # the tables must be equal, because "A10" is a substring of "A100".
        is_same = has == wanted if has in _BY_KEY else wanted in has
        return count >= self.count and (is_same or " " not in kind)

    def with_count(self, count: int) -> Accelerator:
        """Return the same device with another count per node."""
        return replace(self, count=count)

    @property
    def memory_gb(self) -> float | None:
        """Memory of one device in the vendor's gigabytes; None if any memory will do."""
        return float(self.memory.removesuffix("GB")) if self.memory else None

    def __str__(self) -> str:
        times = f"{self.count}x " if self.count > 1 else ""
        return f"{times}{self.name} {self.memory}".rstrip()


@dataclass(frozen=True, kw_only=True)
class AcceleratorFactory:
    """Product of the tables. Calling it returns an `Accelerator`.

    Args:
        name: Name of the product.
        vendor: "nvidia", "amd", "aws", "intel" or "google".
        memory_options: Memory sizes of the product; the first is the default.
        form_factors: Form factors, with the memory sizes of each.
        chips: Chips of one TPU slice, or None.

    Example:
        >>> from skyward.accelerators import H100
        >>> str(H100(form_factor="NVL", count=8))
        '8x H100-NVL 94GB'
    """

    name: str
    vendor: str
    memory_options: tuple[str, ...]
    form_factors: Mapping[str, tuple[str, ...]] = field(default_factory=FrozenMap)
    chips: int | None = None

    @checked_options(place="an accelerator")
    def __call__(self, *, memory: str = "", form_factor: str | None = None, count: int = 1) -> Accelerator:
        """Return an accelerator of this product.

        Args:
            memory: Memory of one device; "" for the default.
            form_factor: Form factor; None for any.
            count: Devices per node, >= 1.

        Raises:
            UsageError: The product does not come with this memory or form factor.
        """
        form = self._form(form_factor)
        options = self.form_factors[form] if form else self.memory_options
        size = _memory(memory) or options[0]
        if size not in options:
            raise _illegal("memory", memory, f"{_choices(options)} for {self._full_name(form)}")
        facts = {"vendor": self.vendor, "form_factor": form, "chips": self.chips}
        known = {name: fact for name, fact in facts.items() if fact is not None}
        return Accelerator(self._full_name(form), memory=size, count=count, metadata=known)

    def _form(self, wanted: str | None) -> str | None:
        if wanted is None:
            return None
        for form in self.form_factors:
            if form.lower() == str(wanted).lower():
                return form
        legal = _choices(tuple(self.form_factors)) if self.form_factors else "no form factor (only one exists)"
        raise _illegal("form_factor", wanted, f"{legal} for {self.name}")

    def _full_name(self, form: str | None) -> str:
        return f"{self.name}-{form}" if form else self.name


@checked_options
def Custom(
    name: str, *, memory: str = "", count: int = 1, cuda_min: str | None = None, cuda_max: str | None = None
) -> Accelerator:
    """Return an accelerator that is not in the tables.

    Args:
        name: Name of the product.
        memory: Memory of one device, such as "48GB"; "" for any.
        count: Devices per node, >= 1.
        cuda_min: Lowest CUDA version; kept in the metadata.
        cuda_max: Highest CUDA version; kept in the metadata.

    Example:
        >>> str(Custom("My-GPU", memory="48GB"))
        'My-GPU 48GB'
    """
    bounds = {"cuda_min": cuda_min, "cuda_max": cuda_max}
    known = {bound: version for bound, version in bounds.items() if version is not None}
    return Accelerator(name, memory=memory, count=count, metadata=known)


@dataclass(frozen=True, kw_only=True)
class _Parsed:
    key: str
    memory: str = ""
    form_factor: str | None = None


# Words that vendors and drivers add to a product's name, and that do not distinguish products.
_FILLER = re.compile(r"nvidia|geforce|tesla|amd|instinct|google|cloud|aws|intel|habana|generation|gpu|hbm\w*|gddr\w*")
_FORM = re.compile(r"(sxm|pcie|nvl)\d*")
_MEMORY = re.compile(r"\d+(\.\d+)?gb")


def _parse(name: str) -> _Parsed:
    """Split a name such as "NVIDIA A100-SXM4-40GB" into product, memory and form factor."""
    key, memory, form = "", "", None
    for word in re.findall(r"[a-z0-9.]+", str(name).lower()):
        if _MEMORY.fullmatch(word):
            memory = word.upper()
        elif match := _FORM.fullmatch(word):
            form = match[1]
        elif not _FILLER.fullmatch(word):
            key += word
    return _Parsed(key=key, memory=memory, form_factor=form)


def _memory(text: str) -> str:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*GB?\s*|", text, re.IGNORECASE) if isinstance(text, str) else None
    if match is None or (match[1] and float(match[1]) == 0):
        raise _illegal("memory", text, 'the gigabytes of one device, such as "80GB", or ""')
    return f"{match[1]}GB" if match[1] else ""


def _choices(options: tuple[str, ...]) -> str:
    return "one of " + ", ".join(options) if len(options) > 1 else options[0]


def _illegal(field_name: str, value: object, legal: str) -> UsageError:
    message = f"accelerator {field_name}={value!r}: not supported; use {legal}"
    return UsageError(message, field=field_name, value=value, legal=legal)


_COUNTED = re.compile(r"\s*(?:(\d+)\s*x\s*)?(\S.*?)(?:(?:\s*[:*]|\s+x|(?<=\d)x)\s*(\d+))?\s*", re.IGNORECASE)
"""Pattern of a name with a count, such as "A100:8" or "8x A100"."""


def _unknown(name: str) -> UsageError:
    import difflib

    counted = _COUNTED.fullmatch(name)
    meant = None if counted is None else _BY_KEY.get(_parse(counted[2]).key)
    if counted is not None and meant is not None and (counted[1] or counted[3]):
        attribute = next(attribute for attribute, factory in _FACTORIES.items() if factory is meant)
        hint = f"write sky.accelerators.{attribute}(count={counted[1] or counted[3]})"
        return UsageError(f"accelerator={name!r}: has a count in it; {hint}", field="accelerator", value=name)
    near = difflib.get_close_matches(_parse(name).key, _BY_KEY, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(_BY_KEY[key].name for key in near)}? Otherwise " if near else ""
    message = f"accelerator={name!r}: unknown product; {hint}write sky.accelerators.Custom({name!r})"
    return UsageError(message, field="accelerator", value=name)


def _factory(attribute: str, vendor: str, memory: str) -> AcceleratorFactory:
    forms = {form: tuple(sizes.split()) for form, sizes in _FORM_FACTORS.get(attribute, {}).items()}
    return AcceleratorFactory(
        name=attribute.replace("_", "-" if attribute in _TPU_SLICES else " "),
        vendor=vendor,
        memory_options=tuple(memory.split()),
        form_factors=FrozenMap(forms),
        chips=_TPU_SLICES.get(attribute),
    )


_FACTORIES = {
    attribute: _factory(attribute, vendor, memory)
    for vendor, products in _BY_VENDOR.items()
    for attribute, memory in products.items()
}
_BY_KEY = {_parse(attribute).key: factory for attribute, factory in _FACTORIES.items()}
_BY_KEY |= {"tpuv6e": _FACTORIES["TPUv6"], "gaudi1": _FACTORIES["Gaudi"], "inferentia": _FACTORIES["Inferentia1"]}

__all__ = ["Accelerator", "AcceleratorFactory", "Custom", *_FACTORIES]  # noqa: PLE0604 - the keys are strings


def __getattr__(name: str) -> AcceleratorFactory:
    try:
        return _FACTORIES[name]
    except KeyError:
        # Imports ask for __path__ and the like.
        near = "" if name.startswith("__") else suggestion(name, _FACTORIES)
        hint = f"; did you mean {near}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}") from None


def __dir__() -> list[str]:
    return sorted(__all__)
