"""The halves of a transformer block as modules of PyTorch, and by the CPU kernel."""

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from permuteformer.ops.call import LinearCall, Tokens
from permuteformer.ops.feature_map import FEATURE_MAPS
from permuteformer.ops.fused_block import NO_DROPOUT, Attention, Linear, Norm, attend, feed_forward
from permuteformer.ops.linear import run
from permuteformer.ops.native_backend import MAPS
from permuteformer.positions.permute import Permute


class Half(nn.Module):
    """A norm and linear maps; ``forward`` is PyTorch's way, ``fused`` the kernel's. ``noise`` is what dropout multiplies by."""

    def __init__(self, width, sizes, bias=True):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.maps = nn.ModuleList(nn.Linear(*size, bias=bias) for size in sizes)
        for p in self.norm.parameters():
            nn.init.normal_(p)

    def weights(self):
        return Norm(self.norm.weight, self.norm.bias, self.norm.eps), tuple(Linear(each.weight, each.bias) for each in self.maps)


class FeedForward(Half):
    def __init__(self, width, hidden, activation, **more):
        super().__init__(width, [(width, hidden), (hidden, width)], **more)
        self.activation = activation

    def forward(self, x, queries=None, noise=1):
        expand, contract = self.maps
        return x + contract(getattr(F, self.activation)(expand(self.norm(x)))) * noise

    def fused(self, x, queries=None, chance=NO_DROPOUT):
        norm, maps = self.weights()
        return feed_forward(x, norm, *maps, self.activation, chance)


class AttentionHalf(Half):
    def __init__(self, width, heads, features, mixing, encoding=None, feature_map="relu_eps", **more):
        super().__init__(width, [(width, heads * features), (width, heads * features), (width, width), (width, width)], **more)
        self.heads, self.mixing, self.encoding, self.feature_map = heads, mixing, encoding, FEATURE_MAPS[feature_map]

    def forward(self, x, queries=None, noise=1):
        asking = x if queries is None else queries
        inputs = (self.norm(asking), self.norm(x), self.norm(x))
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f, y in zip(self.maps, inputs, strict=False))
        tokens = Tokens(self.mixing.positions, self.mixing.mask)
        call = LinearCall(
            q, k, v, self.feature_map, k.shape[-1], encoding=self.encoding, tokens=tokens, query_positions=self.mixing.query_positions
        )
        out, _ = run(replace(call, normalizer="transformed" if self.mixing.normalize else "none"), "torch")
        return asking + self.maps[3](out.transpose(1, 2).flatten(2)) * noise

    def fused(self, x, queries=None, chance=NO_DROPOUT):
        return attend(x, queries, *self.weights(), self.mixing, chance)


def attention_half(
    width, heads, features, length, batch=2, axes=0, masked=False, queries=0, feature_map="relu_eps", normalize=True, **more
):
    encoding = Permute(heads, features, axes) if axes else None
    mixing = Attention(
        heads,
        MAPS[feature_map],
        normalize,
        *((None, None) if encoding is None else encoding.rotation()),
        positions=torch.randint(-50, 10**9, (batch, length, axes)) if axes > 1 or queries else None,
        query_positions=torch.randint(0, 99, (batch, queries, max(axes, 1))) if queries else None,
        mask=torch.rand(batch, length) > 0.3 if masked else None,
    )
    return AttentionHalf(width, heads, features, mixing, encoding, feature_map, **more)
