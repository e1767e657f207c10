"""Commands that use a trained model: labels for new items, and texts that go on."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from permuteformer.cli.terminal import errors_in_words
from permuteformer.terminal import PlainConsole, described
from permuteformer.texts import for_terminal

if TYPE_CHECKING:
    from permuteformer.train.predict import Prediction

RunFolder = Annotated[Path, typer.Argument(help="The folder of a finished run, as permuteformer train makes it.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda …; a GPU if there is one, unless told.")]


def predict(
    run: RunFolder,
    file: Annotated[str, typer.Argument(help="Table, text file (a text a line), - for standard input; folder of images, image.")],
    output: Annotated[Path | None, typer.Option(help="A .csv or .jsonl file; CSV to standard output unless told.")] = None,
    text_column: Annotated[str | None, typer.Option(help="The table's column of texts.")] = None,
    first_column: Annotated[str | None, typer.Option(help="Of pairs: the column of first texts.")] = None,
    second_column: Annotated[str | None, typer.Option(help="Of pairs: that of second texts.")] = None,
    image_column: Annotated[str | None, typer.Option(help="The column of paths of images.")] = None,
    id_column: Annotated[str | None, typer.Option(help="A column to be repeated in the output; id if there is one.")] = None,
    batch_size: Annotated[int, typer.Option(help="Items at a time.", min=1)] = 32,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out items that cannot be read, and count them.")] = False,
    device: Device = None,
) -> None:
    """Label new items by a trained model, with the probability of every label.

    Columns that are not told are those of training, or guessed from their names. The output has the line that an item starts at, its id,
    its label, the label's probability, and p_LABEL for every label.
    """
    from permuteformer.tasks.readers.problems import Problems
    from permuteformer.train.outputs import lines_for
    from permuteformer.train.predict import predict as run_model
    from permuteformer.train.saved import load

    given = {"text": text_column, "first": first_column, "second": second_column, "image": image_column, "id": id_column}
    problems = Problems(skip=skip_bad)
    counts = {"items": 0, "cut": 0}
    with errors_in_words(), _until_nobody_reads(), warnings_as_notes():
        lines = lines_for(output)
        if output is not None and os.path.exists(output) and os.path.exists(file) and os.path.samefile(file, output):
            raise ValueError(f"output must be another file than the one that is read; it is {str(output)!r}")
        trained = load(run, device=device)
        columns = {part: column for part, column in given.items() if column is not None}
        predictions = run_model(trained, file, columns=columns, batch_size=batch_size, problems=problems)
        with bar("predicting", shown=output is not None or not sys.stdout.isatty()) as advance:

            def counted() -> Iterator[Prediction]:
                for prediction in predictions:
                    counts["items"] += 1
                    counts["cut"] += prediction.cut
                    advance(1)
                    yield prediction

            with _writing_to(output) as write:
                for line in lines(counted(), trained.labels):
                    write(line)
    _tell(f"predicted: {counts['items']:,}" + ("" if output is None else f", written to {output}"))
    if counts["cut"]:
        _tell(f"cut, as they were longer than {trained.input.max_length:,} tokens: {counts['cut']:,}", style="yellow")
    if problems.count:
        _tell(f"left out, as they could not be read: {problems.count:,}; the first are", style="yellow")
        for problem in problems.shown:
            _tell(f"  {problem}")


def generate(
    run: RunFolder,
    prompt: Annotated[str | None, typer.Option(help="The text to go on with; the beginning of a text unless told.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="The same from a file.")] = None,
    tokens: Annotated[int, typer.Option(help="Bytes or words to generate.", min=1)] = 500,
    temperature: Annotated[float, typer.Option(help="Below 1 is more careful; 0 takes the likeliest always.", min=0)] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Choose among so many of the likeliest.", min=1)] = None,
    top_p: Annotated[float | None, typer.Option(help="Choose among the likeliest that come to this probability.", min=0, max=1)] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.", min=0)] = 0,
    stop: Annotated[bool, typer.Option("--stop", help="End with the document; with a model of words, with the line.")] = False,
    output: Annotated[Path | None, typer.Option(help="A file for the text; standard output unless told.")] = None,
    device: Device = None,
) -> None:
    """Go on with a text by a trained language model; the text is shown as it comes, without the prompt. Ctrl-C ends it."""
    from permuteformer.train.generate import generate as run_model
    from permuteformer.train.saved import load

    with errors_in_words(), _until_nobody_reads(), warnings_as_notes():
        if prompt is not None and prompt_file is not None:
            raise ValueError("give --prompt or --prompt-file, one of them")
        text = read_text(prompt_file) if prompt_file is not None else prompt or ""
        trained = load(run, device=device)
        generation = run_model(trained, text, tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop)
        for note in generation.notes:
            _tell(f"note: {note}", style="yellow")
        begun = time.perf_counter()
        interrupted, done = False, 0
        with _writing_to(output) as write, bar("generating", tokens, shown=output is not None) as advance:
            try:
                for piece in generation:
                    write(piece)
                    advance(generation.tokens - done)
                    done = generation.tokens
            except KeyboardInterrupt:  # what there is of the text is kept
                interrupted = True
            if output is None and sys.stdout.isatty():
                write("\n")
    seconds = time.perf_counter() - begun
    where = "" if output is None else f", written to {output}"
    _tell(f"{generation.tokens:,} tokens in {seconds:.1f} s, {generation.tokens / max(seconds, 1e-9):,.1f} a second{where}")
    if interrupted:
        _tell("interrupted")
        raise typer.Exit(130)


def read_text(path: Path) -> str:
    """The text of a file, with lines that end as in training."""
    from permuteformer.folders import content_of
    from permuteformer.tasks.readers.unpacking import check_file

    check_file(path)
    try:
        return content_of(path).decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start:,}): save it as UTF-8") from None


@contextmanager
def _writing_to(output: Path | None) -> Iterator[Callable[[str], object]]:
    """Writes text to a file, or to standard output at once, as UTF-8; what a terminal would obey is escaped for it."""
    from permuteformer.train.outputs import new_file

    if output is not None:
        with new_file(output) as file:
            yield file.write
        return
    shown = for_terminal if sys.stdout.isatty() else str
    yield lambda text: typer.echo(shown(text).encode("utf-8", "surrogatepass"), nl=False)


def _tell(text: str, style: str = "") -> None:
    """Beside the output: to standard error."""
    PlainConsole(stderr=True).print(text, style=style, soft_wrap=True)


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """What the model warns of, in words, without the line of code that says it."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _tell(f"note: {message}", style="yellow")
        yield


@contextmanager
def _until_nobody_reads() -> Iterator[None]:
    """End without a word where the reader of a pipe has gone, as ``head`` does."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it ends
        raise typer.Exit(1) from None


@contextmanager
def bar(title: str, total: int | None = None, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A progress bar beside the output, where there is a terminal to see it."""
    parts = (described(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = PlainConsole(stderr=True)
    hidden = not (shown and console.is_terminal)  # Rich would write an empty line to a file
    with Progress(*parts, console=console, transient=True, redirect_stdout=False, redirect_stderr=False, disable=hidden) as progress:
        bar = progress.add_task(title, total=total)
        yield lambda count: progress.advance(bar, count)
