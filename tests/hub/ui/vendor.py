"""Copy the libraries of the hub's pages out of npm's packages: `python -m tests.hub.ui.vendor NODE_MODULES`.

`package-lock.json` beside this file names the versions and the hashes of the packages. A library's file is taken as it
is, except that an import names the file beside it instead of a package: browsers find no packages. The manifest holds
the SHA-256 of the package's own file and the replacements, so that `test_vendor.py` can undo them and compare.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

VENDOR = Path(__file__).resolve().parents[3] / "skyward" / "hub" / "ui" / "vendor"

_NAMES = {
    '"preact"': '"./preact.js"',
    '"preact/hooks"': '"./preact-hooks.js"',
    '"@preact/signals-core"': '"./signals-core.js"',
}


@dataclass(frozen=True, slots=True)
class Library:
    """A file of this repository, the package that it comes from, and its path there."""

    file: str
    package: str
    source: str


LIBRARIES = (
    Library("preact.js", "preact", "dist/preact.mjs"),
    Library("preact-hooks.js", "preact", "hooks/dist/hooks.mjs"),
    Library("signals-core.js", "@preact/signals-core", "dist/signals-core.module.js"),
    Library("signals.js", "@preact/signals", "dist/signals.module.js"),
    Library("htm.js", "htm", "dist/htm.module.js"),
    Library("uplot.js", "uplot", "dist/uPlot.iife.min.js"),
    Library("uplot.css", "uplot", "dist/uPlot.min.css"),
)


def copy(modules: Path) -> None:
    """Write the libraries, their licences and the manifest from an installed `node_modules`."""
    VENDOR.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, object]] = []
    notices: dict[str, str] = {}
    for library in LIBRARIES:
        package = modules / library.package
        about = json.loads((package / "package.json").read_text())
        text = (package / library.source).read_text()
        rewritten = {f"from{old}": f"from{new}" for old, new in _NAMES.items() if f"from{old}" in text}
        entries.append(
            {
                "file": library.file,
                "package": library.package,
                "version": about["version"],
                "license": about["license"],
                "source": library.source,
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
                "rewritten": rewritten,
            }
        )
        for old, new in rewritten.items():
            text = text.replace(old, new)
        (VENDOR / library.file).write_text(text)
        notices[f"{library.package} {about['version']}"] = (package / "LICENSE").read_text().strip()
    (VENDOR / "manifest.json").write_text(json.dumps(entries, indent=2) + "\n")
    (VENDOR / "LICENSES.txt").write_text("\n\n".join(f"{name}\n\n{text}" for name, text in notices.items()) + "\n")


if __name__ == "__main__":
    copy(Path(sys.argv[1]))
