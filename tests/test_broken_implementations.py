"""Every contract check rejects an attention or a task that is broken in the way it looks for."""

from dataclasses import replace
from functools import partial

import checks
import pytest
import task_checks
import torch

from permuteformer import PermuteFormerAttention
from permuteformer.tasks.digits import Digits
from permuteformer.tasks.inputs import Image
from permuteformer.tokens import PAPER, Alphabet

# Each of these replaces the ``forward`` of a correct layer.


def leaks_the_future(forward, x, **arguments):
    y, state = forward(x, **arguments)
    return y + 1e-3 * x.nan_to_num().mean(1, keepdim=True), state


def sees_only_itself(forward, x, **arguments):
    layer = forward.__self__
    return layer.output(layer.value(x)), None


def spreads_nan(forward, x, **arguments):
    y, state = forward(x, **arguments)
    return y + 0 * x.sum(1, keepdim=True), state


def hides_nan(forward, x, **arguments):
    return forward(x.nan_to_num(), **arguments)


def ignores_the_mask(forward, x, key_mask=None, **arguments):
    return forward(x, **arguments)


def masks_scores_but_not_values(forward, x, key_mask=None, **arguments):
    """Weight zero on padding, but zero times NaN is NaN."""
    y, state = forward(x, key_mask=key_mask, **arguments)
    return y if key_mask is None else y + 0 * (x * ~key_mask.unsqueeze(-1)).sum(1, keepdim=True), state


def gives_padding_gradients(forward, x, key_mask=None, **arguments):
    if key_mask is not None:
        x = x.clone()
        x.register_hook(lambda gradient: gradient + ~key_mask.unsqueeze(-1))
    return forward(x, key_mask=key_mask, **arguments)


def gives_nan_without_keys(forward, x, key_mask=None, **arguments):
    y, state = forward(x, key_mask=key_mask, **arguments)
    return y if key_mask is None else y / key_mask.any(1).double()[:, None, None], state


def mixes_the_batch(forward, x, **arguments):
    y, state = forward(x, **arguments)
    return y + 1e-3 * y.mean(0, keepdim=True), state


def selects_the_next_token(forward, x, queries=None, **arguments):
    return forward(x, queries=None if queries is None else queries + 1, **arguments)


def selects_without_the_mask(forward, x, queries=None, key_mask=None, **arguments):
    return forward(x, queries=queries, key_mask=key_mask if queries is None else None, **arguments)


def forgets_the_state(forward, x, state=None, **arguments):
    return forward(x, **arguments)


def restarts_positions(forward, x, positions=None, **arguments):
    """Keeps the state, but counts positions from zero in every call."""
    return forward(x, positions=torch.arange(x.shape[1]).view(1, -1, 1), **arguments)


def ignores_segments(forward, x, segments=None, **arguments):
    return forward(x, **arguments)


def carries_the_state_into_the_next_segment(forward, x, segments=None, state=None, **arguments):
    state = None if state is None else state._replace(segment=segments[:, 0])
    return forward(x, segments=segments, state=state, **arguments)


def leaks_absolute_positions(forward, x, positions=None, **arguments):
    y, state = forward(x, positions=positions, **arguments)
    return y + (0 if positions is None else 1e-6 * positions.double()), state


def ignores_positions(forward, x, positions=None, **arguments):
    return forward(x, positions=None if positions is None else torch.zeros_like(positions), **arguments)


def ignores_global_tokens(forward, x, global_mask=None, **arguments):
    return forward(x, **arguments)


def counts_global_tokens(forward, x, positions=None, key_mask=None, segments=None, global_mask=None):
    """Global tokens have weight 1, but lie between the tokens around them."""
    return checks.layer_by_pairs(forward.__self__, x, positions, key_mask, segments, global_mask, global_steps=True), None


def global_tokens_see_every_segment(forward, x, segments=None, global_mask=None, **arguments):
    y, state = forward(x, segments=segments, global_mask=global_mask, **arguments)
    of_row, _ = forward(x, global_mask=global_mask, **arguments)
    return torch.where(global_mask.unsqueeze(-1), of_row, y), state


BROKEN_LAYERS = {
    "causal": [leaks_the_future, sees_only_itself],
    "no_poison": [spreads_nan, hides_nan],
    "padding": [ignores_the_mask, masks_scores_but_not_values, gives_padding_gradients],
    "masked_keys": [ignores_the_mask, sees_only_itself],
    "all_masked": [ignores_the_mask, gives_nan_without_keys],
    "batch": [mixes_the_batch],
    "queries": [selects_the_next_token, selects_without_the_mask],
    "resume": [forgets_the_state, restarts_positions],
    "packed": [ignores_segments, carries_the_state_into_the_next_segment],
    "relative": [leaks_absolute_positions, ignores_positions],
    "global_tokens": [ignores_global_tokens, counts_global_tokens, global_tokens_see_every_segment],
}
BIDIRECTIONAL = ("padding", "masked_keys", "all_masked", "queries", "global_tokens")
"""Checks of a bidirectional layer: a causal one never sees padding on the right, with or without a mask."""


@pytest.mark.parametrize(("check", "broken"), [(check, broken) for check in BROKEN_LAYERS for broken in BROKEN_LAYERS[check]])
def test_broken_layers_are_rejected(check, broken):
    causal = check not in BIDIRECTIONAL
    decay = "auto" if causal else "two_sided"
    layer = PermuteFormerAttention(32, num_heads=2, causal=causal, feature_multiplier=2, decay=decay).double()
    checks.CHECKS[check](layer)
    layer.forward = partial(broken, layer.forward)
    with pytest.raises(AssertionError):
        checks.CHECKS[check](layer)


def test_every_check_rejects_a_broken_layer():
    assert set(BROKEN_LAYERS) == set(checks.CHECKS)


class WrongLengths(Digits):
    def lengths(self, split):
        return super().lengths(split) - 1


class ForgetsItsOptions(Digits):
    alphabet = PAPER

    def __init__(self):
        super().__init__()
        self.alphabet = Alphabet.lra_pixels()

    def __getstate__(self):
        return {}

    @property
    def input(self):
        return replace(super().input, alphabet=self.alphabet)


class RowsForColumns(Image):
    def collate(self, items, **options):
        batch = super().collate(items, **options)
        return replace(batch, positions=batch.positions.flip(-1) + 1)


class LabelsFromOne(Image):
    def collate(self, items, **options):
        batch = super().collate(items, **options)
        return replace(batch, labels=batch.labels + 1)


class DependsOnItsNeighbours(Image):
    def collate(self, items, **options):
        batch = super().collate(items, **options)
        return replace(batch, input_ids=(batch.input_ids + len(items)).clamp(max=self.vocab_size - 1))


class MeansForSums(Image):
    def score(self, logits, batch):
        return {name: value / len(batch) for name, value in super().score(logits, batch).items()}


class HasTexts(Image):
    def texts(self, item):
        return ["an image"]


class TooFewTokens(Image):
    vocab_size = 100


# Tasks, and inputs that replace the one of a task.

BROKEN_TASKS = {
    WrongLengths: "lengths_are_those_of_batches",
    RowsForColumns: "batches",
    LabelsFromOne: "batches",
    DependsOnItsNeighbours: "an_item_is_the_same_alone_and_among_others",
    MeansForSums: "sums_add_up",
    ForgetsItsOptions: "a_copy_in_another_process_is_the_same_task",
    HasTexts: "items_in_words",
    TooFewTokens: "models_take_its_batches",
}


@pytest.mark.parametrize(("broken", "check"), BROKEN_TASKS.items())
def test_broken_tasks_are_rejected(broken, check, monkeypatch):
    task_checks.CHECKS[check](Digits())
    if issubclass(broken, Image):
        monkeypatch.setattr(Digits, "input", broken(tuple("0123456789"), (8, 8)))
    with pytest.raises((AssertionError, ValueError)):
        task_checks.CHECKS[check](Digits() if issubclass(broken, Image) else broken())


def test_every_task_check_rejects_a_broken_task():
    assert set(BROKEN_TASKS.values()) == set(task_checks.CHECKS)
