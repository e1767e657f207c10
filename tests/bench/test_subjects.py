"""What is timed does what it is called: formulas and peers beside ours, on small sizes."""

import pytest
import torch

from permuteformer.bench.items import prepare
from permuteformer.bench.subjects import SUBJECTS, Subject, decode, formula, make, op, peer
from permuteformer.models import PermuteFormerForSequenceClassification
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
    @pytest.mark.parametrize("method", op.METHODS)
    def test_every_method_runs(self, method, causal, gradients):
        if causal and method.startswith("formula"):
            with pytest.raises(ValueError, match="has no causal form"):
                op.make("cpu", method, length=10, causal=True)
            return
        made = op.make("cpu", method, length=10, heads=2, features=8, values=4, causal=causal, gradients=gradients)
        out = made.step()
        assert all(part.isfinite().all() for part in (out if isinstance(out, tuple) else (out,)))
        if method != "matmul":
            shapes = [part.shape for part in out] if gradients else [out.shape]
            size = 4 if method == "sdpa" else 8
            assert shapes == ([(1, 2, 10, size), (1, 2, 10, size), (1, 2, 10, 4)] if gradients else [(1, 2, 10, 4)])

    def test_the_work_is_that_of_the_roofline(self):
        shape = {"length": 4096, "heads": 8, "features": 256, "values": 64}
        assert op.make("cpu", "permuteformer", **shape).flops == 4 * 8 * 4096 * 256 * 64
        assert op.make("cpu", "permuteformer", **shape, gradients=True).flops == 12 * 8 * 4096 * 256 * 64

    def test_the_formula_is_ours(self):
        q, k, v = torch.randn(3, 2, 2, 30, 16, dtype=torch.float64)
        permute, mask = Permute(2, 16), torch.rand(2, 30) > 0.3
        positions = torch.arange(30).view(1, -1, 1)
        eager = formula.eager_attention(q, k, v, permute.tables(positions), mask)
        ours = linear_attention(q, k, v, feature_map=relu_eps, transform=permute, positions=positions, key_mask=mask)[0]
        shown = mask[:, None, :, None]  # of a hidden token nothing is asked
        torch.testing.assert_close(eager * shown, ours * shown, rtol=1e-10, atol=1e-10)


class TestFormula:
    @pytest.mark.parametrize(
        ("task", "row", "length"), [("text", "permuteformer", 40), ("text", "performer", 40), ("image", "permuteformer", 1026)]
    )
    def test_with_our_weights_it_gives_our_logits(self, task, row, length):
        prepared = prepare(fields(task, row, length), "cpu")
        ours = build_model(prepared.config, "classify").eval()
        assert isinstance(ours, PermuteFormerForSequenceClassification)
        positions = prepared.arguments.get("position_ids", torch.arange(length).view(1, -1, 1))[:1]
        eager = formula.EagerModel(prepared.config, "classify", positions).eval()
        with torch.no_grad():
            theirs = dict(eager.named_parameters())
            matched = {id(theirs[name]) for name, weight in _pairs(ours, theirs) if theirs[name].copy_(weight) is not None}
        assert len(matched) == len(theirs)
        with torch.no_grad():
            logits = ours(**prepared.arguments).logits
            prepared.arguments.pop("position_ids", None)
            torch.testing.assert_close(eager(**prepared.arguments).logits, logits, rtol=1e-4, atol=1e-5)

    def test_it_has_our_number_of_weights(self):
        for task, length in (("text", 40), ("retrieval", 40), ("image", 1026)):
            ours, eager = make("model", fields(task, length=length), "cpu"), make("formula", fields(task, length=length), "cpu")
            assert ours.parameters == eager.parameters

    @pytest.mark.parametrize("task", ["text", "retrieval"])
    def test_it_trains(self, task):
        assert formula.make("cpu", **fields(task, kind="training")).step() is None

    def test_language_models_are_refused(self):
        with pytest.raises(ValueError, match="no causal form"):
            formula.make("cpu", task="lm-bytes", model="permuteformer-lm", kind="training", length=20, model_fields={"vocab_size": 259})


def _pairs(ours, theirs):
    """Weights of ours by the names that the formula's model has for them."""
    names = {
        "feed_forward_norm": "norm",
        "model.embed_tokens": "embedding",
        "model.position.encodings.0.axis_tables.0.weight": "learned",
        "model.": "",
        "classifier": "head",
        "pooler.dense": "pooler",
    }
    for name, weight in ours.named_parameters():
        found = name.replace("attention_norm", "@").replace("attention.", "").replace("@", "attention_norm")
        for old, new in names.items():
            found = found.replace(old, new)
        assert found in theirs, (name, found, list(theirs))
        yield found, weight


class TestPeers:
    @pytest.mark.parametrize("name", [name for name in peer.PEERS if name.startswith("hf-")])
    def test_those_of_transformers_run(self, name):
        made = peer.make("cpu", name, **fields(kind="training"))
        assert made.step() is None
        assert made.parameters > 1000

    def test_what_is_not_installed_is_said(self, monkeypatch):
        monkeypatch.setattr(peer, "find_spec", lambda name: None)
        with pytest.raises(ModuleNotFoundError, match="pip install performer-pytorch"):
            peer.make("cpu", "performer-pytorch", **fields())

    def test_refusals(self):
        with pytest.raises(ValueError, match="did you mean 'hf-longformer'"):
            peer.make("cpu", "hf-longfomer", **fields())
        with pytest.raises(ValueError, match="peers are measured on tasks that classify"):
            peer.make("cpu", "hf-longformer", **fields("retrieval"))


class TestDecode:
    @pytest.mark.parametrize("row", ["permuteformer", "transformer"])
    def test_it_goes_on_from_its_position(self, row):
        small = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        made = decode.make("cpu", f"{row}-lm", 5000, model_fields=small)
        made.step()
        cache = made.step.__wrapped__.__closure__ if hasattr(made.step, "__wrapped__") else made.step.__closure__
        seen = [cell.cell_contents.get_seq_length() for cell in cache if hasattr(cell.cell_contents, "get_seq_length")]
        assert seen == [5001]

    def test_refusals(self):
        with pytest.raises(ValueError, match="is not causal"):
            decode.make("cpu", "permuteformer-text", 10)
        with pytest.raises(ValueError, match="unknown preset"):
            decode.make("cpu", "permuteformer-ml", 10)


def test_every_subject_can_be_made():
    with pytest.raises(ValueError, match="unknown subject 'opp'"):
        make("opp", {}, "cpu")
    assert set(SUBJECTS) == {"decode", "formula", "model", "op", "peer"}
    assert isinstance(make("op", {"method": "sdpa", "length": 4}, "cpu"), Subject)
