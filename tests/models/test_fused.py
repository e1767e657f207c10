"""A fused block is the block, and the modules run instead wherever one was replaced, hooked or changed."""

import copy
import warnings

import pytest
import torch
from accelerate import cpu_offload
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

from permuteformer.models import PermuteFormerConfig, PermuteFormerForSequenceClassification, fused
from permuteformer.ops import fused_block, linear
from permuteformer.ops.native import load

pytestmark = pytest.mark.skipif(isinstance(load(), str), reason=str(load()))

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64, "num_labels": 3}


def make(preset="permuteformer-text", **fields):
    torch.manual_seed(0)
    return PermuteFormerForSequenceClassification(PermuteFormerConfig.preset(preset, **SIZES, **fields))


def batch(axes=1, length=90):
    mask = torch.ones(3, length, dtype=torch.int64)
    mask[1, 60:] = 0
    given = {"input_ids": torch.randint(3, 50, (3, length)), "attention_mask": mask, "labels": torch.tensor([0, 1, 2])}
    return given if axes == 1 else {**given, "position_ids": torch.randint(0, 30, (3, length, axes))}


@pytest.fixture
def calls(monkeypatch):
    """Names of the halves that the kernel ran."""
    names = []
    for name in ("attend", "feed_forward"):
        real = getattr(fused_block, name)
        monkeypatch.setattr(fused_block, name, lambda *given, name=name, real=real: (names.append(name), real(*given))[1])
    return names


def step(model, given, seed=1):
    torch.manual_seed(seed)
    model.zero_grad()
    out = model(**given)
    out.loss.backward()
    return [out.logits.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    ("preset", "axes"), [("permuteformer-text", 1), ("performer-text", 1), ("permuteformer-image", 2), ("permuteformer-decay-image", 2)]
)
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_it_is_the_model(calls, monkeypatch, preset, axes, training, pooling):
    """The same with dropout, whose noise has the same seed, and with only one token of the last block."""
    model, given = make(preset, pooling=pooling).train(training), batch(axes)
    ours = step(model, given)
    # A decay is not fused; CLS, a global token without a decay, is.
    expected = ["feed_forward", *(["attend"] if pooling == "cls" else []), "feed_forward"]
    assert calls == (expected if "decay" in preset else ["attend", "feed_forward"] * 2)
    monkeypatch.setattr(fused, "attend", lambda *_: None)
    monkeypatch.setattr(fused, "feed_forward", lambda *_: None)
    for a, b in zip(ours, step(model, given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Changed(nn.Linear):
    """Another kind of linear map, as LoRA has them."""

    def forward(self, x):
        return super().forward(x) + 1


def _hook(model, name):
    model.get_submodule(name).register_forward_hook(lambda module, given, out: out * 2)


def _swap(model, name):
    owner, _, last = name.rpartition(".")
    old = model.get_submodule(name)
    new = Changed(old.in_features, old.out_features)
    new.load_state_dict(old.state_dict())
    setattr(model.get_submodule(owner), last, new)


def _parametrize(model, name):
    parametrizations.weight_norm(model.get_submodule(name))
    with torch.no_grad():
        model.get_submodule(name).parametrizations.weight.original0.mul_(2)


def _replace(model, name):
    """As accelerate does, to load weights for each call."""
    module = model.get_submodule(name)
    forward = module.forward
    module.forward = lambda x: forward(x) * 2


@pytest.mark.parametrize("change", [_hook, _swap, _parametrize, _replace])
@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("model.layers.0.expand", "attend"),
        ("model.layers.0.contract", "attend"),
        ("model.layers.0.attention.query", "feed_forward"),
        ("model.layers.0.attention.output", "feed_forward"),
    ],
)
def test_changed_modules_run(calls, monkeypatch, change, name, left):
    """Also where the model was used before; the other half of the block, and other blocks, stay fused."""
    model, given = make().eval(), batch()
    before = model(**given).logits
    change(model, name)
    del calls[:]
    after = model(**given).logits
    assert calls == [left, "attend", "feed_forward"]
    assert not torch.allclose(after, before)
    del calls[:]
    monkeypatch.setattr(linear, "DEFAULT_BACKEND", "torch")
    torch.testing.assert_close(after, model(**given).logits, rtol=1e-4, atol=1e-5)
    assert not calls


def test_offloaded_weights():
    model, given = make().eval(), batch()
    with torch.no_grad():
        before = model(**given).logits
        cpu_offload(model, execution_device=torch.device("cpu"))
        assert next(model.parameters()).is_meta
        torch.testing.assert_close(model(**given).logits, before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["expand", "feed_forward_norm"])
def test_weights_of_another_shape_raise(name):
    """The kernel must not read beyond their end."""
    model, given = make().eval(), batch()
    model(**given)
    module = model.model.layers[0].get_submodule(name)
    module.weight = nn.Parameter(module.weight.detach()[:8].clone())
    with pytest.raises(RuntimeError):
        model(**given)
    if name == "feed_forward_norm":
        module.weight = nn.Parameter(torch.ones_like(module.bias))
        module.bias = None
        assert model(**given).logits.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_where_another_type_is_the_default(dtype):
    given, found, before = batch(), [], torch.get_default_dtype()
    for default in (before, dtype):
        model = make().eval()
        try:
            torch.set_default_dtype(default)
            model(**given).loss.backward()
        finally:
            torch.set_default_dtype(before)
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found)


def test_a_traced_model_runs_modules(calls):
    """torch's tracer does not see what the kernel writes."""
    model, ids = make().eval().requires_grad_(False), batch()["input_ids"]
    other = ids.flip(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda x: model(input_ids=x).logits, (ids,), check_trace=False)
        torch.testing.assert_close(traced(other), model(input_ids=other).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["model.layers.0.attention", "model.layers.0.dropout"])
def test_hooks_are_called(name):
    model, given, heard = make().eval(), batch(), []
    model.get_submodule(name).register_forward_hook(lambda *_: heard.append(name))
    model(**given)
    assert heard


@pytest.mark.parametrize("fields", [{"hidden_size": 24, "intermediate_size": 40}, {"hidden_act": "silu"}])
def test_unsupported_modules_run(calls, fields):
    torch.manual_seed(0)
    config = PermuteFormerConfig.preset("permuteformer-text", **{**SIZES, **fields})
    PermuteFormerForSequenceClassification(config)(**batch()).loss.backward()
    assert calls == ([] if "hidden_size" in fields else ["attend"] * 2)


@pytest.mark.parametrize("preset", ["transformer-text", "reformer-text", "linformer-text", "nystromformer-text", "permuteformer-lm"])
def test_other_attentions_have_a_fused_feed_forward(calls, preset):
    make(preset, pooling="mean")(**batch()).loss.backward()
    assert calls == ["feed_forward"] * 2


def test_what_the_kernel_cannot_compute_or_show_runs_on_modules(calls):
    model, given = make(pooling="mean").eval(), batch()
    for dtype in (torch.float64, torch.bfloat16):
        assert copy.deepcopy(model).to(dtype)(**given).logits.dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        model(**given)
    assert model(input_ids=torch.zeros(0, 7, dtype=torch.int64)).logits.shape == (0, 3)
    with FlopCounterMode(display=False) as counter:
        model(**given)
    weights = sum(p.numel() for name, p in model.model.layers[0].named_parameters() if p.dim() == 2)
    assert counter.get_total_flops() > 2 * weights * given["input_ids"].numel()
    heard = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: heard.append(type(module)))
    model(**given)
    handle.remove()
    assert nn.Linear in heard
    assert not calls


def test_positions_are_checked():
    model, given = make("permuteformer-image").eval(), batch(2)
    given["position_ids"][0, 0] = 10**15
    with pytest.warns(UserWarning, match="period"):
        model(**given)
    given["position_ids"] = given["position_ids"][:, :-1]
    with pytest.raises(ValueError, match="positions"):
        model(**given)


def test_functional_call(calls):
    model, given = make().eval(), batch()
    expected = model(**given).logits
    other = {name: p.detach() + 1 for name, p in model.named_parameters()}
    assert not torch.allclose(torch.func.functional_call(model, other, (), given).logits, expected)
    assert torch.equal(model(**given).logits, expected)
    assert len(calls) == 8


def test_a_copy_has_its_own_modules(calls):
    model, given = make().eval(), batch()
    expected = model(**given).logits
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].expand.weight.mul_(30)
        model.model.layers[0].attention_norm.weight.add_(1)
    assert other.model.layers[0].attention_eligibility.modules[0] is other.model.layers[0].attention_norm
    assert not torch.allclose(other(**given).logits, expected)
    del calls[:]
    model.model.layers[0].expand.register_forward_hook(lambda *_: None)
    other(**given)
    assert len(calls) == 4
