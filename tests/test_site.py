"""The documentation as a site: it builds without a warning, needs no other host, has every public name, and its pictures are true."""

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys

import pages
import pytest
from report import browser

import permuteformer
from permuteformer import attention, positions, tasks

ROOT = pages.ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built as `make docs` does, with every warning an error (with --quiet they would not be counted)."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_there_and_asks_no_other_host(site):
    made = {path.relative_to(site).with_suffix(".md").as_posix() for path in site.rglob("*.html")}
    assert {page.relative_to(ROOT / "docs").as_posix() for page in pages.PAGES if page != pages.README} <= made
    assert {f"project/{name}.md" for name in ("readme", "architecture", "contributing", "changelog", "security")} <= made
    for path in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?([^\"\s>]+)|<link[^>]* href=\"?([^\"\s>]+)", path.read_text())
        assert not [address for found in loaded for address in found if address.startswith(("http", "//"))], path
    for path in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )['\"]?(?:https?:)?//[^)]*", path.read_text()), path
    assert (site / "search" / "search_index.json").stat().st_size > 100_000


def test_links_to_what_is_outside_docs_lead_into_the_site(site):
    text = (site / "speed.html").read_text()
    assert 'href="project/results/bench/index.html"' in text
    assert (site / "project" / "results" / "bench" / "ops.jsonl").exists()
    assert 'href="../data.html"' in (site / "project" / "readme.html").read_text()


def test_every_public_name_is_on_the_reference():
    shown = {name.rpartition(".")[2] for _, name in pages.documented()}
    text = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    public = {name for room in (permuteformer, attention, positions, tasks) for name in room.__all__} - {"__version__"}
    entries = {registry[name].__name__ for registry in (permuteformer.ATTENTIONS, positions.POSITIONS, tasks.TASKS) for name in registry}
    maps = {function.__name__ for function in permuteformer.FEATURE_MAPS.values()}
    missing = {name for name in public | entries | maps if name not in shown and f"`{name}`" not in text}
    assert not missing


@pytest.mark.parametrize("name", [name for _, name in pages.documented()])
def test_every_name_on_the_reference_has_an_example(name):
    module, _, short = name.rpartition(".")
    found = getattr(importlib.import_module(module), short)
    assert ">>>" in (inspect.getdoc(found) or ""), f"{name} has no example in its docstring"  # which doctest runs


@pytest.fixture(scope="module")
def draw():
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_what_the_library_draws(draw):
    for name, function in draw.PICTURES.items():
        assert (ROOT / "docs" / "pictures" / f"{name}.svg").read_text() == function(), f"{name}: run python docs/draw.py"


def test_the_picture_of_a_permutation_is_a_permutation(draw):
    rows = [re.findall(r">(\d+)</text>", line) for line in draw.permutation().split("\n")]
    numbers = [int(row[0]) for row in rows if row]
    for i in range(8):
        position, *features = numbers[13 * i : 13 * (i + 1)]
        assert position == i
        assert sorted(features) == list(range(1, 13))
        assert features[:5] == [1 + (i + place) % 5 for place in range(5)]


@pytest.mark.skipif(browser.find() is None, reason="needs chromium")
def test_pages_fit_a_telephone_and_load_nothing(site):
    with browser.Browser() as page:
        for name in ("index", "pictures", "guides/choosing", "api/attention", "project/readme"):
            page.open(site / f"{name}.html", width=400, dark=name == "pictures")
            assert page.run("document.documentElement.scrollWidth") <= 400, f"{name} is wider than the window"
        assert not [address for address in page.requests if not address.startswith(("file:", "data:", "blob:"))]
