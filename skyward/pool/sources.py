"""Sources of a pool's machines: one provider, or any of several providers, regions and accelerators."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, cast

from ..accelerators import Accelerator
from ..core.spellings import foreign, suggestion
from ..errors import UsageError, WrongArguments
from ..providers.base import Provider
from ..providers.choice import SELECTIONS, Selection

Wanted = str | Accelerator


def source_of(
    provider: Provider | None,
    any_of: Sequence[Provider],
    selection: Selection,
    region: str | Sequence[str] | None,
    accelerator: Wanted | Sequence[Wanted] | None,
) -> tuple[Provider, Accelerator | None]:
    """Return the provider of a pool, and the accelerator to request if there is only one.

    Args:
        provider: The only source, or None.
        any_of: The sources, if there are several.
        selection: Order in which several are tried.
        region: Region, or regions, for each source that has one.
        accelerator: Accelerator, or several.

    Raises:
        UsageError: An argument is illegal.
    """
    providers = in_regions(_providers(provider, any_of), region)
    accelerators = _accelerators(accelerator)
    if selection not in SELECTIONS:
        near = suggestion(str(selection), SELECTIONS)
        advice = f"did you mean {near!r}?" if near else f"use one of {', '.join(map(repr, SELECTIONS))}"
        raise UsageError(f"selection={selection!r}: not supported; {advice}", field="selection", value=selection)
    if len(providers) == 1 and len(accelerators) < 2:
        return providers[0], accelerators[0] if accelerators else None
    from ..providers.any_of import AnyOf, SourceEntry  # most pools have one source

    if len(accelerators) < 2:
        entries = [SourceEntry(provider=one) for one in providers]
        return cast(Provider, AnyOf(entries, selection)), accelerators[0] if accelerators else None
    entries = [SourceEntry(provider=one, accelerator=kind) for one in providers for kind in accelerators]
    return cast(Provider, AnyOf(entries, selection)), None


def _providers(provider: Provider | None, any_of: Sequence[Provider]) -> list[Provider]:
    if not isinstance(any_of, Iterable) or isinstance(any_of, str):
        raise UsageError(
            f"any_of={any_of!r}: not a list of providers; write any_of=[sky.SSH(hosts=[...]), sky.AWS()]",
            field="any_of",
        )
    several = list(any_of)
    if provider is not None and several:
        raise UsageError("any_of: the pool has provider= too; put that provider into the list", field="any_of")
    for one in several:
        if not hasattr(one, "launch") or isinstance(one, type):
            raise UsageError(
                f"any_of: {one!r} is not a provider; pass instances, such as sky.Local()", field="any_of", value=one
            )
    if isinstance(any_of, list) and not several and provider is None:  # left out, it is a tuple
        raise UsageError("any_of=[]: names no provider; write any_of=[sky.SSH(hosts=[...]), sky.AWS()]", field="any_of")
    if provider is None and not several:
        raise WrongArguments(
            f"provider: ComputePool requires it; {foreign('ComputePool', 'provider')}", field="provider"
        )
    return several if provider is None else [provider]


def in_regions(
    providers: list[Provider], region: str | Sequence[str] | None, *, is_lenient: bool = False
) -> list[Provider]:
    """Return each provider once for each region, in the order of the providers; unchanged if it has no regions.

    Args:
        providers: The providers.
        region: Region, or regions; None for those of the providers.
        is_lenient: Whether regions are no mistake if no provider has any.

    Raises:
        UsageError: The regions are illegal, or nobody has any.
    """
    if region is None:
        return providers
    regions = [region] if isinstance(region, str) else list(region) if isinstance(region, Iterable) else []
    if not regions or not all(isinstance(name, str) and name for name in regions):
        raise UsageError(
            f'region={region!r}: not a region or a list of them; write region=["us-east-1", "eu-west-1"]',
            field="region",
        )
    placed: list[Provider] = []
    for provider in providers:
        values: Any = provider
        if _has_regions(provider):
            placed += [dataclasses.replace(values, region=name) for name in dict.fromkeys(regions)]
        else:
            placed.append(provider)
    if not is_lenient and not any(map(_has_regions, providers)):
        names = ", ".join(provider.name for provider in providers)
        raise UsageError(f"region={region!r}: provider {names!r} has no regions; leave region out", field="region")
    return placed


def _has_regions(provider: Provider) -> bool:
    values: Any = provider
    return dataclasses.is_dataclass(values) and any(field.name == "region" for field in dataclasses.fields(values))


def _accelerators(wanted: Wanted | Sequence[Wanted] | None) -> list[Accelerator]:
    if wanted is None:
        return []
    several = [wanted] if isinstance(wanted, str | Accelerator) else list(wanted)
    if not several:
        raise UsageError("accelerator=[]: empty; name at least one, or pass None", field="accelerator", value=wanted)
    made = [Accelerator.from_name(one) if isinstance(one, str) else one for one in several]
    return list(dict.fromkeys(made))
