"""Root of all errors, and the error that reports a bug in skyward."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

from ..core.printable import printable_lines

if TYPE_CHECKING:  # the keeper needs no dataclasses, which would be a quarter of its memory
    from dataclasses import InitVar, field
else:
    field = None


# An explicit `__init__` per class would repeat the fields of its bases. Real dataclasses would replace the pickling,
# `str` and equality of exceptions. So only type checkers see a dataclass.
@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
class _Fields(Exception):
    """Exception base that turns keyword arguments into attributes.

    Type checkers accept the keywords that a class annotates.
    """

    def __init__(self, message: str = "", **fields: Any) -> None:
        super().__init__(printable_lines(message))
        for name, value in fields.items():
            setattr(self, name, value)  # not into __dict__: ImportError keeps its `name` elsewhere


class SkywardError(_Fields):
    """Root of all errors that skyward itself raises.

    Catch it to handle any failure of skyward, but not exceptions of your own functions. Keyword arguments become
    attributes, so programs read fields instead of parsing messages.

    Attributes:
        retryable: Whether the same call may succeed when it is made again.
        page: Name of the error's page in the catalogue, such as "node-lost"; `skyward explain node-lost` shows it.

    Example:
        try:
            result = train(data) >> pool
        except sky.errors.SkywardError as error:
            if not error.retryable:
                raise
            result = train(data) >> pool
    """

    if TYPE_CHECKING:
        message: InitVar[str] = field(default="", kw_only=False)
    retryable: bool = False
    page: ClassVar[str] = "skyward-error"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__module__.startswith(f"{__package__}."):  # others keep the page of the public class above them
            cls.page = SkywardError.page_of(cls.__name__)

    @staticmethod
    def page_of(name: str) -> str:
        """Convert the name of an error's class to that of its page: `NodeLost` becomes `node-lost`."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()

    def add_note(self, note: str, /) -> None:
        # Notes quote other machines and end on a terminal: escape sequences must not get there.
        super().add_note(printable_lines(note))


class InternalError(SkywardError):
    """A bug in skyward.

    Please report it with its message and traceback. Your code is not at fault.

    Example:
        try:
            step(x) >> pool
        except sky.errors.InternalError as error:
            report(error)
            raise
    """
