"""One more token of a language model, at a position: what it costs to go on from a text of that length."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from permuteformer.bench.subjects import Subject
from permuteformer.models import PRESETS, PermuteFormerConfig, PermuteFormerForCausalLM
from permuteformer.registry import unknown

PIECE = 4096
"""Tokens that are read at a time, up to the position."""


def make(
    device: str, model: str, position: int, batch: int = 1, model_fields: dict[str, Any] | None = None, peer: str | None = None
) -> Subject:
    """A language model, a preset, that has read random tokens up to ``position``; with ``peer="hf-gpt2"``, a GPT-2 of the same sizes."""
    if model not in PRESETS:
        raise ValueError(unknown("preset", model, PRESETS))
    config = PermuteFormerConfig(**{**PRESETS[model], **(model_fields or {})})
    if not config.causal:
        raise ValueError(f"model {model!r} is not causal, so it does not decode; choose one whose name has -lm")
    if peer not in (None, "hf-gpt2"):
        raise ValueError(unknown("peer", peer, ["hf-gpt2"]))
    decoder: Any = PermuteFormerForCausalLM(config) if peer is None else _gpt2(config, position)
    decoder = decoder.to(device).eval()
    token = torch.randint(0, config.vocab_size, (batch, 1), device=device)
    cache = None
    with torch.inference_mode():
        for start in range(0, position, PIECE):
            piece = torch.randint(0, config.vocab_size, (batch, min(PIECE, position - start)), device=device)
            cache = decoder(piece, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values

    @torch.inference_mode()
    def step() -> None:
        nonlocal cache
        cache = decoder(token, past_key_values=cache, use_cache=True).past_key_values
        if peer is not None:
            cache.crop(-1)  # back to position; ours keeps its size

    return Subject(step, parameters=sum(p.numel() for p in decoder.parameters()))


def _gpt2(config: PermuteFormerConfig, position: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": config.hidden_size, "n_layer": config.num_hidden_layers, "n_head": config.num_attention_heads}
    sizes |= {"vocab_size": config.vocab_size, "n_inner": config.intermediate_size, "n_positions": position + 1}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))  # type: ignore[no-any-return]
