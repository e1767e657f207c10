"""Rows of linear attention sharded across processes, and the same rows on one: compared by ``tests/ops/test_sequence_parallel.py``."""

import itertools

import torch
import torch.distributed as dist
from group_processes import errors_of

from permuteformer.ops import linear, sequence_parallel
from permuteformer.ops.call import LinearCall, Tokens
from permuteformer.ops.feature_map import favor, orthogonal_features, relu_eps
from permuteformer.ops.sequence_parallel import SequenceGroup
from permuteformer.positions.orthogonal import Orthogonal
from permuteformer.positions.permute import Permute
from permuteformer.positions.rope import Rope

B, H, M, V = 3, 2, 8, 5
MODES = ("bidirectional", "causal", "decay", "two_sided", "global")
"""``decay`` is causal with a decay, ``global`` a two-sided decay with global tokens."""
ENCODINGS = {
    "none": lambda: None,
    "permute": lambda: Permute(H, M),
    "permute-2d": lambda: Permute(H, M, axes=2),
    "rope": lambda: Rope(M),
    "orthogonal": lambda: Orthogonal(H, M),
}
PACKED = ("packed", "packed random", "packed one shard")
"""Rows of several segments, which end within shards, at their edges, or span several; masks as the name says."""
MASKS = ("none", "left", "right", "middle", "random", "one shard", "one row")


def rows(mode, encoding, mask, lengths, dtype=torch.float64, seed=0, features=relu_eps, **more):
    """Whole rows: tensors with gradients, the gradient of the output, marks of tokens, and settings; the same on every process."""
    torch.manual_seed(seed)
    length = sum(lengths)
    q, k, v, d_out = (torch.randn(B, H, length, size, dtype=dtype) for size in (M, M, V, V))
    transform = ENCODINGS[encoding]()
    packed = mask in PACKED
    key_mask = masks(mask.removeprefix("packed").strip() or "none" if packed else mask, lengths)
    if key_mask is not None:
        q, k, v = (x.masked_fill(~key_mask[:, None, :, None], torch.nan) for x in (q, k, v))
        d_out = d_out * key_mask[:, None, :, None]
    normalizer = "plain" if transform is not None and not transform.keeps_sign else "transformed"
    decays = mode in ("decay", "two_sided", "global")
    return {
        "tensors": [q, k, v],
        "log_decay": torch.tensor([0.5, 0.95], dtype=dtype).log() if decays else None,
        "parameters": [orthogonal_features(H, M, M, torch.Generator().manual_seed(1)).to(dtype)] if features is favor else [],
        "d_out": d_out,
        "mask": key_mask,
        # Sorted on the first axis only, so that a two-sided decay counts in the sequence order.
        "positions": torch.randint(-4, 9, (B, length, 2)) if encoding == "permute-2d" else None,
        "segments": segments(lengths) if packed else None,
        "global_mask": torch.rand(B, length) > 0.8 if mode == "global" else None,
        "settings": {
            "feature_map": features,
            "encoding": transform,
            "causal": mode in ("causal", "decay"),
            "normalizer": normalizer,
            **more,
        },
    }


def segments(lengths):
    """One row with an end at the first edge, one with a segment over several shards, one of many short segments."""
    length = sum(lengths)
    places = torch.arange(length)
    edge, middle = (places >= lengths[0]).long(), ((places >= 2).long() + (places >= length - 2).long()) * 3
    return torch.stack([edge, middle, torch.div(places, 3, rounding_mode="floor")])


def masks(kind, lengths):
    length = sum(lengths)
    real = torch.ones(B, length, dtype=torch.bool)
    if kind == "left":
        real[:, :2] = False
        real[1, : length // 2 + 1] = False
    elif kind == "right":
        real[:, -2:] = False
        real[1, length // 2 :] = False
    elif kind == "middle":
        real[:, 2 : length - 2] = False
    elif kind == "random":
        real = torch.rand(B, length) > 0.4
    elif kind == "one shard":
        start = sum(lengths[: len(lengths) // 2])
        real[:, start : start + lengths[len(lengths) // 2]] = False
    elif kind == "one row":
        real[1] = False
    return None if kind == "none" else real


def differentiate(given, cut, attend):
    """The output of a shard, and the gradients of everything."""
    tensors = [x[:, :, cut].clone().requires_grad_() for x in given["tensors"]]
    log_decay = None if given["log_decay"] is None else given["log_decay"].clone().requires_grad_()
    parameters = [x.clone().requires_grad_() for x in given["parameters"]]
    marks = {name: None if given[name] is None else given[name][:, cut] for name in ("positions", "mask", "segments", "global_mask")}
    tokens = Tokens.build(B, tensors[0].shape[2], **marks)
    out = attend(
        LinearCall(*tensors, num_features=M, parameters=tuple(parameters), tokens=tokens, log_decay=log_decay, **given["settings"])
    )
    out.backward(given["d_out"][:, :, cut])
    shared = [*([] if log_decay is None else [log_decay]), *parameters]
    out = out.detach() if tokens.mask is None else out.detach().masked_fill(~tokens.mask[:, None, :, None], 0)
    return out, [x.grad for x in tensors], [x.grad for x in shared]


def alone(given, backend=None):
    """On one process."""
    return differentiate(given, slice(None), lambda call: linear.run(call, backend)[0])


def together(rank, cases, lengths, mesh_shape=None, **same):
    """On this process: its shards of several rows, and what was sent for each, forward and in all."""
    group = SequenceGroup(None if mesh_shape is None else _of_mesh(mesh_shape))
    ends = list(itertools.accumulate(lengths, initial=0))
    cut = slice(ends[group.rank], ends[group.rank + 1])
    found = []
    for n, case in enumerate(cases):
        seed = n if mesh_shape is None else 100 * (rank // mesh_shape[1]) + n
        before, sent = (group.bytes_sent, group.messages), []

        def attend(call, sent=sent):
            out = sequence_parallel.run(call, group)
            sent += group.bytes_sent, group.messages
            return out

        result = differentiate(rows(*case, lengths, seed=seed, **same), cut, attend)
        found.append((*result, [sent[0] - before[0], sent[1] - before[1], group.bytes_sent - sent[0], group.messages - sent[1]]))
    return found


_meshes = {}


def _of_mesh(shape):
    """The group of this process along the sequence, where other processes hold other rows."""
    from torch.distributed.device_mesh import init_device_mesh

    if shape not in _meshes:
        _meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=("data", "sequence"))
    return _meshes[shape]["sequence"].get_group()


def refusals(rank):
    """Messages for a group without this process, a state, and a decay on several axes."""
    group = SequenceGroup()
    given = rows("two_sided", "permute-2d", "none", [4])
    tokens = Tokens.build(B, 4, positions=given["positions"], ordered=True)
    call = LinearCall(*given["tensors"], num_features=M, tokens=tokens, log_decay=given["log_decay"], **given["settings"])
    q, k, v = given["tensors"]
    _, state = linear.run(LinearCall(q, k, v, relu_eps, M))
    tries = {
        "group": lambda: SequenceGroup(dist.new_group([0])),
        "axes": lambda: sequence_parallel.run(call, group),
        "state": lambda: sequence_parallel.run(LinearCall(q, k, v, relu_eps, M, state=state), group),
    }
    return errors_of(tries)
