"""Accelerators: the table, its factories, and names from elsewhere."""

from __future__ import annotations

import dataclasses
import pickle
import re
from typing import Any, assert_type

import pytest

from skyward import accelerators
from skyward.accelerators import A100, H100, H200, K80, V100, Accelerator, AcceleratorFactory, Custom
from skyward.errors import UsageError
from tests.doctests import run_examples

FACTORIES = [name for name in accelerators.__all__ if isinstance(getattr(accelerators, name), AcceleratorFactory)]

# The names that programs with this API use already.
KNOWN = """
A2 A10 A10G A16 A40 A100 A800 B100 B200 GB200 GH200 H100 H200 K80 L4 L40 L40S P4 P40 P100 T4 T4G V100
GTX_1060 GTX_1070 GTX_1070_Ti GTX_1080 GTX_1080_Ti GTX_1660 GTX_1660_Super GTX_1660_Ti Titan_V Titan_Xp
RTX_2060 RTX_2060_Super RTX_2070 RTX_2070_Super RTX_2080 RTX_2080_Super RTX_2080_Ti
RTX_3050 RTX_3060 RTX_3060_Laptop RTX_3060_Ti RTX_3070 RTX_3070_Ti RTX_3080 RTX_3080_Ti RTX_3090 RTX_3090_Ti
RTX_4060 RTX_4060_Ti RTX_4070 RTX_4070_Super RTX_4070_Ti RTX_4070_Ti_Super RTX_4080 RTX_4080_Super RTX_4090 RTX_4090D
RTX_5060 RTX_5060_Ti RTX_5070 RTX_5070_Ti RTX_5080 RTX_5090
RTX_A2000 RTX_A4000 RTX_A5000 RTX_A6000 RTX_5000_Ada RTX_5880_Ada RTX_6000_Ada RTX_PRO_4000 RTX_PRO_6000
Quadro_P4000 Quadro_RTX_4000 Quadro_RTX_6000 Quadro_RTX_8000
Instinct_MI25 MI50 MI100 MI210 MI250 MI250X MI300A MI300X RadeonPro_V520 RadeonPro_V710
Gaudi Gaudi2 Gaudi3 Inferentia1 Inferentia2 Trainium1 Trainium2 Trainium3
TPUv2 TPUv2_8 TPUv3 TPUv3_8 TPUv3_32 TPUv4 TPUv4_64 TPUv5e TPUv5e_4 TPUv5p TPUv5p_8 TPUv6 Custom Accelerator
"""


def factory(name: str) -> AcceleratorFactory:
    return accelerators.__getattr__(name)


def test_examples_in_docstrings_run() -> None:
    run_examples(accelerators)


def test_every_known_name_exists_and_dir_and_all_agree() -> None:
    assert set(KNOWN.split()) <= set(accelerators.__all__)
    assert len(FACTORIES) > 110
    assert sorted(accelerators.__all__) == dir(accelerators)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="H1000"):
        accelerators.H1000  # noqa: B018


@pytest.mark.parametrize("name", FACTORIES)
def test_every_factory_makes_the_accelerator_it_names(name: str) -> None:
    made = factory(name)
    one = made()
    assert one == Accelerator.from_name(name) == Accelerator.from_name(one.name.upper())
    assert one.count == 1
    assert one.memory == made.memory_options[0]
    assert one.memory_gb is not None
    assert one.memory_gb > 0
    assert one.metadata["vendor"] == made.vendor
    assert len(set(made.memory_options)) == len(made.memory_options)
    for form, sizes in made.form_factors.items():
        assert set(sizes) <= set(made.memory_options)
        for size in sizes:
            accelerator = made(form_factor=form, memory=size, count=2)
            assert accelerator.name == f"{made.name}-{form}"
            assert accelerator == Accelerator.from_name(accelerator.name, memory=size, count=2)


def test_the_types_of_factories_are_known_to_the_type_checker() -> None:
    assert_type(H100, AcceleratorFactory)
    assert_type(H100(memory="80GB", form_factor="SXM", count=8), Accelerator)


def test_form_factors_are_named_after_their_own_product() -> None:
    assert H100(form_factor="NVL").name == "H100-NVL"
    assert H100(form_factor="NVL").memory == "94GB"
    assert H100(form_factor="sxm").name == "H100-SXM"
    assert H100(form_factor="SXM").metadata == {"vendor": "nvidia", "form_factor": "SXM"}
    assert H200(form_factor="NVL").name == "H200-NVL"
    assert H100().name == "H100"


@pytest.mark.parametrize(
    ("made", "memory"),
    [
        (H100(), "80GB"),
        (H200(), "141GB"),
        (A100(), "80GB"),
        (A100(memory="40 gb"), "40GB"),
        (V100(memory="32GB"), "32GB"),
    ],
)
def test_memory_is_that_of_the_data_sheet(made: Accelerator, memory: str) -> None:
    assert made.memory == memory


def test_memory_is_that_of_one_device_if_a_board_has_several() -> None:
    assert K80().memory_gb == 12
    assert factory("A16")().memory_gb == 16


def test_slices_say_how_many_chips_they_have() -> None:
    assert factory("TPUv4_64")().metadata["chips"] == 32
    assert factory("TPUv5e_4")().metadata["chips"] == 4
    assert factory("TPUv4_64")().name == "TPUv4-64"


@pytest.mark.parametrize(
    ("written", "name", "memory"),
    [
        ("a100", "A100", "80GB"),
        ("A100-80GB", "A100", "80GB"),
        ("A100-40GB", "A100", "40GB"),
        ("h100 nvl", "H100-NVL", "94GB"),
        ("rtx-4090", "RTX 4090", "24GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM", "40GB"),
        ("NVIDIA H100 80GB HBM3", "H100", "80GB"),
        ("NVIDIA GeForce RTX 3080 Ti", "RTX 3080 Ti", "12GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", "48GB"),
        ("Quadro RTX 6000", "Quadro RTX 6000", "24GB"),
        ("Tesla V100-PCIE-32GB", "V100-PCIe", "32GB"),
        ("Tesla T4", "T4", "16GB"),
        ("AMD Instinct MI300X", "MI300X", "192GB"),
        ("MI25", "Instinct MI25", "16GB"),
        ("tpu-v5e", "TPUv5e", "16GB"),
        ("TPUv6e", "TPUv6", "32GB"),
    ],
)
def test_names_are_read_as_vendors_and_drivers_write_them(written: str, name: str, memory: str) -> None:
    accelerator = Accelerator.from_name(written)
    assert (accelerator.name, accelerator.memory) == (name, memory)


def test_arguments_of_from_name_take_precedence_over_the_name() -> None:
    accelerator = Accelerator.from_name("A100-40GB", memory="80GB", form_factor="PCIe", count=4)
    assert str(accelerator) == "4x A100-PCIe 80GB"


def test_an_unknown_name_is_refused_with_near_ones_and_a_workaround() -> None:
    with pytest.raises(UsageError, match=r"did you mean .*A100.*Custom\('A1000'\)"):
        Accelerator.from_name("A1000")
    with pytest.raises(UsageError, match="unknown product"):
        Accelerator.from_name("")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: H100(memory="81GB"), "one of 80GB, 94GB, 40GB for H100"),
        (lambda: H100(form_factor="NVL", memory="80GB"), "94GB for H100-NVL"),
        (lambda: H100(form_factor="OAM"), "one of SXM, PCIe, NVL for H100"),
        (lambda: K80(form_factor="SXM"), "no form factor (only one exists) for K80"),
        (lambda: A100(count=0), "a whole number >= 1"),
        (lambda: A100(count=True), "a whole number >= 1"),
        (lambda: Accelerator("A100", count=1.5), "a whole number >= 1"),  # type: ignore[arg-type]
        (lambda: Accelerator("A100", memory="lots"), "gigabytes"),
        (lambda: Accelerator("A100", memory="0GB"), "gigabytes"),
        (lambda: Accelerator("A100", memory=80), "gigabytes"),  # type: ignore[arg-type]
        (lambda: Accelerator(" "), "a name"),
    ],
)
def test_illegal_values_are_refused_with_the_legal_range(call: Any, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        call()


def test_an_accelerator_is_a_frozen_hashable_picklable_value() -> None:
    one = H100(form_factor="SXM")
    assert pickle.loads(pickle.dumps(one)) == one
    assert len({one, H100(form_factor="SXM")}) == 1
    assert one.with_count(8).count == 8
    assert one.with_count(8).with_count(1) == one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.count = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(H100)) == H100


def test_custom_makes_accelerators_that_no_table_has() -> None:
    mine = Custom("My-GPU", memory="48GB", count=2, cuda_min="12.0")
    assert mine == Accelerator("My-GPU", memory="48GB", count=2, metadata={"cuda_min": "12.0"})
    assert Custom("Any").memory_gb is None


@pytest.mark.parametrize(
    ("wanted", "kind", "is_met"),
    [
        ("A100", "NVIDIA A100-SXM4-80GB", True),
        ("A10", "NVIDIA A100-SXM4-80GB", False),
        ("L4", "NVIDIA L40S", False),
        ("H100-SXM", "NVIDIA H100 80GB HBM3", True),
        ("RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", True),
        ("RTX 4090", "NVIDIA GeForce RTX 4090", True),
        ("MI300X", "AMD", True),
    ],
)
def test_the_machine_is_requested_by_the_drivers_name(wanted: str, kind: str, is_met: bool) -> None:
    accelerator = Accelerator.from_name(wanted)
    assert accelerator.is_met_by(kind, 1) == is_met
    assert not accelerator.with_count(2).is_met_by(kind, 1)
