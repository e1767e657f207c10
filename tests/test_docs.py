"""README and docs: blocks run, numbers are those of the results, links lead somewhere, examples of extensions pass the contract checks."""

import re
import subprocess
import sys
import textwrap
from importlib.util import module_from_spec, spec_from_file_location

import checks
import pages
import pytest

from permuteformer import build, presets

ROOT, README = pages.ROOT, pages.README
EXTENDING = ROOT / "docs" / "extending.md"
RUN_HERE = [page for page in pages.PAGES if page.name != "convert.md"]
"""Pages but the one that tests/models/test_convert.py runs."""

each_page = pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.stem)


@pytest.fixture(scope="module")
def measured():
    spec = spec_from_file_location("measured", ROOT / "docs" / "measured.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.stem)
def test_the_page_runs(page, in_folder):
    pages.run(page)
    if page == README:
        check_alibi()


def check_alibi():
    for attention in ("softmax", "linear"):
        for causal in (False, True):
            layer = build(attention, [("alibi", {})], hidden_size=32, num_heads=2, causal=causal).double()
            names = ["padding", "masked_keys", "all_masked", "batch", "packed", "relative", *(["causal", "resume"] if causal else [])]
            for name in names:
                checks.CHECKS[name](layer)


@each_page
def test_numbers_are_those_of_the_results(page, measured):
    assert measured.updated(page.read_text()) == page.read_text(), "run: python docs/measured.py"


def test_every_number_that_is_generated_is_on_a_page(measured):
    text = "".join(page.read_text() for page in pages.PAGES)
    assert {place[2] for place in measured.PLACE.finditer(text)} == measured.GENERATED.keys()


@pytest.mark.parametrize("page", [*pages.PAGES, *ROOT.glob("*.md")], ids=lambda page: page.stem)
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", page.read_text()):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


@each_page
def test_shell_blocks_are_valid(page):
    for block in pages.blocks(page):
        if block.language == "sh":
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)


def test_files_that_the_architecture_names_exist():
    paths = {path.relative_to(ROOT).as_posix() for top in ("src", "tests", "docs") for path in (ROOT / top).rglob("*.py")}
    for name in re.findall(r"`([\w/]+\.py)", (ROOT / "ARCHITECTURE.md").read_text()):
        assert any(f"/{path}".endswith(f"/{name}") for path in paths), f"ARCHITECTURE.md names {name}"


def test_files_of_extending_work_outside_of_the_package(tmp_path):
    for block in pages.blocks(EXTENDING):
        if block.title.endswith(".py"):
            (tmp_path / block.title).write_text(block.text)
    program = """
        import sys
        sys.path[:0] = sys.argv[1:]
        import turn, mean, softplus, tickets, checks
        from permuteformer import build
        from permuteformer.tasks import TASKS

        layer = build("linear", ["turn"], hidden_size=32, num_heads=2, causal=True, feature_map="softplus").double()
        for name in ("causal", "padding", "resume", "packed"):
            checks.CHECKS[name](layer)
        layer = build("mean", hidden_size=32, num_heads=2).double()
        for name in ("padding", "masked_keys", "all_masked", "batch"):
            checks.CHECKS[name](layer)
        assert "tickets" in TASKS
        try:
            build("mean", ["turn"], hidden_size=32, num_heads=2)
        except ValueError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path), str(ROOT / "tests")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert re.search(r"'mean'.*'turn'.*transform", run.stdout)


def test_the_row_of_extending_is_an_entry_of_the_presets():
    (entry,) = (block.text for block in pages.blocks(EXTENDING) if block.title == "in LM_ROWS")
    ((name, row),) = eval(f"{{{entry}}}", vars(presets)).items()
    assert row.tables == presets.LANGUAGE
    assert name not in presets.LM_ROWS
    assert row.fields(presets.LM)["position"] == [{"name": "rope"}]


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
def test_misspelled_commands_are_found(words):
    with pytest.raises((SystemExit, Exception)):
        pages.parse(words.split())


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("```sh\npermuteformer eval nowhere\n```\n", "page.md:1.*eval nowhere"),
        ("```ruby\nputs 1\n```\n", "ruby"),
        ("```sh\ncurl example.org\n```\n", "mark the block"),
    ],
)
def test_blocks_that_fail_are_found(block, message, in_folder):
    (in_folder / "page.md").write_text(block)
    with pytest.raises(AssertionError, match=message):
        pages.run(in_folder / "page.md")
