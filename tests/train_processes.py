"""Further commands of training for ``soak.processes``, and what is done to them from within."""

import os

from soak.processes import (
    INTERRUPT,
    KILL,
    SERVER,
    SHARED,
    TERM,
    TINY,
    UPDATE,
    At,
    Command,
    digits,
    fail,
    prepared,
    record,
    steps,
    training,
    weights,
)

from permuteformer.experiments.base import Experiment

__all__ = [  # for tests
    "INTERRUPT", "KILL", "SERVER", "SHARED", "TERM", "TINY", "UPDATE",
    "At", "Command", "digits", "fail", "record", "steps", "weights",
]  # fmt: skip

TINY_TEXT = {**TINY, "hidden_size": 32, "num_attention_heads": 4, "attention": {"name": "linear", "feature_multiplier": 4}}
"""Whose permutations repeat after more tokens than a text has."""


def text(*task, **fields):
    """Of a tiny language model of bytes, tested at twice the length too. The text is a file, unless a task's name is given."""
    few = {"length": 48, "context": 16, "train_items": 22, "validation_items": 6, "test_items": 6}
    if not task:
        path = prepared() / "text.txt"
        path.write_text("".join(f"The cat number {n} sat on mat {n * n % 7}.\n\nIt slept.\n" for n in range(300)))
        task = ("lm", str(path))
    return training(*task, fields={**TINY_TEXT, "batch_size": 4, **few, "test_lengths": 96, **fields})


def pairs(**fields):
    """Of a tiny matcher of short texts, of which some have fewer tokens than others have processes."""
    path = prepared() / "pairs.csv"
    path.write_text("first,second,label\n" + "".join(f"{'a' * (n % 9)},{'b' * (n % 23)},{n % 2}\n" for n in range(1, 61)))
    return training("match", str(path), fields={**TINY_TEXT, "batch_size": 8, **fields})


def tiny(task="digits", **fields):
    """An experiment of the same size, for this process."""
    few = {"batch_size": 8, "train_items": 40, "validation_items": 20, "test_items": 20}
    options = {} if task == "digits" else {"corpus": "topics", "length": 48, "context": 16}
    own = {name: fields.pop(name) for name in list(fields) if name in TINY_TEXT}
    model, size = ("permuteformer-image", TINY) if task == "digits" else ("permuteformer-lm", TINY_TEXT)
    return Experiment(task=task, task_options=options, model=model, model_fields={**size, **own}, **{**few, **fields})


def _at_step(number, change):
    """Has ``change(updater)`` called before update ``number``."""
    from permuteformer.train.update import Updater

    update = Updater.__call__

    def changed(self, share, step, *rest, **named):
        if step == number:
            change(self)
        return update(self, share, step, *rest, **named)

    Updater.__call__ = changed


def nan_in_a_weight(rank):
    """At step 6, on all processes."""
    _at_step(6, lambda updater: updater.bare.model.layers[0].expand.weight.data.mul_(float("nan")))


def interrupted_already(rank):
    """A Ctrl-C came before update 6, and another one comes."""

    def change(updater):
        os.kill(os.getpid(), INTERRUPT)

    _at_step(6, change)


def _loss_on_rank_1(rank, spoil):
    def change(updater):
        loss = updater.loss
        updater.loss = lambda *given: spoil(loss(*given)) if rank == 1 else loss(*given)

    _at_step(6, change)


def nan_on_rank_1(rank):
    _loss_on_rank_1(rank, lambda loss: loss * float("nan"))


def infinite_on_rank_1(rank):
    """An infinite loss, with gradients that are finite."""
    _loss_on_rank_1(rank, lambda loss: loss + float("inf"))


def nan_in_a_gradient(rank):
    """Of one weight, on one process, while losses are finite."""

    def change(updater):
        norm = updater._gradient_norm

        def spoiled():
            gradient = updater.bare.get_parameter("model.layers.0.contract.weight").grad
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).fill_(float("nan"))
            return norm()

        updater._gradient_norm = spoiled

    if rank == 1:
        _at_step(6, change)
