"""Every attention with every position encoding it supports, from the registries: a new file is tested without a line here."""

import inspect
import itertools

import checks
import pytest
import torch

from permuteformer import ATTENTIONS, POSITIONS, Attention, PositionEncoding, build
from permuteformer.positions import HOOKS, Compose

pytestmark = pytest.mark.filterwarnings("ignore:positions on axis")  # heads this small repeat early

SIZES = {"max_length": 64, "projected_length": 8, "num_landmarks": 8, "chunk_size": 8, "num_buckets": 8, "feature_multiplier": 2}
"""Values for options, where an entry has them: small enough for several chunks, buckets and landmarks."""


def options(registry, name):
    known = registry.options(name)
    return {key: value for key, value in SIZES.items() if key in known}


def encoding_options(name, causal):
    return options(POSITIONS, name) | ({"two_sided": not causal} if "two_sided" in POSITIONS.options(name) else {})


def encoding_hooks(name):
    return {hook for hook in HOOKS if hook in vars(POSITIONS[name])}


def combinations():
    for attention in ATTENTIONS:
        entry = ATTENTIONS[attention]
        supported = [name for name in POSITIONS if encoding_hooks(name) <= entry.hooks]
        pairs = [("permute", "decay"), ("rope", "decay")] if "log_decay" in entry.hooks else []
        for positions in [(), *((name,) for name in supported), *pairs]:
            for causal, axes in itertools.product((False, True), (1, 2)):
                if ("causal" if causal else "bidirectional") in entry.modes and (axes == 1 or positions):
                    yield attention, positions, causal, axes


def named(case):
    *check, attention, positions, causal, axes = case
    return pytest.param(*case, id="-".join([*check, attention, *positions, "causal" if causal else "bidirectional", f"{axes}d"]))


def contracts():
    """Every check with every layer that it applies to."""
    for check, (attention, positions, causal, axes) in itertools.product(checks.CHECKS, combinations()):
        if not causal and check in ("causal", "resume"):
            continue
        if check == "relative" and not set(positions) & {"permute", "rope", "orthogonal", "t5_bias"}:
            continue
        if check == "no_poison" and attention == "reformer":  # a NaN has no bucket, so the tokens that see it are undefined
            continue
        yield check, attention, positions, causal, axes


LAYERS = pytest.mark.parametrize(("attention", "positions", "causal", "axes"), [*map(named, combinations())])


def layer_of(attention, positions, causal, axes):
    encodings = [(name, encoding_options(name, causal)) for name in positions]
    return build(attention, encodings, hidden_size=24, num_heads=2, causal=causal, axes=axes, **options(ATTENTIONS, attention)).double()


@pytest.mark.parametrize(("check", "attention", "positions", "causal", "axes"), [*map(named, contracts())])
def test_contract(check, attention, positions, causal, axes):
    """The check holds, or the layer does not support the arguments and the error names them."""
    layer = layer_of(attention, positions, causal, axes)
    mode, call = {
        "resume": ("state", {"state": object()}),
        "packed": ("segments", {"segments": torch.zeros(2, 21, dtype=torch.int64)}),
        "global_tokens": ("global_mask", {"global_mask": torch.ones(2, 21, dtype=torch.bool)}),
    }.get(check, (None, {}))
    modes = {None, *layer.attention.modes, *(["global_mask"] if layer.attention.position.two_sided else [])}
    if mode in modes:
        checks.CHECKS[check](layer)
        return
    x, at = checks.inputs(layer)
    with pytest.raises(ValueError, match=mode if mode == "global_mask" else rf"'{attention}'.*'{mode}'"):
        layer(x, positions=at, **call)


@pytest.mark.parametrize("registry", [ATTENTIONS, POSITIONS], ids=lambda registry: registry.kind)
def test_the_name_is_the_file(registry):
    for name in registry:
        assert registry[name].__module__.endswith(f".{name}")
        assert inspect.getdoc(registry[name]), f"{name} has no docstring"


@pytest.mark.parametrize("attention", list(ATTENTIONS))
def test_unsupported_modes_and_encodings_are_rejected(attention):
    entry = ATTENTIONS[attention]
    for mode in {"causal", "bidirectional"} - entry.modes:
        with pytest.raises(ValueError, match=rf"'{attention}'.*'{mode}'"):
            layer_of(attention, (), mode == "causal", 1)
    unsupported = [name for name in POSITIONS if encoding_hooks(name) - entry.hooks]
    assert unsupported, "every attention rejects at least encodings of embeddings"
    for name in unsupported:
        with pytest.raises(ValueError, match=rf"'{attention}'.*'{name}'"):
            layer_of(attention, (name,), "causal" in entry.modes, 1)


def test_compose_has_the_hooks_of_its_parts():
    position = build("linear", [("permute", {}), ("decay", {})], hidden_size=24, num_heads=2, causal=True).attention.position
    assert isinstance(position, Compose)
    assert position.hooks == {"transform", "log_decay"}
    with pytest.raises(ValueError, match=r"Permute and Permute.*'transform'"):
        build("linear", [("permute", {}), ("permute", {})], hidden_size=24, num_heads=2)


@LAYERS
def test_built_on_the_meta_device_and_filled_later(attention, positions, causal, axes):
    """With weights loaded and buffers filled, the layer equals one built directly."""
    expected = layer_of(attention, positions, causal, axes)
    with torch.device("meta"):
        layer = layer_of(attention, positions, causal, axes)
    layer.to_empty(device="cpu")
    for module in layer.modules():
        if isinstance(module, (Attention, PositionEncoding)):
            module.reset()
    layer.load_state_dict(expected.state_dict())
    x, at = checks.inputs(layer)
    assert torch.equal(layer(x, positions=at)[0], expected(x, positions=at)[0])


@LAYERS
def test_no_tensor_is_made_on_another_device(attention, positions, causal, axes):
    """The meta device rejects CPU tensors as a GPU does, forward and backward, and has no values to read."""
    layer = layer_of(attention, positions, causal, axes).to("meta")
    x, at = checks.inputs(layer)
    x, at = x.to("meta").requires_grad_(), None if at is None else at.to("meta")
    mask = torch.ones(x.shape[:2], dtype=torch.bool, device="meta")
    calls = [{}, {"key_mask": mask}]
    if layer.attention.position.two_sided:
        calls += [{"global_mask": mask}, {"global_mask": mask, "queries": torch.zeros(2, 1, dtype=torch.int64, device="meta")}]
    if "segments" in layer.attention.modes:
        calls.append({"segments": torch.zeros(x.shape[:2], dtype=torch.int64, device="meta")})
    for call in calls:
        y, state = layer(x, positions=at, **call)
        assert y.device.type == "meta"
        y.sum().backward()
    if causal and "state" in layer.attention.modes:
        y, state = layer(x[:, :1], positions=None if at is None else at[:, :1], state=state, **{k: v[:, :1] for k, v in calls[-1].items()})
        assert all(t is None or t.device.type == "meta" for t in state)


ENTRIES = [*((POSITIONS, name, {}) for name in POSITIONS), *((ATTENTIONS, name, {}) for name in ATTENTIONS)]


@pytest.mark.parametrize(("registry", "name", "more"), [*ENTRIES, (ATTENTIONS, "linear", {"feature_map": "favor"})])
def test_buffers(registry, name, more):
    """They keep their values in another dtype, ``reset`` fills them, a seed draws them, and a state dict replaces them."""
    structure = {"hidden_size": 24, "num_heads": 2, "head_size": 12, "feature_size": 12, "axes": 1, "causal": False}
    given = {**options(registry, name), **more} if registry is ATTENTIONS else encoding_options(name, False)

    def make(**changes):
        module = registry.build(name, {**given, **changes}, structure)
        return module, dict(module.named_buffers())

    def equal(one, other):
        return all(x.dtype == other[key].dtype and torch.equal(x, other[key]) for key, x in one.items())

    module, buffers = make()
    expected = {key: x.clone() for key, x in buffers.items()}
    assert equal(make()[1], expected)
    assert equal(dict(module.bfloat16().named_buffers()), expected)
    for buffer in module.buffers():
        buffer.zero_()
    module.reset()
    assert equal(dict(module.named_buffers()), expected)
    if "seed" in registry.options(name):
        other, drawn = make(seed=1)
        assert not equal(drawn, expected)
        other.load_state_dict(module.state_dict())
        assert equal(dict(other.named_buffers()), expected)
    if expected and hasattr(module, "redraw"):
        module.redraw(torch.Generator().manual_seed(1))
        assert not equal(dict(module.named_buffers()), expected)
