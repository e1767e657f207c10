"""The loop. A model, a task and an experiment go in; a run folder comes out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, gather_object
from torch import Tensor, nn
from torch.optim import AdamW

from permuteformer.experiments.base import Experiment
from permuteformer.models import PermuteFormerConfig
from permuteformer.tasks import Batch, Task
from permuteformer.tasks.base import UNSCORED
from permuteformer.train import checkpoint
from permuteformer.train.build import build_config, build_model, build_task, inputs, targets
from permuteformer.train.environment import environment, peak_memory
from permuteformer.train.evaluate import evaluate
from permuteformer.train.feed import Share, chosen, training_batches
from permuteformer.train.finish import finish
from permuteformer.train.finite import NotFinite, bad_gradients, first_bad_layer
from permuteformer.train.interrupt import Interruption
from permuteformer.train.progress import Display
from permuteformer.train.run import ENVIRONMENT, RESULT, Run
from permuteformer.train.saved import describe
from permuteformer.train.state import (
    Cursor,
    load_model,
    load_optimizer,
    model_tensors,
    optimizer_tensors,
    random_state,
    seed_all,
    set_random_state,
)

LINES = 200
"""Lines about training that a run records, and a few more."""


@dataclass(frozen=True, kw_only=True)
class How:
    """How a run is carried out, which does not decide its result."""

    data: str | None = None
    """The data folder."""
    shard: bool = False
    """Share out weights and optimiser over the processes (FSDP), where each has its own copy otherwise (DDP)."""
    track: Sequence[str] = ("tensorboard",)
    """Trackers of Accelerate: tensorboard, wandb, and others it knows."""
    workers: int = 0
    """Processes that make batches ahead."""
    checkpoint_minutes: float = 10.0
    """Save so often, besides at every validation."""
    quiet: bool = False
    """Show no bar."""


def train(experiment: Experiment, folder: Path, how: How = How(), cell: Mapping[str, Any] | None = None) -> dict[str, Any]:  # noqa: B008
    """Run an experiment in ``folder``, or go on with it there; returns what is in its ``result.json``.

    Interrupted by SIGTERM or Ctrl-C it saves, and returns the status ``"interrupted"``.
    """
    accelerator = _accelerator(experiment, how, folder)
    task = build_task(experiment.task, experiment.task_options, how.data)
    with accelerator.main_process_first():
        task.prepare()
    config = build_config(experiment.model, experiment.model_fields, task)
    about = {"cell": cell, "task": describe(task), "config": config.to_dict()}
    run = Run(folder, experiment, about)
    with run if accelerator.is_main_process else nullcontext(), Interruption() as interruption:
        accelerator.wait_for_everyone()
        if run.result.get("status") == "finished":
            return run.result
        trainer = Trainer(experiment, run, how, accelerator, task, config)
        try:
            with trainer.display:
                ended = trainer.run_until(interruption)
                result = finish(trainer) if ended else {"status": "interrupted", "signal": interruption.received, "step": trainer.cursor.step}
        except NotFinite as error:
            if accelerator.is_main_process:
                run.log(str(error))
                run.write(RESULT, {**trainer.summary("not finite"), "message": str(error)})
            raise
        finally:
            accelerator.end_training()
        return result


class Trainer:
    """What a run is made of while it runs."""

    def __init__(
        self, experiment: Experiment, run: Run, how: How, accelerator: Accelerator, task: Task, config: PermuteFormerConfig
    ) -> None:
        self.experiment, self.run_folder, self.how, self.accelerator, self.task, self.config = experiment, run, how, accelerator, task, config
        self.cursor = Cursor()
        batch = experiment.batch_size
        self.steps_per_epoch = -(-len(chosen(len(task.dataset("train")), experiment.train_items)) // batch)
        if not self.steps_per_epoch:
            raise ValueError(f"the train split of {task.name} is empty: there is nothing to train on")
        self.steps = experiment.steps or math.ceil((experiment.epochs or 0) * self.steps_per_epoch)
        self.line_every = max(self.steps // LINES, 1)
        seed_all(experiment.seed)
        model = build_model(config, task.kind).to(accelerator.device)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.bare = _shard(model) if how.shard else model
        self.optimizer = AdamW(
            model.parameters(),
            lr=experiment.learning_rate,
            betas=(experiment.adam_beta1, experiment.adam_beta2),
            eps=experiment.adam_epsilon,
            weight_decay=experiment.weight_decay,
            fused=not how.shard,
        )
        self.model: nn.Module = model
        if not how.shard:
            self.model = accelerator.prepare_model(model)
        self.stepper = accelerator.prepare_optimizer(self.optimizer)
        seed_all(experiment.seed + 1_000_003 * accelerator.process_index)  # dropout differs between processes
        self.display = Display(self.steps, task.metric, how.quiet or not accelerator.is_main_process)
        self._resume()
        if accelerator.is_main_process:
            run.write(ENVIRONMENT, environment(accelerator.num_processes, accelerator.device.type))
        name = run.path.resolve().name
        options = {"tensorboard": {"purge_step": self.cursor.step}, "wandb": {"name": name, "dir": str(run.path), "resume": "allow"}}
        accelerator.init_trackers("permuteformer", init_kwargs={tracker: options.get(tracker, {}) for tracker in how.track})

    def run_until(self, interruption: Interruption) -> bool:
        """Train to the end; false if a signal came before."""
        self.model.train()
        saved = time.monotonic()
        for share in self._shares():
            began = time.perf_counter()
            late = time.monotonic() - saved > 60 * self.how.checkpoint_minutes
            stop, save = self._update(share, stop=interruption.received is not None, save=late, began=began)
            if self.cursor.step % self.line_every == 0 or self.cursor.step == self.steps:
                self._record()
            due = self.cursor.step % (self.experiment.evaluate_every or self.steps_per_epoch) == 0 or self.cursor.step == self.steps
            if due:
                self._validate()
            if due or save or stop:
                self.save()
                saved = time.monotonic()
            if stop and self.cursor.step < self.steps:
                return False
        return True

    def _shares(self) -> Iterator[Share]:
        """This process's share of every batch that is left."""
        experiment, accelerator = self.experiment, self.accelerator
        while self.cursor.step < self.steps:
            epoch, start = divmod(self.cursor.step, self.steps_per_epoch)
            shares = training_batches(
                self.task,
                batch_size=experiment.batch_size,
                micro_batch_size=experiment.micro_batch_size,
                by_length=experiment.by_length,
                items=experiment.train_items,
                seed=experiment.seed,
                epoch=epoch,
                start=start,
                process=accelerator.process_index,
                processes=accelerator.num_processes,
                workers=self.how.workers,
            )
            for share in shares:
                yield share
                if self.cursor.step >= self.steps:
                    return

    def _update(self, share: Share, *, stop: bool, save: bool, began: float) -> tuple[bool, bool]:
        """One update of the weights. Returns whether any process was told to stop, or is to save."""
        accelerator, cursor = self.accelerator, self.cursor
        pieces = [piece.to(accelerator.device) for piece in share.pieces]
        counts = [int((piece.labels != UNSCORED).sum()) * share.counts for piece in pieces]
        tokens = sum(_tokens(piece) for piece in pieces) * share.counts
        everywhere = torch.tensor([sum(counts), tokens, stop, save], dtype=torch.float64, device=accelerator.device)
        count, tokens, stop_any, save_any = (
            accelerator.reduce(everywhere, "sum") if accelerator.num_processes > 1 else everywhere  # type: ignore[assignment]
        ).tolist()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(cursor.step + 1)
        losses: list[float] = []
        before = torch.get_rng_state()
        for piece, own in zip(pieces, counts, strict=True):
            last = len(losses) == len(pieces) - 1
            with nullcontext() if last or self.how.shard else accelerator.no_sync(self.model):
                loss = self._loss(piece)
                # Gradients of processes are averaged: so weighted, they come to the mean over all that counts.
                accelerator.backward(loss * (own * accelerator.num_processes / max(count, 1)))
                losses.append(float(loss.detach()))
        norm = self._clip()
        if not all(map(math.isfinite, losses)) or not (math.isfinite(norm) or accelerator.scaler is not None):
            self._stop_not_finite(pieces, losses, before)
        self.stepper.step()
        self.stepper.zero_grad(set_to_none=True)
        cursor.step += 1
        cursor.tokens += int(tokens)
        cursor.loss += math.fsum(loss * own for loss, own in zip(losses, counts, strict=True))
        cursor.counted += sum(counts)
        self.norm = norm
        seconds = time.perf_counter() - began
        cursor.seconds += seconds
        self.display.step(cursor.step, math.fsum(losses) / len(losses), tokens / seconds, peak_memory(accelerator.device))
        return stop_any > 0, save_any > 0

    def _loss(self, batch: Batch) -> Tensor:
        with self.accelerator.autocast():
            loss: Tensor = self.model(**inputs(batch, self.config, self.task.kind), **targets(batch, self.task.kind)).loss
        return loss

    def learning_rate(self, step: int) -> float:
        """Of update number ``step``, counted from 1: up in a line, then down with the square root."""
        experiment = self.experiment
        warmup = experiment.warmup_steps
        if step < warmup:
            return experiment.warmup_from + (experiment.learning_rate - experiment.warmup_from) * step / warmup
        return experiment.learning_rate * math.sqrt(max(warmup, 1) / step)

    def _clip(self) -> float:
        """The gradient's norm, after which it is cut down to the experiment's if that is smaller."""
        accelerator = self.accelerator
        if accelerator.scaler is not None:
            accelerator.unscale_gradients(self.stepper)
        limit = self.experiment.gradient_clip
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), math.inf if limit is None else limit)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _stop_not_finite(self, pieces: list[Batch], losses: list[float], before: Tensor) -> None:
        """Say where it began, on all processes together: a loss that is not finite is in every gradient."""
        bad = [piece for piece, loss in zip(pieces, losses, strict=True) if not math.isfinite(loss)]
        found = ""
        if bad:
            torch.set_rng_state(before)
            layer = first_bad_layer(self.bare, lambda: [self._loss(piece) for piece in pieces])
            found = f"the loss is {[loss for loss in losses if not math.isfinite(loss)][0]}; it began in {layer}; items {_ids(bad)}"
        elif self.accelerator.num_processes == 1 or all(math.isfinite(loss) for loss in losses):
            found = f"a gradient is not finite: of {bad_gradients(self.bare)}; items {_ids(pieces)}"
        everywhere = gather_object([found]) if self.accelerator.num_processes > 1 else [found]
        told = sorted(everywhere, key=lambda text: not text.startswith("the loss"))[0]
        last = checkpoint.steps(self.run_folder.checkpoints)
        kept = f"the checkpoint of step {last[-1]} stays" if last else "no checkpoint was made before it"
        raise NotFinite(f"step {self.cursor.step + 1}: {told} of the train split. Nothing of this step is kept; {kept}")

    def _record(self) -> None:
        """A line about training since the last one."""
        cursor, accelerator = self.cursor, self.accelerator
        sums = torch.tensor([cursor.loss, cursor.counted], dtype=torch.float64, device=accelerator.device)
        loss, counted = (accelerator.reduce(sums, "sum") if accelerator.num_processes > 1 else sums).tolist()  # type: ignore[union-attr]
        seconds = cursor.seconds - cursor.lines_seconds
        values = {
            "loss": loss / max(counted, 1),
            "learning_rate": self.learning_rate(cursor.step),
            "gradient_norm": self.norm,
            "tokens_per_second": (cursor.tokens - cursor.lines_tokens) / max(seconds, 1e-9),
            "seconds": cursor.seconds,
            "memory_bytes": peak_memory(accelerator.device),
        }
        cursor.loss = cursor.counted = 0.0
        cursor.lines_seconds, cursor.lines_tokens = cursor.seconds, cursor.tokens
        if accelerator.is_main_process:
            self.run_folder.record("train", step=cursor.step, epoch=self.epoch, **values)
        accelerator.log({f"train/{name}": value for name, value in values.items()}, step=cursor.step)

    @property
    def epoch(self) -> float:
        """How often the training items were gone through."""
        return self.cursor.step / self.steps_per_epoch

    def evaluate(self, split: str, task: Task | None = None) -> dict[str, float]:
        """The metrics on a split, of the experiment's number of items."""
        experiment, task = self.experiment, task or self.task
        items = experiment.validation_items if split == "validation" else experiment.test_items
        with self.display.evaluating(split, len(chosen(len(task.dataset(split)), items))) as bar:
            return evaluate(
                self.model,
                self.config,
                task,
                split,
                batch_size=experiment.evaluation_batch_size or experiment.batch_size,
                items=items,
                accelerator=self.accelerator,
                progress=bar,
            )

    def _validate(self) -> None:
        metrics = self.evaluate("validation")
        cursor, task = self.cursor, self.task
        value, best = metrics[task.metric], cursor.best.get(task.metric)
        better = best is None or (value > best if task.greater_is_better else value < best)
        if better:
            cursor.best_step, cursor.best = cursor.step, metrics
        self.tell("evaluation", "validation", metrics, better)

    def tell(self, event: str, split: str, metrics: dict[str, float], best: bool = False, **more: Any) -> None:
        """Record metrics, in all places where they are looked for."""
        if self.accelerator.is_main_process:
            about = {"step": self.cursor.step, "epoch": self.epoch, "split": split, "metrics": metrics, "seconds": self.cursor.seconds}
            self.run_folder.record(event, **about, **more)
        self.accelerator.log({f"{split}/{name}": value for name, value in metrics.items()}, step=self.cursor.step)
        self.display.evaluated(split, self.epoch, metrics, best)

    def save(self) -> None:
        """A checkpoint of this step; the one before stays, and the best."""
        tensors = {"model": model_tensors(self.bare), "optimizer": optimizer_tensors(self.bare, self.optimizer)}
        own = [random_state()]
        randoms = gather_object(own) if self.accelerator.num_processes > 1 else own
        if self.accelerator.is_main_process:
            state = {"cursor": self.cursor.to_json(), "random": randoms, "recorded": self.run_folder.recorded}
            if self.accelerator.scaler is not None:
                state["scaler"] = self.accelerator.scaler.state_dict()
            checkpoint.save(self.run_folder.checkpoints, self.cursor.step, state, tensors)
            checkpoint.tidy(self.run_folder.checkpoints, keep={self.cursor.best_step or 0})
        self.accelerator.wait_for_everyone()

    def _resume(self) -> None:
        """Go on from the last good checkpoint, if there is one."""
        latest, problems = checkpoint.load_latest(self.run_folder.checkpoints)
        for problem in problems:
            self.say(f"{problem}; the checkpoint before it is used")
        if latest is None:
            if self.accelerator.is_main_process:
                self.run_folder.rewind(0)
            return
        processes = self.accelerator.num_processes
        if len(latest.state["random"]) != processes:
            raise ValueError(
                f"{self.run_folder.path} was begun on {len(latest.state['random'])} processes, and this is {processes}: go on with as many"
            )
        load_model(self.bare, latest.tensors["model"])
        load_optimizer(self.bare, self.optimizer, latest.tensors["optimizer"])
        self.cursor = Cursor(**latest.state["cursor"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(latest.state["scaler"])
        set_random_state(latest.state["random"][self.accelerator.process_index])
        if self.accelerator.is_main_process:
            self.run_folder.rewind(latest.state["recorded"])
        self.say(f"going on from step {self.cursor.step:,} of {self.steps:,}")

    def say(self, text: str) -> None:
        """To the person and to the log."""
        if self.accelerator.is_main_process:
            self.run_folder.log(text)
        self.display.say(text)

    def summary(self, status: str) -> dict[str, Any]:
        """What a result says of the run, whatever came of it."""
        return {
            "status": status,
            "message": None,
            "metric": self.task.metric,
            "value": None,
            "validation": self.cursor.best,
            "test": {},
            "best_step": self.cursor.best_step,
            "steps": self.cursor.step,
            "epochs": self.epoch,
            "seconds": self.cursor.seconds,
            "tokens": self.cursor.tokens,
            "parameters": self.parameters,
            "peak_memory_bytes": peak_memory(self.accelerator.device),
        }


def _accelerator(experiment: Experiment, how: How, folder: Path) -> Accelerator:
    precision = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[experiment.precision]
    if experiment.precision == "float16" and not torch.cuda.is_available():
        raise ValueError("precision float16 needs a GPU; on a CPU use float32 or bfloat16")
    places = ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "tensorboard"))
    return Accelerator(mixed_precision=precision, log_with=list(how.track) or None, project_config=places)


def _shard(model: nn.Module) -> nn.Module:
    """Share out the weights of each block, and then what is left. Accelerate does so for GPUs only; this is any device."""
    from torch.distributed.fsdp import fully_shard

    for block in model.model.layers:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)
    return model


def _tokens(batch: Batch) -> int:
    second = 0 if batch.second_key_mask is None else int(batch.second_key_mask.sum())
    return int(batch.key_mask.sum()) + second


def _ids(batches: Sequence[Batch]) -> str:
    ids = torch.cat([batch.ids for batch in batches]).tolist()
    return ", ".join(map(str, ids[:20])) + (f" and {len(ids) - 20} more" if len(ids) > 20 else "")
