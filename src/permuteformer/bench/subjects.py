"""Functions that make the calls to time: attention, models, decoding, and their counterparts in other libraries."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import SequenceClassifierOutput

from permuteformer.bench.eager import EagerModel, eager_attention
from permuteformer.bench.inputs import Prepared, inference_step, prepare, training_step
from permuteformer.bench.sweeps import TRANSFORMERS_PEERS
from permuteformer.models import PRESETS, PermuteFormerConfig, PermuteFormerForCausalLM
from permuteformer.models.inspection import summarize
from permuteformer.ops.feature_map import relu_eps
from permuteformer.ops.linear import linear_attention
from permuteformer.positions.decay import Decay
from permuteformer.positions.permute import Permute
from permuteformer.registry import unknown
from permuteformer.train.build import build_model

METHODS = ("permuteformer", "performer", "permuteformer-torch", "formula", "formula-performer", "sdpa", "matmul")
MATRIX_SIZE = 2048
PREFILL = 4096
"""Tokens that a language model reads at a time."""
TRAINING_WORK = 3
"""Work of forward and backward in forward passes: a product has two gradients."""


@dataclass(frozen=True)
class Subject:
    """A call to time."""

    step: Callable[[], object]
    parameters: int = 0
    flops: float | None = None
    """Multiplications and additions that a call needs at least, if known."""
    calls_per_epoch: int | None = None
    """Calls in an epoch, if its time is wanted."""


def make(subject: str, options: Mapping[str, Any], device: str) -> Subject:
    """Return the subject of this name."""
    return SUBJECTS[subject](device, **options)


def make_op(
    device: str,
    method: str,
    length: int = MATRIX_SIZE,
    batch: int = 1,
    heads: int = 8,
    features: int = 64,
    values: int = 64,
    causal: bool = False,
    two_sided: bool = False,
    gradients: bool = False,
    dtype: str = "float32",
) -> Subject:
    """Return one call of attention on random q, k, v, or a matrix product.

    ``"permuteformer-torch"`` is ours without the CPU kernel; ``"formula"`` and ``"formula-performer"`` are equations 11 and 2 in eager
    PyTorch; ``"sdpa"`` is softmax attention, with heads of the size of values. Linear attention has a decay if it is ``causal`` or
    ``two_sided``. On a GPU, products of float32 may use TF32.
    """
    if method not in METHODS:
        raise ValueError(unknown("method", method, METHODS))
    precision = getattr(torch, dtype)
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    if method == "matmul":
        left, right = torch.randn(2, MATRIX_SIZE, MATRIX_SIZE, device=device, dtype=precision)
        return Subject(partial(torch.mm, left, right), flops=2 * MATRIX_SIZE**3)
    sizes = (values, values, values) if method == "sdpa" else (features, features, values)
    # The layout of projections: b l h d, seen as b h l d.
    q, k, v = (
        torch.randn(batch, length, heads, size, device=device, dtype=precision).transpose(1, 2).requires_grad_(gradients) for size in sizes
    )
    call = _attention_call(method, causal, two_sided, q, k, v)

    def call_with_gradients() -> tuple[Tensor, ...]:
        out = call()
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    pairs = length * (length + 1) / 2 if causal else length**2
    flops = 4 * batch * heads * values * (pairs if method == "sdpa" else length * features * (2 if two_sided else 1))
    return Subject(call_with_gradients, flops=TRAINING_WORK * flops) if gradients else Subject(torch.inference_mode()(call), flops=flops)


def _attention_call(method: str, causal: bool, two_sided: bool, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    heads, length, features = q.shape[1:]
    if method == "sdpa":
        return partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
    if method.startswith("formula"):
        if causal:
            raise ValueError(f"method {method!r} has no causal form, as r^-j overflows: compare with 'sdpa' or 'permuteformer-torch'")
        index = Permute(heads, features).tables(torch.arange(length).view(1, -1, 1)).to(q.device) if method == "formula" else None
        return partial(eager_attention, q, k, v, index)
    transform = None if method == "performer" else Permute(heads, features).to(q.device)
    log_decay = Decay(heads, two_sided=two_sided).to(q.device).log_decay() if causal or two_sided else None
    options: dict[str, Any] = {"causal": causal, "two_sided": two_sided, "log_decay": log_decay}
    backend = "torch" if method.endswith("torch") else None

    def call() -> Tensor:
        return linear_attention(q, k, v, feature_map=relu_eps, transform=transform, backend=backend, **options)[0]

    return call


def make_model(device: str, **fields: Any) -> Subject:
    """Return the call of a model of ours; ``fields`` are those of a ``Measurement``."""
    prepared = prepare(fields, device)
    measurement = prepared.measurement
    model = build_model(prepared.config, prepared.kind).to(device)
    if measurement.kind == "inference" and prepared.kind == "lm":
        model.config.use_cache = False
    tokens = measurement.length * measurement.batch_size * (2 if prepared.kind == "match" else 1)
    flops = summarize(prepared.config, measurement.length).flops_per_token * tokens
    return _model_call(model, prepared, flops)


def make_formula(device: str, **fields: Any) -> Subject:
    """Return the call of the paper's formulas in eager PyTorch, with the sizes of a preset, permuteformer or performer."""
    prepared = prepare(fields, device)
    positions = prepared.arguments.pop("position_ids", None)
    positions = torch.arange(prepared.measurement.length).view(1, -1, 1) if positions is None else positions[:1].cpu()
    return _model_call(EagerModel(prepared.config, prepared.kind, positions).to(device), prepared)


def make_peer(device: str, peer: str, **fields: Any) -> Subject:
    """Return the call of another library's model with the sizes of a preset, on a task that classifies."""
    prepared = prepare(fields, device)
    if prepared.kind != "classify":
        raise ValueError(f"peers only classify: task {prepared.measurement.task!r} is of kind {prepared.kind!r}")
    prepared.arguments.pop("position_ids", None)
    prepared.arguments["attention_mask"] = prepared.arguments["attention_mask"].long()
    build = partial(_transformers_peer, TRANSFORMERS_PEERS[peer]) if peer in TRANSFORMERS_PEERS else PerformerPyTorch
    return _model_call(build(prepared.config, prepared.measurement.length).to(device), prepared)


def _model_call(model: nn.Module, prepared: Prepared, forward_flops: float | None = None) -> Subject:
    measurement = prepared.measurement
    training = measurement.kind == "training"
    return Subject(
        training_step(model, prepared.arguments) if training else inference_step(model, prepared.arguments),
        parameters=sum(p.numel() for p in model.parameters()),
        flops=None if forward_flops is None else forward_flops * (TRAINING_WORK if training else 1),
        calls_per_epoch=None if measurement.items is None else math.ceil(measurement.items / measurement.batch_size),
    )


def _transformers_peer(name: str, config: PermuteFormerConfig, length: int) -> nn.Module:
    import transformers

    settings = getattr(transformers, f"{name}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        hidden_dropout_prob=config.hidden_dropout,
        num_labels=config.num_labels,
        pad_token_id=0,
        max_position_embeddings=length + 2,
    )
    model: nn.Module = getattr(transformers, f"{name}ForSequenceClassification")(settings)
    return model


class PerformerPyTorch(nn.Module):
    """The encoder of performer-pytorch with a head on its first token."""

    def __init__(self, config: PermuteFormerConfig, length: int) -> None:
        super().__init__()
        if find_spec("performer_pytorch") is None:
            raise ModuleNotFoundError("performer-pytorch is not installed: pip install performer-pytorch")
        from performer_pytorch import PerformerLM  # type: ignore[import-not-found]

        width = config.hidden_size
        self.encoder = PerformerLM(
            num_tokens=config.vocab_size,
            max_seq_len=length,
            dim=width,
            depth=config.num_hidden_layers,
            heads=config.num_attention_heads,
            dim_head=width // config.num_attention_heads,
            ff_mult=config.intermediate_size // width,
            ff_dropout=config.hidden_dropout,
        )
        self.head = nn.Linear(width, config.num_labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> SequenceClassifierOutput:
        """Return logits, and the loss if labels are given."""
        mask = None if attention_mask is None else attention_mask.bool()
        logits = self.head(self.encoder(input_ids, mask=mask, return_encodings=True)[:, 0])
        return SequenceClassifierOutput(loss=None if labels is None else F.cross_entropy(logits, labels), logits=logits)


def make_decode(
    device: str, model: str, position: int, batch: int = 1, model_fields: Mapping[str, Any] | None = None, peer: str | None = None
) -> Subject:
    """Return one more token of a language model that has read ``position`` random tokens; ``peer="hf-gpt2"`` is GPT-2 of the same sizes."""
    config = PermuteFormerConfig(**{**PRESETS[model], **(model_fields or {})})
    decoder: Any = PermuteFormerForCausalLM(config) if peer is None else _gpt2(config, position)
    decoder = decoder.to(device).eval()
    token = torch.randint(0, config.vocab_size, (batch, 1), device=device)
    cache = None
    with torch.inference_mode():
        for start in range(0, position, PREFILL):
            piece = torch.randint(0, config.vocab_size, (batch, min(PREFILL, position - start)), device=device)
            cache = decoder(piece, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values

    @torch.inference_mode()
    def step() -> None:
        nonlocal cache
        cache = decoder(token, past_key_values=cache, use_cache=True).past_key_values
        if peer is not None:
            cache.crop(-1)  # back to position; ours has a constant size

    return Subject(step, parameters=sum(p.numel() for p in decoder.parameters()))


def _gpt2(config: PermuteFormerConfig, position: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": config.hidden_size, "n_layer": config.num_hidden_layers, "n_head": config.num_attention_heads}
    sizes |= {"vocab_size": config.vocab_size, "n_inner": config.intermediate_size, "n_positions": position + 1}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))  # type: ignore[no-any-return]


SUBJECTS: Mapping[str, Callable[..., Subject]] = {
    "op": make_op,
    "model": make_model,
    "formula": make_formula,
    "peer": make_peer,
    "decode": make_decode,
}
