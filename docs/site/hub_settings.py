"""Reference of the hub's configuration, made from the dataclasses into which the hub reads it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

_INTRODUCTION = """\
# Configuration of the hub

`skyward hub serve --config hub.yaml` reads a file of sections, each with keys below it. The variable of the environment
beside a key wins over the file, so a hub needs no file at all.

- `${NAME}` in a value is a variable of the environment.
- A key that ends with `_file`, such as `secret_key_file`, names a file whose text is the value.
- A list in a variable is separated by commas.
- A wrong key or value is refused when the hub starts.

[PostgreSQL and S3](../guides/hub_team.md) shows a whole file.
"""


def hub_settings_page(argument_texts: Callable[[str], dict[str, str]]) -> str:
    """Return the reference of all sections.

    Args:
        argument_texts: Returns the texts of a docstring's attributes by name.
    """
    from skyward.hub.http.settings import Settings

    lines = [_INTRODUCTION]
    for section, kind in get_type_hints(Settings).items():
        lines += [f"## `{section}`", "", *_rows(section, kind, argument_texts(inspect.getdoc(kind) or "")), ""]
    return "\n".join(lines)


def _rows(section: str, kind: Any, texts: dict[str, str]) -> Iterator[str]:
    from skyward.hub.model.product import ENVIRONMENT_PREFIX

    hints = get_type_hints(kind)
    yield "| key | type | default | variable | |"
    yield "|---|---|---|---|---|"
    for field in dataclasses.fields(kind):
        variable = f"{ENVIRONMENT_PREFIX}{section}_{field.name}".upper()
        cells = (_type(hints[field.name]), _default(field.default), f"`{variable}`", texts[field.name])
        yield f"| `{field.name}` | {' | '.join(cells)} |"


def _type(hint: Any) -> str:
    return {bool: "true or false", int: "whole number", float: "number", str: "text"}.get(hint, "list of texts")


def _default(value: object) -> str:
    if value in ("", ()):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
