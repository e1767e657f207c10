"""Means, deviations, the best, failures, ratios, the paper's numbers, and whether the order agrees."""

import math
import statistics
from dataclasses import replace

import pytest
from report.sample import environment, measurement, speeds

from permuteformer.report.agreement import Standing, compare, is_tie
from permuteformer.report.groups import group, slug
from permuteformer.report.records import Record
from permuteformer.report.spreadsheet import spreadsheet
from permuteformer.report.tables import build_tables

TEXT = {"name": "lra-text", "title": "reviews", "kind": "classify", "metric": "accuracy", "greater_is_better": True}
LM = {"name": "lm-bytes", "title": "help", "kind": "lm", "metric": "perplexity", "greater_is_better": False}


def training(row, value, seed=0, column="text", table="1", status="finished", task=None, preset="small", evaluations=(), **work):
    return Record(
        run=f"table{table}/{column}/{row}-seed{seed}",
        table=table,
        row=row if table else None,
        column=column if table else None,
        preset=preset,
        seed=seed,
        task=task or (LM if column == "lm" else TEXT),
        work={"model": row, "task": (task or TEXT)["name"], "seed": seed, **work},
        environment=environment(),
        result={"status": status, "value": value},
        evaluations=tuple(evaluations),
    )


def only(records):
    (table,) = build_tables(group(records))
    return table


def at(table, row, column):
    return table.cells[row, column]


def test_mean_deviation_and_count_over_seeds():
    values = [0.61, 0.64, 0.66]
    cell = at(only([training("performer", value, seed) for seed, value in enumerate(values)]), "performer", "text")
    assert cell.mean == pytest.approx(100 * statistics.mean(values))
    assert cell.deviation == pytest.approx(100 * statistics.stdev(values))  # of the sample: n − 1
    assert (cell.count, cell.text, cell.detail) == (3, "63.67 ± 2.52", "(3)")
    assert (cell.paper, cell.paper_text) == ((63.95, 0.42), "63.95 ± 0.42")


def test_one_seed_has_no_deviation():
    cell = at(only([training("performer", 0.5)]), "performer", "text")
    assert (cell.deviation, cell.text, cell.detail) == (None, "50.00", "(1)")


def test_the_best_is_the_highest_accuracy_and_the_lowest_perplexity():
    table = only([training("performer", 0.7), training("permuteformer", 0.6), training("transformer", None, status="out of memory")])
    assert [at(table, row, "text").best for row in ("performer", "permuteformer", "transformer")] == [True, False, False]
    table = only([training(row, value, column="lm", table="4") for row, value in {"performer-lm": 7.0, "permuteformer-lm": 6.0}.items()])
    assert [at(table, row, "lm").best for row in ("performer-lm", "permuteformer-lm")] == [False, True]


def test_what_looks_the_same_is_as_good_and_one_alone_is_not_best():
    table = only([training("performer", 0.66661), training("permuteformer", 0.66659), training("roformer", 0.1)])
    assert [at(table, row, "text").best for row in ("performer", "permuteformer", "roformer")] == [True, True, False]
    assert not at(only([training("performer", 0.7)]), "performer", "text").best


def test_failures_are_contents():
    table = only(
        [
            training("transformer", None, status="out of memory"),
            training("performer", None, status="not finite"),
            training("reformer", float("nan")),
            training("linformer", None),
            training("roformer", 0.6, 0),
            training("roformer", None, 1, status="out of memory"),
            training("roformer", None, 2, status="not finished"),
            training("permuteformer", None, 0, status="out of memory"),
            training("permuteformer", None, 1, status="not finite"),
        ]
    )
    texts = {row.name: at(table, row.name, "text").text for row in table.rows}
    assert texts == {
        "transformer": "out of memory",
        "performer": "not finite",
        "reformer": "not finite",
        "linformer": "no value",
        "roformer": "60.00",
        "permuteformer": "out of memory (1), not finite (1)",
    }
    assert at(table, "roformer", "text").remark == "1 of 3 out of memory, 1 of 3 not finished"
    assert at(table, "transformer", "text").count == 0
    assert at(table, "transformer", "text").mean is None


def test_rows_and_columns_stand_in_the_papers_order_and_others_behind():
    rows = ["permuteformer", "my-row", "transformer", "performer"]
    columns = ["digits", "pathfinder", "text"]
    table = only([training(row, 0.5, column=column) for row in rows for column in columns])
    assert [row.name for row in table.rows] == ["transformer", "performer", "permuteformer", "my-row"]
    assert [column.name for column in table.columns] == ["text", "pathfinder", "digits"]
    assert at(table, "permuteformer", "digits").paper is None
    assert [row.leads[0] for row in table.rows] == ["Transformer", "Performer", "PermuteFormer", "my-row"]


def test_the_average_needs_all_four_tasks():
    tasks = ("text", "retrieval", "image", "pathfinder")
    seeds = [training("performer", 0.1 * (i + 1) + seed / 100, seed, task) for i, task in enumerate(tasks) for seed in range(2)]
    table = only([*seeds, training("permuteformer", 0.5)])
    cell = at(table, "performer", "average")
    assert cell.mean == pytest.approx(25.5)
    assert cell.deviation == pytest.approx(math.hypot(*[statistics.stdev([0, 1])] * 4) / 4)
    assert cell.paper == (64.87, 0.53)
    assert ("permuteformer", "average") not in table.cells
    assert cell.anchor == at(table, "performer", "text").anchor
    (line,) = [line for line in spreadsheet(table).splitlines() if line.startswith("performer,average")]
    assert all(f"table1/{column}/performer-seed0" in line for column in ("text", "retrieval", "image", "pathfinder"))
    assert [column.name for column in table.columns][-1] == "average"
    assert "average" not in [column.name for column in only(seeds[:6]).columns]


def test_presets_are_tables_of_their_own():
    tables = build_tables(group([training("performer", 0.5, preset="quick"), training("performer", 0.6, preset="small")]))
    assert [table.name for table in tables] == ["table-1-quick", "table-1-small"]
    assert [at(table, "performer", "text").count for table in tables] == [1, 1]


def test_ratios_are_to_the_transformer():
    table = next(table for table in build_tables(group([Record.from_json(line) for line in speeds()])) if table.name.startswith("table-2"))
    cell = at(table, "performer", "text")
    assert cell.ratio == pytest.approx(0.57)
    assert cell.paper_ratio == pytest.approx(354 / 622)
    assert (cell.text, cell.detail, cell.paper_shown) == ("14,250", "(0.57×)", "354 (0.57×)")
    assert at(table, "performer-t5", "text").remark == "estimated"
    failed = [
        measurement("2", "transformer", "text", None, 100, status="out of memory"),
        measurement("2", "performer", "text", 1.0, 100, items=10),
    ]
    cell = at(only([Record.from_json(line) for line in failed]), "performer", "text")
    assert (cell.mean, cell.ratio) == (10.0, None)


def test_latency_is_of_one_sample():
    line = measurement("3", "performer", "text", 0.5, 4000, batch=10, kind="inference")
    assert at(only([Record.from_json(line)]), "performer", "text").text == "50.0"


def test_speed_by_length_is_a_table_of_time_and_one_of_memory():
    records = [Record.from_json(line) for line in speeds() if line["table"] == "speed"]
    time, memory = build_tables(group(records))
    assert [column.name for column in time.columns] == ["512", "1024", "2048", "4096", "8192", "16384"]
    assert at(time, "performer-lm", "4096").mean == pytest.approx(30)  # microseconds a token
    assert at(time, "performer-lm", "4096").ratio == pytest.approx(30 / (20 + 40.96))
    assert at(time, "transformer-lm", "16384").text == "out of memory"
    assert at(memory, "performer-lm", "512").mean == pytest.approx(50 + 0.002 * 512)
    assert time.lengths["16384"] == 16384
    halved = measurement("speed", "performer-lm", "512", 0.3, 512, batch=4)
    assert at(build_tables(group([Record.from_json(halved)]))[0], "performer-lm", "512").mean == pytest.approx(0.3e6 / 2048)


def lengths(values, trained=256):
    yield {"event": "evaluation", "step": 1, "epoch": 1, "metrics": {"perplexity": 99.0}}
    yield {"event": "test", "step": 1, "epoch": 1, "metrics": {"perplexity": values[1]}}
    for times, value in values.items():
        if times > 1:
            yield {"event": "length", "length": trained * times, "times": times, "metrics": {"perplexity": value}}


def test_lengths_beyond_the_trained_one():
    found = [lengths({1: 5.0 + seed, 2: 4.0, 16: 3.0}) for seed in range(2)]
    records = [training("permuteformer-lm", 5.0, seed, "lm", "4", evaluations=found[seed]) for seed in range(2)]
    records.append(training("transformer-lm", 5.0, 0, "lm", "4", evaluations=lengths({1: 5.0, 2: 8.0, 16: float("inf")})))
    records.append(training("performer-lm", 5.0, 0, "lm", "4"))
    _, table = build_tables(group(records))
    assert [column.title for column in table.columns] == ["256 ×1", "512 ×2", "4,096 ×16"]
    assert [row.name for row in table.rows] == ["transformer-lm", "permuteformer-lm"]
    assert at(table, "permuteformer-lm", "1").mean == pytest.approx(5.5)
    assert at(table, "transformer-lm", "16").text == "not finite"
    assert at(table, "permuteformer-lm", "2").best
    assert table.lengths == {"1": 256, "2": 512, "16": 4096}


def test_lengths_of_models_trained_at_different_ones_are_multiples():
    records = [
        training("permuteformer-lm", 5.0, 0, "lm", "4", evaluations=lengths({1: 5.0, 2: 4.0}, 256)),
        training("transformer-lm", 5.0, 0, "lm", "4", evaluations=lengths({1: 5.0, 2: 4.0}, 512)),
    ]
    _, table = build_tables(group(records))
    assert [column.title for column in table.columns] == ["1 ×", "2 ×"]
    assert table.axes[0] == "length (times the trained one)"


def test_own_runs_are_grouped_by_what_they_are():
    own = {"table": None, "task": {**TEXT, "name": "digits"}}
    records = [training("mine", 0.90, seed, learning_rate=0.1, **own) for seed in range(2)]
    records += [training("mine", 0.95, 0, learning_rate=0.2, **own), training("other", 0.99, 0, learning_rate=0.1, **own)]
    records.append(training("lm", 9.0, 0, table=None, task=LM))
    table = only(records)
    assert table.leads == ("Task", "Model", "Settings", "Metric")
    assert [row.leads for row in table.rows] == [
        ("digits", "mine", "learning_rate=0.1", "accuracy (%)"),
        ("digits", "mine", "learning_rate=0.2", "accuracy (%)"),
        ("digits", "other", "", "accuracy (%)"),
        ("lm-bytes", "lm", "", "perplexity"),
    ]
    assert [at(table, row.name, "test").count for row in table.rows] == [2, 1, 1, 1]
    assert [at(table, row.name, "test").best for row in table.rows] == [False, False, True, False]


def test_notes_of_tasks_and_baselines_stand_under_the_table():
    task = {**TEXT, "notes": ["validated on test", 7], "baselines": {"majority": 0.5, "broken": None}}
    sizes = {"config": {"hidden_size": 64, "num_hidden_layers": 2}, "result": {"status": "finished", "value": 0.5, "steps": 300}}
    rows = [training(row, 0.5, task=task, batch_size=16, learning_rate=1e-3) for row in ("performer", "permuteformer")]
    table = only([replace(row, **sizes) for row in rows])
    assert "Text: lra-text, reviews." in table.notes
    assert "Text: validated on test." in table.notes
    assert "Text, without a model: majority 50.0 %." in table.notes
    assert "Text: width 64, 2 layers, 300 updates of 16 items, learning rate 0.001." in table.notes
    assert any(note.startswith("The paper also has Transformer,") for note in table.notes)


def test_one_seed_is_as_certain_as_its_items_are_many():
    """Of 100 items, accuracies of 50 and 54 % are the same; of 10,000 they are not."""
    for items, same in ((100, 0), (10_000, 1)):
        table = only([training("transformer", 0.50, test_items=items), training("permuteformer", 0.54, test_items=items)])
        assert (table.agreement.same, table.agreement.ties) == (same, 1 - same)


def test_measurements_say_how_they_were_made():
    four = measurement("2", "performer", "text", 1.0, 4000, batch=4, items=25_000)
    two = measurement("2", "reformer", "text", 1.0, 4000, batch=2)
    ways = ["4,000 tokens, batch of 2, best of 3, on cpu", "4,000 tokens, batch of 4, 25,000 items an epoch, best of 3, on cpu"]
    assert f"Text: {' or '.join(ways)}." in only([Record.from_json(line) for line in (four, two)]).notes


def standings(ours, paper, column="Text"):
    return [Standing(column, row, ours[row], paper[row]) for row in ours]


def test_order_that_agrees():
    paper = {"a": (1.0, None), "b": (2.0, None), "c": (3.0, None)}
    agreement = compare(standings({"a": (10.0, None), "b": (20.0, None), "c": (30.0, None)}, paper))
    assert (agreement.same, agreement.ties, agreement.reversed_pairs) == (3, 0, ())
    assert agreement.sentence == "The order of rows is the paper's: all 3 pairs stand as there."


def test_pairs_that_disagree_are_named():
    paper = {"a": (1.0, None), "b": (2.0, None), "c": (3.0, None)}
    agreement = compare(standings({"a": (10.0, None), "b": (40.0, None), "c": (30.0, None)}, paper))
    assert agreement.sentence == (
        "Of 3 pairs of rows 2 stand in the paper's order and 1 stands the other way round: "
        "b is higher than c (40 and 30, in the paper 2 and 3)."
    )


def test_ties_are_within_one_joint_deviation_here_or_there():
    assert is_tie((1.0, 3.0), (5.9, 4.0))
    assert is_tie((1.0, 3.0), (6.0, 4.0))
    assert not is_tie((1.0, 3.0), (6.1, 4.0))
    assert is_tie((1.0, None), (1.0, None))
    assert not is_tie((1.0, None), (1.01, None))
    ours = {"a": (1.0, None), "b": (2.0, None)}
    assert compare(standings(ours, {"a": (2.0, 1.0), "b": (1.0, 0.1)})).ties == 1
    assert compare(standings({"a": (1.0, 1.0), "b": (2.0, 1.0)}, {"a": (2.0, None), "b": (1.0, None)})).ties == 1
    assert len(compare(standings(ours, {"a": (2.0, 0.1), "b": (1.0, 0.1)})).reversed_pairs) == 1


def test_pairs_are_within_a_column_and_need_both_numbers():
    assert compare([]) is None
    assert compare([Standing("Text", "a", (1.0, None), (1.0, None)), Standing("Image", "b", (1.0, None), (1.0, None))]) is None
    table = only([training("performer", 0.5), training("permuteformer", None, status="out of memory"), training("my-row", 0.6)])
    assert table.agreement is None


def test_many_pairs_are_counted_and_three_named():
    rows = [f"row{i}" for i in range(5)]
    ours, paper = {row: (float(i), None) for i, row in enumerate(rows)}, {row: (float(-i), None) for i, row in enumerate(rows)}
    agreement = compare([*standings(ours, paper), *standings(ours, paper, "Image")])
    assert len(agreement.reversed_pairs) == 20
    assert agreement.sentence.endswith("; and 17 more.")
    assert "Text: row1 is higher than row0" in agreement.sentence


def test_the_sentence_of_a_table_counts_its_pairs():
    rows = {"transformer-lm": 5.0, "performer-lm": 6.2, "permuteformer-lm": 5.4}
    table = only([training(row, value, column="lm", table="4") for row, value in rows.items()])
    assert table.agreement.sentence == "The order of rows is the paper's: all 3 pairs stand as there."


def test_groups_have_anchors_of_their_own():
    groups = group([training("a b", 0.5), training("a-b", 0.6), training("<script>", 0.6)])
    assert len({one.anchor for one in groups}) == 3
    assert slug("Table 1", "<script>", "ü") == "table-1-script"
    assert slug("ü") == "unnamed"
