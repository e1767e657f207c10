"""Triton kernels for a GPU: features with their permutation in one pass over memory, and values beside a column of ones.

Imported at their first use, as they need triton. A program does a tile of tokens of one head, in float32. A cycle of a permutation is
a run of neighbouring features, so a turned row is read in runs too: the same bytes as a straight copy.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def features_kernel(
    x, x_row, x_head, x_token, x_feature,
    out, out_row, out_head, out_token,
    turns, turns_row, turns_token, cycles, of_feature,
    shown, shown_row, shown_token,
    length, heads, features, width,
    MAP: tl.constexpr, TURNED: tl.constexpr, COUNTED: tl.constexpr, MASKED: tl.constexpr,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Features of queries or keys: mapped, turned, and zero where hidden and from ``features`` to ``width``."""
    row, head, token = _place(length, heads, TOKENS)
    feature = tl.arange(0, FEATURES)
    there = _shown(shown, shown_row, shown_token, row, token, length, MASKED)
    source = feature[None, :] + tl.zeros((TOKENS, 1), tl.int32)
    if TURNED:
        turn, first, size = _turn(turns, turns_row, turns_token, cycles, of_feature, row, head, token, there, features, feature, COUNTED)
        rank = feature - first + turn
        source = first + tl.where(rank >= size, rank - size, rank)
    far = token.to(tl.int64)[:, None]  # a tensor may have more elements than 32 bits count
    real = there[:, None] & (feature < features)[None, :]
    value = tl.load(x + row * x_row + head * x_head + far * x_token + source * x_feature, mask=real, other=0).to(tl.float32)
    value = tl.where(value <= 0, 0.0, value)  # a NaN stays one
    if MAP == 0:
        value += 1e-3
    if MAP == 2:
        value *= value
    value = tl.where(real, value, 0.0)
    place = out + row * out_row + head * out_head + far * out_token + feature[None, :]
    tl.store(place, value.to(out.dtype.element_ty), mask=(token < length)[:, None] & (feature < width)[None, :])


@triton.jit
def features_back_kernel(
    x, x_row, x_head, x_token, x_feature,
    d_out, d_out_row, d_out_head, d_out_token, d_out_feature,
    d_x, d_x_row, d_x_head, d_x_token, d_x_feature,
    turns, turns_row, turns_token, cycles, of_feature,
    shown, shown_row, shown_token,
    length, heads, features,
    MAP: tl.constexpr, TURNED: tl.constexpr, COUNTED: tl.constexpr, MASKED: tl.constexpr,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Gradients turned back, times the derivative of the map. Every gradient is read once: nothing is added up."""
    row, head, token = _place(length, heads, TOKENS)
    feature = tl.arange(0, FEATURES)
    there = _shown(shown, shown_row, shown_token, row, token, length, MASKED)
    source = feature[None, :] + tl.zeros((TOKENS, 1), tl.int32)
    if TURNED:
        turn, first, size = _turn(turns, turns_row, turns_token, cycles, of_feature, row, head, token, there, features, feature, COUNTED)
        rank = feature - first - turn
        source = first + tl.where(rank < 0, rank + size, rank)
    far = token.to(tl.int64)[:, None]
    real = there[:, None] & (feature < features)[None, :]
    value = tl.load(x + row * x_row + head * x_head + far * x_token + feature[None, :] * x_feature, mask=real, other=0).to(tl.float32)
    place = d_out + row * d_out_row + head * d_out_head + far * d_out_token + source * d_out_feature
    gradient = tl.load(place, mask=real, other=0).to(tl.float32)
    if MAP == 2:
        gradient *= 2 * value
    gradient = tl.where(value <= 0, 0.0, gradient)  # and where nothing was read
    place = d_x + row * d_x_row + head * d_x_head + far * d_x_token + feature[None, :] * d_x_feature
    tl.store(place, gradient.to(d_x.dtype.element_ty), mask=(token < length)[:, None] & (feature < features)[None, :])


@triton.jit
def values_kernel(
    v, v_row, v_head, v_token, v_value,
    out, out_row, out_head, out_token,
    bad, bad_row, bad_head, bad_token,
    shown, shown_row, shown_token,
    length, heads, values, width,
    MASKED: tl.constexpr, FINITE: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Values, zero where hidden, a one after them, zeros up to ``width``. With FINITE, what is not is zero, and its token is ``bad``."""
    row, head, token = _place(length, heads, TOKENS)
    column = tl.arange(0, FEATURES)
    there = _shown(shown, shown_row, shown_token, row, token, length, MASKED)
    far = token.to(tl.int64)[:, None]
    real = there[:, None] & (column < values)[None, :]
    value = tl.load(v + row * v_row + head * v_head + far * v_token + column[None, :] * v_value, mask=real, other=0).to(tl.float32)
    if FINITE:
        finite = tl.abs(value) < float("inf")
        value = tl.where(finite, value, 0.0)
        spoilt = tl.max(tl.where(finite, 0, 1), axis=1)
        tl.store(bad + row * bad_row + head * bad_head + token.to(tl.int64) * bad_token, spoilt.to(tl.int8), mask=token < length)
    value = tl.where((column == values)[None, :] & there[:, None], 1.0, value)
    place = out + row * out_row + head * out_head + far * out_token + column[None, :]
    tl.store(place, value.to(out.dtype.element_ty), mask=(token < length)[:, None] & (column < width)[None, :])


@triton.jit
def _place(length, heads, TOKENS: tl.constexpr):
    """Row, head and tokens of a program: neighbours are heads, as they are in memory."""
    program = tl.program_id(0)
    blocks = tl.cdiv(length, TOKENS)
    row = program // (heads * blocks)
    head = program % heads
    token = (program // heads) % blocks * TOKENS + tl.arange(0, TOKENS)
    return row.to(tl.int64), head.to(tl.int64), token


@triton.jit
def _shown(shown, shown_row, shown_token, row, token, length, MASKED: tl.constexpr):
    """Which tokens of a tile there are, and are not hidden."""
    there = token < length
    if MASKED:
        there = there & (tl.load(shown + row * shown_row + token.to(tl.int64) * shown_token, mask=there, other=0) != 0)
    return there


@triton.jit
def _turn(turns, turns_row, turns_token, cycles, of_feature, row, head, token, there, features, feature, COUNTED: tl.constexpr):
    """By how much the cycle of each feature is turned for each token, less than its size; its first feature, and its size."""
    real = feature < features
    cycle = tl.load(of_feature + head * features + feature, mask=real, other=0)
    first = tl.load(cycles + 3 * cycle, mask=real, other=0)[None, :]
    size = tl.load(cycles + 3 * cycle + 1, mask=real, other=1)[None, :]
    if COUNTED:  # what is given is the turn of the row's first token
        begin = tl.load(turns + row * turns_row + cycle, mask=real, other=0)
        turn = (begin[None, :] + token[:, None]) % size
    else:
        place = turns + row * turns_row + token.to(tl.int64)[:, None] * turns_token + cycle[None, :]
        turn = tl.load(place, mask=there[:, None] & real[None, :], other=0)
    return turn, first, size
