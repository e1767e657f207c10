"""The command that says what an answer came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from permuteformer.cli.terminal import console, errors_in_words, say
from permuteformer.cli.use import Device, bar, warnings_as_notes

if TYPE_CHECKING:
    from permuteformer.train.saved import Trained
    from permuteformer.train.unlabelled import Unlabelled

ENDINGS = (".html", ".png", ".json")


def explain(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run, or of a model of bytes.")],
    text: Annotated[list[str] | None, typer.Option(help="A text; given twice for models of pairs.")] = None,
    file: Annotated[list[Path] | None, typer.Option(help="The same from a file of UTF-8; given twice for pairs.")] = None,
    image: Annotated[Path | None, typer.Option(help="An image.")] = None,
    item: Annotated[int | None, typer.Option(help="An item of the run's own data, by its number from 0.", min=0)] = None,
    split: Annotated[str, typer.Option(help="The split that the item is of.")] = "test",
    data: Annotated[str | None, typer.Option(help="The data folder, for --item.")] = None,
    answer: Annotated[str | None, typer.Option(help="The label, or next character or word, to explain; the likeliest unless told.")] = None,
    output: Annotated[Path | None, typer.Option(help="A .html page, a .png picture or a .json file with all numbers.")] = None,
    device: Device = None,
) -> None:
    """Which bytes, words or pixels a model's answer came from; of a language model, which ones its next token looked at.

    Values are integrated gradients: of all bytes they add up to how much the item changes the log-odds of the answer, and it is said what
    is missing to that. The spans with the largest values are blanked out as well, and it is told how far the log-odds fall.
    """
    from permuteformer.folders import write_whole
    from permuteformer.report.explained import print_explanation
    from permuteformer.report.explained_page import explained_figure, explained_page
    from permuteformer.train.explain import WORK, in_words
    from permuteformer.train.explain import explain as run_model
    from permuteformer.train.saved import load_any

    with errors_in_words(), warnings_as_notes():
        _check_output(output)
        trained = load_any(run, data, device)
        given = _item(trained, text, file, image, item, split)
        with bar("following gradients", WORK) as advance:
            explanation = run_model(trained, given, answer=answer, progress=advance)
        content: dict[str, Any] = json.loads(json.dumps(explanation.to_json()))
        told = in_words(explanation)
        say(told)
        print_explanation(content, console)
        say(f"{explanation.gradients} gradients, {explanation.seconds:.1f} s", style="dim")
        if output is None:
            return
        title = f"{run.name}: {explanation.answer}"
        if output.suffix.lower() == ".html":
            write_whole(output, explained_page(content, title, told).encode("utf-8", "replace"))
        elif output.suffix.lower() == ".png":
            write_whole(output, explained_figure(content, title).png)
        else:
            write_whole(output, (json.dumps(content) + "\n").encode())
        say(f"written to {output}")


def _check_output(output: Path | None) -> None:
    if output is None:
        return
    if output.suffix.lower() not in ENDINGS:
        raise ValueError(f"output must end in {', '.join(ENDINGS)}; it is {str(output)!r}")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {output.parent} to write {output.name} into: make it first")


def _item(
    trained: Trained, texts: list[str] | None, files: list[Path] | None, image: Path | None, number: int | None, split: str
) -> Unlabelled | str:
    """What is to be explained; one way of giving it, and only one."""
    from permuteformer.cli.use import read_text
    from permuteformer.folders import content_of
    from permuteformer.tasks.readers.archives import MAX_MEMBER_BYTES
    from permuteformer.train.unlabelled import item_of_image, item_of_split, item_of_texts

    given = [
        name for name, value in {"--text": texts, "--file": files, "--image": image, "--item": number}.items() if value not in (None, [])
    ]
    if len(given) != 1:
        told = "none was given" if not given else f"{' and '.join(given)} were given"
        raise ValueError(f"give what is to be explained by one of --text, --file, --image and --item; {told}")
    if number is not None:
        return item_of_split(trained, split, number)
    if image is not None:
        if not image.is_file():
            raise FileNotFoundError(f"there is no image {image}: check its name and folder")
        return item_of_image(trained, content_of(image, MAX_MEMBER_BYTES), str(image))
    found = [read_text(path) for path in files] if files else texts or []
    if trained.kind == "lm":
        if len(found) != 1:
            raise ValueError(f"a language model reads one text; {len(found)} were given")
        return found[0]
    return item_of_texts(trained, found)
