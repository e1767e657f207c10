"""LRA ListOps: the value of a nested expression."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from permuteformer.storage import data_folder
from permuteformer.tasks.base import TASKS, Recipe, Source
from permuteformer.tasks.generators.base import Generated, GenerateOptions
from permuteformer.tasks.generators.listops import FILES, OFFICIAL_COUNTS, first_token_answer, generate_listops
from permuteformer.tasks.inputs import Text
from permuteformer.tasks.lra import LraTask
from permuteformer.tasks.readers.errors import BadItem, Errors
from permuteformer.tasks.readers.tables import rows
from permuteformer.tasks.store import Row
from permuteformer.tasks.tokenization import SymbolTokens

SYMBOLS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
LABELS = tuple("0123456789")
FOLDERS = ("listops-1000", "lra_release/listops-1000", "lra_release/lra_release/listops-1000", "listops")


@TASKS.register("lra-listops")
@dataclass(kw_only=True, eq=False)
class LraListops(LraTask):
    """MIN, MAX, MED and SM (sum modulo 10) of digits, nested up to ten deep; ten classes.

    The paper leaves it out: answering 0 if the first token is MIN, 9 if it is MAX and 4 otherwise beats the models it compares with. That
    answer is one of the task's ``baselines``.

    >>> LraListops().input.vocab_size, LraListops().input.labels[:3]
    (18, ('0', '1', '2'))
    """

    title = "nested MIN, MAX, MED, SM"
    licence = "none stated; generated: yours"
    recipe = Recipe("retrieval", {"batch_size": 16, "epochs": 10, "learning_rate": 5e-4, "warmup_steps": 100})
    official_items = OFFICIAL_COUNTS
    layouts = tuple(f"{folder}/basic_{{train,val,test}}.tsv" for folder in FOLDERS)
    advice = "generate it: permuteformer data generate lra-listops, or download it: permuteformer data fetch lra-listops (8 GB)"

    max_length: int = 2002
    """Tokens of the longest expression, with those around it; longer ones are cut."""

    @property
    def input(self) -> Text:
        return Text(LABELS, self.max_length, SymbolTokens(SYMBOLS, self.alphabet(len(SYMBOLS))))

    def sources(self, folder: Path) -> Iterator[Source]:
        for place in FOLDERS:
            files = {split: folder / place / name for split, name in FILES.items()}
            if all(path.is_file() for path in files.values()):
                yield Source(f"{place}/basic_*.tsv", tuple(files.values()), partial(self._read, files))

    def _read(self, files: dict[str, Path], errors: Errors) -> Iterator[tuple[str, Row]]:
        input = self.input
        for split, path in files.items():
            for line, row in rows(path, errors):
                source, target = row.get("Source"), row.get("Target")
                if source is None or target is None:
                    raise BadItem(path, 1, f"the columns must be Source and Target, got {', '.join(row)}")
                with errors.at(path, line):
                    if target not in LABELS:
                        raise ValueError(f"Target must be a digit, got {target!r:.50}")
                    yield split, {**input.row([source]), "label": int(target)}

    def column_names(self) -> dict[str, str]:
        return {"text": "Source"}

    def baselines(self, split: str, numbers: np.ndarray | None = None) -> dict[str, float]:
        items = self.rows(split)
        chosen = range(len(items)) if numbers is None else numbers.tolist()
        right = sum(first_token_answer(SYMBOLS[items[n]["value"][0]]) == items[n]["label"] for n in chosen)
        return {**super().baselines(split, numbers), "from the first token alone": right / len(chosen)}

    def generate(self, options: GenerateOptions) -> Generated:
        """Generate expressions in the layout of the official files."""
        return generate_listops(data_folder(self.data), options)
