"""torch.func and forward-mode differentiation of models: no kernel hides a derivative from them."""

import pytest
import torch
from torch import func
from torch.autograd import forward_ad

from permuteformer.models import PermuteFormerConfig, PermuteFormerForCausalLM, PermuteFormerForSequenceClassification
from permuteformer.ops.feature_map import relu_eps
from permuteformer.ops.linear import linear_attention
from permuteformer.ops.native import load

SIZES = {"vocab_size": 30, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64}
PRESETS = ["permuteformer-text", "performer-text", "roformer-text", "permuteformer-orthogonal-text", "transformer-text", "permuteformer-lm"]
PRESETS += ["permuteformer-decay-text"]
HAS_KERNEL = not isinstance(load(), str)

pytestmark = [  # torch's own formulas of forward mode are scripts, and its softmax attention does not know vmap
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]


def make(preset, dtype):
    """Parameters of a model, and the sum of its squared logits as a function of them."""
    torch.manual_seed(0)
    kind = PermuteFormerForCausalLM if preset.endswith("lm") else PermuteFormerForSequenceClassification
    model = kind(PermuteFormerConfig.preset(preset, **SIZES)).eval().to(dtype)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    more = {"use_cache": False} if preset.endswith("lm") else {}
    return parameters, lambda p, ids: func.functional_call(model, p, (), {"input_ids": ids, **more}).logits.square().sum()


def of_autograd(parameters, f, ids):
    wanted = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    found = torch.autograd.grad(f(wanted, ids), list(wanted.values()), allow_unused=True)
    return {name: torch.zeros_like(p) if d is None else d for (name, p), d in zip(parameters.items(), found, strict=True)}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
def test_gradients_are_those_of_autograd(preset, dtype):
    (parameters, f), ids = make(preset, dtype), torch.randint(3, 30, (3, 70))
    expected = of_autograd(parameters, f, ids)
    close = dict.fromkeys(("rtol", "atol"), 1e-9 if dtype == torch.float64 else 1e-3)
    for name, d in func.grad(f)(parameters, ids).items():
        torch.testing.assert_close(d, expected[name], **close)
    of_rows = func.vmap(lambda row: func.grad(f)(parameters, row.unsqueeze(0)))(ids)
    for name, d in of_rows.items():
        torch.testing.assert_close(d.sum(0), expected[name], **close)


@pytest.mark.parametrize(
    "preset", [preset for preset in PRESETS if preset != "transformer-text"]
)  # torch's own attention has no forward mode
def test_forward_mode_is_reverse_mode(preset):
    (parameters, f), ids = make(preset, torch.float32), torch.randint(3, 30, (2, 70))
    tangents = {name: torch.randn_like(p) for name, p in parameters.items()}
    expected = sum((d * tangents[name]).sum() for name, d in of_autograd(parameters, f, ids).items())
    _, found = func.jvp(lambda p: f(p, ids), (parameters,), (tangents,))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    with torch.no_grad(), forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(p, tangents[name]) for name, p in parameters.items()}
        torch.testing.assert_close(forward_ad.unpack_dual(f(duals, ids)).tangent, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not HAS_KERNEL, reason="needs the CPU kernel")
def test_a_kernel_requested_by_name_refuses():
    q = k = v = torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match="'native'.*torch.func"):
        func.grad(lambda x: linear_attention(x, k, v, feature_map=relu_eps, backend="native")[0].sum())(q)
