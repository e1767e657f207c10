"""Whatever is in a file, a task gives items or says in words what is wrong."""

import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from permuteformer.tasks.batches import loader
from permuteformer.tasks.check import check
from permuteformer.tasks.classify import Classify
from permuteformer.tasks.images import Images
from permuteformer.tasks.lm import Lm
from permuteformer.tasks.lra_listops import LraListops
from permuteformer.tasks.lra_pathfinder import LraPathfinder
from permuteformer.tasks.lra_retrieval import LraRetrieval
from permuteformer.tasks.lra_text import LraText
from permuteformer.tasks.match import Match
from permuteformer.tasks.wikitext import WikiText2

SETTINGS = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)

WORDS = st.text(st.sampled_from("ab é\"',;\t\r\n\0\x1b\ud800{}[]:0.1\\"), max_size=12)
CELLS = st.one_of(WORDS, st.integers(-2, 2), st.floats(), st.none(), st.booleans(), st.lists(st.integers(), max_size=2))
ROWS = st.lists(st.dictionaries(st.sampled_from(["text", "label", "text2", "split", "id", "image"]), CELLS, max_size=5), max_size=12)


def as_json_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_csv(rows):
    lines = [["text", "label", "text2"], *([row.get(name, "") for name in ("text", "label", "text2")] for row in rows)]
    return "".join(",".join(map(str, line)) + "\n" for line in lines).encode("utf-8", "surrogatepass")


CUT_SHORT = ROWS.map(as_csv).map(gzip.compress).map(lambda packed: packed[:-3])
CONTENT = st.one_of(st.binary(max_size=300), ROWS.map(as_json_lines), ROWS.map(as_csv), CUT_SHORT)


def tried(build):
    """Make a task, read all of it, and make a batch of what there is. Only errors that say something may come."""
    try:
        task = build()
        report = check(task)
        assert all(str(problem).isprintable() for problem in report.shown)
        task.skip_bad = True
        for split in report.splits:
            for batch in loader(task, split, 7):
                assert int(batch.input_ids.max()) < task.vocab_size
    except (ValueError, FileNotFoundError) as error:
        said = str(error)
    else:
        return
    assert len(said) > 20, said


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".parquet", ".csv.gz", ".jsonl.xz"])
@SETTINGS
@given(content=CONTENT)
def test_tables(tmp_path, ending, content):
    path = tmp_path / f"a{ending}"
    path.write_bytes(content)
    tried(lambda: Classify(str(path)))
    tried(lambda: Classify(str(path), image="text"))
    tried(lambda: Match(str(path), first="text", second="text2"))


@SETTINGS
@given(contents=st.lists(CONTENT, min_size=1, max_size=4), unit=st.sampled_from(["bytes", "words"]))
def test_text(tmp_path_factory, contents, unit):
    folder = tmp_path_factory.mktemp("text")
    for n, content in enumerate(contents):
        (folder / f"{n}.txt").write_bytes(content)
    tried(lambda: Lm(str(folder), unit=unit, length=16, context=4))


@SETTINGS
@given(contents=st.lists(CONTENT, min_size=1, max_size=4))
def test_images(tmp_path_factory, contents):
    folder = tmp_path_factory.mktemp("images")
    (folder / "a").mkdir()
    for n, content in enumerate(contents):
        (folder / "a" / f"{n}.png").write_bytes(content)
    tried(lambda: Images(str(folder)))
    (folder / "a.tar").write_bytes(contents[0])
    tried(lambda: Images(str(folder / "a.tar")))


@SETTINGS
@given(content=CONTENT)
def test_official_layouts(tmp_path_factory, content):
    data = tmp_path_factory.mktemp("data")
    for name in (
        *(f"listops-1000/basic_{split}.tsv" for split in ("train", "val", "test")),
        *(f"tsv_data/new_aan_pairs.{split}.tsv" for split in ("train", "eval", "test")),
        *(f"imdb/{split}.jsonl" for split in ("train", "test")),
        *(f"wikitext-2/wiki.{split}.tokens" for split in ("train", "valid", "test")),
        "pathfinder32/curv_contour_length_14/metadata/0.npy",
        "pathfinder32/curv_contour_length_14/imgs/0/sample_0.png",
    ):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_bytes(content)
    for task in (LraListops, LraRetrieval, LraText, LraPathfinder, WikiText2):
        tried(lambda task=task: task(data=str(data)))
