"""Models of other libraries on long texts, with the sizes of a preset of ours."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import SequenceClassifierOutput

from permuteformer.bench.items import prepare
from permuteformer.bench.steps import subject_of
from permuteformer.bench.subjects import Subject
from permuteformer.models import PermuteFormerConfig
from permuteformer.registry import unknown

Classifier = Callable[[PermuteFormerConfig, int], nn.Module]


def make(device: str, peer: str, **fields: Any) -> Subject:
    """A peer on a task that classifies; other fields are those of a ``Measurement``, whose model gives the sizes."""
    if peer not in PEERS:
        raise ValueError(unknown("peer", peer, PEERS))
    prepared = prepare(fields, device)
    if prepared.kind != "classify":
        raise ValueError(f"peers are measured on tasks that classify; {prepared.measurement.task!r} is of kind {prepared.kind!r}")
    prepared.arguments.pop("position_ids", None)
    prepared.arguments["attention_mask"] = prepared.arguments["attention_mask"].long()
    return subject_of(PEERS[peer](prepared.config, prepared.measurement.length).to(device), prepared)


def _sizes(config: PermuteFormerConfig, length: int) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "hidden_dropout_prob": config.hidden_dropout,
        "num_labels": config.num_labels,
        "pad_token_id": 0,
        "max_position_embeddings": length + 2,
    }


def _of_transformers(name: str, **more: Any) -> Classifier:
    """A classifier of transformers, with its own defaults for what is its own."""

    def build(config: PermuteFormerConfig, length: int) -> nn.Module:
        import transformers

        settings = getattr(transformers, f"{name}Config")(**_sizes(config, length), **more)
        model: nn.Module = getattr(transformers, f"{name}ForSequenceClassification")(settings)
        return model

    return build


class _PerformerPyTorch(nn.Module):
    """The encoder of performer-pytorch, and a head on its first token."""

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
        """Logits, and the loss where labels are given."""
        mask = None if attention_mask is None else attention_mask.bool()
        logits = self.head(self.encoder(input_ids, mask=mask, return_encodings=True)[:, 0])
        return SequenceClassifierOutput(loss=None if labels is None else F.cross_entropy(logits, labels), logits=logits)


PEERS: dict[str, Classifier] = {
    "hf-nystromformer": _of_transformers("Nystromformer"),
    "hf-longformer": _of_transformers("Longformer"),
    "hf-bigbird": _of_transformers("BigBird"),
    "hf-modernbert": _of_transformers("ModernBert"),
    "performer-pytorch": _PerformerPyTorch,
}
