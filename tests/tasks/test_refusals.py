"""A bad item names its file and line, is skipped and counted with ``skip_bad``; options without meaning are refused."""

import pytest
from small_tasks import SMALL

from permuteformer.tasks import TASKS

GOOD_PAIR, PAIRS = "1.0\ta\tb\tb'x'\tb'y'", "new_aan_pairs.train.tsv"
METADATA = "pathfinder32/curv_contour_length_14/metadata/1.npy"
LISTOPS = "listops-1000/basic_train.tsv"

BAD_LINES = [
    ("classify", "a.jsonl", '{"text": 3, "label": "bad"}', "column 'text' must be text, got int"),
    ("classify", "a.jsonl", '{"text": null, "label": "bad"}', "column 'text' must be text, got nothing"),
    ("classify", "a.jsonl", '{"text": "a"}', "label"),
    ("classify", "a.jsonl", '{"text": "a", "label": [1]}', "label .*list"),
    ("classify", "a.jsonl", '{"text": "a", "label": " "}', "label"),
    ("classify", "a.jsonl", "[1, 2]", "list"),
    ("lm", "a.txt", "\udce9", "byte 0xe9"),
    ("lra-retrieval", PAIRS, "2.0\ta\tb\tb'x'\tb'y'", "'2.0'"),
    ("lra-retrieval", PAIRS, "1.0\ta\tb\tb'x'\tb'y' + exit()", "literal"),
    ("lra-pathfinder", METADATA, "imgs/0 x.png 0", "folder, file, index, label"),
    ("lra-pathfinder", METADATA, "imgs/0 x.png 0 2", "folder, file, index, label"),
    ("lra-pathfinder", METADATA, "../../.. secret.png 0 1", "outside"),
    ("lra-pathfinder", METADATA, "imgs/0 none.png 0 1", "imgs/0/none.png"),
    ("lra-pathfinder", METADATA, "imgs/0 sample_0.png 0 1", "imgs/0/sample_0.png occurs twice"),
    ("lra-listops", LISTOPS, "( [MAX 2 )\t10", "'10'"),
    ("lra-listops", LISTOPS, "\t1", "empty"),
    ("lra-listops", LISTOPS, "[AVG 2 3 ]\t2", r"'\[AVG'"),
    ("lra-listops", LISTOPS, "__import__('os')\t1", "__import__"),
]


@pytest.mark.parametrize(("name", "file", "line", "message"), BAD_LINES)
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path, name, file, line, message):
    options, path = SMALL[name](tmp_path), tmp_path / file
    if name == "classify":
        path.write_text("".join(f'{{"text": "{n}", "label": "{n % 2}"}}\n' for n in range(20)))
        options = {"path": str(path)}
    with path.open("a", errors="surrogateescape") as opened:
        opened.write(f"{line}\n")
    number = path.read_bytes().count(b"\n")
    with pytest.raises(ValueError, match=rf"{path.name}, line {number}: .*{message}"):
        TASKS[name](**options).prepare()
    store = TASKS[name](**options, skip_bad=True).store
    assert store.info["errors"]["count"] == 1
    assert sum(store.splits.values()) > 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("images", {"size": 0}, "0 x 0"),
        ("classify", {"seed": -1}, "seed .*-1"),
        ("lra-text", {"protocol": "papers"}, "protocol .*'paper', 'lra'.*'papers'"),
        ("lra-text", {"validate_on": "given"}, "validate_on .*'train', 'test'.*'given'"),
        ("lra-text", {"max_length": 1}, "max_length .*2.*1"),
        ("lra-pathfinder", {"resolution": 48}, "resolution .*32, 64, 128, 256.*48"),
        ("lra-pathfinder", {"level": "harder"}, "level .*'easy', 'intermediate', 'hard'.*'harder'"),
        ("lm", {"unit": "letters"}, "unit .*'bytes', 'words'.*'letters'"),
        ("lm", {"length": 4, "context": 4}, "length .*context .*4 and 4"),
        ("lm", {"min_frequency": 2}, "min_frequency=2"),
        ("lm-bytes", {"corpus": "everything"}, "corpus .*'everything'"),
    ],
)
def test_options_without_meaning_are_refused(tmp_path, name, options, message):
    with pytest.raises(ValueError, match=message):
        TASKS[name](**{**SMALL[name](tmp_path), **options}).input.collate([])
