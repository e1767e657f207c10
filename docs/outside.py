"""A hook of mkdocs that adds files outside of docs to the site if pages link to them: README, results, …

So the same links work in the repository and in the site. A page becomes a page, a folder a list of its files, other files are copied.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
"""The path of a link, without a fragment."""
MARK = re.compile(r"<!-- (?:\w+|/) -->")
"""Marks of docs/measured.py."""
SOURCES: dict[str, str] = {}
"""Paths in the repository by path in the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add everything that pages link to, and what that links to in turn."""
    waiting = [page.src_uri for page in files.documentation_pages()]
    SOURCES.update({uri: f"docs/{uri}" for uri in waiting})
    while waiting:
        for target in targets(SOURCES[waiting.pop()]):
            place = place_of(target)
            if place in SOURCES or files.get_file_from_path(place):
                continue
            path = ROOT / target
            content = {"content": listing(target)} if path.is_dir() else {"abs_src_path": str(path)}
            files.append(File.generated(config, place, **content))
            SOURCES[place] = target
            if place.endswith(".md"):
                waiting.append(place)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove marks, and make links lead to places in the site."""
    uri = page.file.src_uri
    source = SOURCES[uri]

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        if not exists(target):
            return link[1]  # mkdocs reports it
        return posixpath.relpath(place_of(target), posixpath.dirname(uri) or ".")

    return markdown if (ROOT / source).is_dir() else LINK.sub(moved, MARK.sub("", markdown))


def on_post_build(config: MkDocsConfig) -> None:
    """Write the search index as a script too: a page that was opened as a file cannot read other files (worker.js)."""
    index = Path(config.site_dir) / "search" / "search_index.json"
    index.with_suffix(".js").write_text(f"var __index = {index.read_text()}")


def targets(source: str) -> list[str]:
    """Return the paths that a page links to; for a folder, those of its files."""
    path = ROOT / source
    if path.is_dir():
        return [f"{source}/{entry.name}" for entry in sorted(path.iterdir())]
    links = (posixpath.normpath(posixpath.join(posixpath.dirname(source), link)) for link in LINK.findall(path.read_text()))
    return [link for link in links if exists(link)]


def exists(target: str) -> bool:
    return not target.startswith("..") and (ROOT / target).exists()


def place_of(target: str) -> str:
    """Return the path in the site."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if (ROOT / target).is_dir():
        return f"project/{target}/index.md"
    return f"project/{target.lower() if target.endswith('.md') else target}"


def listing(folder: str) -> str:
    """Return a page with links to the files of a folder."""
    lines = [f"# {folder}", ""]
    for path in sorted((ROOT / folder).iterdir(), key=lambda path: (path.is_file(), path.name)):
        place = posixpath.relpath(place_of(f"{folder}/{path.name}"), posixpath.dirname(place_of(folder)))
        lines.append(f"- [{path.name}]({place})" + (f", {path.stat().st_size:,} bytes" if path.is_file() else ""))
    return "\n".join(lines)
