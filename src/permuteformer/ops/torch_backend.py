"""Linear attention in blocks of PyTorch calls: runs anywhere, and no temporary grows with the length.

Features exist for one block at a time, in the backward pass too: it keeps q, k, v and the carries between blocks, and
runs each block again to differentiate it ("Sub-linear memory", Likhosherstov et al., 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from permuteformer.ops.blocks import Blocks, Carry, Decays, decay_powers


def scan(
    blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, carry: Carry, log_decay: Tensor | None, parameters: Sequence[Tensor]
) -> tuple[Tensor, Carry]:
    """Attention by a carry that runs along the sequence: causal, or from both sides. Output ``b h l v``, last carry."""
    if torch.compiler.is_compiling():  # the compiler itself decides what to keep and what to compute again
        out, final, _, _ = _scan(blocks, q, k, v, carry, log_decay, parameters)
        return out, final
    out, *final = _Scan.apply(blocks, q, k, v, *carry, log_decay, *parameters)
    return out, Carry(*final)


def total(blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, carry: Carry, parameters: Sequence[Tensor]) -> tuple[Tensor, Carry]:
    """Attention of every query to every key, by one sum over the keys (equation 6). Output ``b h l v``, the sum."""
    if torch.compiler.is_compiling():
        return _total(blocks, q, k, v, carry, parameters)
    out, *final = _Total.apply(blocks, q, k, v, *carry, *parameters)
    return out, Carry(*final)


def _output(q: Tensor, v: Tensor) -> Tensor:
    """Room for the output ``b h l v``, laid out so that merging the heads copies nothing."""
    b, h, l, _ = q.shape
    return v.new_empty(b, l, h, v.shape[-1]).transpose(1, 2)


def _powers(blocks: Blocks, log_decay: Tensor | None) -> dict[int, Decays | None]:
    """Powers of r for each size of block there is."""
    return {size: None if log_decay is None else decay_powers(log_decay.to(blocks.dtype), size) for size in blocks.sizes}


def _scan(
    blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, left: Carry, log_decay: Tensor | None, parameters: Sequence[Tensor], keep: bool = False
) -> tuple[Tensor, Carry, list[Carry], list[Carry]]:
    """The forward scan; with ``keep``, also the carries that each block met from the left and from the right."""
    powers = _powers(blocks, log_decay)
    last = len(blocks.slices) - 1
    rights: list[Carry] = []
    if not blocks.causal:
        rights.append(Carry(torch.zeros_like(left.kv), torch.zeros_like(left.z)))
        for n in range(last, 0, -1):
            block = blocks.slices[n]
            rights.append(Carry(*blocks.right_block(n, k[:, :, block], v[:, :, block], rights[-1], powers[blocks.size(n)], parameters)))
        rights.reverse()
    out, lefts = _output(q, v), []
    for n, block in enumerate(blocks.slices):
        if keep:
            lefts.append(left)
        right = rights[n] if rights else None
        out[:, :, block], *after = blocks.scan_block(
            n, q[:, :, block], k[:, :, block], v[:, :, block], left, right, powers[blocks.size(n)], parameters
        )
        left = Carry(*after)
    return out, left, lefts, rights


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, log_decay: Tensor | None, *parameters: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        keep = any(ctx.needs_input_grad)
        out, final, lefts, rights = _scan(blocks, q, k, v, Carry(kv, z), log_decay, parameters, keep)
        ctx.blocks, ctx.has_decay = blocks, log_decay is not None
        decay = [] if log_decay is None else [log_decay]
        ctx.save_for_backward(q, k, v, *decay, *parameters)
        ctx.lefts, ctx.rights = lefts, rights
        return out, *final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_kv: Tensor, d_z: Tensor) -> tuple[Tensor | None, ...]:
        blocks: Blocks = ctx.blocks
        q, k, v, *rest = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        with torch.enable_grad():
            log_decay = _leaf(rest.pop(0), needs[5]) if ctx.has_decay else None
            powers = _powers(blocks, log_decay)
            parameters = [_leaf(x, need) for x, need in zip(rest, needs[6:], strict=True)]
        # Gradients of what all blocks share, summed up as the blocks go by.
        shared = _Sums([*parameters, *(p for size in powers.values() if size is not None for p in size)])
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        d_rights: list[Carry] = []

        d_left = Carry(d_kv, d_z)
        for n in reversed(range(len(blocks.slices))):
            block = blocks.slices[n]
            inputs = [_leaf(x[:, :, block], need) for x, need in zip((q, k, v), needs, strict=False)]
            left = Carry(*map(_leaf, ctx.lefts[n]))
            right = Carry(*map(_leaf, ctx.rights[n])) if ctx.rights else None
            with torch.enable_grad():
                outputs = blocks.scan_block(n, *inputs, left, right, powers[blocks.size(n)], parameters)
            gradients = shared.pull(outputs, (d_out[:, :, block], *d_left), [*inputs, *left, *(right or ())])
            dq[:, :, block], dk[:, :, block], dv[:, :, block] = gradients[:3]
            d_left = Carry(*gradients[3:5])
            d_rights.append(Carry(*gradients[5:]) if right else d_left)

        if ctx.rights:
            d_right = d_rights.pop()  # of block 0; what follows runs the way the right carry did not
            for n in range(1, len(blocks.slices)):
                block = blocks.slices[n]
                inputs = [_leaf(x[:, :, block], need) for x, need in zip((k, v), needs[1:], strict=False)]
                right = Carry(*map(_leaf, ctx.rights[n]))
                with torch.enable_grad():
                    outputs = blocks.right_block(n, *inputs, right, powers[blocks.size(n)], parameters)
                gradients = shared.pull(outputs, d_right, [*inputs, *right])
                dk[:, :, block] += gradients[0]
                dv[:, :, block] += gradients[1]
                d_right = Carry(*(a + b for a, b in zip(gradients[2:], d_rights.pop(), strict=True)))

        d_decay = shared.through(log_decay, [p for size in powers.values() if size is not None for p in size])
        return None, dq, dk, dv, *d_left, d_decay, *(shared.sums[id(p)] for p in parameters)


def _total(blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, carry: Carry, parameters: Sequence[Tensor]) -> tuple[Tensor, Carry]:
    for n, block in enumerate(blocks.slices):
        carry = Carry(*blocks.sum_block(n, k[:, :, block], v[:, :, block], carry, parameters))
    final, out = carry, _output(q, v)
    for n in reversed(range(len(blocks.slices))):
        carry = blocks.move(carry, -blocks.size(n))
        out[:, :, blocks.slices[n]] = blocks.read_block(n, q[:, :, blocks.slices[n]], carry, parameters)
    return out, final


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, final = _total(blocks, q, k, v, Carry(kv, z), parameters)
        ctx.blocks = blocks
        ctx.save_for_backward(q, k, v, *final, *parameters)
        return out, *final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_kv: Tensor, d_z: Tensor) -> tuple[Tensor | None, ...]:
        blocks: Blocks = ctx.blocks
        q, k, v, kv, z, *rest = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        parameters = [_leaf(x, need) for x, need in zip(rest, needs[5:], strict=True)]
        shared = _Sums(parameters)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        # Back through the reading, which ran from the last block to the first.
        nothing = Carry(torch.zeros_like(kv), torch.zeros_like(z))
        d_carry, carry = nothing, blocks.move(Carry(kv, z), -blocks.length)
        for n, block in enumerate(blocks.slices):
            query, seen = _leaf(q[:, :, block], needs[0]), Carry(*map(_leaf, carry))
            with torch.enable_grad():
                out = blocks.read_block(n, query, seen, parameters)
            gradients = shared.pull([out], [d_out[:, :, block]], [query, *seen])
            dq[:, :, block] = gradients[0]
            carry = blocks.move(carry, blocks.size(n))
            # Moving keeps dot products, so what moves a carry on moves its gradient on.
            d_carry = blocks.move(Carry(*(a + b for a, b in zip(d_carry, gradients[1:], strict=True))), blocks.size(n))
        d_carry = Carry(d_carry.kv + d_kv, d_carry.z + d_z)
        # Back through the sum. It adds, so a block's gradient does not need the carry it met.
        for n in reversed(range(len(blocks.slices))):
            block = blocks.slices[n]
            inputs = [_leaf(x[:, :, block], need) for x, need in zip((k, v), needs[1:], strict=False)]
            with torch.enable_grad():
                outputs = blocks.sum_block(n, *inputs, nothing, parameters)
            dk[:, :, block], dv[:, :, block] = shared.pull(outputs, d_carry, inputs)
            d_carry = blocks.move(d_carry, -blocks.size(n))
        return None, dq, dk, dv, *d_carry, *(shared.sums[id(p)] for p in parameters)


def _leaf(x: Tensor, needs_gradient: bool = True) -> Tensor:
    return x.detach().requires_grad_(needs_gradient)


class _Sums:
    """Gradients of tensors that every block shares, summed over the blocks."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [x for x in tensors if x.requires_grad]
        self.sums: dict[int, Tensor | None] = {id(x): None for x in tensors}

    def pull(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of ``inputs`` (zero where there is none); those of the shared tensors go to their sums."""
        wanted = [x for x in (*inputs, *self.tensors) if x.requires_grad]
        pairs = [(y, g.to(y.dtype)) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
        found = dict.fromkeys(map(id, wanted))
        if pairs:
            grads = torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
            found = {id(x): g for x, g in zip(wanted, grads, strict=True)}
        for x in self.tensors:
            gradient = found[id(x)]
            if gradient is not None:
                total = self.sums[id(x)]
                self.sums[id(x)] = gradient if total is None else total + gradient
        return [torch.zeros_like(x) if found.get(id(x)) is None else found[id(x)] for x in inputs]  # type: ignore[misc]

    def through(self, x: Tensor | None, tensors: Sequence[Tensor]) -> Tensor | None:
        """The gradient of ``x``, which ``tensors`` were computed from, from their sums."""
        if x is None or not x.requires_grad:
            return None
        reached = [(y, self.sums[id(y)]) for y in tensors if self.sums[id(y)] is not None]
        return torch.autograd.grad([y for y, _ in reached], x, [g for _, g in reached])[0] if reached else None
