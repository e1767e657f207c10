"""Every contract check must reject a layer that is broken in the way it looks for."""

from dataclasses import replace

import checks
import pytest
import task_checks
import torch
from torch import nn

from permuteformer import PermuteFormerAttention
from permuteformer.tasks.digits import Digits


class Broken(nn.Module):
    """A correct layer, for subclasses to break."""

    def __init__(self, causal=True):
        super().__init__()
        decay = "auto" if causal else "two_sided"
        self.layer = PermuteFormerAttention(32, num_heads=2, causal=causal, feature_multiplier=2, decay=decay).double()
        for name in ("hidden_size", "axes", "attention", "query", "key", "value", "output", "heads"):
            setattr(self, name, getattr(self.layer, name))

    def forward(self, x, **arguments):
        return self.layer(x, **arguments)


class LeaksTheFuture(Broken):
    def forward(self, x, **arguments):
        y, state = self.layer(x, **arguments)
        return y + 1e-3 * x.nan_to_num().mean(1, keepdim=True), state


class SeesOnlyItself(Broken):
    def forward(self, x, **arguments):
        return self.layer.output(self.layer.value(x)), None


class SpreadsNaN(Broken):
    def forward(self, x, **arguments):
        y, state = self.layer(x, **arguments)
        return y + 0 * x.sum(1, keepdim=True), state


class HidesNaN(Broken):
    def forward(self, x, **arguments):
        return self.layer(x.nan_to_num(), **arguments)


class IgnoresTheMask(Broken):
    def forward(self, x, key_mask=None, **arguments):
        return self.layer(x, **arguments)


class MasksScoresButNotValues(Broken):
    """Weight zero on padding, but zero times NaN is NaN."""

    def forward(self, x, key_mask=None, **arguments):
        y, state = self.layer(x, key_mask=key_mask, **arguments)
        return y if key_mask is None else y + 0 * (x * ~key_mask.unsqueeze(-1)).sum(1, keepdim=True), state


class GivesPaddingGradients(Broken):
    def forward(self, x, key_mask=None, **arguments):
        if key_mask is not None:
            x = x.clone()
            x.register_hook(lambda gradient: gradient + ~key_mask.unsqueeze(-1))
        return self.layer(x, key_mask=key_mask, **arguments)


class GivesNaNWithoutKeys(Broken):
    def forward(self, x, key_mask=None, **arguments):
        y, state = self.layer(x, key_mask=key_mask, **arguments)
        return y if key_mask is None else y / key_mask.any(1).double()[:, None, None], state


class MixesTheBatch(Broken):
    def forward(self, x, **arguments):
        y, state = self.layer(x, **arguments)
        return y + 1e-3 * y.mean(0, keepdim=True), state


class SelectsTheNextToken(Broken):
    def forward(self, x, queries=None, **arguments):
        return self.layer(x, queries=None if queries is None else queries + 1, **arguments)


class SelectsWithoutTheMask(Broken):
    def forward(self, x, queries=None, key_mask=None, **arguments):
        return self.layer(x, queries=queries, key_mask=key_mask if queries is None else None, **arguments)


class ForgetsTheState(Broken):
    def forward(self, x, state=None, **arguments):
        return self.layer(x, **arguments)


class RestartsPositions(Broken):
    """Keeps the state, but counts positions from zero in every call."""

    def forward(self, x, positions=None, **arguments):
        return self.layer(x, positions=torch.arange(x.shape[1]).view(1, -1, 1), **arguments)


class IgnoresSegments(Broken):
    def forward(self, x, segments=None, **arguments):
        return self.layer(x, **arguments)


class CarriesTheStateIntoTheNextSegment(Broken):
    def forward(self, x, segments=None, state=None, **arguments):
        if state is not None:
            state = state._replace(segment=segments[:, 0])
        return self.layer(x, segments=segments, state=state, **arguments)


class LeaksAbsolutePositions(Broken):
    def forward(self, x, positions=None, **arguments):
        y, state = self.layer(x, positions=positions, **arguments)
        return y + (0 if positions is None else 1e-6 * positions.double()), state


class IgnoresPositions(Broken):
    def forward(self, x, positions=None, **arguments):
        return self.layer(x, positions=None if positions is None else torch.zeros_like(positions), **arguments)


class IgnoresGlobalTokens(Broken):
    def forward(self, x, global_mask=None, **arguments):
        return self.layer(x, **arguments)


class CountsGlobalTokens(Broken):
    """Global tokens have weight 1, but lie between the tokens around them."""

    def forward(self, x, positions=None, key_mask=None, segments=None, global_mask=None):
        return checks.two_sided_reference(self.layer, x, positions, key_mask, segments, global_mask, global_steps=True), None


class GlobalTokensSeeEverySegment(Broken):
    def forward(self, x, segments=None, global_mask=None, **arguments):
        y, state = self.layer(x, segments=segments, global_mask=global_mask, **arguments)
        of_row, _ = self.layer(x, global_mask=global_mask, **arguments)
        return torch.where(global_mask.unsqueeze(-1), of_row, y), state


BROKEN_LAYERS = [
    ("causal", LeaksTheFuture),
    ("causal", SeesOnlyItself),
    ("no_poison", SpreadsNaN),
    ("no_poison", HidesNaN),
    ("padding", IgnoresTheMask),
    ("padding", MasksScoresButNotValues),
    ("padding", GivesPaddingGradients),
    ("masked_keys", IgnoresTheMask),
    ("masked_keys", SeesOnlyItself),
    ("all_masked", IgnoresTheMask),
    ("all_masked", GivesNaNWithoutKeys),
    ("batch", MixesTheBatch),
    ("queries", SelectsTheNextToken),
    ("queries", SelectsWithoutTheMask),
    ("resume", ForgetsTheState),
    ("resume", RestartsPositions),
    ("packed", IgnoresSegments),
    ("packed", CarriesTheStateIntoTheNextSegment),
    ("relative", LeaksAbsolutePositions),
    ("relative", IgnoresPositions),
    ("global_tokens", IgnoresGlobalTokens),
    ("global_tokens", CountsGlobalTokens),
    ("global_tokens", GlobalTokensSeeEverySegment),
]
BIDIRECTIONAL = ("padding", "masked_keys", "all_masked", "queries", "global_tokens")
"""Checks of a bidirectional layer: a causal one never sees padding on the right, with or without a mask."""


@pytest.mark.parametrize(("check", "broken"), BROKEN_LAYERS)
def test_broken_layers_are_rejected(check, broken):
    causal = check not in BIDIRECTIONAL
    checks.CHECKS[check](Broken(causal))
    with pytest.raises(AssertionError):
        checks.CHECKS[check](broken(causal))


def test_every_check_rejects_a_broken_layer():
    assert {check for check, _ in BROKEN_LAYERS} == set(checks.CHECKS)


class WrongLengths(Digits):
    def lengths(self, split):
        return super().lengths(split) - 1


class RowsForColumns(Digits):
    def collate(self, items):
        batch = super().collate(items)
        return replace(batch, positions=batch.positions.flip(-1) + 1)


class LabelsFromOne(Digits):
    def collate(self, items):
        batch = super().collate(items)
        return replace(batch, labels=batch.labels + 1)


class DependsOnItsNeighbours(Digits):
    def collate(self, items):
        batch = super().collate(items)
        return replace(batch, input_ids=(batch.input_ids + len(items)).clamp(max=self.vocab_size - 1))


class MeansForSums(Digits):
    def score(self, logits, batch):
        return {name: value / len(batch) for name, value in super().score(logits, batch).items()}


class ForgetsItsOptions(Digits):
    def __getstate__(self):
        return {"protocol": "lra"}

    def __setstate__(self, state):
        self.__init__(**state)


class NothingToRead(Digits):
    def words(self, item):
        return ["an image"]


class TooFewTokens(Digits):
    @property
    def vocab_size(self):
        return 100


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (WrongLengths, "lengths_are_those_of_batches"),
        (RowsForColumns, "batches"),
        (LabelsFromOne, "batches"),
        (DependsOnItsNeighbours, "an_item_is_the_same_alone_and_among_others"),
        (MeansForSums, "sums_add_up"),
        (ForgetsItsOptions, "a_copy_in_another_process_is_the_same_task"),
        (NothingToRead, "items_in_words"),
        (TooFewTokens, "models_take_its_batches"),
    ],
)
def test_task_checks_have_teeth(broken, check, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    task_checks.CHECKS[check](Digits())
    with pytest.raises((AssertionError, ValueError)):
        task_checks.CHECKS[check](broken())


def test_every_task_check_has_a_broken_twin():
    (mark,) = test_task_checks_have_teeth.pytestmark
    assert {check for _, check in mark.args[1]} == set(task_checks.CHECKS)
