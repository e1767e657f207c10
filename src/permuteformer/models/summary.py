"""What a configuration comes to, without its memory: parameters, work a token, the state it decodes with, how far it tells apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from permuteformer.models.causal_lm import PermuteFormerForCausalLM
from permuteformer.models.classifier import PermuteFormerForSequenceClassification
from permuteformer.models.config import PermuteFormerConfig
from permuteformer.positions import PositionEncoding


@dataclass(frozen=True)
class Summary:
    """Of one model, at one length."""

    parameters: int
    """Numbers that are trained."""
    flops_per_token: float
    """Of a forward pass at ``length``: multiplications and additions of its matrix products."""
    length: int
    state_bytes: int | None
    """Bytes that decoding keeps of one sequence of ``length`` tokens; ``None`` where the model does not decode."""
    reach: tuple[int, ...] | None
    """The longest distance it tells apart, on each axis; ``None`` where there is no limit."""


def summarize(config: PermuteFormerConfig, length: int) -> Summary:
    """Make the model on the meta device and run it there, at ``length`` tokens.

    >>> config = PermuteFormerConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    >>> summarize(config, 100).parameters
    18018
    """
    kind = PermuteFormerForCausalLM if config.causal else PermuteFormerForSequenceClassification
    with torch.device("meta"):
        model = kind(config).eval()
        ids = torch.zeros(1, length, dtype=torch.int64)
        positions = torch.zeros(1, length, config.axes, dtype=torch.int64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        out = model(ids, position_ids=positions)
    encodings = [module for module in model.modules() if isinstance(module, PositionEncoding)]
    cache = out.past_key_values if config.causal else None
    return Summary(
        parameters=sum(p.numel() for p in model.parameters()),
        flops_per_token=counter.get_total_flops() / length,
        length=length,
        state_bytes=None if cache is None else cache.nbytes,
        reach=max((e.reach for e in encodings if e.reach is not None), default=None),
    )
