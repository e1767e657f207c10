"""Tables: means, deviations, best cells, failures, ratios, the paper's numbers, agreement of the order of rows, and the summary."""

import math
import re
import statistics
from dataclasses import replace

import pytest
from report.sample import environment, measurement, speeds

from permuteformer.report.cells import group_runs, slug
from permuteformer.report.remarks import Standing, compare, is_tie
from permuteformer.report.render import csv_table
from permuteformer.report.runs import Run
from permuteformer.report.summary import finding, overview
from permuteformer.report.tables import build_tables

TEXT = {"name": "lra-text", "title": "reviews", "kind": "classify", "metric": "accuracy", "greater_is_better": True}
LM = {"name": "lm-bytes", "title": "help", "kind": "lm", "metric": "perplexity", "greater_is_better": False}


def training(row, value, seed=0, column="text", table="1", status="finished", task=None, preset="small", evaluations=(), **work):
    return Run(
        name=f"table{table}/{column}/{row}-seed{seed}",
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


def only(runs):
    (table,) = build_tables(group_runs(runs))
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


@pytest.mark.parametrize(
    ("column", "values", "best"),
    [
        ("text", {"performer": 0.7, "permuteformer": 0.6, "transformer": None}, {"performer"}),
        ("lm", {"performer-lm": 7.0, "permuteformer-lm": 6.0}, {"permuteformer-lm"}),
        ("text", {"performer": 0.66661, "permuteformer": 0.66659, "roformer": 0.1}, {"performer", "permuteformer"}),  # as displayed
        ("text", {"performer": 0.7}, set()),
    ],
)
def test_the_best_is_the_highest_accuracy_and_the_lowest_perplexity(column, values, best):
    status = {None: "out of memory"}
    table = only([training(row, value, column=column, status=status.get(value, "finished")) for row, value in values.items()])
    assert {row for row in values if at(table, row, column).best} == best


def test_failed_runs_are_shown_in_their_cells():
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


def test_rows_and_columns_are_in_the_papers_order_others_last():
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
    (line,) = [line for line in csv_table(table).splitlines() if line.startswith("performer,average")]
    assert all(f"table1/{column}/performer-seed0" in line for column in ("text", "retrieval", "image", "pathfinder"))
    assert [column.name for column in table.columns][-1] == "average"
    assert "average" not in [column.name for column in only(seeds[:6]).columns]


def test_each_preset_has_its_table():
    tables = build_tables(group_runs([training("performer", 0.5, preset="quick"), training("performer", 0.6, preset="small")]))
    assert [table.name for table in tables] == ["table-1-quick", "table-1-small"]
    assert [at(table, "performer", "text").count for table in tables] == [1, 1]


def test_ratios_are_to_the_transformer():
    table = next(
        table for table in build_tables(group_runs([Run.from_json(line) for line in speeds()])) if table.name.startswith("table-2")
    )
    cell = at(table, "performer", "text")
    assert cell.ratio == pytest.approx(0.57)
    assert cell.paper_ratio == pytest.approx(354 / 622)
    assert (cell.text, cell.detail, cell.paper_shown) == ("14,250", "(0.57×)", "354 (0.57×)")
    assert at(table, "performer-t5", "text").remark == "estimated"
    failed = [
        measurement("2", "transformer", "text", None, 100, status="out of memory"),
        measurement("2", "performer", "text", 1.0, 100, items=10),
    ]
    cell = at(only([Run.from_json(line) for line in failed]), "performer", "text")
    assert (cell.mean, cell.ratio) == (10.0, None)


def test_latency_is_of_one_sample():
    line = measurement("3", "performer", "text", 0.5, 4000, batch=10, kind="inference")
    assert at(only([Run.from_json(line)]), "performer", "text").text == "50.0"


def test_speed_by_length_is_a_table_of_time_and_one_of_memory():
    runs = [Run.from_json(line) for line in speeds() if line["table"] == "speed"]
    time, memory = build_tables(group_runs(runs))
    assert [column.name for column in time.columns] == ["512", "1024", "2048", "4096", "8192", "16384"]
    assert at(time, "performer-lm", "4096").mean == pytest.approx(30)  # microseconds a token
    assert at(time, "performer-lm", "4096").ratio == pytest.approx(30 / (20 + 40.96))
    assert at(time, "transformer-lm", "16384").text == "out of memory"
    assert at(memory, "performer-lm", "512").mean == pytest.approx(50 + 0.002 * 512)
    assert time.lengths["16384"] == 16384
    halved = measurement("speed", "performer-lm", "512", 0.3, 512, batch=4)
    assert at(build_tables(group_runs([Run.from_json(halved)]))[0], "performer-lm", "512").mean == pytest.approx(0.3e6 / 2048)


def lengths(values, trained=256):
    yield {"event": "evaluation", "step": 1, "epoch": 1, "metrics": {"perplexity": 99.0}}
    yield {"event": "test", "step": 1, "epoch": 1, "metrics": {"perplexity": values[1]}}
    for times, value in values.items():
        if times > 1:
            yield {"event": "length", "length": trained * times, "times": times, "metrics": {"perplexity": value}}


def test_lengths_beyond_the_trained_one():
    found = [lengths({1: 5.0 + seed, 2: 4.0, 16: 3.0}) for seed in range(2)]
    runs = [training("permuteformer-lm", 5.0, seed, "lm", "4", evaluations=found[seed]) for seed in range(2)]
    runs.append(training("transformer-lm", 5.0, 0, "lm", "4", evaluations=lengths({1: 5.0, 2: 8.0, 16: float("inf")})))
    runs.append(training("performer-lm", 5.0, 0, "lm", "4"))
    _, table = build_tables(group_runs(runs))
    assert [column.title for column in table.columns] == ["256 ×1", "512 ×2", "4,096 ×16"]
    assert [row.name for row in table.rows] == ["transformer-lm", "permuteformer-lm"]
    assert at(table, "permuteformer-lm", "1").mean == pytest.approx(5.5)
    assert at(table, "transformer-lm", "16").text == "not finite"
    assert at(table, "permuteformer-lm", "2").best
    assert table.lengths == {"1": 256, "2": 512, "16": 4096}


def test_lengths_of_models_trained_at_different_ones_are_multiples():
    runs = [
        training("permuteformer-lm", 5.0, 0, "lm", "4", evaluations=lengths({1: 5.0, 2: 4.0}, 256)),
        training("transformer-lm", 5.0, 0, "lm", "4", evaluations=lengths({1: 5.0, 2: 4.0}, 512)),
    ]
    _, table = build_tables(group_runs(runs))
    assert [column.title for column in table.columns] == ["1 ×", "2 ×"]
    assert "multiples" in table.axes[0]


def test_own_runs_are_grouped_by_task_model_and_settings():
    own = {"table": None, "task": {**TEXT, "name": "digits"}}
    runs = [training("mine", 0.90, seed, learning_rate=0.1, **own) for seed in range(2)]
    runs += [training("mine", 0.95, 0, learning_rate=0.2, **own), training("other", 0.99, 0, learning_rate=0.1, **own)]
    runs.append(training("lm", 9.0, 0, table=None, task=LM))
    table = only(runs)
    assert table.leads == ("Task", "Model", "Settings", "Metric")
    assert [row.leads for row in table.rows] == [
        ("digits", "mine", "learning_rate=0.1", "accuracy (%)"),
        ("digits", "mine", "learning_rate=0.2", "accuracy (%)"),
        ("digits", "other", "", "accuracy (%)"),
        ("lm-bytes", "lm", "", "perplexity"),
    ]
    assert [at(table, row.name, "test").count for row in table.rows] == [2, 1, 1, 1]
    assert [at(table, row.name, "test").best for row in table.rows] == [False, False, True, False]


def test_notes_name_tasks_baselines_sizes_and_missing_rows():
    task = {**TEXT, "notes": ["validated on test", 7], "baselines": {"majority": 0.5, "broken": None}}
    sizes = {"config": {"hidden_size": 64, "num_hidden_layers": 2}, "result": {"status": "finished", "value": 0.5, "steps": 300}}
    rows = [training(row, 0.5, task=task, batch_size=16, learning_rate=1e-3) for row in ("performer", "permuteformer")]
    table = only([replace(row, **sizes) for row in rows])
    notes = "\n".join(table.notes)
    for words in (
        "lra-text, reviews",
        "validated on test",
        "majority 50.0 %",
        "width 64, 2 layers, 300 updates of 16 items",
        "Transformer,",
    ):
        assert words in notes
    assert "broken" not in notes


def test_the_error_of_one_seed_depends_on_the_number_of_test_items():
    """Of 100 items, accuracies of 50 and 54 % are the same; of 10,000 they are not."""
    for items, same in ((100, 0), (10_000, 1)):
        table = only([training("transformer", 0.50, test_items=items), training("permuteformer", 0.54, test_items=items)])
        assert (table.agreement.same, table.agreement.ties) == (same, 1 - same)


def test_notes_say_how_measurements_were_made():
    four = measurement("2", "performer", "text", 1.0, 4000, batch=4, items=25_000)
    two = measurement("2", "reformer", "text", 1.0, 4000, batch=2)
    ways = ["4,000 tokens, batch of 2, best of 3, on cpu", "4,000 tokens, batch of 4, 25,000 items per epoch, best of 3, on cpu"]
    assert f"Text: {' or '.join(ways)}." in only([Run.from_json(line) for line in (four, two)]).notes


def standings(ours, paper, column="Text"):
    return [Standing(column, row, ours[row], paper[row]) for row in ours]


PAPER = {"a": (1.0, None), "b": (2.0, None), "c": (3.0, None)}


def test_order_that_agrees():
    agreement = compare(standings({"a": (10.0, None), "b": (20.0, None), "c": (30.0, None)}, PAPER))
    assert (agreement.same, agreement.ties, agreement.reversed_pairs) == (3, 0, ())
    assert "3 pairs" in agreement.sentence


def test_pairs_that_disagree_are_named():
    agreement = compare(standings({"a": (10.0, None), "b": (40.0, None), "c": (30.0, None)}, PAPER))
    assert (agreement.same, agreement.ties, len(agreement.reversed_pairs)) == (2, 0, 1)
    assert re.search(r"\bb\b.*\bc\b.*40 .*30.* 2 .*3", agreement.reversed_pairs[0])
    assert agreement.reversed_pairs[0] in agreement.details


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
    assert "17 more" in agreement.details
    assert sum(pair in agreement.details for pair in agreement.reversed_pairs) == 3
    assert "Text" in agreement.reversed_pairs[0]


def test_groups_have_anchors_of_their_own():
    groups = group_runs([training("a b", 0.5), training("a-b", 0.6), training("<script>", 0.6)])
    assert len({one.anchor for one in groups}) == 3
    assert slug("Table 1", "<script>", "ü") == "table-1-script"
    assert slug("ü") == "unnamed"


def test_the_overview_counts_runs_models_and_seeds():
    runs = [training(row, 0.5, seed) for row in ("performer", "permuteformer") for seed in range(3)]
    runs.append(training("transformer", None, status="out of memory"))
    first, trained = overview(runs, group_runs(runs))
    assert "7 runs" in first
    assert "6 finished, 1 out of memory" in first
    assert re.search("3 models on Text.*3 seeds", trained)


def test_the_finding_names_the_best_model_and_compares_it_with_the_baseline():
    task = {**TEXT, "baselines": {"most frequent label": 0.5}}
    table = only([training("performer", 0.60, task=task, test_items=1000), training("permuteformer", 0.66, task=task, test_items=1000)])
    assert re.search(r"^PermuteFormer \(66.00 %\).*Performer \(60.00 %\).*beats.*Text \(most frequent label 50.0 %\)", finding(table))
    chance = only([training("performer", 0.51, task=task, test_items=100), training("permuteformer", 0.52, task=task, test_items=100)])
    assert re.search("No model beats.*Text.*nothing was learned", finding(chance))
    assert "No run has a value" in finding(only([training("performer", None, status="out of memory")]))


@pytest.mark.parametrize(("ours", "same"), [(5.4, 3), (4.0, 2)])
def test_the_finding_says_how_much_of_the_papers_order_holds(ours, same):
    rows = {"transformer-lm": 5.0, "performer-lm": 6.2, "permuteformer-lm": ours}
    table = only([training(row, value, column="lm", table="4") for row, value in rows.items()])
    assert (table.agreement.pairs, table.agreement.same) == (3, same)
    assert table.agreement.sentence in finding(table)
