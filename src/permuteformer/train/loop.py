"""The training loop: an experiment goes in, a run folder with metrics, checkpoints and the model comes out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from permuteformer.experiments.experiment import Experiment, RunOptions
from permuteformer.experiments.layout import RESULT
from permuteformer.formatting import printable
from permuteformer.machine import bfloat16_advice, environment, peak_memory
from permuteformer.models import PermuteFormerConfig
from permuteformer.tasks import SPLITS, NotReady, Task
from permuteformer.tasks.store import sample_numbers
from permuteformer.train import checkpoint
from permuteformer.train.build import build_config, build_model, build_task
from permuteformer.train.data import MicroBatch, training_shares
from permuteformer.train.distributed import Distributed, start, start_trackers
from permuteformer.train.failures import (
    Interrupted,
    NotFinite,
    StopSignal,
    bad_tensors,
    bad_weights,
    first_bad_module,
    kept,
    readable_failures,
)
from permuteformer.train.log import Display, MetricsLog
from permuteformer.train.run_folder import RunFolder, check_folder, finished_result
from permuteformer.train.step import Updater, evaluate
from permuteformer.train.trained_model import write_model

LOG_LINES = 200
"""About how many lines on training a run records."""

FLAGS = {"processes": "torchrun --nproc-per-node", "shard": "--shard", "sequence_parallel": "--sequence-parallel"}
"""Flags by field of a checkpoint. A run is resumed with the same values, since other processes round their sums differently."""


@dataclass
class Progress:
    """How far a run has come; the same on all processes."""

    step: int = 0
    """Updates made."""
    seconds: float = 0.0
    """Time of training, without evaluation and checkpoints."""
    tokens: int = 0
    validation_due: bool = False
    """Whether this step has to be validated."""
    best_step: int | None = None
    best: dict[str, float] = field(default_factory=dict)
    """Metrics of the best validation."""
    loss: float = 0.0
    """Sum of the loss since training was last logged."""
    labels: float = 0.0
    """Number of labels in that sum."""
    logged_seconds: float = 0.0
    logged_tokens: int = 0
    metrics_bytes: int = 0
    """Size of the metrics file."""

    @classmethod
    def from_json(cls, content: Any) -> Progress:
        """Return the progress of a checkpoint; raise if a field has another type."""
        progress = cls(**content)
        for name, example in vars(cls(best_step=0)).items():
            value = getattr(progress, name)
            is_none = name == "best_step" and value is None
            if not is_none and (type(value) is not type(example) or (name != "best" and value < 0)):
                raise ValueError(f"{name} of a checkpoint cannot be {value!r:.100}")
        return progress


def train(experiment: Experiment, folder: Path, options: RunOptions | None = None, cell: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run an experiment in ``folder``, or resume it there; return its ``result.json``.

    After SIGTERM or Ctrl-C it saves a checkpoint and returns the status ``"interrupted"``. ``cell`` is the cell of a table, for the record.
    """
    options = options or RunOptions()
    with readable_failures(folder), start(experiment.precision, folder, options) as distributed:
        result = distributed.on_main(lambda: finished_result(folder, experiment))
        try:
            task = build_task(experiment.task, experiment.task_options, options.data)
            distributed.on_main(lambda: bool(task.store))
        except NotReady:
            if result:
                return result  # the data is gone, and not needed any more
            raise
        if result:
            check_folder(folder, experiment, task.store.digest)
            return result
        config = build_config(experiment.model, experiment.model_fields, task.input)
        _check(experiment, task, config, options)
        about = {"cell": cell, "task": task.describe(experiment.test_items), "config": config.to_dict()}
        run = RunFolder(folder, experiment, about)
        with ExitStack() as opened, StopSignal() as stop:
            distributed.on_main(lambda: bool(opened.enter_context(run)))
            return Trainer(experiment, task, config, run, distributed, stop, options).run()


def _check(experiment: Experiment, task: Task, config: PermuteFormerConfig, options: RunOptions) -> None:
    """Raise before training if something does not fit."""
    if options.sequence_parallel > 1:
        with torch.device("meta"):
            config.build_layer(0).attention.check_sequence_parallel()
    labels = task.input.labels
    if task.input.kind != "lm" and len(labels) < 2:
        title = task.store.info["title"]
        raise ValueError(f"{title}: {task.name} has one label, {''.join(map(repr, labels))}: a classifier needs at least two")
    for split in SPLITS:
        if not len(task.items(split)):
            raise ValueError(f"the {split} split of {task.name} is empty: training needs {', '.join(SPLITS)}")
    for length in experiment.test_lengths:
        task_at_length(task, length)
        for part in (config.attention, *config.position):
            if part.get("max_length", length) < length:
                raise ValueError(f"test_lengths: {part['name']} of this model supports at most {part['max_length']} tokens, got {length}")


def task_at_length(task: Task, length: int) -> Task:
    """Return a task of language modelling with windows of another length and the same share of context."""
    if task.input.kind != "lm":
        raise ValueError(f"test_lengths needs a language model; {task.name} is a task of kind {task.input.kind!r}")
    return replace(task, length=length, context=length * task.context // task.length)  # type: ignore[attr-defined,call-arg]


class Trainer:
    """Trains, validates, saves and tests one model."""

    def __init__(
        self,
        experiment: Experiment,
        task: Task,
        config: PermuteFormerConfig,
        run: RunFolder,
        distributed: Distributed,
        stop: StopSignal,
        options: RunOptions,
    ) -> None:
        self.experiment, self.task, self.config, self.run_folder = experiment, task, config, run
        self.distributed, self.stop, self.options = distributed, stop, options
        items = len(sample_numbers(len(task.items("train")), experiment.train_items))
        self.steps_per_epoch = -(-items // experiment.batch_size)
        self.steps = experiment.steps or math.ceil((experiment.epochs or 0) * self.steps_per_epoch)
        self.progress = Progress()
        self.display = Display(self.steps, task.input.metric, options.quiet or not distributed.is_main)
        self.log = MetricsLog(run, distributed, self.display, self.steps_per_epoch)
        torch.manual_seed(experiment.seed)
        self.updater = Updater(build_model(config, task.input.kind), experiment, distributed, options.shard)
        self._saved = self._clock = 0.0

    def run(self) -> dict[str, Any]:
        """Resume from the latest checkpoint, train to the last step, and test the best weights."""
        try:
            with self.display:
                self._start()
                self._fit()
                return self._finish()
        except Interrupted:
            signals = self.distributed.gather([self.stop.received or 0])
            return {"status": "interrupted", "signal": max(signals), "step": self.progress.step}
        except NotFinite as error:
            advice = "Try a lower learning_rate, more warmup_steps, or gradient_clip"
            message = f"{error}. Nothing of this step was kept; {kept(self.run_folder.checkpoints)}. {advice}"
            self.distributed.on_main(lambda: self.run_folder.log(message))
            self.distributed.on_main(lambda: self.run_folder.write(RESULT, {**self._summary("not finite"), "message": message}))
            raise NotFinite(message) from None
        finally:
            self.updater.shutdown()

    def _start(self) -> None:
        """Restore the latest checkpoint, if there is one, and record where the run is carried out."""
        run, distributed = self.run_folder, self.distributed
        latest, damaged = checkpoint.load_latest(run.checkpoints)
        for problem in damaged:
            self.log.say(f"{problem}; {'using the checkpoint before it' if latest else 'there is no other checkpoint'}")
        if latest is not None:
            self._restore(latest)
        step = self.progress.step
        distributed.on_main(lambda: run.truncate_metrics(self.progress.metrics_bytes))
        now = environment(distributed.size, distributed.device.type)
        threads = distributed.on_main(lambda: run.start(now, resumed=latest is not None))
        if latest is not None:
            self.log.say(f"resuming from step {step:,} of {self.steps:,}")
        if threads is not None:
            self.log.say(f"started with {threads} threads, resumed with {now['threads']}: results will not be bit-identical")
        if self.experiment.precision == "bfloat16" and (advice := bfloat16_advice(distributed.device.type)):
            self.log.say(advice)
        start_trackers(distributed.accelerator, run.path, self.experiment.to_json(), step)

    def _fit(self) -> None:
        """Train to the last step. If interrupted, save; a validation that was interrupted is repeated after resuming."""
        self.updater.model.train()
        self._reset_timers()
        try:
            if self.progress.validation_due:
                self._validate()
            for share in self._shares():
                self._step(share)
                is_late = self.distributed.is_main and time.monotonic() - self._saved > 60 * self.options.checkpoint_minutes
                stop, save = self.distributed.all_sum(self.stop.received is not None, is_late)
                if stop:
                    raise Interrupted
                if self.progress.validation_due:
                    self._validate()
                elif save:
                    self._save()
        except Interrupted:
            self._save()
            raise

    def _shares(self) -> Iterator[list[MicroBatch]]:
        """Yield this process's share of every remaining batch."""
        while self.progress.step < self.steps:
            epoch, first = divmod(self.progress.step, self.steps_per_epoch)
            for share in training_shares(self.task, self.experiment, self.distributed, epoch, first, self.options.workers):
                yield share
                if self.progress.step >= self.steps:
                    return

    def _step(self, share: list[MicroBatch]) -> None:
        """Make an update and log it."""
        progress = self.progress
        updated = self.updater.update(share, progress.step + 1)
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        progress.step += 1
        progress.seconds += seconds
        progress.tokens += updated.tokens
        progress.loss += updated.loss
        progress.labels += updated.labels
        is_last = progress.step == self.steps
        progress.validation_due = is_last or progress.step % (self.experiment.evaluate_every or self.steps_per_epoch) == 0
        self.log.update(progress, updated, updated.tokens / seconds)
        if is_last or progress.step % max(self.steps // LOG_LINES, 1) == 0:
            self.log.training(progress, updated)

    def _validate(self) -> None:
        """Evaluate on the validation split, and save."""
        metrics = self._evaluate("validation")
        progress, input, model = self.progress, self.task.input, self.updater.unwrapped_model
        if not math.isfinite(metrics["loss"]):
            place = first_bad_module(model, lambda: self._evaluate("validation"))
            loss = f"the loss on the validation split is {metrics['loss']}, first in {place}"
            raise NotFinite(f"step {progress.step:,}: {loss}; weights that are not finite: {bad_weights(model) or 'none'}")
        value, best = metrics[input.metric], progress.best.get(input.metric)
        is_best = best is None or (value > best if input.greater_is_better else value < best)
        if is_best:
            progress.best_step, progress.best = progress.step, metrics
        progress.validation_due = False
        self.log.metrics("evaluation", progress, "validation", metrics, is_best)
        self._save()

    def _evaluate(self, split: str, task: Task | None = None) -> dict[str, float]:
        """Return the metrics on a split. Raises ``Interrupted`` after a signal."""
        experiment, task = self.experiment, task or self.task
        items = experiment.validation_items if split == "validation" else experiment.test_items
        size = experiment.evaluation_batch_size or experiment.batch_size
        if task is not self.task:  # fewer of longer windows: the same number of tokens, and the same memory
            here, there = self.task.input.max_length, task.input.max_length
            size, items = max(size * here // there, 1), None if items is None else max(items * here // there, 1)
        with self.display.evaluating(split, len(sample_numbers(len(task.items(split)), items))) as advance:
            return evaluate(
                self.updater.unwrapped_model,
                task,
                split,
                batch_size=size,
                items=items,
                distributed=self.distributed,
                progress=advance,
                stopped=lambda: self.stop.received is not None,
            )

    def _finish(self) -> dict[str, Any]:
        """Test the weights of the best validation; write the model and the result."""
        progress, task, run, model = self.progress, self.task, self.run_folder, self.updater.unwrapped_model
        summary = self._summary("finished")  # before tests at longer lengths, which need more memory
        if progress.best_step not in (None, progress.step):
            try:
                best = checkpoint.load(run.checkpoints, int(progress.best_step or 0))
            except checkpoint.Damaged as error:
                raise checkpoint.Damaged(f"{error}. It has the best weights: train again in another folder") from error
            checkpoint.load_model(model, best.tensors["model"])
        test = self._evaluate("test")
        self.log.metrics("test", progress, "test", test)
        for length in self.experiment.test_lengths:
            metrics = self._evaluate("test", task_at_length(task, length))
            self.log.metrics("length", progress, "test", metrics, length=length, times=length / task.input.max_length)
        weights = checkpoint.model_tensors(model)
        result = {**summary, "value": test[task.input.metric], "test": test}
        device = torch.device("cpu") if self.options.shard else self.distributed.device
        self.distributed.on_main(lambda: write_model(run, task, self.config, weights, result, device))
        self.distributed.on_main(lambda: run.write(RESULT, result))
        return result

    def _summary(self, status: str) -> dict[str, Any]:
        """Return what a result records of the run, however it ended."""
        progress = self.progress
        return {
            "status": status,
            "message": None,
            "metric": self.task.input.metric,
            "value": None,
            "validation": progress.best,
            "test": {},
            "best_step": progress.best_step,
            "steps": progress.step,
            "epochs": progress.step / self.steps_per_epoch,
            "seconds": progress.seconds,
            "tokens": progress.tokens,
            "parameters": self.updater.parameters,
            "peak_memory_bytes": peak_memory(self.distributed.device),
        }

    def _save(self) -> None:
        """Write a checkpoint of this step. The one before is kept, and the best. All processes must call it."""
        updater, run, step = self.updater, self.run_folder, self.progress.step
        model = updater.unwrapped_model
        tensors = {"model": checkpoint.model_tensors(model), "optimizer": checkpoint.optimizer_tensors(model, updater.optimizer)}

        def write() -> None:
            if bad := bad_tensors(tensors):  # no loss has shown it yet
                raise NotFinite(f"step {step:,}: not finite, and not saved: {bad}")
            progress = {**asdict(self.progress), "metrics_bytes": run.metrics_bytes()}
            scaler = {} if updater.scaler is None else {"scaler": updater.scaler.state_dict()}
            checkpoint.save(run.checkpoints, step, {"progress": progress, **self._parallel(), **scaler}, tensors)
            self._remove_old_checkpoints()

        self.distributed.on_main(write)
        self._reset_timers()

    def _restore(self, latest: checkpoint.Checkpoint) -> None:
        path, state, updater = self.run_folder.path, latest.state, self.updater
        for name, value in self._parallel().items():
            if state.get(name) != value:
                raise ValueError(f"{path} was started with {FLAGS[name]} {state.get(name)!r:.20}, got {value}: resume with the same value")
        try:
            self.progress = Progress.from_json(state["progress"])
            checkpoint.load_model(updater.unwrapped_model, latest.tensors["model"])
            checkpoint.load_optimizer(updater.unwrapped_model, updater.optimizer, latest.tensors["optimizer"])
            if updater.scaler is not None:
                updater.scaler.load_state_dict(state["scaler"])
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            reason = printable(" ".join(f"{type(error).__name__}: {error}".split()))
            raise ValueError(f"the checkpoint of step {latest.step:,} does not fit this run ({reason}): train in another folder") from error
        self.distributed.on_main(self._remove_old_checkpoints)  # a run may have been killed while it did

    def _parallel(self) -> dict[str, Any]:
        return {"processes": self.distributed.size, "shard": self.options.shard, "sequence_parallel": self.options.sequence_parallel}

    def _remove_old_checkpoints(self) -> None:
        checkpoint.remove_old(self.run_folder.checkpoints, self.progress.step, keep={self.progress.best_step or 0})

    def _reset_timers(self) -> None:
        """Exclude the time since the last update from training."""
        self._saved, self._clock = time.monotonic(), time.perf_counter()
