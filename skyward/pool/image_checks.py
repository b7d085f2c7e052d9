"""Checks of a pool's image before anything costs money: ineffective fields, and likely failures on the nodes."""

from __future__ import annotations

import dataclasses
import os

from ..core.user_lines import warn_user
from ..errors import UsageError
from ..providers.base import Provider
from ..values.machine import PoolSpec


def checked_spec(provider: Provider, spec: PoolSpec) -> PoolSpec:
    """Warn of what the image asks for in vain, and return the request with the user's code. Raises UsageError."""
    image, acting = spec.image, provider.acts_on_image
    if image.container and "container" not in acting:
        why = (
            'which runs calls in this interpreter; install podman, and use sky.SSH(hosts=["localhost"])'
            if provider.shares_files
            else "whose nodes stay as they are; omit it, or use sky.SSH(hosts=[...])"
        )
        raise UsageError(
            f"Image.container={image.container!r}: not supported with {provider.name}, {why}",
            field="container",
            value=image.container,
        )
    unused = image.unused_fields(acting)
    if unused:
        warn_user(
            f"Image: {', '.join(unused)} has no effect with {provider!r}, whose nodes use this environment; "
            "install here what the calls need"
        )
    if provider.shares_files and image.includes:  # its nodes read them where they are
        from ..bootstrap.code import path_of_include

        here = os.path.realpath(os.getcwd())
        for entry in image.includes:
            path_of_include(entry, here)
    if provider.shares_files or "pip" not in acting:
        return spec
    from ..bootstrap.code import gather
    from ..bootstrap.preflight import check

    code = gather(image)
    check(image, code, architecture=spec.architecture, resolves=provider.is_rented)
    return dataclasses.replace(spec, code=code)
