"""One training step on all processes, and evaluation of a split."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from permuteformer.experiments.experiment import Experiment
from permuteformer.models.backbone import PermuteFormerPreTrainedModel
from permuteformer.models.parallel import set_sequence_group
from permuteformer.tasks import Task
from permuteformer.train.build import model_inputs, model_targets
from permuteformer.train.data import MicroBatch, evaluation_batches
from permuteformer.train.distributed import Distributed, fully_shard_model
from permuteformer.train.failures import Interrupted, NotFinite, bad_gradients, bad_weights, first_bad_module, some


@dataclass(frozen=True)
class Updated:
    """Outcome of an update, over all processes."""

    loss: float
    """Sum over all labels."""
    labels: float
    tokens: int
    gradient_norm: float
    learning_rate: float


def learning_rate(step: int, *, peak: float, warmup_steps: int, warmup_from: float = 0.0) -> float:
    """Return the rate of update ``step``, counted from 1: linear warm-up to ``peak``, then decay by the inverse square root.

    >>> [round(learning_rate(step, peak=1.0, warmup_steps=4), 3) for step in (1, 2, 4, 5, 16, 400)]
    [0.25, 0.5, 1.0, 0.894, 0.5, 0.1]
    """
    if step < warmup_steps:
        return warmup_from + (peak - warmup_from) * step / warmup_steps
    return peak * math.sqrt(max(warmup_steps, 1) / step)


class Updater:
    """A model with its optimizer, on all processes.

    Args:
        model: with new weights, the same on all processes.
        experiment: batch size, learning rate and so on.
        distributed: the processes.
        shard: shard weights and optimizer over the processes; else each has a copy.
    """

    def __init__(self, model: PermuteFormerPreTrainedModel, experiment: Experiment, distributed: Distributed, shard: bool = False) -> None:
        self.experiment, self.distributed, self.accelerator, self.shard = experiment, distributed, distributed.accelerator, shard
        self.scaler = self.accelerator.scaler
        """Scales the loss in float16; else ``None``."""
        self.config, self.parameters = model.config, sum(p.numel() for p in model.parameters())
        set_sequence_group(model, distributed.sequence)
        model = model.to(distributed.device)
        self.unwrapped_model: nn.Module = fully_shard_model(model) if shard else model
        self.optimizer = AdamW(
            self.unwrapped_model.parameters(),
            lr=experiment.learning_rate,
            betas=(experiment.adam_beta1, experiment.adam_beta2),
            eps=experiment.adam_epsilon,
            weight_decay=experiment.weight_decay,
            fused=not shard,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)  # Accelerate has no successor of it yet
            self.model: nn.Module = model if shard else self.accelerator.prepare_model(model)
        self._wrapped_optimizer: Any = self.accelerator.prepare_optimizer(self.optimizer)

    def update(self, share: Sequence[MicroBatch], step: int) -> Updated:
        """Make update ``step``, counted from 1, with this process's share of a batch."""
        distributed = self.distributed
        labels, tokens = distributed.all_sum(sum(micro.labels for micro in share), sum(micro.tokens for micro in share))
        share = [micro.to(distributed.device) for micro in share]
        self._seed(step)
        losses = self._backward(share, [micro.labels * distributed.size / max(labels, 1) for micro in share])
        if self.scaler is not None:
            self.accelerator.unscale_gradients(self._wrapped_optimizer)
        norm = _norm([p.grad for p in self.unwrapped_model.parameters() if p.grad is not None])
        bad_loss = not all(map(math.isfinite, losses))
        own_loss = 0.0 if bad_loss else math.fsum(loss * micro.labels for loss, micro in zip(losses, share, strict=True))
        bad_gradient = not math.isfinite(norm) and self.scaler is None  # a scaler skips the step and scales less
        # A weight of minus infinity before a relu shows in nothing else. The norm is quick, but overflows for some finite weights.
        bad_weight = not math.isfinite(_norm(list(self.unwrapped_model.parameters()))) and bool(bad_weights(self.unwrapped_model))
        loss, *bad = distributed.all_sum(own_loss, bad_loss, bad_weight, bad_gradient)
        for what, count in zip(("loss", "weight", "gradient"), bad, strict=True):
            if count:
                self._raise_not_finite(share, losses, what, step)
        return Updated(loss, labels, int(tokens), norm, self._apply(step, norm))

    def _seed(self, step: int) -> None:
        """Seed dropout by step and process, so that checkpoints need no random state."""
        state = np.random.SeedSequence([self.experiment.seed, step, self.distributed.rank]).generate_state(1, np.uint64)
        torch.manual_seed(int(state[0] >> 1))

    def _backward(self, share: Sequence[MicroBatch], weights: Sequence[float]) -> list[float]:
        """Compute gradients. Processes average theirs, which with these weights gives the mean over all labels."""
        losses: list[float] = []
        for micro, weight in zip(share, weights, strict=True):
            is_last = len(losses) == len(share) - 1
            with nullcontext() if is_last or self.shard else self.accelerator.no_sync(self.model):
                loss = self._loss(micro, self.model)
                self.accelerator.backward(loss * weight)
                losses.append(float(loss.detach()))
        return losses

    def _loss(self, micro: MicroBatch, model: nn.Module) -> Tensor:
        with self.accelerator.autocast():
            loss: Tensor = model(**model_inputs(micro.batch, self.config), **model_targets(micro.batch)).loss
        return loss

    def _apply(self, step: int, norm: float) -> float:
        """Clip gradients and update the weights; return the learning rate."""
        experiment = self.experiment
        if experiment.gradient_clip is not None:
            nn.utils.clip_grads_with_norm_(self.unwrapped_model.parameters(), experiment.gradient_clip, torch.tensor(norm))
        rate = learning_rate(step, peak=experiment.learning_rate, warmup_steps=experiment.warmup_steps, warmup_from=experiment.warmup_from)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._wrapped_optimizer.step()
        self._wrapped_optimizer.zero_grad(set_to_none=True)
        return rate

    def _raise_not_finite(self, share: Sequence[MicroBatch], losses: Sequence[float], what: str, step: int) -> None:
        """Find where it started, and raise. All processes compute the step again, since a sharded model needs all of them."""
        model, is_loss = self.unwrapped_model, what == "loss"
        if is_loss:
            self._seed(step)
            place = first_bad_module(model, lambda: [self._loss(micro, model) for micro in share])
        else:
            place = bad_gradients(model) if what == "gradient" else bad_weights(model)
        bad = [(micro, loss) for micro, loss in zip(share, losses, strict=True) if not (is_loss and math.isfinite(loss))]
        found = self.distributed.gather([(loss, place, micro.batch.ids.tolist()) for micro, loss in bad])
        loss, place = next(((loss, place) for loss, place, _ in found if place), (math.nan, "an unknown layer"))
        message = f"the loss is {loss}, first in {place}" if is_loss else f"a {what} is not finite, of {place}"
        items = some(list(dict.fromkeys(n for *_, ids in found for n in ids)))
        raise NotFinite(f"step {step:,}: {message}; items {items} of the train split")

    def shutdown(self) -> None:
        """Disconnect from the other processes.

        The reducer of a model that outlives the process group, as in a traceback, would wait for threads that wait for the interpreter.
        """
        if isinstance(self.model, DistributedDataParallel):
            del self.model.logger, self.model.reducer


@torch.no_grad()
def _norm(tensors: Sequence[Tensor]) -> float:
    norm = nn.utils.get_total_norm(tensors)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def evaluate(
    model: nn.Module,
    task: Task,
    split: str,
    *,
    batch_size: int,
    items: int | None = None,
    distributed: Distributed | None = None,
    progress: Callable[[int], None] = lambda items: None,
    stopped: Callable[[], bool] | None = None,
) -> dict[str, float]:
    """Return the metrics of a model on a split, or on ``items`` of it. The mode of the model and random numbers are restored.

    Groups of processes compute batches in turn; their sums are added exactly, in the order of the batches, so that metrics do not depend on
    the number of processes. If ``stopped`` returns true on one of them, all raise ``Interrupted``.
    """
    distributed = distributed or Distributed(Accelerator(cpu=not torch.cuda.is_available()))
    was_training, device = model.training, distributed.device
    model.eval()
    sums: list[tuple[int, dict[str, float]]] = []
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            batches = evaluation_batches(task, split, batch_size=batch_size, items=items, distributed=distributed)
            for number, batch, is_scored in batches:
                if stopped is not None and distributed.all_sum(stopped())[0]:
                    raise Interrupted
                torch.manual_seed(number)  # for attention that draws random numbers
                batch = batch.to(device)
                given = model_inputs(batch, model.config)  # type: ignore[arg-type]
                with distributed.accelerator.autocast():
                    logits = model(**given, **({"use_cache": False} if task.input.kind == "lm" else {})).logits
                if is_scored:
                    sums.append((number, {name: float(value) for name, value in task.input.score(logits, batch).items()}))
                    progress(len(batch) * distributed.data_size)
    finally:
        model.train(was_training)
    everywhere = sorted(distributed.gather(sums), key=lambda part: part[0])
    if not everywhere:
        raise ValueError(f"the {split} split of {task.name} is empty: there is nothing to evaluate")
    totals = {name: math.fsum(part[name] for _, part in everywhere) for name in everywhere[0][1]}
    return task.input.summarize(totals, split)
