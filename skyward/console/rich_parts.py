"""Parts of rich for the screens of `watch` commands, which only the extra `training` installs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..errors import MissingDependency

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text


class RichParts(NamedTuple):
    """Classes of rich."""

    Console: type[Console]
    Group: type[Group]
    Live: type[Live]
    Panel: type[Panel]
    Table: type[Table]
    Text: type[Text]


def rich_parts() -> RichParts:
    """Import rich, and return its classes.

    Raises:
        MissingDependency: Without the extra `training`.
    """
    try:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        text = f"the live view of a terminal: {error}; install `skyward[training]`, or append `| cat` for plain lines"
        raise MissingDependency(text, name=error.name) from error
    return RichParts(Console, Group, Live, Panel, Table, Text)
