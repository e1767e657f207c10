"""Linear attention in blocks of PyTorch calls: runs anywhere, and no temporary grows with the length.

Features exist for one block at a time, in the backward pass too: it keeps q, k, v and the carries between blocks, and
runs each block again to differentiate it ("Sub-linear memory", Likhosherstov et al., 2020).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from permuteformer.ops.blocks import Blocks, Carry, Decays, Transform, decay_powers
from permuteformer.ops.checks import is_looked_through, without_autocast


def scan(
    blocks: Blocks,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    carry: Carry,
    right: Carry | None,
    log_decay: Tensor | None,
    parameters: Sequence[Tensor],
) -> tuple[Tensor, Carry]:
    """Attention by a carry that runs along the sequence: causal, or from both sides. Output ``b h l v``, last carry.

    ``right``: what keys after the last block left, seen from that block; nothing unless given.
    """
    if _is_followed(blocks):  # a compiler itself decides what to keep and what to compute again
        out, final, _, _ = _scan(blocks, q, k, v, carry, right, log_decay, parameters)
        return out, final
    out, *final = _Scan.apply(blocks, q, k, v, *carry, *(right or (None, None)), log_decay, *parameters)
    return out, Carry(*final)


def total(blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, carry: Carry, parameters: Sequence[Tensor]) -> tuple[Tensor, Carry]:
    """Attention of every query to every key, by one sum over the keys (equation 6). Output ``b h l v``, the sum."""
    if _is_followed(blocks):
        return _total(blocks, q, k, v, carry, parameters)
    out, *final = _Total.apply(blocks, q, k, v, *carry, *parameters)
    return out, Carry(*final)


def key_sum(blocks: Blocks, k: Tensor, v: Tensor, log_decay: Tensor | None, steps: Tensor | None, parameters: Sequence[Tensor]) -> Carry:
    """The sum of all keys, each decayed by its ``steps``, ``b l``. Positions of the blocks are to be given."""
    if _is_followed(blocks):
        return _key_sum(blocks, k, v, log_decay, steps, parameters)
    return Carry(*_KeySum.apply(blocks, k, v, log_decay, steps, *parameters))


def _is_followed(blocks: Blocks) -> bool:
    """Whether operations are left to who follows them: autograd too, for an encoding that is trained, of which nothing is known below."""
    return is_looked_through() or (torch.is_grad_enabled() and blocks.transform is not None and _is_trained(blocks.transform))


def _is_trained(transform: Transform) -> bool:
    """Whether what moves features has parameters; what goes with it, a decay for one, may have some of its own."""
    parts = getattr(transform, "encodings", [transform])
    return any(p.requires_grad for part in parts if "transform" in getattr(part, "hooks", ()) for p in part.parameters())


def _scan(
    blocks: Blocks,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: Carry,
    right: Carry | None,
    log_decay: Tensor | None,
    parameters: Sequence[Tensor],
    keep: bool = False,
) -> tuple[Tensor, Carry, list[Carry], list[Carry]]:
    """Output, last carry, and the carries that each block met from the left (with ``keep``) and from the right."""
    powers = _powers(blocks, log_decay)
    rights: list[Carry] = []
    if not blocks.causal:
        rights.append(_zeros(left) if right is None else right)
        for n in range(len(blocks.slices) - 1, 0, -1):
            block = blocks.slices[n]
            rights.append(Carry(*blocks.right_block(n, k[:, :, block], v[:, :, block], rights[-1], powers[blocks.size(n)], parameters)))
        rights.reverse()
    out, lefts = _output(q, v), []
    for n, block in enumerate(blocks.slices):
        if keep:
            lefts.append(left)
        met = rights[n] if rights else None
        out[:, :, block], *after = blocks.scan_block(
            n, q[:, :, block], k[:, :, block], v[:, :, block], left, met, powers[blocks.size(n)], parameters
        )
        left = Carry(*after)
    return out, left, lefts, rights


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        blocks: Blocks,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: Tensor,
        z: Tensor,
        right_kv: Tensor | None,
        right_z: Tensor | None,
        log_decay: Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        keep = any(ctx.needs_input_grad)
        right = None if right_kv is None or right_z is None else Carry(right_kv, right_z)
        out, final, lefts, rights = _scan(blocks, q, k, v, Carry(kv, z), right, log_decay, parameters, keep)
        ctx.blocks, ctx.parameters = blocks, len(parameters)
        ctx.save_for_backward(q, k, v, log_decay, *parameters, *(x for carry in (*lefts, *rights) for x in carry))
        return out, *final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_kv: Tensor, d_z: Tensor) -> tuple[Tensor | None, ...]:
        with without_autocast(d_out.device):
            return _Scan._backward(ctx, d_out, d_kv, d_z)

    @staticmethod
    def _backward(ctx: Any, d_out: Tensor, d_kv: Tensor, d_z: Tensor) -> tuple[Tensor | None, ...]:
        blocks: Blocks = ctx.blocks
        q, k, v, log_decay, *rest = ctx.saved_tensors
        need_q, need_k, need_v, _, _, need_right, _, need_decay, *need_parameters = ctx.needs_input_grad[1:]
        parameters = [_leaf(x, need) for x, need in zip(rest[: ctx.parameters], need_parameters, strict=True)]
        carries = [Carry(*pair) for pair in zip(rest[ctx.parameters :: 2], rest[ctx.parameters + 1 :: 2], strict=True)]
        lefts, rights = carries[: len(blocks.slices)], carries[len(blocks.slices) :]
        log_decay = None if log_decay is None else _leaf(log_decay, need_decay)
        with torch.enable_grad():
            powers = _powers(blocks, log_decay)
        all_powers = [power for size in powers.values() if size is not None for power in size]
        tape = _Tape([*parameters, *all_powers])
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

        d_left, d_rights = Carry(d_kv, d_z), []
        for n in reversed(range(len(blocks.slices))):
            block = blocks.slices[n]
            query, key, value = _leaf(q[:, :, block], need_q), _leaf(k[:, :, block], need_k), _leaf(v[:, :, block], need_v)
            left = _leaves(lefts[n])
            right = _leaves(rights[n]) if rights else None
            with torch.enable_grad():
                outputs = blocks.scan_block(n, query, key, value, left, right, powers[blocks.size(n)], parameters)
            found = tape.pull(outputs, (d_out[:, :, block], *d_left), (query, key, value, *left, *(right or ())))
            dq[:, :, block], dk[:, :, block], dv[:, :, block] = found[:3]
            d_left = Carry(*found[3:5])
            d_rights.append(found[5:])

        # What block n did to the carry from the right that block n - 1 met, in the order opposite to its own.
        d_right = d_rights.pop()
        for n in range(1, len(blocks.slices)) if rights else ():
            block = blocks.slices[n]
            key, value, right = _leaf(k[:, :, block], need_k), _leaf(v[:, :, block], need_v), _leaves(rights[n])
            with torch.enable_grad():
                handed = blocks.right_block(n, key, value, right, powers[blocks.size(n)], parameters)
            found = tape.pull(handed, d_right, (key, value, *right))
            dk[:, :, block] += found[0]
            dv[:, :, block] += found[1]
            d_right = [here + beyond for here, beyond in zip(d_rights.pop(), found[2:], strict=True)]

        d_parameters, d_powers = tape.sums[: len(parameters)], tape.sums[len(parameters) :]
        d_decay = torch.autograd.grad(all_powers, log_decay, d_powers)[0] if log_decay is not None and need_decay else None
        return None, dq, dk, dv, *d_left, *(d_right if need_right else (None, None)), d_decay, *d_parameters


def _total(blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, carry: Carry, parameters: Sequence[Tensor]) -> tuple[Tensor, Carry]:
    for n, block in enumerate(blocks.slices):
        carry = Carry(*blocks.sum_block(n, k[:, :, block], v[:, :, block], carry, parameters))
    final, out = carry, _output(q, v)
    for n in reversed(range(len(blocks.slices))):
        block = blocks.slices[n]
        carry = blocks.move(carry, -blocks.size(n))
        out[:, :, block] = blocks.read_block(n, q[:, :, block], carry, parameters)
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
        with without_autocast(d_out.device):
            return _Total._backward(ctx, d_out, d_kv, d_z)

    @staticmethod
    def _backward(ctx: Any, d_out: Tensor, d_kv: Tensor, d_z: Tensor) -> tuple[Tensor | None, ...]:
        blocks: Blocks = ctx.blocks
        q, k, v, kv, z, *parameters = ctx.saved_tensors
        need_q, need_k, need_v, _, _, *need_parameters = ctx.needs_input_grad[1:]
        parameters = [_leaf(x, need) for x, need in zip(parameters, need_parameters, strict=True)]
        tape = _Tape(parameters)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

        # Back through the reading, which ran from the last block to the first.
        carry = blocks.move(Carry(kv, z), -blocks.length)
        d_carry = nothing = _zeros(carry)
        for n, block in enumerate(blocks.slices):
            query, seen = _leaf(q[:, :, block], need_q), _leaves(carry)
            with torch.enable_grad():
                out = blocks.read_block(n, query, seen, parameters)
            dq[:, :, block], *found = tape.pull([out], [d_out[:, :, block]], (query, *seen))
            carry = blocks.move(carry, blocks.size(n))
            # Moving keeps dot products, so what moves a carry moves its gradient.
            d_carry = blocks.move(Carry(d_carry.kv + found[0], d_carry.z + found[1]), blocks.size(n))
        d_carry = Carry(d_carry.kv + d_kv, d_carry.z + d_z)

        # Back through the sum. It only adds, so a block's gradient does not need the carry it met.
        for n in reversed(range(len(blocks.slices))):
            block = blocks.slices[n]
            key, value = _leaf(k[:, :, block], need_k), _leaf(v[:, :, block], need_v)
            with torch.enable_grad():
                handed = blocks.sum_block(n, key, value, nothing, parameters)
            dk[:, :, block], dv[:, :, block] = tape.pull(handed, d_carry, (key, value))
            d_carry = blocks.move(d_carry, -blocks.size(n))
        return None, dq, dk, dv, *d_carry, *tape.sums


def _key_sum(blocks: Blocks, k: Tensor, v: Tensor, log_decay: Tensor | None, steps: Tensor | None, parameters: Sequence[Tensor]) -> Carry:
    parts = [
        blocks.key_block(n, k[:, :, block], v[:, :, block], _weight(blocks, n, log_decay, steps), parameters)
        for n, block in enumerate(blocks.slices)
    ]
    return Carry(*(sum(part[1:], part[0]) for part in zip(*parts, strict=True)))


class _KeySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, blocks: Blocks, k: Tensor, v: Tensor, log_decay: Tensor | None, steps: Tensor | None, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.blocks = blocks
        ctx.save_for_backward(k, v, log_decay, steps, *parameters)
        return _key_sum(blocks, k, v, log_decay, steps, parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_kv: Tensor, d_z: Tensor) -> tuple[Tensor | None, ...]:
        blocks: Blocks = ctx.blocks
        k, v, log_decay, steps, *parameters = ctx.saved_tensors
        need_k, need_v, need_decay, _, *need_parameters = ctx.needs_input_grad[1:]
        parameters = [_leaf(x, need) for x, need in zip(parameters, need_parameters, strict=True)]
        log_decay = None if log_decay is None else _leaf(log_decay, need_decay)
        tape = _Tape([*parameters, *(() if log_decay is None else (log_decay,))])
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        with without_autocast(d_kv.device):
            for n, block in enumerate(blocks.slices):
                key, value = _leaf(k[:, :, block], need_k), _leaf(v[:, :, block], need_v)
                with torch.enable_grad():
                    part = blocks.key_block(n, key, value, _weight(blocks, n, log_decay, steps), parameters)
                dk[:, :, block], dv[:, :, block] = tape.pull(part, (d_kv, d_z), (key, value))
        return None, dk, dv, None if log_decay is None else tape.sums[-1], None, *tape.sums[: len(parameters)]


def _weight(blocks: Blocks, n: int, log_decay: Tensor | None, steps: Tensor | None) -> Tensor | None:
    """r to the power of the steps of a block's tokens: ``b h C 1``."""
    if log_decay is None or steps is None:
        return None
    return (log_decay.to(blocks.dtype).view(-1, 1) * steps[:, None, blocks.slices[n]]).exp().unsqueeze(-1)


class _Tape:
    """Differentiates one block after another, and sums up the gradients of the tensors that all blocks share."""

    def __init__(self, shared: Sequence[Tensor]) -> None:
        self.shared = shared
        self.sums = [torch.zeros_like(x) if x.requires_grad else None for x in shared]

    def pull(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """The gradient of each input; zero for one that needs none."""
        reached = [(y, d_y.to(y.dtype)) for y, d_y in zip(outputs, gradients, strict=True) if y.requires_grad]
        wanted = [x for x in (*inputs, *self.shared) if x.requires_grad]
        found: Iterator[Tensor | None] = iter([None] * len(wanted))
        if reached:
            found = iter(torch.autograd.grad([y for y, _ in reached], wanted, [d_y for _, d_y in reached], allow_unused=True))
        result = [next(found) if x.requires_grad else None for x in inputs]
        for n, total in enumerate(self.sums):
            if total is not None and (gradient := next(found)) is not None:
                self.sums[n] = total + gradient
        return [torch.zeros_like(x) if d_x is None else d_x for x, d_x in zip(inputs, result, strict=True)]


def _output(q: Tensor, v: Tensor) -> Tensor:
    """Room for the output ``b h l v``, laid out so that merging the heads copies nothing."""
    b, h, length, _ = q.shape
    return v.new_empty(b, length, h, v.shape[-1]).transpose(1, 2)


def _powers(blocks: Blocks, log_decay: Tensor | None) -> dict[int, Decays | None]:
    """Powers of r for each size of block there is."""
    return {size: None if log_decay is None else decay_powers(log_decay.to(blocks.dtype), size) for size in blocks.sizes}


def _zeros(carry: Carry) -> Carry:
    return Carry(torch.zeros_like(carry.kv), torch.zeros_like(carry.z))


def _leaf(x: Tensor, needs_gradient: bool = True) -> Tensor:
    return x.detach().requires_grad_(needs_gradient)


def _leaves(carry: Carry) -> Carry:
    return Carry(_leaf(carry.kv), _leaf(carry.z))
