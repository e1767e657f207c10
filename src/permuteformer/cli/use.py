"""Commands that use a trained model: labels for new items, generated text, explanations."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from permuteformer.cli.console import console, note, progress_bar, say, warnings_as_notes
from permuteformer.formatting import escape_terminal

if TYPE_CHECKING:
    from permuteformer.train.predict import NewItem, Prediction
    from permuteformer.train.trained_model import TrainedModel


def predict(
    folder: Path,
    file: str,
    *,
    output: Path | None = None,
    text: str | None = None,
    second_text: str | None = None,
    image: str | None = None,
    id: str | None = None,
    batch_size: int = 32,
    skip_bad: bool = False,
    device: str | None = None,
) -> None:
    """Label new items with a trained model, with the probability of every label.

    The output has the line where an item starts, its id, its label, the label's probability, and p_LABEL for every label.

    Args:
        folder: run folder of a finished run.
        file: a table, a text file with one text per line, - for standard input, a folder of images, or an image.
        output: .csv or .jsonl file; default: CSV to standard output.
        text: column of texts; default: as in training, else guessed.
        second_text: column of second texts, for pairs.
        image: column of image paths.
        id: column to repeat in the output; default: id, if there is one.
        skip_bad: skip items that cannot be read, and count them.
    """
    from permuteformer.tasks.readers.errors import Errors
    from permuteformer.train.predict import lines_for
    from permuteformer.train.predict import predict as run_model
    from permuteformer.train.trained_model import load

    lines, errors = lines_for(output), Errors(skip=skip_bad)
    if output is not None and os.path.exists(output) and os.path.exists(file) and os.path.samefile(file, output):
        raise ValueError(f"output must be another file than the input, got {str(output)!r}")
    given = {"text": text, "second_text": second_text, "image": image, "id": id}
    count = cut = 0
    with _until_pipe_closes(), warnings_as_notes():
        trained = load(folder, device=device)
        columns = {part: column for part, column in given.items() if column is not None}
        predictions = run_model(trained, file, columns=columns, batch_size=batch_size, errors=errors)
        with progress_bar("predicting", shown=output is not None or not sys.stdout.isatty()) as advance, _writing_to(output) as write:

            def counted() -> Iterator[Prediction]:
                nonlocal count, cut
                for prediction in predictions:
                    count, cut = count + 1, cut + prediction.cut
                    advance(1)
                    yield prediction

            for line in lines(counted(), trained.labels):
                write(line)
    note(f"predicted: {count:,}" + ("" if output is None else f", written to {output}"))
    if cut:
        note(f"{cut:,} were longer than {trained.input.max_length:,} tokens and were cut", style="yellow")
    if errors.count:
        note(f"{errors.count:,} could not be read and were skipped; the first are", style="yellow")
        for error in errors.shown:
            note(f"  {error}")


def generate(
    folder: Path,
    *,
    prompt: str | None = None,
    prompt_file: Path | None = None,
    max_new_tokens: int = 500,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: bool = False,
    output: Path | None = None,
    device: str | None = None,
) -> None:
    """Generate text with a trained language model. The text is printed as it is generated, without the prompt; Ctrl-C stops.

    Args:
        folder: run folder of a finished run.
        prompt: start of the text.
        prompt_file: file with the start of the text.
        max_new_tokens: bytes or words to generate.
        temperature: below 1 is more conservative; 0 always picks the most likely token.
        top_k: sample from this many of the most likely tokens.
        top_p: sample from the most likely tokens with this total probability.
        seed: the same seed gives the same text.
        stop: stop at the end of the document, or of the line for a model of words.
        output: file for the text; default: standard output.
    """
    from permuteformer.train.generate import Generation
    from permuteformer.train.trained_model import load

    if prompt is not None and prompt_file is not None:
        raise ValueError("give either --prompt or --prompt-file")
    text = _read_text(prompt_file) if prompt_file is not None else prompt or ""
    with _until_pipe_closes(), warnings_as_notes():
        trained = load(folder, device=device)
        generation = Generation(trained, text, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop)
        for remark in generation.notes:
            note(f"note: {remark}", style="yellow")
        began, interrupted, done = time.perf_counter(), False, 0
        with _writing_to(output) as write, progress_bar("generating", max_new_tokens, shown=output is not None) as advance:
            try:
                for piece in generation:
                    write(piece)
                    advance(generation.tokens - done)
                    done = generation.tokens
            except KeyboardInterrupt:  # the text so far is kept
                interrupted = True
            if output is None and sys.stdout.isatty():
                write("\n")
    seconds = time.perf_counter() - began
    where = "" if output is None else f", written to {output}"
    note(f"{generation.tokens:,} tokens in {seconds:.1f} s, {generation.tokens / max(seconds, 1e-9):,.1f} per second{where}")
    if interrupted:
        note("interrupted")
        raise SystemExit(130)


def explain(
    folder: Path,
    *,
    text: str | None = None,
    second_text: str | None = None,
    file: Path | None = None,
    second_file: Path | None = None,
    image: Path | None = None,
    item: int | None = None,
    split: str = "test",
    data: str | None = None,
    answer: str | None = None,
    output: Path | None = None,
    device: str | None = None,
) -> None:
    """Show which bytes, words or pixels an answer of a model comes from; for a language model, its next token.

    Contributions are integrated gradients: they add up to the change of the answer's log-odds by the item, and the error of that sum is
    printed. The largest ones are also measured by blanking them.

    Args:
        folder: run folder, or a model that reads bytes.
        text: a text.
        second_text: second text, for pairs.
        file: file with the text.
        second_file: file with the second text, for pairs.
        image: an image file.
        item: number of an item of the run's own data, from 0.
        split: split of the item.
        data: data folder, for --item.
        answer: label, or next character or word, to explain; default: the most likely one.
        output: .html page, .png picture or .json file with all numbers.
    """
    from permuteformer.report.explain import print_explanation
    from permuteformer.report.explain_page import explanation_figure, explanation_page
    from permuteformer.storage import atomic_write
    from permuteformer.train.explain import WORK, summary
    from permuteformer.train.explain import explain as run_model
    from permuteformer.train.trained_model import load

    endings = (".html", ".png", ".json")
    if output is not None and output.suffix.lower() not in endings:
        raise ValueError(f"output must end in {', '.join(endings)}, got {str(output)!r}")
    if output is not None and not output.parent.is_dir():
        raise FileNotFoundError(f"folder not found: {output.parent}")
    with warnings_as_notes():
        trained = load(folder, data, device)
        chosen = _explained_item(trained, [text, second_text], [file, second_file], image, item, split)
        with progress_bar("computing gradients", WORK) as advance:
            explanation = run_model(trained, chosen, answer=answer, progress=advance)
    content: dict[str, Any] = json.loads(json.dumps(explanation.to_json()))
    message = summary(explanation)
    say(message)
    print_explanation(content, console)
    say(f"{explanation.gradients} gradients, {explanation.seconds:.1f} s", style="dim")
    if output is None:
        return
    title = f"{folder.name}: {explanation.answer}"
    if output.suffix.lower() == ".html":
        atomic_write(output, explanation_page(content, title, message).encode("utf-8", "replace"))
    elif output.suffix.lower() == ".png":
        atomic_write(output, explanation_figure(content, title).png)
    else:
        atomic_write(output, (json.dumps(content) + "\n").encode())
    say(f"written to {output}")


def _explained_item(
    trained: TrainedModel, texts: list[str | None], files: list[Path | None], image: Path | None, item: int | None, split: str
) -> NewItem | str:
    from permuteformer.storage import read_bytes
    from permuteformer.tasks.readers.archives import MAX_MEMBER_BYTES
    from permuteformer.train.predict import NewItem, classifier_input, new_item

    options = {"--text": texts[0], "--file": files[0], "--image": image, "--item": item}
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        raise ValueError(f"give one of --text, --file, --image and --item, got {' and '.join(given) or 'none'}")
    if item is not None:
        items = trained.task.items(split)
        if not 0 <= item < len(items):
            raise ValueError(f"item must be from 0 to {len(items) - 1:,} in the {split} split, got {item:,}")
        if trained.kind == "lm":
            return trained.input.texts(items[item])[0]
        input = classifier_input(trained)
        row = {name: items[item][name] for name in input.stored}
        return NewItem(f"item {item:,} of {split}", None, None, row, input.is_cut(row))
    if image is not None:
        if not image.is_file():
            raise FileNotFoundError(f"file not found: {image}")
        return new_item(trained, [read_bytes(image, MAX_MEMBER_BYTES)], str(image))
    found = [_read_text(path) for path in files if path is not None] or [text for text in texts if text is not None]
    if trained.kind == "lm":
        if len(found) != 1:
            raise ValueError(f"a language model reads one text, got {len(found)}")
        return found[0]
    return new_item(trained, found)


def _read_text(path: Path) -> str:
    """Return the text of a file, with lines that end as in training."""
    from permuteformer.storage import read_bytes

    if not path.is_file():
        raise FileNotFoundError(f"file not found: {path}")
    try:
        return read_bytes(path).decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start:,}): convert it, for example with iconv") from None


@contextmanager
def _writing_to(path: Path | None) -> Iterator[Callable[[str], object]]:
    """Yield a function that writes text to a file, atomically, or to standard output, escaped if that is a terminal."""
    from permuteformer.train.predict import new_file

    if path is not None:
        with new_file(path) as file:
            yield file.write
        return
    escape = escape_terminal if sys.stdout.isatty() else str

    def write(text: str) -> None:
        sys.stdout.buffer.write(escape(text).encode("utf-8", "surrogatepass"))
        sys.stdout.buffer.flush()

    yield write


@contextmanager
def _until_pipe_closes() -> Iterator[None]:
    """End without an error if the reader of standard output has ended, as ``head`` does."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it exits
        raise SystemExit(1) from None
