"""Every contract check must reject a layer that is broken in the way it looks for."""

import checks
import pytest
import torch
from torch import nn

from permuteformer import PermuteFormerAttention


class Broken(nn.Module):
    """A good layer, spoilt."""

    def __init__(self, causal=True):
        super().__init__()
        self.layer = PermuteFormerAttention(32, num_heads=2, causal=causal, feature_multiplier=2).double()
        self.hidden_size, self.axes, self.attention, self.output = 32, 1, self.layer.attention, self.layer.output

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


class GivesNaNWhereNothingIsSeen(Broken):
    def forward(self, x, key_mask=None, **arguments):
        y, state = self.layer(x, key_mask=key_mask, **arguments)
        return y if key_mask is None else y / key_mask.any(1).double()[:, None, None], state


class MixesTheBatch(Broken):
    def forward(self, x, **arguments):
        y, state = self.layer(x, **arguments)
        return y + 1e-3 * y.mean(0, keepdim=True), state


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


class KnowsNoPositions(Broken):
    def forward(self, x, positions=None, **arguments):
        return self.layer(x, positions=None if positions is None else torch.zeros_like(positions), **arguments)


TEETH = [
    ("causal", LeaksTheFuture),
    ("causal", SeesOnlyItself),
    ("no_poison", SpreadsNaN),
    ("no_poison", HidesNaN),
    ("padding", IgnoresTheMask),
    ("padding", MasksScoresButNotValues),
    ("hidden_keys", IgnoresTheMask),
    ("hidden_keys", SeesOnlyItself),
    ("all_hidden", IgnoresTheMask),
    ("all_hidden", GivesNaNWhereNothingIsSeen),
    ("batch", MixesTheBatch),
    ("resume", ForgetsTheState),
    ("resume", RestartsPositions),
    ("packed", IgnoresSegments),
    ("packed", CarriesTheStateIntoTheNextSegment),
    ("relative", LeaksAbsolutePositions),
    ("relative", KnowsNoPositions),
]


@pytest.mark.parametrize(("check", "broken"), TEETH)
def test_the_broken_is_rejected(check, broken):
    # Padding to the right of a causal row is never seen, mask or no mask: only a bidirectional layer shows that.
    causal = check not in ("padding", "hidden_keys", "all_hidden")
    checks.CHECKS[check](Broken(causal))
    with pytest.raises(AssertionError):
        checks.CHECKS[check](broken(causal))


def test_every_check_has_teeth():
    assert {check for check, _ in TEETH} == set(checks.CHECKS)
