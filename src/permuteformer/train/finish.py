"""The end of a run: the best weights are tested once, looked at, and saved as a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from permuteformer.experiments.layout import LOOKS, RESULT
from permuteformer.folders import remove_folder, whole_folder
from permuteformer.models import PermuteFormerConfig
from permuteformer.models.backbone import PermuteFormerPreTrainedModel
from permuteformer.tasks import TASKS, Task
from permuteformer.tokens import PAPER
from permuteformer.train import checkpoint
from permuteformer.train.build import build_model
from permuteformer.train.card import model_card
from permuteformer.train.looks import look
from permuteformer.train.run import Run
from permuteformer.train.state import load_model, model_tensors

if TYPE_CHECKING:
    from permuteformer.train.loop import Trainer

LOOKED_AT = 4
"""Items whose attention is looked at."""


def finish(trainer: Trainer) -> dict[str, Any]:
    """Test the weights of the best validation, and write the model and the result."""
    run, cursor, task, bare = trainer.run_folder, trainer.cursor, trainer.task, trainer.updater.bare
    trained = trainer.summary("finished")  # before tests at longer lengths, which take memory of their own
    if cursor.best_step is not None and cursor.best_step != cursor.step:
        load_model(bare, _best(run, cursor.best_step))
    test = trainer.evaluate("test")
    trainer.tell("test", "test", test)
    for length in trainer.experiment.test_lengths:
        metrics = trainer.evaluate("test", _at_length(task, length))
        trainer.tell("length", "test", metrics, length=length, times=length / task.max_length)
    weights = model_tensors(bare)
    result = {**trained, "value": test[task.metric], "test": test}

    def write() -> None:
        model = build_model(trainer.config, task.kind).eval()  # whole and plain, whatever became of the one that was trained
        load_model(model, weights)
        _save(model, task, run, result)
        dataset = task.dataset("validation")
        batch = task.collate([dataset[n] for n in range(min(LOOKED_AT, len(dataset)))])
        run.write(LOOKS, look(model if trainer.how.shard else model.to(trainer.accelerator.device), task, batch))
        run.write(RESULT, result)

    trainer.teller.on_main(write)
    return result


def check_lengths(task: Task, config: PermuteFormerConfig, lengths: Iterable[int]) -> None:
    """Raise before training where a model cannot be tested at these lengths after it."""
    for length in lengths:
        _at_length(task, length)
        for part in (config.attention, *config.position):
            if part.get("max_length", length) < length:
                raise ValueError(f"test_lengths has {length}, and {part['name']} of this model ends at {part['max_length']}: leave it out")


def _at_length(task: Task, length: int) -> Task:
    """The same text in windows of another length, of which as large a part is context."""
    if task.kind != "lm":
        raise ValueError(f"test_lengths are of language models; {task.name} is a task of kind {task.kind!r}: leave them out")
    options = {name: getattr(task, name) for name in TASKS.options(task.name)}
    longer: Task = type(task)(**{**options, "length": length, "context": length * options["context"] // options["length"]})
    return longer


def _best(run: Run, step: int) -> dict[str, Tensor]:
    try:
        return checkpoint.load(run.checkpoints, step).tensors["model"]
    except checkpoint.Damaged as error:
        raise checkpoint.Damaged(f"{error}. It has the best weights, which are to be tested: train anew in another folder") from error


def _save(model: PermuteFormerPreTrainedModel, task: Task, run: Run, result: dict[str, Any]) -> None:
    """A folder for ``from_pretrained``, with a card, and the tokenizer where there is one."""
    import transformers

    from permuteformer.models.tokenizer import ByteTokenizer, tokenizer_of_words

    transformers.logging.disable_progress_bar()  # "writing shards", of which there is one
    path = run.path / "model"
    remove_folder(path)
    with whole_folder(path) as partial:
        model.save_pretrained(partial)
        (partial / "README.md").write_text(model_card(run, result), encoding="utf-8")
        if words := getattr(task, "vocabulary", None):
            tokenizer_of_words(words).save_pretrained(partial)
        elif task.grid is None and task.vocab_size == PAPER.size:
            ByteTokenizer(prompts=task.kind == "lm").save_pretrained(partial)
