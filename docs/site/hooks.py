"""Hooks of mkdocs: assemble the pages before each build, and take the project's address from pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pages


def on_config(config: Any) -> Any:
    """Link the source in the footer. With `repo_url` instead, the theme would ask GitHub for stars at each visit."""
    config["extra"]["social"] = [{"icon": "fontawesome/brands/github", "link": pages.repository(), "name": "Source"}]
    return config


def on_pre_build(config: Any) -> None:
    """Write the pages that mkdocs is about to read."""
    pages.assemble(Path(config["docs_dir"]))
