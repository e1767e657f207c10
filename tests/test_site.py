"""The documentation as a site: it builds without warnings, loads nothing from other hosts, has every public name, and current figures."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location

import pages
import pytest
from report import browser

import permuteformer
from permuteformer import attention, positions, tasks

ROOT = pages.ROOT
API = ROOT / "docs" / "api.md"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site as ``make docs`` does; warnings are errors (with --quiet they would not be counted)."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def figures():
    spec = spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FIGURES


def test_every_page_is_built_and_loads_nothing_from_other_hosts(site):
    built = {path.relative_to(site).with_suffix(".md").as_posix() for path in site.rglob("*.html")}
    assert built >= {page.name for page in pages.PAGES if page != pages.README}
    assert built >= {f"project/{name}.md" for name in ("readme", "architecture", "contributing", "changelog", "security")}
    for path in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?([^\"\s>]+)|<link[^>]* href=\"?([^\"\s>]+)", path.read_text())
        assert not [address for found in loaded for address in found if address.startswith(("http", "//"))], path
    for path in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )['\"]?(?:https?:)?//[^)]*", path.read_text()), path
    assert (site / "search" / "search_index.json").stat().st_size > 100_000


def test_links_to_files_outside_of_docs_stay_in_the_site(site):
    assert 'href="project/results/bench/index.html"' in (site / "performance.html").read_text()
    assert (site / "project" / "results" / "bench" / "ops.jsonl").exists()
    assert 'href="../data.html"' in (site / "project" / "readme.html").read_text()
    assert "<!-- " not in re.sub(r"<!-- ?(Generated|Page|Theme).*?-->", "", (site / "performance.html").read_text())


def test_every_public_name_is_in_the_reference(site):
    documented = {name.rpartition(".")[2] for name in pages.documented()}
    public = {name for package in (permuteformer, attention, positions, tasks) for name in package.__all__} - {"__version__"}
    registries = (permuteformer.ATTENTIONS, positions.POSITIONS, tasks.TASKS)
    registered = {registry[name].__name__ for registry in registries for name in registry}
    maps = {function.__name__ for function in permuteformer.FEATURE_MAPS.values()}
    text = API.read_text()
    assert not {name for name in public | registered | maps if name not in documented and f"`{name}`" not in text}
    html = (site / "api.html").read_text()
    assert not [name for name in pages.documented() if f'id="{name}"' not in html]


@pytest.mark.parametrize("name", pages.documented())
def test_every_name_in_the_reference_has_an_example(name):
    module, _, short = name.rpartition(".")
    found = getattr(importlib.import_module(module), short)
    assert ">>>" in (inspect.getdoc(found) or ""), f"{name} has no example in its docstring"


def test_figures_are_current(figures):
    drawn = {f"{name}.svg" for name in figures}
    assert {path.name for path in (ROOT / "docs" / "pictures").glob("*.svg")} == drawn
    shown = "".join(page.read_text() for page in pages.PAGES)
    assert all(name in shown for name in drawn)
    for name, svg in figures.items():
        assert (ROOT / "docs" / "pictures" / f"{name}.svg").read_text() == svg(), f"{name}: run python docs/figures.py"


@pytest.mark.skipif(browser.find() is None, reason="needs chromium")
def test_pages_fit_a_phone_and_load_nothing(site):
    with browser.Browser() as page:
        for name in ("index", "concepts", "performance", "api", "project/readme"):
            page.open(site / f"{name}.html", width=400, dark=name == "concepts")
            assert page.run("document.documentElement.scrollWidth") <= 400, f"{name} is wider than the window"
        assert not [address for address in page.requests if not address.startswith(("file:", "data:", "blob:"))]
