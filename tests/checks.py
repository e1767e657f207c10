"""Contract checks: properties of every attention layer. ``test_broken_implementations.py`` gives each check a layer that it must reject.

A layer is called as ``MultiHeadAttention``: ``layer(x, positions=, key_mask=, segments=, global_mask=, queries=, state=) -> (y, state)``.
Tolerances are defined here and nowhere else.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from permuteformer.ops import reference

TOLERANCE = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-10},
    torch.float32: {"rtol": 2e-4, "atol": 2e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
}


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Compare within the tolerance of ``dtype``, by default that of ``actual``."""
    torch.testing.assert_close(actual.to(expected.dtype), expected, **TOLERANCE[dtype or actual.dtype])


def assert_all_close(actual, expected, dtype: torch.dtype) -> None:
    """Compare tensors one by one, each divided by its largest number: sums are rounded at their own size."""
    for ours, theirs in zip(actual, expected, strict=True):
        size = theirs.abs().max().clamp(min=1)
        assert_close(ours / size, theirs / size, dtype)


def assert_as_exact(ours, float32, float64) -> None:
    """Require that the kernel is nearly as close to float64 as PyTorch's own float32 is."""
    for n, (kernel, usual, exact) in enumerate(zip(ours, float32, float64, strict=True)):
        size = exact.abs().max().clamp(min=1)
        error, other = ((x.double() - exact).abs().max() for x in (kernel, usual))
        assert error <= 2e-6 * size + 5 * other, (n, float(error), float(other))


def largest_tensor(call) -> int:
    """Run ``call`` without gradients and return the bytes of the largest tensor that it makes."""
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            sizes.extend(x.untyped_storage().nbytes() for x in tree_leaves(result) if isinstance(x, Tensor))
            return result

    with Watch(), torch.no_grad():
        call()
    return max(sizes)


def inputs(layer, batch: int = 2, length: int = 21) -> tuple[Tensor, Tensor | None]:
    """Return random tokens, and their positions on a grid, or ``None`` with one axis."""
    return torch.randn(batch, length, layer.hidden_size, dtype=torch.float64), grid(layer, batch, length)


def grid(layer, batch: int, length: int) -> Tensor | None:
    """Positions on a grid four wide, for layers with several axes; ``None`` with one."""
    if layer.axes == 1:
        return None
    i = torch.arange(length)
    columns = [i // 4**axis % 4 for axis in range(layer.axes - 1)]
    return torch.stack([*columns, i // 4 ** (layer.axes - 1)], dim=-1).expand(batch, -1, -1)


def explicit(positions: Tensor | None, batch: int, length: int) -> Tensor:
    """Return positions, or 0, 1, … for ``None``."""
    return torch.arange(length).view(1, -1, 1).expand(batch, -1, -1) if positions is None else positions


def part(positions: Tensor | None, tokens: slice) -> Tensor | None:
    return None if positions is None else positions[:, tokens]


def check_causal(layer) -> None:
    """Later tokens change no earlier output; earlier tokens are seen."""
    x, positions = inputs(layer)
    expected, _ = layer(x, positions=positions)
    changed = x.clone()
    changed[:, 13:] += 1
    assert_close(layer(changed, positions=positions)[0][:, :13], expected[:, :13])
    changed = x.clone()
    changed[:, 3] += 1
    assert (layer(changed, positions=positions)[0][:, 4:] - expected[:, 4:]).abs().max() > 1e-8, "the past is not seen"


def check_no_poison(layer) -> None:
    """A NaN reaches only the tokens that see it: those of its own row, and if causal from its own index on."""
    x, positions = inputs(layer)
    expected, _ = layer(x, positions=positions)
    x[0, 13] = torch.nan
    y, _ = layer(x, positions=positions)
    assert_close(y[1], expected[1])
    assert y[0, 13].isnan().all(), "the NaN is hidden"
    if layer.attention.causal:
        assert_close(y[0, :13], expected[0, :13])


def check_padding(layer) -> None:
    """Padding on the right changes no output and no gradient of a real token, whatever it contains, and has gradients of zero."""
    x, positions = inputs(layer)
    batch, length, _ = x.shape
    for real in (1, 8, 20):
        alone, padded = x[:, :real].clone().requires_grad_(), x.clone()
        padded[:, real:] = torch.nan
        mask = (torch.arange(length) < real).expand(batch, -1)
        expected, _ = layer(alone, positions=part(positions, slice(real)))
        y, _ = layer(padded.requires_grad_(), positions=positions, key_mask=mask)
        assert_close(y[:, :real], expected)
        (expected_gradient,) = torch.autograd.grad(expected.square().sum(), alone)
        (gradient,) = torch.autograd.grad(y[:, :real].square().sum(), padded)
        assert_close(gradient[:, :real], expected_gradient)
        assert (gradient[:, real:] == 0).all(), "padding has gradients"


def check_masked_keys(layer) -> None:
    """Masked keys anywhere are not seen, whatever they contain; other keys are."""
    x, positions = inputs(layer)
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    mask[:, 5:9] = False
    expected, _ = layer(x, positions=positions, key_mask=mask)
    changed = torch.where(mask.unsqueeze(-1), x, x + 1)
    y, _ = layer(changed, positions=positions, key_mask=mask)
    assert_close(y[mask], expected[mask])
    y, _ = layer(changed, positions=positions)
    assert (y[:, 9:] - expected[:, 9:]).abs().max() > 1e-8, "no key is seen"


def check_all_masked(layer) -> None:
    """A row whose keys are all masked gives zero in the attention: the layer gives its output bias."""
    x, positions = inputs(layer)
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    mask[0] = False
    y, _ = layer(x, positions=positions, key_mask=mask)
    assert_close(y[0], layer.output.bias.expand_as(y[0]))
    assert_close(y[1:], layer(x[1:], positions=None if positions is None else positions[1:])[0])


def check_batch(layer) -> None:
    """A row does not depend on the other rows."""
    x, positions = inputs(layer, batch=3)
    y, _ = layer(x, positions=positions)
    for row in range(3):
        alone, _ = layer(x[row : row + 1], positions=None if positions is None else positions[:1])
        assert_close(y[row : row + 1], alone)


def check_queries(layer) -> None:
    """Outputs and gradients of selected queries equal those among all tokens, whatever the padding contains."""
    x, positions = inputs(layer)
    queries = torch.tensor([[0, 12], [7, 7]])
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    mask[:, 9:11] = mask[1, 15:] = False
    calls = [{}, {"key_mask": mask}]
    if layer.attention.position.two_sided:  # the outputs of global tokens alone need no decay
        global_mask = torch.zeros_like(mask).scatter(1, queries, True)
        calls += [{**call, "global_mask": global_mask} for call in calls]
    for call in calls:
        content = x.masked_fill(~mask.unsqueeze(-1), 100.0) if "key_mask" in call else x
        found = []
        for selected in (None, queries):
            leaf = content.clone().requires_grad_()
            y, _ = layer(leaf, positions=positions, queries=selected, **call)
            y = y if selected is not None else y[torch.arange(2).unsqueeze(1), queries]
            leaves = [leaf, *(p for p in layer.parameters() if p.requires_grad)]
            found.append([y, *torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)])
        for expected, actual in zip(*found, strict=True):
            assert (actual is None) == (expected is None), "one of them has no gradient"
            if actual is not None and expected is not None:
                assert_close(actual, expected)


def check_resume(layer) -> None:
    """A sequence split anywhere and resumed from the state, also token by token, gives the same as one call."""
    x, positions = inputs(layer)
    length = x.shape[1]
    expected, _ = layer(x, positions=positions)
    for cuts in ([0, 1, length], [0, 8, 16, length], [0, length - 1, length], list(range(length + 1))):
        state, parts = None, []
        for start, stop in itertools.pairwise(cuts):
            y, state = layer(x[:, start:stop], positions=part(positions, slice(start, stop)), state=state)
            parts.append(y)
        assert_close(torch.cat(parts, dim=1), expected)


def check_packed(layer) -> None:
    """Sequences packed into one row give the same as alone, and a packed row can be split anywhere."""
    lengths = (3, 9, 1, 8)
    x, positions = inputs(layer, length=sum(lengths))
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(len(x), -1).contiguous()
    packed, _ = layer(x, positions=positions, segments=segments)
    for start, stop in itertools.pairwise(itertools.accumulate(lengths, initial=0)):
        alone, _ = layer(x[:, start:stop], positions=part(positions, slice(start, stop)))
        assert_close(packed[:, start:stop], alone)
    if layer.attention.causal:
        for cut in (3, 5, 12, 20):
            before, after = slice(cut), slice(cut, None)
            first, state = layer(x[:, before], positions=part(positions, before), segments=segments[:, before])
            rest, _ = layer(x[:, after], positions=part(positions, after), segments=segments[:, after], state=state)
            assert_close(torch.cat([first, rest], dim=1), packed)


def check_relative(layer) -> None:
    """Moving all positions by the same distance changes nothing; moving them apart does."""
    x, positions = inputs(layer)
    positions = explicit(positions, *x.shape[:2])
    expected, _ = layer(x, positions=positions)
    shift = torch.tensor([10**6, -(10**5), 17])[: layer.axes]
    assert_close(layer(x, positions=positions + shift)[0], expected)
    assert (layer(x, positions=positions * 3)[0] - expected).abs().max() > 1e-8, "distance does not matter"


def check_global_tokens(layer) -> None:
    """With a two-sided decay, global tokens have weight 1 in both directions within their segment, and take no step."""
    x, positions = inputs(layer)
    batch, length, _ = x.shape
    positions = explicit(positions, batch, length)
    global_mask = torch.zeros(batch, length, dtype=torch.bool)
    global_mask[:, [0, 7, 8]] = global_mask[1, 16] = True
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[:, 3:5] = mask[1, 16:] = False  # a global token can be masked
    segments = (torch.arange(length) >= 10).long().expand(batch, -1)
    for key_mask, packed in itertools.product((None, mask), (None, segments)):
        y, _ = layer(x, positions=positions, key_mask=key_mask, segments=packed, global_mask=global_mask)
        expected = layer_by_pairs(layer, x, positions, key_mask, packed, global_mask)
        real = mask if key_mask is not None else torch.ones_like(mask)
        assert_close(y[real], expected[real])


def layer_by_pairs(
    layer,
    x: Tensor,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    global_mask: Tensor | None = None,
    *,
    transform=None,
    bias: Tensor | None = None,
    global_steps: bool = False,
) -> Tensor:
    """Compute a layer of linear or softmax attention over all pairs of tokens, by ``ops.reference`` or SDPA.

    Args:
        transform: maps features and positions to features, in place of the layer's own encoding.
        bias: what an encoding adds to the scores, ``1 h l l``.
        global_steps: make global tokens take a step of the decay, which is wrong.
    """
    attention = layer.attention
    batch, length, _ = x.shape
    positions = explicit(positions, batch, length)
    mask = torch.ones(batch, length, dtype=torch.bool) if mask is None else mask
    segments = torch.zeros(batch, length) if segments is None else segments
    global_mask = torch.zeros(batch, length, dtype=torch.bool) if global_mask is None else global_mask
    visible = (segments.unsqueeze(-1) == segments.unsqueeze(-2)) & mask.unsqueeze(-2)  # b l l
    visible = visible.tril() if attention.causal else visible
    takes_step = visible if global_steps else visible & ~global_mask.unsqueeze(-2)
    q, k, v = (layer.heads(projection(x)) for projection in (layer.query, layer.key, layer.value))
    plain = (q, k) if attention.name == "softmax" else (attention.feature_map(q), attention.feature_map(k))
    if transform is None:
        tables = attention.position.tables(positions)
        q, k = (attention.position.transform(features, tables) for features in plain)
    else:
        q, k = (transform(features, positions) for features in plain)
    if attention.name == "softmax":
        scores = visible.unsqueeze(1) if bias is None else bias.masked_fill(~visible.unsqueeze(1), -torch.inf)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=scores)
    else:
        decay = None if bias is None else bias.exp()
        if "log_decay" in attention.position.hooks:
            ranks = [reference.ranks(positions, head % layer.axes, takes_step) for head in range(attention.num_heads)]
            if attention.causal:
                ranks = [torch.arange(length).expand(batch, -1)] * attention.num_heads
            r = attention.position.log_decay().double().exp()
            decay = reference.decay_weights(r, torch.stack(ranks, dim=1), global_mask)
        normalizer = {"normalize": attention.normalizer != "none", "plain": plain if attention.normalizer == "plain" else None}
        out = reference.kernel_attention(q, k, v, visible=visible.unsqueeze(1), decay=decay, **normalizer)
    return layer.output(out.transpose(1, 2).flatten(2))


CHECKS = {name.removeprefix("check_"): function for name, function in globals().items() if name.startswith("check_")}
