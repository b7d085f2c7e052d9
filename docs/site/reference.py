"""Pages of the reference that are generated: API, command line and configuration.

Nothing here imports a framework: public names come from the stubs, and options from the parsers and annotations.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from hub_settings import hub_settings_page
from routes import routes_page

ROOT = Path(__file__).parent.parent.parent

MODULES = {
    "skyward": "Calls, pools, providers and the values that they take.",
    "skyward.errors": "Exceptions that skyward raises. The [error catalogue](../docs/errors.md) explains each.",
    "skyward.events": "Events that `pool.events()` and `on_event=` deliver.",
    "skyward.accelerators": "Names and sizes of GPUs and other accelerators.",
    "skyward.integrations": "Decorators that set up frameworks, and pools for joblib and scikit-learn.",
    "skyward.training": "Trainers, callbacks and their events.",
    "skyward.training.callbacks": "Callbacks that log, measure and profile a run.",
    "skyward.training.checkpoint": "Checkpoints: write, load, verify, migrate and prune.",
    "skyward.training.control": "Control of a run from outside: status, save, stop.",
    "skyward.training.diloco": "Loosely joined training: server, worker, callback, sampler and outer optimizers.",
    "skyward.training.evaluation": "Evaluation beside training.",
    "skyward.training.evaluation.dispatchers": "Places where evaluations run.",
    "skyward.training.snapshot": "Copies of a model's state in reused buffers.",
    "skyward.training.sakura": "Evaluation callbacks under the names that users of Sakura know.",
    "skyward.hub": "Runs that are remembered: connect, log and read.",
    "skyward.testing": "Conformance suites, fakes and a virtual clock for your own tests.",
}


def public_names(module: str) -> list[str]:
    """Return the public names of a module, in the order of its stub or of its `__all__`.

    Submodules that have a page of their own are left out.
    """
    folder = ROOT.joinpath(*module.split("."))
    stub = folder / "__init__.pyi"
    if stub.exists():
        names: list[str] = []
        for node in ast.parse(stub.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                names += [alias.asname or alias.name for alias in node.names]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.append(node.target.id)
        return [name for name in names if f"{module}.{name}" not in MODULES and name != "__all__"]
    return list(import_module(module).__all__)


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the Markdown text of each generated page."""
    yield "reference/api.md", _overview()
    for module, purpose in MODULES.items():
        yield f"reference/{module}.md", _module_page(module, purpose)
    yield "reference/cli.md", cli_page()
    yield "reference/configuration.md", configuration_page()
    yield "reference/hub_routes.md", routes_page()
    yield "reference/hub_configuration.md", hub_settings_page(_argument_texts)


# API --------------------------------------------------------------------------------------------------------------


def _overview() -> str:
    rows = [f"| [`{module}`]({module}.md) | {purpose} |" for module, purpose in MODULES.items()]
    return "\n".join(["# API reference", "", "| module | contents |", "|---|---|", *rows, ""])


def _module_page(module: str, purpose: str) -> str:
    lines = [f"# {module}", "", purpose, ""]
    for name in public_names(module):
        if module == "skyward" and name == "__version__":
            lines += ['<a id="skyward.__version__"></a>', "", "## `__version__`", ""]
            lines += ["Version of the installed package, a string.", ""]
        elif module != "skyward.accelerators" or name in ("Accelerator", "AcceleratorFactory", "Custom"):
            lines += [f"::: {module}.{name}", ""]
    if module == "skyward.accelerators":
        lines += _products()
    return "\n".join(lines)


def _products() -> list[str]:
    """Return one table of the factories that `skyward.accelerators` makes from its rows of products."""
    from skyward import accelerators

    lines = ["## Products", "", "Each name is an `AcceleratorFactory`. The first memory is the default.", ""]
    lines += ["| name | vendor | memory of one device | form factors |", "|---|---|---|---|"]
    for name in accelerators.__all__:
        product = getattr(accelerators, name)
        if not isinstance(product, accelerators.AcceleratorFactory):
            continue
        forms = ", ".join(f"{form} ({', '.join(sizes)})" for form, sizes in product.form_factors.items())
        anchor = f'<a id="skyward.accelerators.{name}"></a>'
        lines.append(f"| {anchor}`{name}` | {product.vendor} | {', '.join(product.memory_options)} | {forms} |")
    return [*lines, ""]


# Command line -----------------------------------------------------------------------------------------------------


def cli_page() -> str:
    """Return the reference of the command line, made from its parsers."""
    from skyward.cli import build_parser

    lines = ["# Command line", "", "Each command shows this text with `--help`.", ""]
    for parser in _parsers(build_parser()):
        depth = "##" if parser.prog.count(" ") < 2 else "###"
        lines += [f"{depth} {parser.prog}", "", "```text", parser.format_help().rstrip(), "```", ""]
    return "\n".join(lines)


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _parsers(child)


# Configuration ----------------------------------------------------------------------------------------------------

_INTRODUCTION = """\
# Configuration

`skyward.toml` names pools, for `sky.ComputePool.named("train")` and for the command line:

```toml
{example}
```

skyward merges three files, key by key. Later files win:

1. `~/.skyward/defaults.toml`
2. `~/.config/skyward/skyward.toml` (`XDG_CONFIG_HOME` is respected)
3. the nearest `skyward.toml` in the working folder or above it, up to the project's root

Where text is expected, `{ env = "NAME" }` stands for the value of that environment variable. In
`[pools.NAME.image.env]` it makes a `sky.Secret`. A file that another user owns is refused unless `SKYWARD_TRUST` names
it.

The tables below come from the code that reads these files.
"""


def configuration_page() -> str:
    """Return the reference of skyward.toml, made from the annotations that its reader checks."""
    from skyward.accelerators import Accelerator
    from skyward.pool.config import _NOT_IN_A_FILE
    from skyward.pool.options import ALIASES
    from skyward.pool.pool import ComputePool
    from skyward.providers import PROVIDERS, load
    from skyward.values.image import Image

    hidden = {*_NOT_IN_A_FILE, "self", "return"}
    lines = [_INTRODUCTION.replace("{example}", _example())]
    lines += ["## `[pools.NAME]`", "", *_keys(ComputePool, hidden)]
    others = ", ".join(f"`{alias}` for `{name}`" for alias, name in ALIASES.items())
    lines += [f"Other spellings: {others}.", ""]
    lines += ["## `[pools.NAME.accelerator]`", "", *_keys(Accelerator.from_name, {"return"})]
    lines += ["## `[pools.NAME.image]`", "", *_keys(Image, {"self", "return"})]
    for kind in PROVIDERS:
        lines += [f'## `[providers.NAME]` with `type = "{kind}"`', "", *_keys(load(kind), {"self", "return"})]
    return "\n".join(lines)


def _example() -> str:
    """Return the file that the reader's docstring shows."""
    from skyward.pool import config

    after_summary = (inspect.getdoc(config) or "").splitlines()[1:]
    block = itertools.takewhile(lambda line: not line or line.startswith("    "), after_summary)
    return inspect.cleandoc("\n".join(["", *block]))


def _keys(make: Any, hidden: set[str]) -> list[str]:
    function = make.__init__ if isinstance(make, type) else make
    hints = get_type_hints(function)
    texts = _argument_texts(inspect.getdoc(make) or "")
    rows = ["| key | type | default | |", "|---|---|---|---|"]
    for name, parameter in inspect.signature(function).parameters.items():
        if name in hidden or parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        default = _toml_default(parameter.default)
        row = (f"`{name}`", _toml_type(hints.get(name, Any)), default, texts.get(name, ""))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return [*rows, ""]


def _toml_default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    if isinstance(value, bool | int | float | str):
        return f"`{json.dumps(value)}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return ""


def _toml_type(hint: Any) -> str:
    from skyward.pool.hints import illegal

    # No file can hold this value, so the reader's own refusal names everything that it accepts.
    words = illegal(_Nothing(), hint)
    # A function is legal for the same argument in Python.
    return " or ".join(word for word in words.split(" or ") if word != "a Callable") or "any"


class _Nothing:
    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = object.__hash__


def _argument_texts(docstring: str) -> dict[str, str]:
    """Return the texts of a docstring's `Args:` section, by argument."""
    section = re.search(r"^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", docstring, re.MULTILINE | re.DOTALL)
    texts: dict[str, str] = {}
    entries = re.compile(r"^ {4}(\w+(?:, \w+)*)(?: \([^)]*\))?: (.*?)(?=^ {4}\w|\Z)", re.MULTILINE | re.DOTALL)
    for entry in entries.finditer(section[1] if section else ""):
        texts |= dict.fromkeys(entry[1].split(", "), " ".join(entry[2].split()))
    return texts
