"""Models for Hugging Face: one backbone, and a head a file. Importing this registers them with the Auto classes."""

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
from permuteformer.models.causal_lm import PermuteFormerForCausalLM
from permuteformer.models.classifier import PermuteFormerForSequenceClassification, PermuteFormerForTokenClassification
from permuteformer.models.config import PermuteFormerConfig
from permuteformer.models.masked_lm import PermuteFormerForMaskedLM
from permuteformer.models.matcher import PermuteFormerForMatching
from permuteformer.models.presets import PRESETS
from permuteformer.models.tokenizer import ByteTokenizer, encode_lines, word_tokenizer

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
