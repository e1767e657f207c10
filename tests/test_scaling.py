"""The cost model counts what the code does, and the page of scaling has its tables."""

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
    return PermuteFormerConfig.preset("permuteformer-lm", vocab_size=scaling.MODEL.vocabulary, hidden_dropout=0.0)


def test_the_page_has_the_tables(scaling):
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert f"<!-- seconds -->\n{scaling.seconds_table()}\n" in page
    assert f"<!-- communication -->\n{scaling.communication_table()}\n" in page
    layer = scaling.layer_flops()
    assert f"sharding adds {4 * layer.sharding:,} to {layer.training - 4 * layer.sharding:,}" in " ".join(page.split())


def test_the_model_is_the_preset(scaling, config):
    model = scaling.MODEL
    assert (model.layers, model.hidden, model.heads) == (config.num_hidden_layers, config.hidden_size, config.num_attention_heads)
    assert model.feed_forward == config.intermediate_size
    assert model.features == model.values == config.hidden_size // config.num_attention_heads
    assert model.block == block_length(model.heads, model.features, model.values, scans=True)
    assert scaling.parameters() == summarize(config, 8).parameters


def test_work_forwards_and_in_training(scaling, config, monkeypatch):
    monkeypatch.setattr(linear, "DEFAULT_BACKEND", "torch")  # torch counts its own products
    layer, output = scaling.layer_flops(), 2 * scaling.MODEL.hidden * scaling.MODEL.vocabulary
    forward = config.num_hidden_layers * (layer.forward - layer.sharding) + output
    assert summarize(config, LENGTH).flops_per_token == pytest.approx(forward, rel=1e-3)
    one = PermuteFormerForCausalLM(PermuteFormerConfig(**{**config.to_diff_dict(), "num_hidden_layers": 1}))
    expected = layer.training - 4 * layer.sharding - 2 * layer.care + 3 * output  # on a CPU
    with FlopCounterMode(display=False) as counter:
        one(torch.randint(0, 259, (1, LENGTH)), use_cache=False).logits.sum().backward()
    assert counter.get_total_flops() / LENGTH == pytest.approx(expected, rel=1e-3)


def test_work_of_sharding(scaling):
    model = scaling.MODEL
    k, v = (torch.rand(1, model.heads, LENGTH, size, requires_grad=True) for size in (model.features, model.values))
    call = LinearCall(k[:, :, :0], k, v, torch.relu, model.features, causal=True, log_decay=torch.full((model.heads,), -0.1))
    with FlopCounterMode(display=False) as counter:
        _, state = linear.run(call)
        assert counter.get_total_flops() / LENGTH == scaling.layer_flops().sharding
        (state.kv.sum() + state.z.sum()).backward()
    assert counter.get_total_flops() / LENGTH == pytest.approx(4 * scaling.layer_flops().sharding, rel=0.01)


def test_turns_of_the_scan(scaling):
    """The most that any process sends, by the rule of the page."""
    for n in (2, 3, 4, 5, 8, 9, 64, 512):
        sends = [(p < n - 1) + sum(p > 0 and p + 2**w < n for w in range(10) if 2**w < n - 1) for p in range(n)]
        assert max(sends) in (
            scaling.rounds(n),
            scaling.rounds(n) - 1,
        )  # a process in the middle takes part in every turn, or in all but one
