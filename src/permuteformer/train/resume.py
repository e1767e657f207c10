"""Saving a run under way, and going on with it bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.utils import gather_object

from permuteformer.train import checkpoint
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
        checkpoint.save(run.checkpoints, cursor.step, {**state, "recorded": run.recorded()}, tensors)
        checkpoint.tidy(run.checkpoints, cursor.step, keep={cursor.best_step or 0})

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
    load_model(updater.bare, latest.tensors["model"])
    load_optimizer(updater.bare, updater.optimizer, latest.tensors["optimizer"])
    trainer.cursor = Cursor(**state["cursor"])
    if accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    set_random_state(state["random"][accelerator.process_index], accelerator.device)
    trainer.teller.on_main(lambda: run.rewind(state["recorded"]))
    trainer.teller.say(f"going on from step {trainer.cursor.step:,} of {trainer.steps:,}")
