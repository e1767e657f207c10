"""Words of a command line become an experiment, each field where it belongs."""

import pytest

from permuteformer.train.fields import experiment_from_words, listing


def made(*words, task="digits", model=None, given=None):
    return experiment_from_words(task, model, words, given or {}, None)


def test_a_field_goes_where_it_belongs():
    experiment = made("--learning-rate", "1e-4", "--hidden-size=32", "--protocol", "lra", "--epochs", "3")
    assert experiment.learning_rate == 1e-4
    assert experiment.model_fields["hidden_size"] == 32
    assert experiment.task_options == {"protocol": "lra"}
    assert (experiment.epochs, experiment.steps) == (3, None)


def test_steps_take_the_place_of_epochs():
    assert (made("--steps", "7").steps, made("--steps", "7").epochs) == (7, None)


def test_numbers_below_zero_flags_and_none():
    experiment = made("--by-length", "false", "--scale-embeddings", "--gradient-clip", "none", "--adam-epsilon", "1e-6")
    assert experiment.by_length is False
    assert experiment.model_fields["scale_embeddings"] is True
    assert experiment.gradient_clip is None
    with pytest.raises(ValueError, match="warmup_steps must be 0 or more; it is -3"):
        made("--warmup-steps", "-3")


def test_json_literals_and_lists():
    parts = ("--attention", '{"name": "softmax"}', "--position", '[{"name": "rope"}]')
    experiment = made(*parts, "--pooling", "mean", "--test-lengths", "512,1024")
    assert experiment.model_fields == {
        "hidden_dropout": 0.1,
        "attention": {"name": "softmax"},
        "position": [{"name": "rope"}],
        "pooling": "mean",
    }
    assert experiment.test_lengths == (512, 1024)
    with pytest.raises(ValueError, match="attention must be JSON"):
        made("--attention", "softmax")


def test_all_presets_of_a_task_get_the_same_sizes():
    """What is compared is fair: rows differ in the attention and its positions alone."""
    assert made().model == "permuteformer-image"
    assert made(model="performer-image").model_fields == made().model_fields == {"hidden_dropout": 0.1}
    assert made(task="lm-bytes", model="performer-lm").model_fields == made(task="lm-bytes").model_fields


def test_prefixes_say_whose_a_field_is(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("text,label\n" + "".join(f"words {n},{n % 2}\n" for n in range(40)))
    experiment = made("--seed", "4", "--task.seed", "9", "--model.hidden-size", "64", task="classify", given={"path": str(table)})
    assert experiment.seed == 4
    assert experiment.task_options == {"path": str(table), "seed": 9}
    assert experiment.model_fields == {"hidden_size": 64}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learnin-rate", "1"], "unknown field 'learnin_rate'.*did you mean 'learning_rate'"),
        (["--task.nothing", "1"], "unknown field of the task: 'nothing'"),
        (["--learning-rate", "nan"], "learning_rate must be a number above 0; it is nan"),
        (["--learning-rate", "fast"], "learning_rate must be of type float; it is 'fast'"),
        (["--epochs", "1", "--epochs", "2"], "epochs is given twice"),
        (["5"], "'5' follows no field"),
        (["--vocab-size", "5"], "unknown field 'vocab_size'"),
    ],
)
def test_what_is_wrong_is_told(words, message):
    with pytest.raises(ValueError, match=message):
        made(*words)


def test_unknown_tasks_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"unknown task 'digit'.*did you mean 'digits'"):
        made(task="digit")


def test_the_listing_names_every_field_with_what_it_is():
    rows = {row[0]: row for row in listing("lra-image")}
    assert rows["--batch-size"][1:3] == ("training", "256")
    assert rows["--hidden-size"][3] == "width."
    assert rows["--protocol"][1] == "task"
    assert all(row[3] for row in rows.values()), [row[0] for row in rows.values() if not row[3]]
    assert listing("classify")
