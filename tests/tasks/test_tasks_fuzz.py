"""Whatever is in its files, a task gives batches or an error with a message. Damaged files of every format are in ``tests/soak``."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_data import COMPRESS, written

from permuteformer.tasks import TASKS
from permuteformer.tasks.inspect import check

few = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])

WORDS = st.text("ab é\"',;\t\r\n\0\x1b\ud800{}[]:0.1\\", max_size=12)
CELLS = WORDS | st.integers(-2, 2) | st.floats() | st.none() | st.booleans() | st.lists(st.integers(), max_size=2)
ROWS = st.lists(st.dictionaries(st.sampled_from(["text", "label", "text2", "split", "id", "image"]), CELLS, max_size=5), max_size=12)


def as_json_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_csv(rows):
    names = ["text", "label", "text2"]
    lines = [names, *([row.get(name, "") for name in names] for row in rows)]
    return "".join(",".join(map(str, line)) + "\n" for line in lines).encode("utf-8", "surrogatepass")


TRUNCATED = ROWS.map(as_csv).map(COMPRESS[".gz"]).map(lambda data: data[:-3])
CONTENT = st.binary(max_size=300) | ROWS.map(as_json_lines) | ROWS.map(as_csv) | TRUNCATED


def use(name, **options):
    """Read all of a task's data and make a batch of every split; only errors with a message may be raised."""
    try:
        task = TASKS[name](**options)
        report = check(task)
        task.skip_bad = True
        batches = [task.input.collate(task.items(split)[:7]) for split in report.splits]
    except (ValueError, FileNotFoundError) as error:
        message = str(error)
    else:
        message = ""
        assert all(message.isprintable() for message in report.shown)
        assert all(int(batch.input_ids.max()) < task.input.vocab_size for batch in batches)
    assert not message or len(message) > 20


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".parquet", ".csv.gz", ".jsonl.xz"])
@few
@given(content=CONTENT)
def test_any_table(tmp_path, ending, content):
    path = str(written(tmp_path / f"a{ending}", content))
    use("classify", path=path)
    use("classify", path=path, image="text")
    use("match", path=path, text="text", second_text="text2")


@few
@given(contents=st.lists(CONTENT, min_size=1, max_size=4), unit=st.sampled_from(["bytes", "words"]))
def test_any_texts_and_images(tmp_path_factory, contents, unit):
    folder = tmp_path_factory.mktemp("files")
    for name in ("text", "images/a"):
        (folder / name).mkdir(parents=True)
        for n, content in enumerate(contents):
            written(folder / name / f"{n}.png", content)
    use("lm", path=str(folder / "text"), unit=unit, length=16, context=4)
    use("images", path=str(folder / "images"))
    use("images", path=str(written(folder / "a.tar", contents[0])))


@few
@given(content=CONTENT)
def test_any_files_in_the_official_layouts(tmp_path_factory, content):
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
        written(data / name, content)
    for name in ("lra-listops", "lra-retrieval", "lra-text", "lra-pathfinder", "wikitext-2"):
        use(name, data=str(data))
