"""Runs are read from folders and files; damaged ones are refused or skipped with a message."""

import json
import os
import re

import pytest
from report.sample import attention_maps, lines, measurement, run_folder, speeds, write

from permuteformer.experiments.layout import RUN_FORMAT
from permuteformer.report.runs import Run, load_runs, number, printable_data, read_run, thinned
from permuteformer.storage import MAX_FILE_BYTES


def test_a_run_folder_is_a_record(tmp_path):
    record = read_run(run_folder(tmp_path / "run", "lm", "permuteformer-lm", 3, 5.4, "4", "quick", lengths=(2, 4), maps=True))
    assert (record.table, record.row, record.column, record.seed, record.preset) == ("4", "permuteformer-lm", "lm", 3, "quick")
    assert record.name == "table4/lm/permuteformer-lm-seed3"
    assert record.command == "permuteformer train lm-bytes --model permuteformer-lm"
    assert (record.status, record.metric, record.greater_is_better, record.parameters) == ("finished", "perplexity", False, 1_234_567)
    assert [event["event"] for event in record.evaluations] == ["evaluation"] * 10 + ["test", "length", "length"]
    assert record.losses[0][0] == 0
    assert len(record.losses) == 50
    assert record.maps["length"] == 24


def test_a_record_goes_to_a_line_and_back(tmp_path):
    record = read_run(run_folder(tmp_path / "run"))
    line = json.loads(json.dumps(record.to_json()))
    assert Run.from_json(line, path=record.path) == record
    assert line["experiment"]["model"] == "permuteformer"
    measured = Run.from_json(speeds()[0])
    assert Run.from_json(measured.to_json()) == measured
    assert "measurement" in measured.to_json()


def test_runs_are_found_at_any_depth_and_not_inside_runs(tmp_path):
    run_folder(tmp_path / "a" / "b" / "c", seed=0)
    run_folder(tmp_path / "d", seed=1)
    run_folder(tmp_path / "d" / "checkpoints" / "copy", seed=2)  # within a run
    run_folder(tmp_path / ".hidden" / "run", seed=3)
    (tmp_path / "a" / "up").symlink_to(tmp_path, target_is_directory=True)
    assert sorted(record.seed for record in load_runs([tmp_path]).runs) == [0, 1]


def test_results_files_and_their_looks(tmp_path):
    record = read_run(run_folder(tmp_path / "elsewhere", "lm", "permuteformer-lm", table="4"))
    folder = tmp_path / "results"
    folder.mkdir()
    lines(folder / "results.jsonl", [record.to_json(), *speeds()])
    lines(
        folder / "attention_maps.jsonl",
        [{"run": record.name, "attention_maps": attention_maps(record.task, record.row)}],
    )
    for given in (folder, folder / "results.jsonl"):
        loaded = load_runs([given])
        assert len(loaded.runs) == 1 + len(speeds())
        assert loaded.runs[0].maps["kernel"]["distances"][0] == 0
        assert loaded.runs[1].maps is None
        assert loaded.skipped == ()


def test_other_json_lines_on_the_way_are_skipped_and_reported(tmp_path):
    run_folder(tmp_path / "run")
    lines(tmp_path / "core.jsonl", [{"kind": "speed", "milliseconds": 3}])
    (tmp_path / "noise.jsonl").write_text("no JSON at all\n")
    loaded = load_runs([tmp_path])
    assert len(loaded.runs) == 1
    assert re.search(rf"2 .jsonl files in {tmp_path} ", *loaded.skipped)
    with pytest.raises(ValueError, match=r"core\.jsonl"):
        load_runs([tmp_path / "core.jsonl"])


def test_inputs_without_runs_are_refused(tmp_path):
    run_folder(tmp_path / "run")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="FOLDER"):
        load_runs([])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_runs([tmp_path / "nowhere"])
    for name, message in {
        "empty": "empty.*experiment.json",
        "notes.txt": r"notes\.txt",
        "run/metrics.jsonl": r"metrics\.jsonl.*folder",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_runs([tmp_path / name])


def test_another_format_is_refused_by_name_and_skipped_on_the_way(tmp_path):
    run_folder(tmp_path / "good")
    bad = run_folder(tmp_path / "bad", seed=1)
    content = json.loads((bad / "experiment.json").read_text())
    write(bad / "experiment.json", {**content, "format": 7, "version": "0.9"})
    with pytest.raises(ValueError, match=rf"bad.*format 7.*0\.9.*format {RUN_FORMAT}"):
        load_runs([bad])
    loaded = load_runs([tmp_path])
    assert [record.seed for record in loaded.runs] == [0]
    assert re.search("bad.*format 7", *loaded.skipped)


@pytest.mark.parametrize("name", ["experiment.json", "environment.json", "result.json", "attention_maps.json"])
@pytest.mark.parametrize("content", ["{", "[1]", "null", '"text"', "[" * 100_000])
def test_a_file_that_is_no_json_object_is_named(tmp_path, name, content):
    run = run_folder(tmp_path / "run", maps=True)
    (run / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name}.*JSON"):
        load_runs([run])


def endless(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def device(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def too_long(path):
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)


@pytest.mark.parametrize(("make", "message"), [(endless, "regular file"), (device, "regular file"), (too_long, f"{MAX_FILE_BYTES:,}")])
@pytest.mark.parametrize("name", ["environment.json", "result.json", "attention_maps.json", "metrics.jsonl"])
def test_a_file_that_would_never_end_is_refused(tmp_path, name, make, message):
    run = run_folder(tmp_path / "run", maps=True)
    make(run / name)
    with pytest.raises(ValueError, match=rf"{name}.*{message}"):
        load_runs([run])


def test_results_that_would_never_end_are_skipped_and_reported(tmp_path):
    run_folder(tmp_path / "run")
    endless(tmp_path / "pipe.jsonl")
    too_long(tmp_path / "long.jsonl")
    endless(run_folder(tmp_path / "unknown") / "experiment.json")  # without a regular file it is no run folder
    loaded = load_runs([tmp_path])
    assert len(loaded.runs) == 1
    long, pipe, _ = loaded.skipped
    assert re.search(rf"long\.jsonl.*{MAX_FILE_BYTES:,}", long)
    assert re.search(r"pipe\.jsonl.*regular file", pipe)


def test_a_broken_last_line_is_skipped_and_one_in_the_middle_refused(tmp_path):
    run = run_folder(tmp_path / "run")
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole + '{"event": "test", "metr')
    assert read_run(run).evaluations == read_run(run_folder(tmp_path / "same")).evaluations
    (run / "metrics.jsonl").write_text('{"event": "te\n' + whole)
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1\b.*JSON"):
        read_run(run)


def test_a_broken_last_record_is_reported(tmp_path):
    file = lines(tmp_path / "results.jsonl", speeds())
    file.write_text(file.read_text() + '{"format": 1, "ki')
    loaded = load_runs([file])
    assert len(loaded.runs) == len(speeds())
    (message,) = loaded.skipped
    assert str(file) in message


def test_maps_of_a_results_file_may_have_any_content(tmp_path):
    file = lines(tmp_path / "results.jsonl", speeds())
    lines(tmp_path / "attention_maps.jsonl", [{"run": ["a list"]}, {"run": speeds()[0]["run"], "attention_maps": [3]}])
    assert not any(run.maps for run in load_runs([file]).runs)


def test_a_run_that_goes_on_has_what_it_has(tmp_path):
    run = run_folder(tmp_path / "run", status="not finished")
    (run / "environment.json").unlink()
    record = read_run(run)
    assert record.status == "not finished"
    assert record.evaluations
    (run / "metrics.jsonl").unlink()
    assert read_run(run).losses == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": None}, "'run'"),
        ({"kind": None}, "'kind'"),
        ({"kind": "guess"}, "kind.*training.*measurement.*'guess'"),
        ({"result": None}, "'result'"),
        ({"result": {}}, "'status'"),
        ({"result": 3}, "result.*object.*3"),
        ({"row": None}, "row"),
        ({"table": 2}, "table.*string.*2"),
        ({"seed": True}, "seed.*True"),
        ({"evaluations": {}}, "evaluations.*list"),
        ({"format": "1"}, "format '1'.*format 1"),
    ],
)
def test_a_bad_record_is_refused_with_its_line(tmp_path, change, message):
    good = measurement("2", "performer", "text", 1.0, 100)
    file = lines(tmp_path / "results.jsonl", [good, {**good, **change}])
    with pytest.raises(ValueError, match=rf"results\.jsonl, line 2: .*{message}"):
        load_runs([file])


def test_a_cell_without_its_row_is_refused(tmp_path):
    run = run_folder(tmp_path / "run")
    content = json.loads((run / "experiment.json").read_text())
    del content["cell"]["row"]
    write(run / "experiment.json", content)
    with pytest.raises(ValueError, match="run.*cell.*'row'"):
        read_run(run)


def test_of_two_runs_of_a_cell_the_later_counts_and_the_other_is_reported(tmp_path):
    old = run_folder(tmp_path / "old" / "run", value=0.1, started="2026-01-01T00:00:00+00:00")
    new = run_folder(tmp_path / "new" / "run", value=0.9, started="2026-02-01T00:00:00+00:00")
    for inputs in ((old, new), (new, old)):
        loaded = load_runs(inputs)
        assert [record.path for record in loaded.runs] == [str(new)]
        assert re.search(f"{old}.*table1/text/permuteformer-seed0.*{new}", *loaded.skipped)


def test_a_run_and_its_line_are_one_and_the_folder_is_shown(tmp_path):
    run = run_folder(tmp_path / "table1" / "run")
    lines(tmp_path / "results.jsonl", [read_run(run).to_json()])
    for inputs in ([tmp_path], [run, tmp_path / "results.jsonl"], [tmp_path / "results.jsonl", run, tmp_path]):
        loaded = load_runs(inputs)
        assert [record.path for record in loaded.runs] == [str(run)]
        assert loaded.skipped == ()


def test_lines_of_the_same_run_that_differ_are_reported(tmp_path):
    one = measurement("2", "performer", "text", 1.0, 100)
    other = measurement("2", "performer", "text", 2.0, 100)
    loaded = load_runs([lines(tmp_path / "a.jsonl", [one]), lines(tmp_path / "b.jsonl", [other])])
    assert len(loaded.runs) == 1
    assert re.search(r"a\.jsonl.*b\.jsonl.*table2/text/performer-seed0", *loaded.skipped)


def test_presets_are_kept_apart_and_own_runs_of_one_name_too(tmp_path):
    run_folder(tmp_path / "a" / "run", preset="quick")
    run_folder(tmp_path / "b" / "run", preset="small")
    run_folder(tmp_path / "c" / "mine", table=None, started="2026-01-01T00:00:00+00:00")
    run_folder(tmp_path / "d" / "mine", table=None, started="2026-01-02T00:00:00+00:00")
    loaded = load_runs([tmp_path / name for name in "abcd"])
    assert len(loaded.runs) == 4
    assert loaded.skipped == ()


def test_what_is_not_finite_is_not_taken(tmp_path):
    run = run_folder(tmp_path / "run")
    events = [
        '{"event": "train", "step": 1, "loss": NaN, "seconds": 1}',
        '{"event": "train", "step": 2, "loss": Infinity, "seconds": 1}',
        '{"event": "train", "step": 3, "loss": "low", "seconds": 1}',
        '{"event": "train", "step": 4, "loss": 0.5, "seconds": NaN}',
        '{"event": "train", "step": 5, "loss": 1' + "0" * 400 + "}",
        '{"event": "surprise"}',
    ]
    (run / "metrics.jsonl").write_text("\n".join(events) + "\n")
    assert read_run(run).losses == ((4.0, 0.5, None),)


def test_texts_are_printable_and_bounded(tmp_path):
    run = run_folder(tmp_path / "run", row="\x1b[31m\u202ered\x07\ud800", task={"title": "a\nb\tc", "notes": ["x" * 100_000]})
    record = read_run(run)
    assert record.row == r"\x1b[31m\u202ered\x07\ud800"
    assert record.task["title"] == "a b c"
    assert len(record.task["notes"][0]) == 10_001
    json.dumps(record.to_json(), ensure_ascii=False).encode("utf-8")
    assert printable_data({"k\x00": ["\x7f", 3, None]}) == {r"k\x00": [r"\x7f", 3, None]}


def test_thinning_keeps_both_ends():
    points = list(range(1000))
    assert thinned(points, 200)[0] == 0
    assert thinned(points, 200)[-1] == 999
    assert len(thinned(points, 200)) == len(set(thinned(points, 200))) == 200
    assert thinned(points[:5], 200) == points[:5]


def test_numbers_are_finite():
    assert [number(value) for value in (1, 0.5, float("nan"), float("-inf"), None, "1", True, 10**400)] == [1.0, 0.5] + [None] * 6
