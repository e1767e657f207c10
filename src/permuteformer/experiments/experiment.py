"""Experiments as data: a training run, or a measurement of time and memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from permuteformer.registry import unknown

PRECISIONS = ("float32", "bfloat16", "float16")
MEASURED = ("training", "inference")

IGNORED_FIELDS = ("micro_batch_size",)
"""Fields that do not change a result."""


def differing_fields(old: Any, new: Mapping[str, Any]) -> list[str]:
    """Return the fields in which a recorded experiment or measurement differs from another.

    >>> differing_fields({"steps": 3, "micro_batch_size": 4}, {"steps": 5, "micro_batch_size": None})
    ['steps']
    """
    old, new = old if isinstance(old, dict) else {}, json.loads(json.dumps(new))
    return [name for name in sorted({*old, *new} - {*IGNORED_FIELDS}) if old.get(name) != new.get(name)]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A training run: everything that decides its result."""

    task: str
    """Name of the task."""
    model: str
    """Name of the preset."""
    task_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the task."""
    model_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the configuration that differ from the preset's."""

    epochs: float | None = None
    """Passes over the training items; give this or steps."""
    steps: int | None = None
    """Updates; give this or epochs."""
    batch_size: int = 32
    """Items per update, over all processes."""
    micro_batch_size: int | None = None
    """Items that a process computes at a time; default: its whole share. Smaller needs less memory."""
    by_length: bool = True
    """Put items of similar lengths into a batch, to save padding."""

    learning_rate: float = 1e-3
    """Peak learning rate, at the end of the warm-up; then it decays with the inverse square root of the step."""
    warmup_steps: int = 100
    """Updates of the warm-up."""
    warmup_from: float = 0.0
    """Learning rate before the first update."""
    adam_beta1: float = 0.9
    """Adam: decay of the mean of gradients."""
    adam_beta2: float = 0.999
    """Adam: decay of the mean of squared gradients."""
    adam_epsilon: float = 1e-8
    """Adam: added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    gradient_clip: float | None = None
    """Largest norm of the gradient; default: no clipping."""
    precision: str = "float32"
    """float32, bfloat16 or float16 (by autocast)."""
    seed: int = 0
    """Seed of weights, dropout and the order of the data."""

    train_items: int | None = None
    """Train on this many items, drawn at random but always the same; default: all."""
    validation_items: int | None = None
    """Validate on this many items; default: all."""
    test_items: int | None = None
    """Test on this many items; default: all."""
    evaluate_every: int | None = None
    """Updates between validations; default: one epoch."""
    evaluation_batch_size: int | None = None
    """Items per batch of evaluation; default: as in training."""
    test_lengths: tuple[int, ...] = ()
    """Language models: further lengths to test the trained model at, such as 1024,2048."""

    def __post_init__(self) -> None:
        _copy(self, task_options=dict, model_fields=dict, test_lengths=tuple)
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"give either epochs or steps, got {self.epochs!r:.100} and {self.steps!r:.100}")
        _check(self, int, "at least 1", "steps", "batch_size", "micro_batch_size", "evaluate_every", "evaluation_batch_size")
        _check(self, int, "at least 1", "train_items", "validation_items", "test_items", "test_lengths")
        _check(self, int, "at least 0", "warmup_steps", "seed")
        _check(self, float, "above 0", "epochs", "learning_rate", "adam_epsilon", "gradient_clip")
        _check(self, float, "at least 0", "warmup_from", "weight_decay")
        _check(self, float, "from 0 to below 1", "adam_beta1", "adam_beta2")
        if self.precision not in PRECISIONS:
            raise ValueError(unknown("precision", self.precision, PRECISIONS))

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return {**asdict(self), "test_lengths": list(self.test_lengths)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Experiment:
        """Return the experiment of ``to_json``; raise for an unknown field."""
        return cls(**_known_fields(cls, content))


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run is carried out; none of it changes the result."""

    data: str | None = None
    """Data folder; default: PERMUTEFORMER_DATA, else the user's cache."""
    shard: bool = False
    """Shard weights and optimizer over the processes of torchrun (FSDP)."""
    sequence_parallel: int = 1
    """Shard every sequence over this many processes of torchrun."""
    track: tuple[str, ...] | None = None
    """Trackers that get the metrics too: tensorboard (default, if installed), wandb or another tracker of Accelerate, or none."""
    workers: int = 0
    """Processes that load batches ahead."""
    checkpoint_minutes: float = 10.0
    """Minutes between checkpoints, besides those at every validation."""
    quiet: bool = False
    """Show no progress bar."""

    def __post_init__(self) -> None:
        _check(self, int, "at least 1", "sequence_parallel")
        _check(self, int, "at least 0", "workers")
        _check(self, float, "at least 0", "checkpoint_minutes")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A measurement of time and memory on random tokens."""

    kind: str
    """``"training"`` (forward, backward and update) or ``"inference"`` (forward)."""
    task: str
    """Name of the task, for the kind of model and the grid."""
    model: str
    """Name of the preset."""
    length: int
    """Tokens per sequence."""
    task_options: Mapping[str, Any] = field(default_factory=dict)
    model_fields: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 1
    """Sequences per batch."""
    items: int | None = None
    """Training items of an epoch, to compute the time of an epoch."""
    repeats: int = 5
    """Timed repeats; the best counts."""

    def __post_init__(self) -> None:
        _copy(self, task_options=dict, model_fields=dict)
        if self.kind not in MEASURED:
            raise ValueError(unknown("kind of measurement", self.kind, MEASURED))
        for name in ("task", "model"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a name, got {getattr(self, name)!r:.100}")
        _check(self, int, "at least 1", "length", "batch_size", "items", "repeats")

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Measurement:
        """Return the measurement of ``to_json``; raise for an unknown field."""
        return cls(**_known_fields(cls, content))


def _known_fields(kind: type, content: Mapping[str, Any]) -> Mapping[str, Any]:
    names = {entry.name for entry in fields(kind)}
    for name in content:
        if name not in names:
            raise ValueError(unknown(f"field of {kind.__name__}", name, names))
    return content


def _copy(owner: Any, **kinds: type) -> None:
    """Replace fields by copies of these types: a frozen dataclass must not change with its arguments."""
    for name, kind in kinds.items():
        object.__setattr__(owner, name, kind(getattr(owner, name)))


RANGES: dict[str, Callable[[Any], bool]] = {
    "at least 1": lambda value: value >= 1,
    "at least 0": lambda value: value >= 0,
    "above 0": lambda value: value > 0,
    "from 0 to below 1": lambda value: 0 <= value < 1,
}


def _check(owner: Any, kind: type[int] | type[float], wanted: str, *names: str) -> None:
    """Raise unless these fields are numbers of a range. Those whose default is ``None`` may be ``None``."""
    optional = {entry.name for entry in fields(owner) if entry.default is None}
    for name in names:
        found = getattr(owner, name)
        for value in found if isinstance(found, tuple) else [found]:
            if value is None and name in optional:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, kind)):
                raise TypeError(f"{name} must be {'an integer' if kind is int else 'a number'}, got {value!r:.100}")
            if not RANGES[wanted](value) or value == math.inf:
                raise ValueError(f"{name} must be {wanted}, got {value!r:.100}")
