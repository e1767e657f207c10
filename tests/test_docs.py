"""The pages of README and docs do what they say."""

import re
import subprocess
from pathlib import Path

import pages
import pytest

ELSEWHERE = {"docs/convert.md": "tests/models/test_convert.py", "README.md": "tests/test_readme.py"}
"""Pages that another test runs, and looks at what came of it."""


@pytest.mark.parametrize(
    "page", [page for page in pages.PAGES if str(page.relative_to(pages.ROOT)) not in ELSEWHERE], ids=lambda page: page.stem
)
def test_the_page_runs(page, in_folder):
    pages.run(page)


def test_pages_that_are_run_elsewhere_are():
    for page, test in ELSEWHERE.items():
        assert Path(page).stem in (pages.ROOT / test).read_text()


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.stem)
def test_every_file_that_is_linked_to_is_there(page):
    for link in re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", page.read_text()):
        assert link.startswith("project/") or (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize(
    "words",
    [
        "permuteformer trian digits",
        "permuteformer train digits --learning-rat 1",
        "permuteformer train digits --hidden-size wide",
        "permuteformer bench ops --devise cuda",
        "permuteformer data fetch --dta x",
        "torchrun --nproc-per-nodes 8 -m permuteformer train digits",
        "torchrun --nproc-per-node 8 -m permuteformer train digits --shards",
        "srun torchrun -m permuteformer trian",
        "pip install --constraintz constraints.txt .",
        "make everything",
        "python benchmarks/core.py --fast",
        "curl example.org",
    ],
)
def test_a_misspelled_command_is_noticed(words):
    with pytest.raises((SystemExit, Exception)):
        pages.parse(words.split())


def test_a_command_that_fails_is_noticed(in_folder):
    page = in_folder / "page.md"
    page.write_text("```sh\npermuteformer eval nowhere\n```\n")
    with pytest.raises(AssertionError, match=r"page.md:1: permuteformer eval nowhere"):
        pages.run(page)
    page.write_text("```ruby\nputs 1\n```\n")
    with pytest.raises(AssertionError, match="'ruby' is neither run nor output"):
        pages.run(page)
    page.write_text("```sh\ncurl example.org\n```\n")
    with pytest.raises(AssertionError, match="mark the block"):
        pages.run(page)


def test_scripts_of_shell_can_be_read():
    for page in pages.PAGES:
        for block in pages.blocks(page):
            if block.language == "sh":
                subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
