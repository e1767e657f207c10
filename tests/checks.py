"""What must hold of every attention, as functions that a layer is given to; ``test_teeth.py`` gives them broken ones.

A layer is called as ``MultiHeadAttention`` is: ``layer(x, positions=, key_mask=, segments=, state=) -> (y, state)``.
Tolerances stand here and nowhere else.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

TOLERANCE = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-10},
    torch.float32: {"rtol": 2e-4, "atol": 2e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
}


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Equal to the tolerance of ``dtype``, that of ``actual`` if not given."""
    torch.testing.assert_close(actual.to(expected.dtype), expected, **TOLERANCE[dtype or actual.dtype])


def inputs(layer, batch: int = 2, length: int = 21) -> Tensor:
    return torch.randn(batch, length, layer.hidden_size, dtype=torch.float64)


def grid(layer, batch: int, length: int) -> Tensor | None:
    """Positions where the layer needs them given: a grid four wide."""
    if layer.axes == 1:
        return None
    i = torch.arange(length)
    return torch.stack([i // 4**axis % 4 if axis < layer.axes - 1 else i // 4**axis for axis in range(layer.axes)], dim=-1).expand(
        batch, -1, -1
    )


def check_causal(layer) -> None:
    """What comes later changes nothing earlier; what came earlier is seen."""
    x = inputs(layer)
    positions = grid(layer, *x.shape[:2])
    expected, _ = layer(x, positions=positions)
    changed = x.clone()
    changed[:, 13:] += 1
    assert_close(layer(changed, positions=positions)[0][:, :13], expected[:, :13])
    changed = x.clone()
    changed[:, 3] += 1
    assert (layer(changed, positions=positions)[0][:, 4:] - expected[:, 4:]).abs().max() > 1e-8, "the past is not seen"


def check_no_poison(layer) -> None:
    """A NaN reaches only the rows that see it: of its own sequence, from its own place on where causal."""
    x = inputs(layer)
    positions = grid(layer, *x.shape[:2])
    expected, _ = layer(x, positions=positions)
    x[0, 13] = torch.nan
    y, _ = layer(x, positions=positions)
    assert_close(y[1], expected[1])
    assert y[0, 13].isnan().all(), "the NaN is hidden"
    if layer.attention.causal:
        assert_close(y[0, :13], expected[0, :13])


def check_padding(layer) -> None:
    """Padded on the right, real tokens come out as without padding, whatever is in the padding."""
    x = inputs(layer)
    batch, length, _ = x.shape
    positions = grid(layer, batch, length)
    for real in (1, 8, 20):
        expected, _ = layer(x[:, :real], positions=None if positions is None else positions[:, :real])
        padded = x.clone()
        padded[:, real:] = torch.nan
        mask = (torch.arange(length) < real).expand(batch, -1)
        y, _ = layer(padded, positions=positions, key_mask=mask)
        assert_close(y[:, :real], expected)


def check_hidden_keys(layer) -> None:
    """Keys hidden anywhere are not seen, whatever their content; keys that are not hidden are."""
    x = inputs(layer)
    positions = grid(layer, *x.shape[:2])
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    mask[:, 5:9] = False
    expected, _ = layer(x, positions=positions, key_mask=mask)
    changed = torch.where(mask.unsqueeze(-1), x, x + 1)
    y, _ = layer(changed, positions=positions, key_mask=mask)
    assert_close(y[mask], expected[mask])
    y, _ = layer(changed, positions=positions)
    assert (y[:, 9:] - expected[:, 9:]).abs().max() > 1e-8, "nothing was seen to begin with"


def check_all_hidden(layer) -> None:
    """Where every key of a row is hidden the attention gives zero: the layer gives its output bias."""
    x = inputs(layer)
    positions = grid(layer, *x.shape[:2])
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    mask[0] = False
    y, _ = layer(x, positions=positions, key_mask=mask)
    assert_close(y[0], layer.output.bias.expand_as(y[0]))
    assert_close(y[1:], layer(x[1:], positions=None if positions is None else positions[1:])[0])


def check_batch(layer) -> None:
    """A row comes out as it does alone."""
    x = inputs(layer, batch=3)
    positions = grid(layer, *x.shape[:2])
    y, _ = layer(x, positions=positions)
    for row in range(3):
        alone, _ = layer(x[row : row + 1], positions=None if positions is None else positions[:1])
        assert_close(y[row : row + 1], alone)


def check_chosen(layer) -> None:
    """Tokens that are asked for alone come out as among all, and so do gradients, whatever is in the padding."""
    x = inputs(layer)
    positions = grid(layer, *x.shape[:2])
    chosen = torch.tensor([[0, 12], [7, 7]])
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    mask[:, 9:11] = mask[1, 15:] = False
    for key_mask in (None, mask):
        given = x if key_mask is None else x.masked_fill(~mask.unsqueeze(-1), 100.0)
        found = []
        for asked in (None, chosen):
            leaf = given.clone().requires_grad_()
            y, _ = layer(leaf, positions=positions, key_mask=key_mask, chosen=asked)
            y = y if asked is not None else y[torch.arange(2).unsqueeze(1), chosen]
            leaves = [leaf, *(p for p in layer.parameters() if p.requires_grad)]
            found.append([y, *torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)])
        for actual, expected in zip(*found, strict=True):
            assert (actual is None) == (expected is None), "one of them has no gradient"
            if actual is not None and expected is not None:
                assert_close(actual, expected)


def check_resume(layer) -> None:
    """Split anywhere and gone on from the state, also a token at a time, it is as in one call."""
    x = inputs(layer)
    batch, length, _ = x.shape
    positions = grid(layer, batch, length)
    expected, _ = layer(x, positions=positions)
    for cuts in ([0, 1, length], [0, 8, 16, length], [0, length - 1, length], list(range(length + 1))):
        state, parts = None, []
        for start, stop in itertools.pairwise(cuts):
            piece = None if positions is None else positions[:, start:stop]
            y, state = layer(x[:, start:stop], positions=piece, state=state)
            parts.append(y)
        assert_close(torch.cat(parts, dim=1), expected)


def check_packed(layer) -> None:
    """Sequences packed into one row come out as they do alone, and a packed row can be split anywhere."""
    lengths = (3, 9, 1, 8)
    x = inputs(layer, length=sum(lengths))
    batch, length, _ = x.shape
    positions = grid(layer, batch, length)
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(batch, -1).contiguous()
    packed, _ = layer(x, positions=positions, segments=segments)
    start = 0
    for size in lengths:
        part = slice(start, start + size)
        alone, _ = layer(x[:, part], positions=None if positions is None else positions[:, part])
        assert_close(packed[:, part], alone)
        start += size
    if layer.attention.causal:
        for cut in (3, 5, 12, 20):
            first, state = layer(x[:, :cut], positions=None if positions is None else positions[:, :cut], segments=segments[:, :cut])
            rest, _ = layer(
                x[:, cut:], positions=None if positions is None else positions[:, cut:], segments=segments[:, cut:], state=state
            )
            assert_close(torch.cat([first, rest], dim=1), packed)


def check_relative(layer) -> None:
    """Positions moved all by the same change nothing; moved apart they do."""
    x = inputs(layer)
    batch, length, _ = x.shape
    positions = grid(layer, batch, length)
    if positions is None:
        positions = torch.arange(length).view(1, -1, 1).expand(batch, -1, -1)
    expected, _ = layer(x, positions=positions)
    shift = torch.tensor([10**6, -(10**5), 17])[: layer.axes]
    assert_close(layer(x, positions=positions + shift)[0], expected)
    assert (layer(x, positions=positions * 3)[0] - expected).abs().max() > 1e-8, "distance does not matter"


CHECKS = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_causal,
        check_no_poison,
        check_padding,
        check_hidden_keys,
        check_all_hidden,
        check_batch,
        check_chosen,
        check_resume,
        check_packed,
        check_relative,
    )
}
