"""Rows shared out over processes, and the same rows on one: what ``test_sequence_parallel`` compares."""

import itertools

import torch
import torch.distributed as dist

from permuteformer.ops.feature_map import favor, orthogonal_features, relu_eps
from permuteformer.ops.linear import linear_attention
from permuteformer.ops.sequence_parallel import SequenceGroup, sequence_parallel_attention
from permuteformer.positions.orthogonal import Orthogonal
from permuteformer.positions.permute import Permute
from permuteformer.positions.rope import Rope

B, H, M, V = 3, 2, 8, 5
KINDS = {
    "bidirectional": {},
    "causal": {"causal": True},
    "decay": {"causal": True, "decays": True},
    "two-sided": {"two_sided": True, "decays": True},
}
ENCODINGS = {
    "none": lambda: None,
    "permute": lambda: Permute(H, M),
    "permute-2d": lambda: Permute(H, M, axes=2),
    "rope": lambda: Rope(M),
    "orthogonal": lambda: Orthogonal(H, M),
}
PACKED = ("packed", "packed random", "packed one stretch")
"""Rows of several segments, which end within stretches, at their edges, or span several; tokens are hidden as the name says."""
MASKS = ("none", "left", "right", "middle", "random", "one stretch", "one row")


def rows(kind, encoding, mask, lengths, dtype=torch.float64, seed=0, features=relu_eps, **more):
    """Whole rows: q, k, v, the gradient of the output, and arguments; the same wherever it is called."""
    torch.manual_seed(seed)
    length = sum(lengths)
    q, k, v, d_out = (torch.randn(B, H, length, size, dtype=dtype) for size in (M, M, V, V))
    options = dict(KINDS[kind])
    decays = options.pop("decays", False)
    transform = ENCODINGS[encoding]()
    packed = mask in PACKED
    key_mask = masks(mask.removeprefix("packed").strip() or "none" if packed else mask, lengths)
    if key_mask is not None:
        q, k, v = (x.masked_fill(~key_mask[:, None, :, None], torch.nan) for x in (q, k, v))
        d_out = d_out * key_mask[:, None, :, None]
    return {
        "tensors": [q, k, v],
        "log_decay": torch.tensor([0.5, 0.95], dtype=dtype).log() if decays else None,
        "parameters": [orthogonal_features(H, M, M, torch.Generator().manual_seed(1)).to(dtype)] if features is favor else [],
        "d_out": d_out,
        "key_mask": key_mask,
        "positions": torch.randint(-4, 9, (B, length, 2)) if encoding == "permute-2d" else None,
        "segments": segments(lengths) if packed else None,
        "options": {
            **options,
            "feature_map": features,
            "transform": transform,
            "plain_normalizer": transform is not None and not transform.keeps_sign,
            **more,
        },
    }


def segments(lengths):
    """One row with an end at the first edge, one with a segment over several stretches, one of many short segments."""
    length = sum(lengths)
    places = torch.arange(length)
    edge, middle = (places >= lengths[0]).long(), ((places >= 2).long() + (places >= length - 2).long()) * 3
    return torch.stack([edge, middle, torch.div(places, 3, rounding_mode="floor")])


def masks(kind, lengths):
    length = sum(lengths)
    shown = torch.ones(B, length, dtype=torch.bool)
    if kind == "left":
        shown[:, :2] = False
        shown[1, : length // 2 + 1] = False
    elif kind == "right":
        shown[:, -2:] = False
        shown[1, length // 2 :] = False
    elif kind == "middle":
        shown[:, 2 : length - 2] = False
    elif kind == "random":
        shown = torch.rand(B, length) > 0.4
    elif kind == "one stretch":
        start = sum(lengths[: len(lengths) // 2])
        shown[:, start : start + lengths[len(lengths) // 2]] = False
    elif kind == "one row":
        shown[1] = False
    return None if kind == "none" else shown


def differentiate(given, cut, attend):
    """Output of a stretch, and the gradients of all that has one."""
    tensors = [x[:, :, cut].clone().requires_grad_() for x in given["tensors"]]
    log_decay = None if given["log_decay"] is None else given["log_decay"].clone().requires_grad_()
    parameters = [x.clone().requires_grad_() for x in given["parameters"]]
    key_mask = None if given["key_mask"] is None else given["key_mask"][:, cut]
    own = {name: None if given[name] is None else given[name][:, cut] for name in ("positions", "segments")}
    out = attend(*tensors, log_decay=log_decay, parameters=parameters, key_mask=key_mask, **own, **given["options"])
    out.backward(given["d_out"][:, :, cut])
    shared = [*([] if log_decay is None else [log_decay]), *parameters]
    out = out.detach() if key_mask is None else out.detach().masked_fill(~key_mask[:, None, :, None], 0)
    return out, [x.grad for x in tensors], [x.grad for x in shared]


def alone(given, **more):
    """On one process."""
    return differentiate(given, slice(None), lambda *tensors, **named: linear_attention(*tensors, **named, **more)[0])


def together(rank, kinds, lengths, mesh_shape=None, **same):
    """On this process: its stretches of several rows, and what was sent for each, forwards and in all."""
    group = SequenceGroup(None if mesh_shape is None else _of_mesh(mesh_shape))
    ends = list(itertools.accumulate(lengths, initial=0))
    cut = slice(ends[group.rank], ends[group.rank + 1])
    found = []
    for n, (kind, encoding, mask) in enumerate(kinds):
        seed = n if mesh_shape is None else 100 * (rank // mesh_shape[1]) + n
        before, sent = (group.bytes_sent, group.messages), []

        def attend(*tensors, sent=sent, **named):
            out = sequence_parallel_attention(*tensors, group, **named)
            sent += group.bytes_sent, group.messages
            return out

        result = differentiate(rows(kind, encoding, mask, lengths, seed=seed, **same), cut, attend)
        found.append((*result, [sent[0] - before[0], sent[1] - before[1], group.bytes_sent - sent[0], group.messages - sent[1]]))
    return found


_meshes = {}


def _of_mesh(shape):
    """The group of this process along the sequence, where other processes hold other rows."""
    from torch.distributed.device_mesh import init_device_mesh

    if shape not in _meshes:
        _meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=("data", "sequence"))
    return _meshes[shape]["sequence"].get_group()


def refuses_strangers(rank):
    """Whether a group that this process is not in is refused."""
    group = dist.new_group([0])
    try:
        SequenceGroup(group)
    except ValueError as error:
        return str(error)
    return ""
