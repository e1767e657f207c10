"""The cost model of sequence parallelism counts what the code does."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from permuteformer.models import PermuteFormerConfig, PermuteFormerForCausalLM
from permuteformer.models.inspection import summarize
from permuteformer.ops import linear
from permuteformer.ops.call import LinearCall
from permuteformer.ops.torch_backend import block_length

ROOT = Path(__file__).parent.parent
LENGTH = 512


@pytest.fixture(scope="module")
def scaling():
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "benchmarks" / "scaling.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling"] = module  # where its dataclasses look
    spec.loader.exec_module(module)
    yield module
    del sys.modules["scaling"]


@pytest.fixture(scope="module")
def config(scaling):
    return PermuteFormerConfig.preset("permuteformer-lm", vocab_size=scaling.VOCABULARY, hidden_dropout=0.0)


def test_the_model_is_the_preset(scaling, config):
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (scaling.LAYERS, scaling.HIDDEN, scaling.HEADS)
    assert config.intermediate_size == scaling.FEED_FORWARD
    assert scaling.FEATURES == scaling.VALUES == config.hidden_size // config.num_attention_heads
    assert block_length(scaling.HEADS, scaling.FEATURES, scaling.VALUES, scans=True) == scaling.BLOCK
    assert scaling.parameters() == summarize(config, 8).parameters


def test_operations_of_a_forward_pass_and_of_training(scaling, config, monkeypatch):
    monkeypatch.setattr(linear, "DEFAULT_BACKEND", "torch")  # torch counts its own products
    layer, output = scaling.FLOPS, 2 * scaling.HIDDEN * scaling.VOCABULARY
    forward = config.num_hidden_layers * (layer.forward - layer.sharding) + output
    assert summarize(config, LENGTH).flops_per_token == pytest.approx(forward, rel=1e-3)
    model = PermuteFormerForCausalLM(PermuteFormerConfig(**{**config.to_diff_dict(), "num_hidden_layers": 1}))
    expected = layer.training - 4 * layer.sharding - 2 * layer.care + 3 * output  # on a CPU
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(0, 259, (1, LENGTH)), use_cache=False).logits.sum().backward()
    assert counter.get_total_flops() / LENGTH == pytest.approx(expected, rel=1e-3)


def test_operations_of_sharding(scaling):
    k, v = (torch.rand(1, scaling.HEADS, LENGTH, size, requires_grad=True) for size in (scaling.FEATURES, scaling.VALUES))
    call = LinearCall(k[:, :, :0], k, v, torch.relu, scaling.FEATURES, causal=True, log_decay=torch.full((scaling.HEADS,), -0.1))
    with FlopCounterMode(display=False) as counter:
        _, state = linear.run(call)
        assert counter.get_total_flops() / LENGTH == scaling.FLOPS.sharding
        (state.kv.sum() + state.z.sum()).backward()
    assert counter.get_total_flops() / LENGTH == pytest.approx(4 * scaling.FLOPS.sharding, rel=0.01)


def test_rounds_of_the_scan(scaling):
    """A process in the middle sends in every round, or in all but one."""
    for n in (2, 3, 4, 5, 8, 9, 64, 512):
        sends = [(p < n - 1) + sum(p > 0 and p + 2**w < n for w in range(10) if 2**w < n - 1) for p in range(n)]
        assert max(sends) in (scaling.rounds(n), scaling.rounds(n) - 1)
