"""Sequence parallelism for models: rows sharded across processes."""

from __future__ import annotations

from permuteformer.attention import Attention
from permuteformer.models.backbone import PermuteFormerModel, PermuteFormerPreTrainedModel
from permuteformer.models.heads import Pooler
from permuteformer.ops.sequence_parallel import SequenceGroup


def set_sequence_group(model: PermuteFormerPreTrainedModel, sequence: SequenceGroup | None) -> None:
    """Take the model's input for a shard of rows that all processes of ``sequence`` hold together; ``None`` undoes it.

    All processes call the model together, each with its own tokens of the same rows, in the order of their ranks, and with the same
    weights. Shards may have different lengths; ``attention_mask`` may mask tokens anywhere. Positions, where a model needs them, are those
    in the whole row.

    Outputs per token (hidden states, logits of language models) are those of the shard; outputs per row (logits of classifiers and
    matchers) are the same on all processes. A loss is the mean over the labels of this process. ``backward`` gives the gradient of the
    *sum* of all processes' losses with respect to this process. So

    - for a language model, multiply each loss by the number of labels in the shard over that in all, and sum gradients over the processes;
    - for a classifier, multiply the loss of all processes but one by 0, and sum gradients over the processes.

    All processes must call ``backward``, since it communicates. Caches and ``generate`` are not supported.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            module.set_sequence_group(sequence)
        elif isinstance(module, (PermuteFormerModel, Pooler)):
            module.sequence = sequence
