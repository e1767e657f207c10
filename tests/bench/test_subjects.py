"""Subjects of benchmarks compute what their names say: formulas, peers and our models, at small sizes."""

import pytest
import torch

from permuteformer.bench import subjects
from permuteformer.bench.eager import EagerModel, eager_attention
from permuteformer.bench.inputs import prepare
from permuteformer.bench.subjects import METHODS, make_decode, make_formula, make_model, make_op, make_peer
from permuteformer.bench.sweeps import TRANSFORMERS_PEERS
from permuteformer.ops.feature_map import relu_eps
from permuteformer.ops.linear import linear_attention
from permuteformer.positions.permute import Permute
from permuteformer.train.build import build_model

pytestmark = pytest.mark.filterwarnings("ignore:positions on axis")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "hidden_dropout": 0.0}


def fields(task="text", row="permuteformer", length=40, kind="inference"):
    return {
        "task": f"lra-{task}",
        "task_options": {"protocol": "paper"},
        "model": f"{row}-{task}",
        "kind": kind,
        "length": length,
        "batch_size": 2,
        "model_fields": SMALL,
    }


class TestOp:
    @pytest.mark.parametrize("gradients", [False, True])
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("method", METHODS)
    def test_every_method_runs(self, method, causal, gradients):
        options = {"length": 10, "heads": 2, "features": 8, "values": 4, "causal": causal, "gradients": gradients}
        if causal and method.startswith("formula"):
            with pytest.raises(ValueError, match=f"'{method}'.*causal"):
                make_op("cpu", method, **options)
            return
        out = make_op("cpu", method, **options).step()
        parts = out if gradients and method != "matmul" else (out,)
        assert all(part.isfinite().all() for part in parts)
        if method != "matmul":
            size = 4 if method == "sdpa" else 8
            expected = [(1, 2, 10, size), (1, 2, 10, size), (1, 2, 10, 4)] if gradients else [(1, 2, 10, 4)]
            assert [part.shape for part in parts] == expected

    def test_the_number_of_operations(self):
        shape = {"length": 4096, "heads": 8, "features": 256, "values": 64}
        assert make_op("cpu", "permuteformer", **shape).flops == 4 * 8 * 4096 * 256 * 64
        assert make_op("cpu", "permuteformer", **shape, gradients=True).flops == 12 * 8 * 4096 * 256 * 64

    def test_the_formula_equals_our_attention(self):
        q, k, v = torch.randn(3, 2, 2, 30, 16, dtype=torch.float64)
        permute, mask = Permute(2, 16), torch.rand(2, 30) > 0.3
        positions = torch.arange(30).view(1, -1, 1)
        eager = eager_attention(q, k, v, permute.tables(positions), mask)
        ours = linear_attention(q, k, v, feature_map=relu_eps, transform=permute, positions=positions, key_mask=mask)[0]
        real = mask[:, None, :, None]  # outputs of masked tokens may differ
        torch.testing.assert_close(eager * real, ours * real, rtol=1e-10, atol=1e-10)


class TestFormula:
    @pytest.mark.parametrize(
        ("task", "row", "length"), [("text", "permuteformer", 40), ("text", "performer", 40), ("image", "permuteformer", 1026)]
    )
    def test_with_our_weights_it_gives_our_logits(self, task, row, length):
        prepared = prepare(fields(task, row, length), "cpu")
        ours = build_model(prepared.config, "classify").eval()
        positions = prepared.arguments.get("position_ids", torch.arange(length).view(1, -1, 1))[:1]
        eager = EagerModel(prepared.config, "classify", positions).eval()
        theirs = dict(eager.named_parameters())
        with torch.no_grad():
            for name, weight in ours.named_parameters():
                theirs.pop(eager_name(name)).copy_(weight)
            assert not theirs  # every weight has been copied
            logits = ours(**prepared.arguments).logits
            prepared.arguments.pop("position_ids", None)
            torch.testing.assert_close(eager(**prepared.arguments).logits, logits, rtol=1e-4, atol=1e-5)

    def test_it_has_our_number_of_weights(self):
        for task, length in (("text", 40), ("retrieval", 40), ("image", 1026)):
            options = fields(task, length=length)
            assert make_model("cpu", **options).parameters == make_formula("cpu", **options).parameters

    @pytest.mark.parametrize("task", ["text", "retrieval"])
    def test_it_trains(self, task):
        assert make_formula("cpu", **fields(task, kind="training")).step() is None


def eager_name(name):
    """Return the name that a weight of ours has in ``EagerModel``."""
    replaced = {
        "feed_forward_norm": "norm",
        "model.embed_tokens": "embedding",
        "model.position.encodings.0.axis_tables.0.weight": "learned",
        "model.": "",
        "classifier": "head",
        "pooler.dense": "pooler",
        ".attention.": ".",
    }
    for old, new in replaced.items():
        name = name.replace(old, new)
    return name


class TestPeers:
    @pytest.mark.parametrize("name", TRANSFORMERS_PEERS)
    def test_those_of_transformers_run(self, name):
        made = make_peer("cpu", name, **fields(kind="training"))
        assert made.step() is None
        assert made.parameters > 1000

    def test_a_package_that_is_not_installed_is_named(self, monkeypatch):
        monkeypatch.setattr(subjects, "find_spec", lambda name: None)
        with pytest.raises(ModuleNotFoundError, match="pip install performer-pytorch"):
            make_peer("cpu", "performer-pytorch", **fields())

    def test_they_only_classify(self):
        with pytest.raises(ValueError, match="'lra-retrieval'.*'match'"):
            make_peer("cpu", "hf-longformer", **fields("retrieval"))


@pytest.mark.parametrize(("row", "peer"), [("permuteformer", None), ("transformer", None), ("permuteformer", "hf-gpt2")])
def test_every_step_decodes_the_token_at_the_same_position(row, peer, monkeypatch):
    """The cache of ours grows by a token per step; that of a peer is cut back to the position."""
    small = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    step = make_decode("cpu", f"{row}-lm", 5000, model_fields=small, peer=peer).step
    step()
    (cache,) = (cell.cell_contents for cell in step.__wrapped__.__closure__ if hasattr(cell.cell_contents, "get_seq_length"))
    assert cache.get_seq_length() == (5001 if peer is None else 5000)
