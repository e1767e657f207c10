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


CASES = [
    pytest.param(*case, id="-".join([case[0], *case[1], "causal" if case[2] else "bidirectional", f"{case[3]}d"]))
    for case in combinations()
]
CAUSAL = [case for case in CASES if case.values[2]]
RELATIVE = [case for case in CASES if set(case.values[1]) & {"permute", "rope", "orthogonal", "t5_bias"}]
ARGUMENTS = ("attention", "positions", "causal", "axes")


def layer_of(attention, positions, causal, axes):
    encodings = [(name, encoding_options(name, causal)) for name in positions]
    return build(attention, encodings, hidden_size=24, num_heads=2, causal=causal, axes=axes, **options(ATTENTIONS, attention)).double()


def supports(layer, mode, **call):
    """Return whether the layer supports ``mode``; if not, the call must raise an error that names it."""
    if mode in layer.attention.modes:
        return True
    with pytest.raises(ValueError, match=rf"'{layer.attention.name}'.*'{mode}'"):
        layer(checks.inputs(layer), positions=checks.grid(layer, 2, 21), **call)
    return False


@pytest.mark.parametrize(ARGUMENTS, CASES)
@pytest.mark.parametrize("check", ["padding", "masked_keys", "all_masked", "batch", "queries"])
def test_masks(attention, positions, causal, axes, check):
    checks.CHECKS[check](layer_of(attention, positions, causal, axes))


@pytest.mark.parametrize(ARGUMENTS, CAUSAL)
@pytest.mark.parametrize("check", ["causal", "resume"])
def test_causal(attention, positions, causal, axes, check):
    layer = layer_of(attention, positions, causal, axes)
    if check != "resume" or supports(layer, "state", state=object()):
        checks.CHECKS[check](layer)


@pytest.mark.parametrize(ARGUMENTS, CASES)
def test_packed(attention, positions, causal, axes):
    layer = layer_of(attention, positions, causal, axes)
    if supports(layer, "segments", segments=torch.zeros(2, 21, dtype=torch.int64)):
        checks.check_packed(layer)


@pytest.mark.parametrize(ARGUMENTS, RELATIVE)
def test_relative(attention, positions, causal, axes):
    checks.check_relative(layer_of(attention, positions, causal, axes))


@pytest.mark.parametrize(ARGUMENTS, CASES)
def test_global_tokens(attention, positions, causal, axes):
    layer = layer_of(attention, positions, causal, axes)
    if layer.attention.position.two_sided:
        checks.check_global_tokens(layer)
    else:
        with pytest.raises(ValueError, match="global_mask"):
            layer(checks.inputs(layer), positions=checks.grid(layer, 2, 21), global_mask=torch.ones(2, 21, dtype=torch.bool))


@pytest.mark.parametrize(ARGUMENTS, CASES)
def test_nan_reaches_only_tokens_that_see_it(attention, positions, causal, axes):
    if attention == "reformer":
        pytest.skip("a NaN has no bucket, so the tokens that see it are undefined")
    checks.check_no_poison(layer_of(attention, positions, causal, axes))


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


@pytest.mark.parametrize(ARGUMENTS, CASES)
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
    x = checks.inputs(layer)
    at = checks.grid(layer, *x.shape[:2])
    assert torch.equal(layer(x, positions=at)[0], expected(x, positions=at)[0])


@pytest.mark.parametrize(ARGUMENTS, CASES)
def test_no_tensor_is_made_on_another_device(attention, positions, causal, axes):
    """The meta device rejects CPU tensors as a GPU does, forward and backward, and has no values to read."""
    layer = layer_of(attention, positions, causal, axes).to("meta")
    x = checks.inputs(layer).to("meta").requires_grad_()
    at = None if axes == 1 else checks.grid(layer, *x.shape[:2]).to("meta")
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


@pytest.mark.parametrize("name", list(POSITIONS))
def test_reset_fills_every_buffer(name):
    structure = {"hidden_size": 24, "num_heads": 2, "feature_size": 12, "axes": 1, "causal": True}
    encoding = POSITIONS.build(name, encoding_options(name, True), structure)
    before = {key: value.clone() for key, value in encoding.named_buffers()}
    for buffer in encoding.buffers():
        buffer.zero_()
    encoding.reset()
    for key, value in encoding.named_buffers():
        assert torch.equal(value, before[key]), key
