"""Images as sequences: a token a pixel, and a grid of positions."""

from __future__ import annotations

import torch
from torch import Tensor


def image_tokens(images: Tensor, first_token: int = 3, cls_token: int | None = 1, sep_token: int | None = 2) -> tuple[Tensor, Tensor]:
    """Tokens ``b l`` and positions ``b l 2`` (column, row) of gray images ``b height width`` of 0 … 255.

    Pixels come row by row, as tokens from ``first_token`` on. CLS stands at (0, 0) and SEP at the last pixel, as in the paper's
    models; ``None`` leaves them out.

    >>> tokens, positions = image_tokens(torch.tensor([[[0, 255], [7, 8]]], dtype=torch.uint8))
    >>> tokens.tolist(), positions[0].tolist()
    ([[1, 3, 258, 10, 11, 2]], [[0, 0], [0, 0], [1, 0], [0, 1], [1, 1], [1, 1]])
    """
    if images.dim() != 3 or images.is_floating_point() or images.is_complex():
        raise ValueError(
            f"images must be whole numbers 0 … 255 of shape (batch, height, width); they are {images.dtype} of shape "
            f"{tuple(images.shape)}: turn colours to gray, and scale to 0 … 255, first"
        )
    tokens = images.flatten(1).long()
    if tokens.numel() and (tokens.amin() < 0 or tokens.amax() > 255):
        raise ValueError(f"images must be from 0 to 255; they are from {int(tokens.amin())} to {int(tokens.amax())}")
    batch, height, width = images.shape
    tokens = tokens + first_token
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    positions = torch.stack([columns.flatten(), rows.flatten()], dim=-1)  # l 2
    if cls_token is not None:
        tokens = torch.cat([tokens.new_full((batch, 1), cls_token), tokens], dim=1)
        positions = torch.cat([torch.zeros(1, 2, dtype=torch.int64), positions])
    if sep_token is not None:
        tokens = torch.cat([tokens, tokens.new_full((batch, 1), sep_token)], dim=1)
        positions = torch.cat([positions, torch.tensor([[width - 1, height - 1]])])
    return tokens, positions.to(tokens.device).expand(batch, -1, -1)
