"""Rich output of a task: one content in several forms, as a mime bundle."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import field, replace
from typing import Any, Final

from ..core.records import dataclass

PLAIN: Final = "text/plain"
JSON: Final = "application/json"
IMAGES: Final = ("image/png", "image/jpeg")
"""Forms in base64."""
FORMS: Final = (PLAIN, "text/html", "text/markdown", "text/latex", "image/svg+xml", *IMAGES, JSON)
"""Forms that are passed on. JavaScript is none of them: it cannot be shown, only run."""
MAX_DISPLAY: Final = 4 << 20
"""Characters of one display, all forms together."""


@dataclass(frozen=True, kw_only=True)
class Display:
    """Rich output of a task.

    Args:
        data: Content by form, such as "text/html".
        metadata: Width and height by form.
        name: Name by which the task updates it.
        is_update: Whether it replaces the display of that name.
    """

    data: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    is_update: bool = False

    @property
    def text(self) -> str:
        """Return the plain form."""
        return str(self.data.get(PLAIN) or f"<{', '.join(self.data)}>")

    @property
    def size(self) -> int:
        """Return the number of characters of the largest form."""
        return max((len(value) for value in self.data.values() if isinstance(value, str)), default=0)

    def masked(self, mask: Callable[[str], str]) -> Display:
        """Return it with a mask applied to all texts. JSON that is none afterwards is left out."""
        data = {}
        for form, value in self.data.items():
            if form == JSON:
                try:
                    data[form] = json.loads(mask(json.dumps(value)))
                except ValueError:
                    continue
            else:
                data[form] = value if form in IMAGES else mask(value)
        return replace(self, data=data)
