"""The halves of a block as modules, by torch and by the CPU kernel."""

import torch
from torch import nn
from torch.nn import functional as F

from permuteformer.ops.backend import Work
from permuteformer.ops.feature_map import FEATURE_MAPS
from permuteformer.ops.halves import attend_to_all
from permuteformer.ops.sublayers import NOTHING, Linear, Norm, attend, feed_forward
from permuteformer.positions.permute import Permute


class Half(nn.Module):
    """A norm and linear maps; ``forward`` is torch's way, ``by_kernel`` ours. ``noise`` is what dropout multiplies by."""

    def __init__(self, width, sizes, bias=True):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.maps = nn.ModuleList(nn.Linear(*size, bias=bias) for size in sizes)
        for p in self.norm.parameters():
            nn.init.normal_(p)

    def given(self):
        return Norm(self.norm.weight, self.norm.bias, self.norm.eps), *(Linear(each.weight, each.bias) for each in self.maps)


class FeedForward(Half):
    def __init__(self, width, hidden, activation, **more):
        super().__init__(width, [(width, hidden), (hidden, width)], **more)
        self.activation = activation

    def forward(self, x, queries, noise=1):
        expand, contract = self.maps
        return x + contract(getattr(F, self.activation)(expand(self.norm(x)))) * noise

    def by_kernel(self, x, queries, chance=NOTHING):
        return feed_forward(x, *self.given(), self.activation, chance)


class Attend(Half):
    def __init__(self, width, heads, features, work, transform=None, **more):
        super().__init__(width, [(width, heads * features), (width, heads * features), (width, width), (width, width)], **more)
        self.heads, self.work, self.transform = heads, work, transform

    def forward(self, x, queries, noise=1):
        asking = x if queries is None else queries
        inputs = (self.norm(asking), self.norm(x), self.norm(x))
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f, y in zip(self.maps, inputs, strict=False))
        out = attend_to_all(
            q,
            k,
            v,
            feature_map=FEATURE_MAPS[self.work.feature_map],
            transform=self.transform,
            positions=self.work.positions,
            query_positions=self.work.query_positions,
            key_mask=self.work.shown,
            normalize=self.work.normalize,
            backend="torch",
        )
        return asking + self.maps[3](out.transpose(1, 2).flatten(2)) * noise

    def by_kernel(self, x, queries, chance=NOTHING):
        return attend(x, queries, *self.given(), self.heads, self.work, chance)


def make_attend(width, heads, features, length, batch=2, axes=0, masked=False, queries=0, feature_map="relu_eps", normalize=True, **more):
    transform = Permute(heads, features, axes) if axes else None
    positions = torch.randint(-50, 10**9, (batch, length, axes)) if axes > 1 or queries else None
    work = Work(
        None if transform is None else transform.rotation(torch.device("cpu")),
        None,
        positions,
        torch.rand(batch, length) > 0.3 if masked else None,
        feature_map,
        normalize,
        causal=False,
        query_positions=torch.randint(0, 99, (batch, queries, max(axes, 1))) if queries else None,
    )
    return Attend(width, heads, features, work, transform, **more)
