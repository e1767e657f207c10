"""What an experiment is: one training run or one measurement, as data that decides its result."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from permuteformer.registry import unknown

PRECISIONS = ("float32", "bfloat16", "float16")
MEASURED = ("training", "inference")
"""What a measurement may be of: a step with its update, or a batch forwards."""


AT_A_TIME = "micro_batch_size"
"""What does not make another experiment of one: how much of a batch is computed at a time."""


def differing(there: Any, wanted: Mapping[str, Any]) -> list[str]:
    """In which fields what a file says of an experiment or measurement is not the one that is wanted.

    >>> differing({"steps": 3, "micro_batch_size": 4}, {"steps": 5, "micro_batch_size": None})
    ['steps']
    """
    there, wanted = there if isinstance(there, dict) else {}, json.loads(json.dumps(wanted))
    return [name for name in sorted({*there, *wanted} - {AT_A_TIME}) if there.get(name) != wanted.get(name)]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One training run. Everything that decides its result stands here; where its data and its folder are does not."""

    task: str
    """A task of the registry."""
    model: str
    """A preset."""
    task_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the task."""
    model_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the model's configuration that differ from the preset's."""

    epochs: float | None = None
    """Times that the training items are gone through; give this or steps."""
    steps: int | None = None
    """Updates of the weights; give this or epochs."""
    batch_size: int = 32
    """Items an update, over all processes."""
    micro_batch_size: int | None = None
    """Items that a process computes at a time; gradients of several add up to an update. All of its share unless told."""
    by_length: bool = True
    """Batch items of like lengths, so that little is padding."""

    learning_rate: float = 1e-3
    """The highest, at the end of the warm-up; from there on it falls with the square root of the step."""
    warmup_steps: int = 100
    """Updates over which the learning rate rises."""
    warmup_from: float = 0.0
    """The learning rate before the first update."""
    adam_beta1: float = 0.9
    """Adam: how much of the mean of gradients is kept."""
    adam_beta2: float = 0.999
    """Adam: how much of the mean of their squares is kept."""
    adam_epsilon: float = 1e-8
    """Adam: added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    gradient_clip: float | None = None
    """The largest norm of the gradient; none unless told."""
    precision: str = "float32"
    """float32, bfloat16 or float16, for what autocast thinks fit."""
    seed: int = 0
    """Of weights, of dropout, and of the order of the data."""

    train_items: int | None = None
    """Train on so many items, chosen by chance but always the same; all unless told."""
    validation_items: int | None = None
    """Validate on so many; all unless told."""
    test_items: int | None = None
    """Test on so many; all unless told."""
    evaluate_every: int | None = None
    """Updates between validations; once an epoch unless told."""
    evaluation_batch_size: int | None = None
    """Items a batch of evaluation; as in training unless told."""
    test_lengths: tuple[int, ...] = ()
    """Language models: further lengths to test the trained model at."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "task_options", dict(self.task_options))
        object.__setattr__(self, "model_fields", dict(self.model_fields))
        object.__setattr__(self, "test_lengths", tuple(self.test_lengths))
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"give epochs or steps, one of them; they are {self.epochs!r:.100} and {self.steps!r:.100}")
        for name in ("steps", "batch_size", "micro_batch_size", "evaluate_every", "evaluation_batch_size"):
            _at_least(name, getattr(self, name), 1)
        for name in ("train_items", "validation_items", "test_items"):
            _at_least(name, getattr(self, name), 1)
        for name in ("warmup_steps", "seed"):
            _at_least(name, getattr(self, name), 0)
        for length in self.test_lengths:
            _at_least("test_lengths", length, 1)
        for name in ("epochs", "learning_rate", "adam_epsilon", "gradient_clip"):
            value = getattr(self, name)
            if value is not None and not (_number(name, value) > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a number above 0; it is {value}")
        for name in ("warmup_from", "weight_decay"):
            value = getattr(self, name)
            if not (_number(name, value) >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be 0 or a number above it; it is {value}")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= _number(name, getattr(self, name)) < 1:
                raise ValueError(f"{name} must be from 0 to below 1; it is {getattr(self, name)}")
        if self.precision not in PRECISIONS:
            raise ValueError(unknown("precision", self.precision, PRECISIONS))

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "test_lengths": list(self.test_lengths)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Experiment:
        """From plain data; a field that is not known is refused."""
        return cls(**_known(cls, "an experiment", content))


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measurement of time and memory, on random tokens: no data is needed."""

    kind: str
    """``"training"`` (a step, forward and backward and update) or ``"inference"`` (a batch forwards)."""
    task: str
    """A task of the registry; of it the kind of model and the grid are taken."""
    model: str
    """A preset."""
    length: int
    """Tokens of a sequence."""
    task_options: Mapping[str, Any] = field(default_factory=dict)
    model_fields: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 1
    """Sequences at a time."""
    items: int | None = None
    """Training items of an epoch, to say what an epoch takes."""
    repeats: int = 5
    """Timed; the best counts."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "task_options", dict(self.task_options))
        object.__setattr__(self, "model_fields", dict(self.model_fields))
        if self.kind not in MEASURED:
            raise ValueError(unknown("kind of measurement", self.kind, MEASURED))
        for name in ("task", "model"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a name; it is {getattr(self, name)!r:.100}")
        for name in ("length", "batch_size", "repeats"):
            if getattr(self, name) is None:
                raise TypeError(f"{name} must be a whole number; it is None")
            _at_least(name, getattr(self, name), 1)
        _at_least("items", self.items, 1)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Measurement:
        """From plain data; a field that is not known is refused."""
        return cls(**_known(cls, "a measurement", content))


@dataclass(frozen=True)
class Cell:
    """One run of a table: where it stands there, and what is done."""

    table: str
    """``"1"`` to ``"4"``, or the name of a table of our own."""
    row: str
    column: str
    seed: int
    work: Experiment | Measurement

    @property
    def name(self) -> str:
        """Unique within a preset; a folder's name."""
        return f"table{self.table}/{self.column}/{self.row}-seed{self.seed}"

    @property
    def key(self) -> str:
        """The same for cells that do the same work, so that one of them is enough."""
        return type(self.work).__name__ + json.dumps(self.work.to_json(), sort_keys=True)


def _known(kind: type, what: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
    names = {entry.name for entry in fields(kind)}
    for name in content:
        if name not in names:
            raise ValueError(unknown(f"field of {what}", name, names))
    return content


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; it is {value!r:.100}")
    return value


def _at_least(name: str, value: Any, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number; it is {value!r:.100}")
    if value < least:
        raise ValueError(f"{name} must be {least} or more; it is {value!r:.100}")
