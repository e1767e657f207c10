"""The end of a run: the best weights are tested once, looked at, and saved as a model."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from permuteformer.folders import whole_folder
from permuteformer.tasks import TASKS, Task
from permuteformer.tokens import PAPER
from permuteformer.train import checkpoint
from permuteformer.train.looks import look
from permuteformer.train.run import LOOKS, RESULT
from permuteformer.train.state import load_model, model_tensors

if TYPE_CHECKING:
    from permuteformer.train.loop import Trainer

LOOKED_AT = 4
"""Items whose attention is looked at."""


def finish(trainer: Trainer) -> dict[str, Any]:
    """Test the weights of the best validation, and write the model and the result."""
    run, cursor, task = trainer.run_folder, trainer.cursor, trainer.task
    if cursor.best_step not in (None, cursor.step):
        best = checkpoint.load(run.checkpoints, cursor.best_step)  # type: ignore[arg-type]
        load_model(trainer.bare, best.tensors["model"])
    test = trainer.evaluate("test")
    trainer.tell("test", "test", test)
    for length in trainer.experiment.test_lengths:
        longer = _at_length(task, length)
        trainer.tell("length", "test", trainer.evaluate("test", longer), length=length, times=length / task.max_length)
    weights = model_tensors(trainer.bare)
    result = {**trainer.summary("finished"), "value": test[task.metric], "test": test}
    if trainer.accelerator.is_main_process:
        _save_model(trainer, weights)
        if not trainer.how.shard:
            dataset = task.dataset("validation")
            batch = task.collate([dataset[n] for n in range(min(LOOKED_AT, len(dataset)))])
            run.write(LOOKS, look(trainer.bare, task, batch.to(trainer.accelerator.device)))
        run.write(RESULT, result)
    trainer.accelerator.wait_for_everyone()
    return result


def _at_length(task: Task, length: int) -> Task:
    """The same text in windows of another length, of which as large a part is context."""
    if task.kind != "lm":
        raise ValueError(f"test_lengths are of language models; {task.name} is a task of kind {task.kind!r}")
    options = {name: getattr(task, name) for name in TASKS.options(task.name)}
    longer: Task = type(task)(**{**options, "length": length, "context": length * options["context"] // options["length"]})
    return longer


def _save_model(trainer: Trainer, weights: dict[str, Any]) -> None:
    """A folder for ``from_pretrained``, with the tokenizer where there is one."""
    import transformers

    from permuteformer.models.tokenizer import ByteTokenizer, tokenizer_of_words

    transformers.logging.disable_progress_bar()  # "writing shards", of which there is one
    path, task = trainer.run_folder.path / "model", trainer.task
    shutil.rmtree(path, ignore_errors=True)
    with whole_folder(path) as partial:
        trainer.bare.save_pretrained(partial, state_dict=weights)  # type: ignore[operator]
        if words := getattr(task, "vocabulary", None):
            tokenizer_of_words(words).save_pretrained(partial)
        elif task.grid is None and task.vocab_size == PAPER.size:
            ByteTokenizer(prompts=task.kind == "lm").save_pretrained(partial)
