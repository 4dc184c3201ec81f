"""Hooks of MkDocs. Files of the repository that pages link to become part of the site.

A link such as ``../deploy/dagster.yaml`` leads somewhere on GitHub, and out of the site. Here the file is added to the
site, below ``repository/``, and the link is rewritten to it. So pages are written for GitHub and need no second form.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).resolve().parent
REPOSITORY = DOCS.parent
FRONT_DOORS = {REPOSITORY / "README.md": "index.md"}
"""Pages that the site has in another form."""

_CODE_OR_LINK = re.compile(r"^ *```.*?^ *```|`[^`\n]+`|(?<=\]\()[^)\s]+(?=\))", re.MULTILINE | re.DOTALL)


def links(markdown: str) -> Iterator[str]:
    """Yield the targets of a page's links, without those in code."""
    return (found[0] for found in _CODE_OR_LINK.finditer(markdown) if not found[0].lstrip().startswith("`"))


def target_of(link: str, source: Path) -> Path | None:
    """The file of the repository that a link of the page `source` names, if it is outside of docs/."""
    name = link.partition("#")[0]
    if not name or "://" in name or name.startswith("mailto:"):
        return None
    target = (source.parent / name).resolve()
    if not target.is_relative_to(REPOSITORY) or not target.is_file():
        return None  # MkDocs warns
    return target


def place_of(target: Path) -> str:
    """Where a file of the repository is in the site's sources."""
    if target in FRONT_DOORS:
        return FRONT_DOORS[target]
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    return f"repository/{target.relative_to(REPOSITORY).as_posix()}"


def on_files(files: Files, config: Any) -> Files:
    """Add what pages link to outside of docs/, and what those pages link to."""
    waiting = [Path(page.abs_src_path or "") for page in files.documentation_pages()]
    waiting += [
        REPOSITORY / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md")
    ]  # in the nav
    added = set(FRONT_DOORS)
    while waiting:
        page = waiting.pop()
        targets = [page] + [target_of(link, page) for link in links(page.read_text(encoding="utf-8"))]
        for target in targets:
            if target is None or target in added or target.is_relative_to(DOCS):
                continue
            added.add(target)
            files.append(File.generated(config, place_of(target), abs_src_path=str(target)))
            if target.suffix == ".md" and target != page:
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links between docs/ and the rest of the repository to their places in the site."""
    source = Path(page.file.abs_src_path)
    folder = posixpath.dirname(page.file.src_uri)

    def rewritten(found: re.Match[str]) -> str:
        target = None if found[0].lstrip().startswith("`") else target_of(found[0], source)
        if target is None or (target.is_relative_to(DOCS) and source.is_relative_to(DOCS)):
            return found[0]
        _, mark, anchor = found[0].partition("#")
        return posixpath.relpath(place_of(target), folder or ".") + mark + anchor

    return _CODE_OR_LINK.sub(rewritten, markdown)


def on_post_build(config: Any) -> None:
    """Put the Markdown of docs/ beside its pages: llms.txt leads there."""
    for page in DOCS.rglob("*.md"):
        shutil.copyfile(page, Path(config.site_dir) / page.relative_to(DOCS))
