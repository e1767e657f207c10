"""A hook of mkdocs: what pages link to outside of docs (README, results, …) comes into the site, and their links lead there.

So the same links work in a checkout, where a file stands, and in the site, which needs nothing beside it. A page becomes a page, a folder a
list of its files, and anything else is copied.
"""

from __future__ import annotations

import os
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
"""The path in a link of a page, without what follows a #."""
MARK = re.compile(r"<!-- \w+ -->\n?")
"""Where a number or a table is written from results: nothing for a reader."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add all that is linked to, and what that links to in turn."""
    waiting = [page.src_uri for page in files.documentation_pages()]
    sources = {uri: f"docs/{uri}" for uri in waiting}
    while waiting:
        uri = waiting.pop()
        for target in targets(sources[uri]):
            place = place_of(target)
            if place in sources or files.get_file_from_path(place):
                continue
            path = ROOT / target
            if path.is_dir():
                files.append(File.generated(config, place, content=listing(target)))
            else:
                files.append(File.generated(config, place, abs_src_path=str(path)))
            sources[place] = target
            if place.endswith(".md"):
                waiting.append(place)
    _SOURCES.update(sources)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where things are in the site."""
    uri = page.file.src_uri
    folder = posixpath.dirname(_SOURCES[uri])

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        if target.startswith("..") or not (ROOT / target).exists():
            return link[1]  # mkdocs says so
        return posixpath.relpath(place_of(target), posixpath.dirname(uri) or ".")

    if (ROOT / _SOURCES[uri]).is_dir():
        return markdown
    return LINK.sub(moved, MARK.sub("", markdown))


def on_post_build(config: MkDocsConfig) -> None:
    """The index of the search as a script, too: a page that was opened from a folder may not read another file."""
    index = Path(config.site_dir) / "search" / "search_index.json"
    index.with_suffix(".js").write_text(f"var __index = {index.read_text()}")


def targets(source: str) -> list[str]:
    """What a page links to, by paths from the root; for a folder, what is in it."""
    path = ROOT / source
    if path.is_dir():
        return [f"{source}/{entry}" for entry in sorted(os.listdir(path))]
    links = (posixpath.normpath(posixpath.join(posixpath.dirname(source), link)) for link in LINK.findall(path.read_text()))
    return [link for link in links if not link.startswith("..") and (ROOT / link).exists()]


def place_of(target: str) -> str:
    """Where a file of the repository is in the site."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if (ROOT / target).is_dir():
        return f"project/{target}/index.md"
    return f"project/{target.lower() if target.endswith('.md') else target}"


def listing(folder: str) -> str:
    """A page with the files of a folder."""
    lines = [f"# {folder}", ""]
    for path in sorted((ROOT / folder).iterdir(), key=lambda path: (path.is_file(), path.name)):
        place = posixpath.relpath(place_of(f"{folder}/{path.name}"), posixpath.dirname(place_of(folder)))
        lines.append(f"- [{path.name}]({place})" + (f", {path.stat().st_size:,} bytes" if path.is_file() else ""))
    return "\n".join(lines)


_SOURCES: dict[str, str] = {}
"""Pages of the site, and the files they are made of."""
