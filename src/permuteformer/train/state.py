"""All that training goes on from: weights, optimiser, random numbers, and how far it has come."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


@dataclass
class Cursor:
    """How far a run has come; the same on all processes."""

    step: int = 0
    """Updates made."""
    seconds: float = 0.0
    """Time of training, without evaluation and checkpoints."""
    tokens: int = 0
    unvalidated: bool = False
    """Whether a validation is due after this step and was not made yet."""
    best_step: int | None = None
    best: dict[str, float] = field(default_factory=dict)
    """Metrics of the best validation."""
    loss: float = 0.0
    """Sum of the loss since the last line of the record, over all that counted."""
    counted: float = 0.0
    lines_seconds: float = 0.0
    """``seconds`` and ``tokens`` at the last line of the record."""
    lines_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Cursor:
        """From plain data; raises where a field is of another kind."""
        cursor, kinds = cls(**content), {"unvalidated": bool, "best": dict}
        for name, value in asdict(cursor).items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
            if not (isinstance(value, kinds[name]) if name in kinds else is_number or (name == "best_step" and value is None)):
                raise ValueError(f"{name} of a cursor cannot be {value!r:.100}")
        return cursor


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The weights and buffers, whole, in the memory of the computer; a tied one once. All processes must call it."""
    return {name: _whole(value) for name, value in _own(model).items()}


def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put weights and buffers in place."""
    own = _own(model)
    if set(own) != set(tensors):
        raise ValueError(f"the weights are of another model: {', '.join(sorted(set(own) ^ set(tensors))[:3])} is only in one of them")
    with torch.no_grad():
        for name, value in own.items():
            if tensors[name].shape != value.shape:
                raise ValueError(f"the weights are of another model: {name} is {tuple(tensors[name].shape)}, not {tuple(value.shape)}")
            value.copy_(_shared_out(tensors[name], value))


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Adam's moments and counts by the names of the weights. All processes must call it."""
    return {
        f"{name}/{key}": _whole(value)
        for name, parameter in _parameters(model).items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put Adam's state in place."""
    parameters = _parameters(model)
    optimizer.state.clear()
    for name, value in tensors.items():
        weight, _, key = name.rpartition("/")
        like = parameters[weight]
        if value.shape != (torch.Size() if key == "step" else like.shape):
            raise ValueError(f"the optimiser is of another model: {name} is {tuple(value.shape)}, not {tuple(like.shape)}")
        count_device = like.device if optimizer.defaults.get("fused") else "cpu"
        optimizer.state[like][key] = (value.to(count_device) if key == "step" else _shared_out(value, like)).clone()


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator of random numbers of this process, as plain data."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    own, on_device = torch_random_state(device)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": _hex(own),
        "device": None if on_device is None else _hex(on_device),
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Go on with random numbers where they were."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    if name != "MT19937" or len(keys) != 624 or not 0 <= rest[0] <= 624:  # NumPy does not look, and would read elsewhere
        raise ValueError("the random numbers of NumPy are of another kind")
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    on_device = state.get("device")
    set_torch_random_state((_unhex(state["torch"]), None if on_device is None else _unhex(on_device)), device)


def torch_random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Of torch alone, which is quick: the computer's, and the device's where it is another one."""
    return torch.get_rng_state(), None if device.type == "cpu" else torch.get_device_module(device.type).get_rng_state(device)


def set_torch_random_state(states: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    """The reverse."""
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.get_device_module(device.type).set_rng_state(states[1], device)


@contextmanager
def same_random_numbers_after(device: torch.device) -> Iterator[None]:
    """Random numbers go on after the block as if it had not been."""
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)


def seed_all(seed: int) -> None:
    """Begin all random numbers anew."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def _hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _unhex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _own(model: nn.Module) -> dict[str, Tensor]:
    """What a model is loaded from: its parameters, each once, and its buffers that are saved."""
    parameters = _parameters(model)
    saved = {name for name, value in model.state_dict(keep_vars=True).items() if not isinstance(value, nn.Parameter)}
    return {**parameters, **{name: value for name, value in model.named_buffers() if name in saved}}


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, FSDPModule):
        model.reshard()  # after an evaluation it has some weights whole, which are not those that the optimiser knows
    return dict(model.named_parameters())


def _whole(value: Tensor) -> Tensor:
    full: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().cpu()


def _shared_out(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor as the processes hold ``like``."""
    value = value.to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements) if isinstance(like, DTensor) else value
