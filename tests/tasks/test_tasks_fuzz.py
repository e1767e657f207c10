"""Whatever is in its files, a task gives batches or an error with a message. Damaged files of every format are in ``tests/soak``."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_data import COMPRESS, written
from small_tasks import SMALL

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


@pytest.mark.parametrize("name", [name for name in SMALL if name not in ("digits", "lm-bytes")])
@few
@given(contents=st.lists(CONTENT, min_size=1, max_size=4))
def test_any_files(tmp_path_factory, name, contents):
    folder = tmp_path_factory.mktemp("files")
    options = SMALL[name](folder)
    for n, path in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        written(path, contents[n % len(contents)])
    use(name, **options)
