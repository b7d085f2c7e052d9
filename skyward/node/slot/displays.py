"""`display(...)` in tasks: objects become mime bundles, which the client shows as a notebook shows its own.

IPython is not required. `display` is a builtin here, as in a notebook, and asks objects for their forms by IPython's
protocol. Where a task imports IPython, its functions get these in their place: without a shell, IPython would print.
"""

from __future__ import annotations

import base64
import builtins
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Container
from types import ModuleType
from typing import Any

from ...values.displays import JSON, MAX_DISPLAY, PLAIN, Display
from .import_hooks import call_after_import
from .runtime import call_endings, current_call

_METHODS = {
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "text/latex": "_repr_latex_",
    "image/svg+xml": "_repr_svg_",
    "image/png": "_repr_png_",
    "image/jpeg": "_repr_jpeg_",
    JSON: "_repr_json_",
}
"""Source: IPython.core.formatters."""
_BACKEND = "module://skyward.node.slot.figures"

Send = Callable[[int, Display], bool]
"""Sends a display of a task. Returns False if this process cannot."""

_send: Send | None = None
_last: dict[int, tuple[str, bool]] = {}
"""By task: the name of its last display, and whether the next one replaces it."""


def offer_displays(send: Send) -> None:
    """Let the tasks of this process display objects and show figures."""
    global _send
    _send = send
    if not hasattr(builtins, "display"):
        builtins.display = display  # type: ignore[attr-defined]
    call_after_import("IPython.core.display_functions", _take_over)
    call_after_import("matplotlib", _choose_backend)


def _take_over(module: ModuleType) -> None:
    # The others are there already, with the functions of their own, only if the slot's zygote has imported them.
    modules = [module, sys.modules.get("IPython.display"), sys.modules.get("IPython.core.display")]
    for function in (display, publish_display_data, clear_output):
        for loaded in modules:
            if hasattr(loaded, function.__name__):
                setattr(loaded, function.__name__, function)


def _choose_backend(matplotlib: ModuleType) -> None:
    """Choose our backend unless the user has chosen one, by MPLBACKEND or a matplotlibrc.

    MPLBACKEND was tried: subprocesses of the task inherit it, and their Python may have no skyward. A kernel sets it
    to its own backend, which then comes with the environment of a local pool, and is not the user's choice.
    """
    chosen = dict.get(matplotlib.rcParams, "backend")  # without a choice it is no text; plain access would choose
    if not isinstance(chosen, str) or "inline" in chosen:
        matplotlib.rcParams["backend"] = _BACKEND


# Functions for tasks --------------------------------------------------------------------------------------------------


class DisplayHandle:
    """Handle of a display, by which it can be replaced."""

    def __init__(self, display_id: str | None = None) -> None:
        self.display_id = display_id or os.urandom(16).hex()

    def display(self, obj: Any, **options: Any) -> None:
        """Display an object under this id."""
        display(obj, display_id=self.display_id, **options)

    def update(self, obj: Any, **options: Any) -> None:
        """Replace the display by that of another object."""
        display(obj, display_id=self.display_id, update=True, **options)


def display(
    *objects: Any,
    include: Container[str] | None = None,
    exclude: Container[str] | None = None,
    metadata: dict[str, Any] | None = None,
    transient: dict[str, Any] | None = None,
    display_id: str | bool | None = None,
    raw: bool = False,
    clear: bool = False,
    update: bool = False,
    **_: Any,
) -> DisplayHandle | None:
    """Show objects where the caller of this task looks: as rich output of a notebook, as plain text of a terminal.

    Takes what `IPython.display.display` takes.

    Returns:
        A handle that can replace the display, if `display_id` was given.
    """
    handle = None
    if display_id:
        handle = DisplayHandle(None if display_id is True else display_id)
        transient = {**(transient or {}), "display_id": handle.display_id}
    if clear:
        clear_output(wait=True)
    for obj in objects:
        if not raw and _displays_itself(obj):
            continue
        data, own_metadata = (obj, {}) if raw else bundle_of(obj)
        chosen = {
            form: value
            for form, value in data.items()
            if form == PLAIN or ((include is None or form in include) and (exclude is None or form not in exclude))
        }
        publish_display_data(chosen, {**own_metadata, **(metadata or {})}, transient=transient, update=update)
    return handle


def publish_display_data(
    data: dict[str, Any],
    metadata: dict[str, Any] | None = None,
    *,
    transient: dict[str, Any] | None = None,
    update: bool = False,
    **_: Any,
) -> None:
    """Send a mime bundle to the caller of this task. Outside a task, and in its child processes, print its text."""
    call = current_call()
    data = _within_limits(data)
    task = 0 if call is None else call.task
    name = str((transient or {}).get("display_id") or "")
    if task and not name:
        last, is_cleared = _last.get(task, ("", False))
        update = update or is_cleared
        name = last if is_cleared else os.urandom(8).hex()
        _remember(task, name, is_cleared=False)
    shown = Display(data=data, metadata=metadata or {}, name=name, is_update=update)
    if _send is None or not task or not _send(task, shown):
        print(shown.text)  # noqa: T201  # as IPython does without a notebook


def clear_output(wait: bool = False) -> None:
    """Let the next display of this task replace its last one. Printed lines stay."""
    call = current_call()
    if call is not None and call.task in _last:
        _remember(call.task, _last[call.task][0], is_cleared=True)


def _remember(task: int, name: str, *, is_cleared: bool) -> None:
    if task not in _last:
        call_endings.setdefault(task, []).append(_forget)
    _last[task] = name, is_cleared


def _forget(task: int) -> None:
    _last.pop(task, None)


# Bundles ----------------------------------------------------------------------------------------------------------


def bundle_of(obj: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the forms of an object, and their metadata. A form that raises is left out, with its traceback."""
    data: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    figures = sys.modules.get("matplotlib.figure")
    if figures is not None and isinstance(obj, figures.Figure):
        data["image/png"] = _png_of(obj)
    elif not isinstance(obj, type):
        whole, details = _asked(obj, "_repr_mimebundle_", include=None, exclude=None)
        data.update(whole or {})
        metadata.update(details)
        for form, method in _METHODS.items():
            if form not in data:
                value, details = _asked(obj, method)
                if value is not None:
                    data[form] = value
                    metadata.update({form: details} if details else {})
    data.setdefault(PLAIN, repr(obj))
    return data, metadata


def _displays_itself(obj: Any) -> bool:
    method = None if isinstance(obj, type) else getattr(obj, "_ipython_display_", None)
    if not callable(method):
        return False
    try:
        method()
    except NotImplementedError:
        return False
    return True


def _asked(obj: Any, method: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Call a method of IPython's protocol, and return its content and metadata."""
    function = getattr(obj, method, None)
    if not callable(function):
        return None, {}
    try:
        answer = function(**options)
    except NotImplementedError:
        return None, {}
    except Exception:
        traceback.print_exc()
        return None, {}
    return answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})


def _png_of(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", bbox_inches="tight")
    return file.getvalue()


def _within_limits(data: dict[str, Any]) -> dict[str, Any]:
    """Return the forms that fit into a display, the plain one first, and report the others."""
    kept: dict[str, Any] = {}
    left = MAX_DISPLAY
    for form, value in sorted(data.items(), key=lambda item: item[0] != PLAIN):
        content = base64.b64encode(value).decode() if isinstance(value, bytes) else value
        size = len(content if isinstance(content, str) else json.dumps(content))
        if size <= left:
            kept[form] = content
            left -= size
        elif form == PLAIN:
            kept[form] = content[: left // 4] + f"... ({size:,} characters)"
            left -= len(kept[form])
        else:
            message = (
                f"skyward: display: {form} of {size / 2**20:.1f} MiB is more than {MAX_DISPLAY >> 20} MiB and is not "
                "shown; show a part of it or a smaller picture, or return it from the function\n"
            )
            sys.stderr.write(message)
    return kept
