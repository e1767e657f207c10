"""Long-Range Arena's two protocols: the benchmark's own, and that of the paper's authors."""

from __future__ import annotations

from dataclasses import dataclass

from permuteformer.tasks.base import Task
from permuteformer.tokens import TEXT_LENGTH, Alphabet


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise unless an option has one of its values."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


@dataclass(kw_only=True, eq=False)
class LraTask(Task):
    """A task of Long-Range Arena."""

    protocol: str = "paper"
    """Token ids: those of the paper's authors ("paper"), or of Long-Range Arena ("lra")."""
    validate_on: str | None = None
    """Validation split: "test" as the paper's authors did; default: the "given" one, else a tenth of "train"."""

    def __post_init__(self) -> None:
        check_choice("protocol", self.protocol, ("paper", "lra"))
        check_choice("validate_on", self.validation_split, (self._usual_validation, "test"))

    @property
    def _usual_validation(self) -> str:
        return "given" if "validation" in self.official_items else "train"

    @property
    def validation_split(self) -> str:
        return self.validate_on or self._usual_validation

    def alphabet(self, count: int = 256, pixels: bool = False) -> Alphabet:
        """Return the ids of ``count`` values."""
        if self.protocol == "paper":
            return Alphabet.paper(count)
        return Alphabet.lra_pixels() if pixels else Alphabet.lra(count)


@dataclass(kw_only=True, eq=False)
class LraTextTask(LraTask):
    """A task of Long-Range Arena with texts of any length."""

    max_length: int | None = None
    """Tokens of the longest text, with those around it; longer ones are cut. Default: 4,000, in LRA's protocol beside CLS."""

    @property
    def protocol_length(self) -> int:
        """Tokens of the longest text by the protocol."""
        return TEXT_LENGTH if self.protocol == "paper" else TEXT_LENGTH + 1

    def notes(self) -> list[str]:
        if self.max_length is None or self.max_length >= self.protocol_length:
            return super().notes()
        return [*super().notes(), f"texts are cut to {self.max_length:,} tokens; the protocol has {self.protocol_length:,}"]
