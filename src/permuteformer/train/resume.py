"""Saving a run under way, and going on with it bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.optim import Optimizer

from permuteformer.texts import printable
from permuteformer.train import checkpoint
from permuteformer.train.checkpoint import Checkpoint
from permuteformer.train.finite import NotFinite, bad_tensors
from permuteformer.train.state import (
    Cursor,
    load_model,
    load_optimizer,
    model_tensors,
    optimizer_tensors,
    random_state,
    set_random_state,
)

if TYPE_CHECKING:
    from permuteformer.train.loop import Trainer


def save(trainer: Trainer) -> None:
    """A checkpoint of this step; the one before stays, and the best. All processes must call it."""
    updater, accelerator, cursor, run = trainer.updater, trainer.accelerator, trainer.cursor, trainer.run_folder
    tensors = {"model": model_tensors(updater.bare), "optimizer": optimizer_tensors(updater.bare, updater.optimizer)}
    own = [random_state(accelerator.device)]
    randoms = gather_object(own) if accelerator.num_processes > 1 else own
    how = trainer.how
    state = {"cursor": cursor.to_json(), "random": randoms, "items": trainer.items, "shard": how.shard, "stretches": how.sequence_parallel}
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler.state_dict()

    def write() -> None:
        if bad := bad_tensors(tensors):  # what no loss has shown yet is not gone on from
            raise NotFinite(f"step {cursor.step:,}: not finite, and not saved: {bad}")
        checkpoint.save(run.checkpoints, cursor.step, {**state, "recorded": run.recorded()}, tensors)
        _tidy(trainer)

    trainer.teller.on_main(write)


def resume(trainer: Trainer) -> None:
    """Go on from the last good checkpoint, if there is one."""
    updater, accelerator, run = trainer.updater, trainer.accelerator, trainer.run_folder
    latest, problems = checkpoint.load_latest(run.checkpoints)
    for problem in problems:
        trainer.teller.say(f"{problem}; {'the checkpoint before it is used' if latest else 'there is no good one before it'}")
    if latest is None:
        trainer.teller.on_main(lambda: run.rewind(0))
        return
    state = latest.state
    if not isinstance(state.get("random"), list) or not isinstance(state.get("recorded"), int):
        raise ValueError(f"{run.path / 'checkpoints'} has a checkpoint that is not of a run: begin anew in another folder")
    if len(state["random"]) != accelerator.num_processes:
        raise ValueError(
            f"{run.path} was begun on {len(state['random'])} processes, and this is {accelerator.num_processes}: go on with as many, "
            "or choose another folder with --output"
        )
    if state.get("shard", trainer.how.shard) != trainer.how.shard:
        raise ValueError(f"{run.path} was begun {'with' if state['shard'] else 'without'} --shard: go on as it was begun")
    if state.get("stretches", 1) != trainer.how.sequence_parallel:
        raise ValueError(f"{run.path} was begun with --sequence-parallel {state.get('stretches', 1)}: go on as it was begun")
    if state.get("items", trainer.items) != trainer.items:
        raise ValueError(
            f"the data of {run.path} has changed: it had {state['items']:,} items to train on, and has {trainer.items:,}: "
            "bring back the data, or choose another folder with --output"
        )
    trainer.cursor = put_in_place(latest, updater.bare, updater.optimizer, accelerator.device, accelerator.process_index)
    if accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    trainer.teller.on_main(lambda: run.rewind(state["recorded"]))
    trainer.teller.on_main(lambda: _tidy(trainer))  # a run may have been killed while it did, after its last step
    trainer.teller.say(f"going on from step {trainer.cursor.step:,} of {trainer.steps:,}")


def _tidy(trainer: Trainer) -> None:
    checkpoint.tidy(trainer.run_folder.checkpoints, trainer.cursor.step, keep={trainer.cursor.best_step or 0})


def put_in_place(latest: Checkpoint, model: nn.Module, optimizer: Optimizer, device: torch.device, process: int) -> Cursor:
    """Weights, Adam's state and random numbers of a checkpoint; how far it had come is returned.

    Raises:
        ValueError: they are not those of this model, whoever wrote them.
    """
    try:
        load_model(model, latest.tensors["model"])
        load_optimizer(model, optimizer, latest.tensors["optimizer"])
        cursor = Cursor.from_json(latest.state["cursor"])
        set_random_state(latest.state["random"][process], device)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        said = printable(" ".join(f"{type(error).__name__}: {error}".split()))
        raise ValueError(f"the checkpoint of step {latest.step:,} is not of this run ({said}): begin anew in another folder") from error
    return cursor
