"""Models whose rows are spread over processes, a stretch each: sequence parallelism."""

from __future__ import annotations

from permuteformer.attention import Attention
from permuteformer.models.backbone import PermuteFormerModel, PermuteFormerPreTrainedModel
from permuteformer.models.classifier import Pooler
from permuteformer.ops.sequence_parallel import SequenceGroup


def spread(model: PermuteFormerPreTrainedModel, sequence: SequenceGroup | None) -> None:
    """From now on the model's input is a stretch of rows that all processes of ``sequence`` hold together; ``None`` takes it back.

    All processes call the model together, each with its own tokens of the same rows, in the order of their ranks, and with the same
    weights. Stretches may be of different lengths; ``attention_mask`` may hide tokens anywhere. Positions, where a model needs them given,
    are those in the whole row.

    What comes out: of tokens (hidden states, logits of language models) those of this stretch; of rows (logits of classifiers and
    matchers) the same on all processes. A loss is the mean over the labels that this process was given. The gradient that
    ``backward`` leaves is that of the *sum* of all processes' losses, as far as it goes through this process: so

    - for a language model, multiply each loss by the labels in the stretch over those in all, and sum gradients over the processes;
    - for a classifier, let the loss of one process count, multiply the others by 0, and sum gradients over the processes.

    All of them must call ``backward``, since it communicates. Caches and ``generate`` are refused.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            module.spread(sequence)
        elif isinstance(module, (PermuteFormerModel, Pooler)):
            module.sequence = sequence
