"""Hugging Face models: one backbone, several heads. Importing this registers them with the Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from permuteformer.models.backbone import PermuteFormerModel
from permuteformer.models.cache import PermuteFormerCache
from permuteformer.models.config import PermuteFormerConfig
from permuteformer.models.heads import (
    PermuteFormerForCausalLM,
    PermuteFormerForMaskedLM,
    PermuteFormerForMatching,
    PermuteFormerForSequenceClassification,
    PermuteFormerForTokenClassification,
)
from permuteformer.models.tokenizer import ByteTokenizer, encode_lines, word_tokenizer
from permuteformer.presets import PRESETS

AutoConfig.register(PermuteFormerConfig.model_type, PermuteFormerConfig, exist_ok=True)
for auto, model in (
    (AutoModel, PermuteFormerModel),
    (AutoModelForCausalLM, PermuteFormerForCausalLM),
    (AutoModelForMaskedLM, PermuteFormerForMaskedLM),
    (AutoModelForSequenceClassification, PermuteFormerForSequenceClassification),
    (AutoModelForTokenClassification, PermuteFormerForTokenClassification),
):
    auto.register(PermuteFormerConfig, model, exist_ok=True)

__all__ = [
    "PRESETS",
    "ByteTokenizer",
    "PermuteFormerCache",
    "PermuteFormerConfig",
    "PermuteFormerForCausalLM",
    "PermuteFormerForMaskedLM",
    "PermuteFormerForMatching",
    "PermuteFormerForSequenceClassification",
    "PermuteFormerForTokenClassification",
    "PermuteFormerModel",
    "encode_lines",
    "word_tokenizer",
]
