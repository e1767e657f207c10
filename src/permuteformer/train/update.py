"""One update of the weights: loss, gradients, Adam; on all processes together, and with nothing that the experiment does not name."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from permuteformer.experiments.base import Experiment
from permuteformer.models import PermuteFormerConfig
from permuteformer.models.backbone import PermuteFormerPreTrainedModel
from permuteformer.tasks import Batch
from permuteformer.train.build import inputs, targets
from permuteformer.train.feed import Piece
from permuteformer.train.finite import NotFinite, bad_gradients, bad_weights, first_bad_layer, item_numbers
from permuteformer.train.schedule import learning_rate
from permuteformer.train.state import set_torch_random_state, torch_random_state
from permuteformer.train.together import total


@dataclass(frozen=True)
class Updated:
    """What an update came to, over all processes."""

    loss: float
    """Summed over what counted."""
    counted: float
    tokens: int
    gradient_norm: float
    learning_rate: float
    told: list[float]
    """Sums of what each process told the others."""


class Updater:
    """A model with its optimiser, spread over the processes.

    Args:
        model: with new weights; the same on all processes.
        kind: of the task.
        experiment: batch size, learning rate and so on.
        accelerator: the processes.
        shard: share out weights and optimiser over the processes; else each has all of them.
    """

    def __init__(
        self, model: PermuteFormerPreTrainedModel, kind: str, experiment: Experiment, accelerator: Accelerator, shard: bool = False
    ) -> None:
        self.config: PermuteFormerConfig = model.config
        self.kind, self.experiment, self.accelerator, self.shard = kind, experiment, accelerator, shard
        self.bare = _shard(model.to(accelerator.device)) if shard else model.to(accelerator.device)
        self.optimizer = AdamW(
            self.bare.parameters(),
            lr=experiment.learning_rate,
            betas=(experiment.adam_beta1, experiment.adam_beta2),
            eps=experiment.adam_epsilon,
            weight_decay=experiment.weight_decay,
            fused=not shard,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)  # its successor is not Accelerate's yet
            self.model: nn.Module = self.bare if shard else accelerator.prepare_model(self.bare)
        self._stepper: Any = accelerator.prepare_optimizer(self.optimizer)

    def __call__(self, share: Sequence[Piece], step: int, told: Callable[[], Sequence[float]] = tuple) -> Updated:
        """Update number ``step``, counted from 1, by this process's share of a batch. What ``told`` says near its end is summed."""
        accelerator = self.accelerator
        counts = [piece.scored for piece in share]
        counted, tokens = total(accelerator, sum(counts), sum(piece.tokens for piece in share))
        share = [piece.to(accelerator.device) for piece in share]
        before = torch_random_state(accelerator.device)
        losses = self._backward(share, [count * accelerator.num_processes / max(counted, 1) for count in counts])
        norm = self._gradient_norm()
        finite = all(map(math.isfinite, losses))
        own = math.fsum(loss * count for loss, count in zip(losses, counts, strict=True)) if finite else 0.0
        bad_norm = not math.isfinite(norm) and accelerator.scaler is None  # a scaler skips what is too large, and scales less
        # A weight of minus infinity before a relu shows in nothing else; the norm is quick, and too large for some that are finite.
        bad_weight = not math.isfinite(self._norm(list(self.bare.parameters()))) and bool(bad_weights(self.bare))
        loss, losses_bad, norms_bad, weights_bad, *told_by_all = total(accelerator, own, not finite, bad_norm, bad_weight, *told())
        if losses_bad or norms_bad or weights_bad:
            self._stop(share, losses, before, "loss" if losses_bad else "weight" if weights_bad else "gradient", step)
        rate = self._step(step, norm)
        return Updated(loss, counted, int(tokens), norm, rate, told_by_all)

    def part(self) -> None:
        """From the other processes: no more updates.

        A model that outlives its process group, as in a traceback, would wait for gloo's threads, which wait for the interpreter it holds.
        """
        if isinstance(self.model, DistributedDataParallel):
            del self.model.logger, self.model.reducer

    def loss(self, batch: Batch, model: nn.Module | None = None) -> Tensor:
        """The mean loss of a batch."""
        with self.accelerator.autocast():
            loss: Tensor = (model or self.model)(**inputs(batch, self.config, self.kind), **targets(batch, self.kind)).loss
        return loss

    def _backward(self, share: Sequence[Piece], weights: Sequence[float]) -> list[float]:
        """Gradients of the losses so weighted: processes take the mean of theirs, which comes to the mean over all that counts."""
        losses: list[float] = []
        for piece, weight in zip(share, weights, strict=True):
            last = len(losses) == len(share) - 1
            with nullcontext() if last or self.shard else self.accelerator.no_sync(self.model):
                loss = self.loss(piece.batch)
                self.accelerator.backward(loss * weight)
                losses.append(float(loss.detach()))
        return losses

    def _gradient_norm(self) -> float:
        if self.accelerator.scaler is not None:
            self.accelerator.unscale_gradients(self._stepper)
        return self._norm([p.grad for p in self.bare.parameters() if p.grad is not None])

    @torch.no_grad()
    def _norm(self, tensors: Sequence[Tensor]) -> float:
        norm = nn.utils.get_total_norm(tensors)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _step(self, step: int, norm: float) -> float:
        experiment = self.experiment
        if experiment.gradient_clip is not None:
            nn.utils.clip_grads_with_norm_(self.bare.parameters(), experiment.gradient_clip, torch.tensor(norm))
        rate = learning_rate(step, peak=experiment.learning_rate, warmup_steps=experiment.warmup_steps, warmup_from=experiment.warmup_from)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._stepper.step()
        self._stepper.zero_grad(set_to_none=True)
        return rate

    def _stop(self, share: Sequence[Piece], losses: Sequence[float], before: Any, what: str, step: int) -> None:
        """Say where it began. All processes come here together, and all compute once more: a sharded model needs all of them."""
        is_loss = what == "loss"
        if is_loss:
            set_torch_random_state(before, self.accelerator.device)
            place = first_bad_layer(self.bare, lambda: [self.loss(piece.batch, self.bare) for piece in share])
        else:
            place = bad_gradients(self.bare) if what == "gradient" else bad_weights(self.bare)
        bad = [(piece, loss) for piece, loss in zip(share, losses, strict=True) if not (is_loss and math.isfinite(loss))]
        own = [(loss, place, piece.batch.ids.tolist()) for piece, loss in bad]
        found = gather_object(own) if self.accelerator.num_processes > 1 else own
        loss, place = next(((loss, place) for loss, place, _ in found if place), (math.nan, "a layer that is not known"))
        told = f"the loss is {loss}; it began in {place}" if is_loss else f"a {what} is not finite, of {place}"
        raise NotFinite(f"step {step:,}: {told}; {item_numbers([n for *_, ids in found for n in ids])} of the train split")


def _shard(model: PermuteFormerPreTrainedModel) -> PermuteFormerPreTrainedModel:
    """Share out the weights of each block, and then what is left. Accelerate does so for GPUs only; this is any device."""
    from torch.distributed.fsdp import fully_shard

    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    return model
