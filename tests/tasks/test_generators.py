"""Properties that all generators share: seeds, processes, progress, atomic folders and refused arguments."""

import hashlib
from functools import partial

import numpy as np
import pytest
from PIL import Image

from permuteformer.tasks import GenerateOptions
from permuteformer.tasks.generators.listops import generate_listops
from permuteformer.tasks.generators.pathfinder import generate_pathfinder
from permuteformer.tasks.generators.retrieval import generate_retrieval

COUNTS = {"train": 50, "validation": 6, "test": 4}


def retrieval(folder, options):
    articles = {**COUNTS, "train": 90}
    documents = {split: [(f"{split} {n}", f"word{split}{n} " * 100) for n in range(count)] for split, count in articles.items()}
    return generate_retrieval(folder, documents, options, half_bytes=100, min_bytes=10)


PARALLEL = {"listops": generate_listops, "pathfinder": partial(generate_pathfinder, level="easy")}
GENERATORS = {**PARALLEL, "retrieval": retrieval}


def options(**changes):
    return GenerateOptions(**{"counts": COUNTS, "processes": 1, **changes})


RECORD = {"listops": "5228b5f2ba3d216c", "pathfinder": "650bdcccabeebd98", "retrieval": "82604e222c611598"}
"""Digests of the data of seed 0. The CHANGELOG says why whenever one changes."""


@pytest.fixture(params=GENERATORS)
def generate(request):
    return GENERATORS[request.param]


def files(folder):
    """Return the digests of all files in a folder by name."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_seed_decides_the_files(generate, tmp_path):
    results = [generate(tmp_path / name, options(seed=seed)) for name, seed in (("a", 3), ("b", 3), ("c", 4))]
    a, b, c = (files(result.folder) for result in results)
    assert a == b
    assert results[0].statistics == results[1].statistics
    assert not {digest for name, digest in a.items() if name != "splits.json"} & set(c.values())


@pytest.mark.parametrize("name", GENERATORS)
def test_data_of_a_seed_is_on_record(name, tmp_path):
    folder, digest = GENERATORS[name](tmp_path, options()).folder, hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = np.asarray(Image.open(path)).tobytes() if path.suffix == ".png" else path.read_bytes()
        digest.update(str(path.relative_to(folder)).encode() + content)
    assert digest.hexdigest()[:16] == RECORD[name]


@pytest.mark.parametrize(("name", "count"), [("listops", 900), ("pathfinder", 1001)])
def test_files_do_not_depend_on_processes(name, count, tmp_path):
    counts = {**COUNTS, "train": count}
    results = [PARALLEL[name](tmp_path / str(n), options(counts=counts, seed=5, processes=n)) for n in (1, 2)]
    assert files(results[0].folder) == files(results[1].folder)
    assert results[0].statistics == results[1].statistics


def test_progress_counts_all_items(generate, tmp_path):
    reports = []
    generate(tmp_path, options(progress=reports.append))
    assert sum(reports) == sum(COUNTS.values())


def stop(_):
    raise KeyboardInterrupt


def test_interrupted_generation_leaves_nothing(generate, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        generate(tmp_path, options(progress=stop))
    assert not files(tmp_path)
    assert generate(tmp_path, options()).folder.is_dir()


def test_interrupted_processes_leave_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        PARALLEL["pathfinder"](tmp_path, options(counts={**COUNTS, "train": 1001}, processes=2, progress=stop))
    assert not files(tmp_path)


def test_existing_folder_is_kept(generate, tmp_path):
    folder = generate(tmp_path, options()).folder
    before = files(tmp_path)
    with pytest.raises(FileExistsError, match=folder.name):
        generate(tmp_path, options(seed=1))
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", -1), ("seed", 0.5), ("train", 0), ("train", 2.5), ("processes", 0), ("processes", 1.5), ("processes", True)],
)
def test_bad_options(name, value):
    with pytest.raises(ValueError, match=f"{name} .*{value}"):
        GenerateOptions(**({"counts": {name: value}} if name == "train" else {name: value}))


def test_an_unknown_split_is_refused(generate, tmp_path):
    with pytest.raises(ValueError, match=r"'valid'.*'validation'"):
        generate(tmp_path, options(counts={"valid": 4}))
    assert not list(tmp_path.iterdir())
