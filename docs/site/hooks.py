"""Hooks of mkdocs: assemble the pages before each build, and take the project's address from pyproject.toml."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pages
from mkdocs.exceptions import PluginError

_FOREIGN = re.compile(
    r"""<(?:script|img|iframe|link\s[^>]*rel="?(?:stylesheet|preload|icon))\b[^>]*(?:src|href)="?https?:"""
)


def on_config(config: Any) -> Any:
    """Link the source in the footer. With `repo_url` instead, the theme would ask GitHub for stars at each visit."""
    config["extra"]["social"] = [{"icon": "fontawesome/brands/github", "link": pages.repository(), "name": "Source"}]
    return config


def on_pre_build(config: Any) -> None:
    """Write the pages that mkdocs is about to read."""
    pages.assemble(Path(config["docs_dir"]))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse a page that loads something from another server: the site is read without a network too.

    Raises:
        PluginError: There is such a page, which fails the build.
    """
    if found := _FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri}: loads from another server: {found[0]}; keep a copy in docs/site")
    return output
