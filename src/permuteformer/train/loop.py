"""The loop. A model, a task and an experiment go in; a run folder comes out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from permuteformer.experiments.base import Experiment
from permuteformer.experiments.layout import CHECKPOINTS, ENVIRONMENT, RESULT
from permuteformer.folders import read_json
from permuteformer.models import PermuteFormerConfig
from permuteformer.models.parallel import set_sequence_group
from permuteformer.tasks import SPLITS, Task
from permuteformer.train import checkpoint
from permuteformer.train.build import build_config, build_model, build_task
from permuteformer.train.environment import environment, peak_memory, resumed
from permuteformer.train.evaluate import evaluate
from permuteformer.train.feed import Piece, chosen, training_batches
from permuteformer.train.finish import check_lengths, finish
from permuteformer.train.finite import NotFinite, bad_weights, first_bad_layer
from permuteformer.train.full import full_disk_in_words
from permuteformer.train.interrupt import Interrupted, Interruption
from permuteformer.train.lost import lost_process_in_words
from permuteformer.train.progress import Display
from permuteformer.train.resume import resume, save
from permuteformer.train.run import Run, finished
from permuteformer.train.saved import describe
from permuteformer.train.start import advice, end, start, start_trackers, usual_trackers
from permuteformer.train.state import Cursor, seed_all
from permuteformer.train.stretches import find_place
from permuteformer.train.tell import Teller
from permuteformer.train.together import on_main
from permuteformer.train.update import Updater

LINES = 200
"""Lines about training that a run records, and a few more."""


@dataclass(frozen=True, kw_only=True)
class How:
    """How a run is carried out, which does not decide its result."""

    data: str | None = None
    """The data folder."""
    shard: bool = False
    """Share out weights and optimiser over the processes (FSDP), where each has its own copy otherwise (DDP)."""
    sequence_parallel: int = 1
    """Spread every row over so many processes, a stretch each; groups of them share out the batch."""
    track: Sequence[str] = field(default_factory=usual_trackers)
    """Trackers of Accelerate: tensorboard, which is used without a word where it is installed, wandb, and others it knows."""
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
    with lost_process_in_words(folder, folder / CHECKPOINTS):
        return _train(experiment, folder, how, cell)


def _train(experiment: Experiment, folder: Path, how: How, cell: Mapping[str, Any] | None) -> dict[str, Any]:
    accelerator = start(experiment.precision, how.track, how.shard, how.sequence_parallel, folder)
    try:
        if result := on_main(accelerator, lambda: finished(folder, experiment)):
            return result
        task = build_task(experiment.task, experiment.task_options, how.data)
        on_main(accelerator, lambda: bool(task.prepare()))
        config = build_config(experiment.model, experiment.model_fields, task)
        _check(experiment, task, config, how)
        run = Run(folder, experiment, {"cell": cell, "task": describe(task, experiment.test_items), "config": config.to_dict()})
        with ExitStack() as opened, full_disk_in_words(folder, run.checkpoints), Interruption() as interruption:
            on_main(accelerator, lambda: bool(opened.enter_context(run)))
            return Trainer(experiment, run, how, accelerator, task, config, interruption).run()
    finally:
        end(accelerator)


def _check(experiment: Experiment, task: Task, config: PermuteFormerConfig, how: How) -> None:
    """Raise where something does not fit, or will be lacking at the end, before there is a folder."""
    if how.sequence_parallel > 1:
        with torch.device("meta"):
            config.build_layer(0).attention.check_sequence_parallel()
    if task.kind != "lm" and len(task.labels) < 2:
        raise ValueError(f"{task.name} has one label, {''.join(map(repr, task.labels))}: training needs two or more to tell apart")
    for split in SPLITS:
        if not len(task.dataset(split)):
            raise ValueError(f"the {split} split of {task.name} is empty: training needs {', '.join(SPLITS)}")
    check_lengths(task, config, experiment.test_lengths)


class Trainer:
    """What a run is made of while it runs."""

    def __init__(
        self,
        experiment: Experiment,
        run: Run,
        how: How,
        accelerator: Accelerator,
        task: Task,
        config: PermuteFormerConfig,
        interruption: Interruption,
    ) -> None:
        self.experiment, self.task, self.config = experiment, task, config
        self.run_folder, self.how, self.accelerator, self.interruption = run, how, accelerator, interruption
        self.items = len(chosen(len(task.dataset("train")), experiment.train_items))
        self.steps_per_epoch = -(-self.items // experiment.batch_size)
        self.steps = experiment.steps or math.ceil((experiment.epochs or 0) * self.steps_per_epoch)
        self.cursor = Cursor()
        self.display = Display(self.steps, task.metric, how.quiet or not accelerator.is_main_process)
        self.teller = Teller(run, accelerator, self.display, self.steps_per_epoch)
        seed_all(experiment.seed)
        model = build_model(config, task.kind)
        self.place = find_place(accelerator, how.sequence_parallel)
        set_sequence_group(model, self.place.sequence)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.updater = Updater(model, task.kind, experiment, accelerator, how.shard)
        seed_all(experiment.seed + 1_000_003 * accelerator.process_index)  # dropout differs between processes
        self._saved = self._clock = 0.0

    def run(self) -> dict[str, Any]:
        """From where the run is to its end."""
        try:
            with self.display:
                self._begin()
                self._train()
                return finish(self)
        except Interrupted:
            own = [self.interruption.received or 0]
            signals = gather_object(own) if self.accelerator.num_processes > 1 else own
            return {"status": "interrupted", "signal": max(signals), "step": self.cursor.step}
        except NotFinite as error:
            there = checkpoint.steps(self.run_folder.checkpoints)
            kept = f"the checkpoint of step {there[-1]:,} stays" if there else "there is no checkpoint before it"
            message = f"{error}. Nothing of this step is kept; {kept}. A lower learning_rate, more warmup_steps or a gradient_clip may help"
            self.teller.on_main(lambda: self.run_folder.log(message))
            self.teller.on_main(lambda: self.run_folder.write(RESULT, {**self.summary("not finite"), "message": message}))
            raise NotFinite(message) from None
        finally:
            self.updater.part()

    def _begin(self) -> None:
        """Go on from the last checkpoint, and note where."""
        resume(self)
        run, step = self.run_folder, self.cursor.step
        now = environment(self.accelerator.num_processes, self.accelerator.device.type)
        self.teller.on_main(lambda: run.go_on(resumed(read_json(run.path / ENVIRONMENT), now) if step else now))
        if told := advice(self.experiment.precision, self.accelerator.device):
            self.teller.say(told)
        start_trackers(self.accelerator, self.how.track, run.path, self.experiment, step)

    def _train(self) -> None:
        """To the last update. Interrupted, it saves; a validation that was under way is made when the run goes on."""
        self.updater.model.train()
        self._rested()
        try:
            if self.cursor.unvalidated:
                self._validate()
            for share in self._shares():
                stop, late = self._update(share)
                if stop:
                    raise Interrupted
                if self.cursor.unvalidated:
                    self._validate()
                elif late:
                    self.save()
        except Interrupted:
            self.save()
            raise

    def _shares(self) -> Iterator[list[Piece]]:
        """This process's share of every batch that is left."""
        experiment = self.experiment
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
                place=self.place,
                workers=self.how.workers,
            )
            for share in shares:
                yield share
                if self.cursor.step >= self.steps:
                    return

    def _update(self, share: list[Piece]) -> tuple[bool, bool]:
        """One update. Returns whether any process was told to stop, and whether it is time to save."""
        cursor = self.cursor
        updated = self.updater(share, cursor.step + 1, told=lambda: (self.interruption.received is not None, self._is_late()))
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        cursor.step += 1
        cursor.seconds += seconds
        cursor.tokens += updated.tokens
        cursor.loss += updated.loss
        cursor.counted += updated.counted
        is_last = cursor.step == self.steps
        cursor.unvalidated = is_last or cursor.step % (self.experiment.evaluate_every or self.steps_per_epoch) == 0
        self.teller.update(cursor, updated, updated.tokens / seconds)
        if is_last or cursor.step % max(self.steps // LINES, 1) == 0:
            self.teller.line(cursor, updated)
        stop, save_now = updated.told
        return stop > 0, save_now > 0

    def _validate(self) -> None:
        """Evaluate, and save."""
        metrics = self.evaluate("validation")
        cursor, task = self.cursor, self.task
        if not math.isfinite(metrics["loss"]):
            place = first_bad_layer(self.updater.bare, lambda: self.evaluate("validation"))
            where = bad_weights(self.updater.bare) or "none"
            told = f"the loss on the validation split is {metrics['loss']}; it began in {place}; weights not finite: {where}"
            raise NotFinite(f"step {cursor.step:,}: {told}")
        value, best = metrics[task.metric], cursor.best.get(task.metric)
        better = best is None or (value > best if task.greater_is_better else value < best)
        if better:
            cursor.best_step, cursor.best = cursor.step, metrics
        cursor.unvalidated = False
        self.tell("evaluation", "validation", metrics, better)
        self.save()

    def evaluate(self, split: str, task: Task | None = None) -> dict[str, float]:
        """The metrics on a split, of the experiment's number of items. Raises ``Interrupted`` where a signal comes."""
        experiment, task = self.experiment, task or self.task
        items = experiment.validation_items if split == "validation" else experiment.test_items
        size = experiment.evaluation_batch_size or experiment.batch_size
        if task is not self.task:  # of longer windows fewer, so that as many tokens are scored, in as much memory
            here, there = self.task.max_length, task.max_length
            size, items = max(size * here // there, 1), None if items is None else max(items * here // there, 1)
        with self.display.evaluating(split, len(chosen(len(task.dataset(split)), items))) as bar:
            return evaluate(
                self.updater.bare,
                self.config,
                task,
                split,
                batch_size=size,
                items=items,
                accelerator=self.accelerator,
                place=self.place,
                progress=bar,
                interrupted=lambda: self.interruption.received is not None,
            )

    def tell(self, event: str, split: str, metrics: dict[str, float], best: bool = False, **more: Any) -> None:
        """Record metrics, in all places where they are looked for."""
        self.teller.metrics(event, self.cursor, split, metrics, best, **more)

    def save(self) -> None:
        """A checkpoint of this step."""
        save(self)
        self._rested()

    def _is_late(self) -> bool:
        """Whether it is time to save; the main process has the clock."""
        return self.accelerator.is_main_process and time.monotonic() - self._saved > 60 * self.how.checkpoint_minutes

    def _rested(self) -> None:
        """Time since the last update was not training."""
        self._saved, self._clock = time.monotonic(), time.perf_counter()

    def summary(self, status: str) -> dict[str, Any]:
        """What a result says of the run, whatever came of it."""
        cursor = self.cursor
        return {
            "status": status,
            "message": None,
            "metric": self.task.metric,
            "value": None,
            "validation": cursor.best,
            "test": {},
            "best_step": cursor.best_step,
            "steps": cursor.step,
            "epochs": cursor.step / self.steps_per_epoch,
            "seconds": cursor.seconds,
            "tokens": cursor.tokens,
            "parameters": self.parameters,
            "peak_memory_bytes": peak_memory(self.accelerator.device),
        }
