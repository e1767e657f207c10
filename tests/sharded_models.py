"""Models whose rows are sharded across processes, and the same models on one: compared by ``tests/models/test_parallel.py``."""

import itertools

import torch
from group_processes import errors_of

from permuteformer.models import (
    PermuteFormerConfig,
    PermuteFormerForCausalLM,
    PermuteFormerForMaskedLM,
    PermuteFormerForMatching,
    PermuteFormerForSequenceClassification,
    PermuteFormerForTokenClassification,
)
from permuteformer.models.parallel import set_sequence_group
from permuteformer.ops.sequence_parallel import SequenceGroup

SIZE = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
SMALL = {**SIZE, "hidden_dropout": 0.0, "num_labels": 3, "pad_token_id": None}
DECAY = [{"name": "permute"}, {"name": "decay", "learnable": True}]
TWO_SIDED = [{"name": "permute"}, {"name": "decay", "two_sided": True}]
CASES = {
    "lm": (PermuteFormerForCausalLM, {"causal": True, "position": DECAY}),
    "lm-learned": (PermuteFormerForCausalLM, {"causal": True, "position": [{"name": "learned", "max_length": 64}, {"name": "rope"}]}),
    "lm-sinusoidal": (PermuteFormerForCausalLM, {"causal": True, "position": [{"name": "sinusoidal"}]}),
    "packed-lm": (PermuteFormerForCausalLM, {"causal": True, "position": [{"name": "learned", "max_length": 64}, *DECAY]}),
    "packed-masked-lm": (PermuteFormerForMaskedLM, {"position": [{"name": "learned", "max_length": 64}, *TWO_SIDED]}),
    "masked-lm": (PermuteFormerForMaskedLM, {"position": TWO_SIDED}),
    "cls": (PermuteFormerForSequenceClassification, {}),
    "cls-decay": (PermuteFormerForSequenceClassification, {"position": TWO_SIDED}),
    "mean": (PermuteFormerForSequenceClassification, {"pooling": "mean", "position": [{"name": "orthogonal"}]}),
    "last": (PermuteFormerForSequenceClassification, {"pooling": "last", "causal": True, "position": DECAY}),
    "grid": (PermuteFormerForSequenceClassification, {"axes": 2}),
    "tokens": (PermuteFormerForTokenClassification, {}),
    "match": (PermuteFormerForMatching, {}),
    "match-decay": (PermuteFormerForMatching, {"position": TWO_SIDED}),
}
OF_ROWS = (PermuteFormerForSequenceClassification, PermuteFormerForMatching)
B = 3


def build(name, dtype=torch.float64, **more):
    kind, fields = CASES[name]
    torch.manual_seed(0)
    model = kind(PermuteFormerConfig(**SMALL, **{**fields, **more})).to(dtype)
    with torch.no_grad():
        for weight in model.parameters():  # far from each other
            weight.add_(0.3 * torch.randn_like(weight))
    return model


def batch(name, lengths):
    """Whole rows: one without padding, one with it in front and within, one with it at the end and in a whole shard."""
    torch.manual_seed(1)
    length = sum(lengths)
    mask = torch.ones(B, length, dtype=torch.long)
    mask[1, : lengths[0] + 1] = 0
    mask[1, -3] = 0
    mask[2, -lengths[-1] - 1 :] = 0
    given = {"input_ids": torch.randint(0, 20, (B, length)), "attention_mask": mask}
    kind = CASES[name][0]
    if kind is PermuteFormerForMatching:
        given |= {"second_input_ids": torch.randint(0, 20, (B, length)), "second_attention_mask": mask.flip(0)}
    if name == "grid":
        given["position_ids"] = torch.randint(0, 6, (B, length, 2))
    if name.startswith("packed"):
        places = torch.arange(length)
        given["segment_ids"] = torch.stack([places // 4, (places >= 2).long(), (places >= lengths[0]).long()])
    if kind in OF_ROWS:
        return given, torch.randint(0, 3, (B,))
    labels = torch.randint(0, 20 if "lm" in name else 3, (B, length))
    return given, labels.masked_fill(mask == 0, -100)


def run(model, given, labels, weight=1.0):
    """Logits, loss, and gradients of the weighted loss."""
    more = {"shift_labels": labels} if isinstance(model, PermuteFormerForCausalLM) else {}
    out = model(**given, labels=labels, **more)
    (out.loss * weight).backward()
    return out.logits.detach(), out.loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def alone(name, lengths, **more):
    return run(build(name, **more), *batch(name, lengths))


def together(rank, name, lengths, checkpointed=False, **more):
    group = SequenceGroup()
    model = build(name, **more)
    set_sequence_group(model, group)
    if checkpointed:
        model.gradient_checkpointing_enable()
    ends = list(itertools.accumulate(lengths, initial=0))
    cut = slice(ends[rank], ends[rank + 1])
    given, labels = batch(name, lengths)
    own = {key: value[:, cut] for key, value in given.items()}
    if isinstance(model, OF_ROWS):
        return run(model, own, labels, float(rank == 0))
    share = (labels[:, cut] != -100).sum() / (labels != -100).sum()
    return run(model, own, labels[:, cut].contiguous(), share)


def refusals(rank):
    """Messages for what sequence parallelism does not support."""
    group, ids = SequenceGroup(), torch.randint(0, 20, (1, 4))
    model = build("lm", torch.float32)
    set_sequence_group(model, group)
    tries = {
        "labels": lambda: model(ids, labels=ids),
        "cache": lambda: model(ids, use_cache=True),
        "generate": lambda: model.generate(ids, max_new_tokens=2),
        "softmax": lambda: set_sequence_group(build("cls", attention={"name": "softmax"}), group),
        "axes": lambda: set_sequence_group(build("cls-decay", axes=2), group),
        "bias": lambda: set_sequence_group(build("cls", position=[{"name": "t5_bias"}]), group),
    }
    messages = errors_of(tries)
    set_sequence_group(model, None)
    messages["undone"] = str(tuple(model.generate(ids, max_new_tokens=2, eos_token_id=None).shape))
    return messages
