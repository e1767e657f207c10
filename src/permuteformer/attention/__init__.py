"""Attentions, one a file. The registry key is the file's name."""

from permuteformer.attention.base import ATTENTIONS, Attention, KVState
from permuteformer.attention.layer import MultiHeadAttention, PermuteFormerAttention, build

__all__ = ["ATTENTIONS", "Attention", "KVState", "MultiHeadAttention", "PermuteFormerAttention", "build"]
