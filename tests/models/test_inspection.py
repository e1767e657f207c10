"""Inspection of positions: cycles, similarity and decay against the encodings themselves, and the command."""

import math

import pytest
import torch
from commands import run
from PIL import Image

from permuteformer.attention import build
from permuteformer.models import PermuteFormerConfig, PermuteFormerForCausalLM
from permuteformer.models.inspection import Head, inspect, inspect_attentions
from permuteformer.ops.call import Tokens
from permuteformer.positions.permute import Permute

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}


def heads_of(positions, heads=3, size=32, **options):
    """The attention of a layer with these positions, and its heads."""
    attention = build("linear", positions, hidden_size=heads * size, num_heads=heads, **options).attention
    return attention, inspect_attentions(PermuteFormerConfig(axes=options.get("axes", 1)), [attention]).layers[0].heads


def test_cycles_are_those_of_the_permutation():
    found = inspect("permuteformer-image")
    (layers,) = found.layers
    assert layers.numbers == (0, 1, 2)
    permute = Permute(4, 64, axes=2)
    for head, permutation in zip(layers.heads, permute.permutation, strict=True):
        assert [sum(lengths) for lengths in head.cycles] == [32, 32]
        moved, steps = permutation.clone(), 1
        while not torch.equal(moved, torch.arange(64)) and steps < 100_000:
            moved, steps = permutation[moved], steps + 1
        assert math.lcm(*head.order) == steps or steps == 100_000
    assert found.reach == permute.period


def test_similarity_is_the_score_of_independent_features():
    attention, heads = heads_of(["permute"])
    permute = attention.encodings[0]
    features = torch.eye(32, dtype=torch.float64).expand(1, 3, -1, -1)  # a token per feature
    for distance in (0, 1, 2, 7, 60, 420):
        moved = permute.transform(features, permute.tables(torch.full((1, 32, 1), distance)))
        score = (features * moved).sum((0, 2, 3)) / 32
        assert [head.similarity(distance) for head in heads] == pytest.approx(score.tolist())


@pytest.mark.parametrize("grid", [(1, 15), (3, 5), (5, 3)])
@pytest.mark.parametrize("axes", [1, 2])
def test_the_decay_of_a_head_is_that_of_attention(axes, grid):
    """Equal features leave weights that depend on the decay only: those of a query are r^|i-j|, relative to its own."""
    attention, heads = heads_of([("decay", {"two_sided": True})], size=4, axes=axes)
    assert [(head.two_sided, head.axis) for head in heads] == [(True, n % axes) for n in range(3)]
    rows, columns = torch.meshgrid(*map(torch.arange, grid), indexing="ij")
    positions = torch.stack([columns.flatten(), rows.flatten()], -1) if axes == 2 else torch.arange(15)[:, None]
    tokens = Tokens.build(1, 15, positions=positions[None], ordered=axes == 2)
    ones, identity = torch.ones(1, 3, 15, 4, dtype=torch.float64), torch.eye(15, dtype=torch.float64).expand(1, 3, -1, -1)
    weights = attention.mix(ones, ones, identity, tokens, None)[0][0]
    for head, of_head in zip(heads, weights, strict=True):
        for i in (0, 7, 14):
            distances = (positions - positions[i]).tolist()
            expected = [head.decay(*distance, grid=grid if axes == 2 else None) for distance in distances]
            assert (of_head[i] / of_head[i, i]).tolist() == pytest.approx(expected, abs=1e-12)
            assert [head.similarity(*d, grid=grid if axes == 2 else None) for d in distances] == expected


def test_r_and_half_lives():
    heads = inspect("permuteformer-lm").layers[0].heads
    assert [head.r for head in heads] == pytest.approx([1 / (1 + math.exp(-2 - 3 * h / 8)) for h in range(8)])
    for head in heads:
        assert not head.two_sided
        assert head.r**head.half_life == pytest.approx(0.5)
        assert head.decay(7) == pytest.approx(head.r**7)
    assert Head((), 1.0).half_life == math.inf
    assert (Head((), None).half_life, Head((), None).decay(3)) == (None, 1)
    assert Head((), 0.5).decay(1, 2) == 1  # rows cannot be counted in tokens without a grid


def test_a_trained_r_and_layers_that_differ_are_read_from_the_model(tmp_path):
    position = [{"name": "permute"}, {"name": "decay", "learnable": True}]
    config = PermuteFormerConfig(**SIZES, causal=True, attention={"name": "linear"}, position=position, positions_per_layer=True)
    model = PermuteFormerForCausalLM(config)
    with torch.no_grad():
        model.model.layers[1].attention.attention.encodings[1].logit.fill_(-3)
    model.save_pretrained(tmp_path)
    found = inspect(str(tmp_path))
    assert [layers.numbers for layers in found.layers] == [(0,), (1,)]
    assert found.layers[1].heads[0].r == pytest.approx(torch.sigmoid(torch.tensor(-3.0)).item())
    assert found.layers[0].heads[0].cycles != found.layers[1].heads[0].cycles
    assert any("layer 1, head 0" in warning and "0.0474" in warning for warning in found.warnings())
    run("inspect", tmp_path, "--picture", tmp_path / "layers.png")  # two groups of layers


def test_warnings():
    permutation = torch.tensor([[1, 0, 2, 3], [1, 2, 0, 3]])
    attention, _ = heads_of([("permute", {"permutation": permutation})], heads=2, size=4)
    found = inspect_attentions(PermuteFormerConfig(), [attention])
    assert found.reach == (6,)
    assert any("head 0" in warning and "2 of 4" in warning for warning in found.warnings())
    assert not any("look the same" in warning for warning in found.warnings(5))
    assert any("differ by 6" in warning for warning in found.warnings(6))
    assert "learned" in inspect("transformer-text").warnings()[0]
    image = inspect("permuteformer-decay-image")
    assert any("grid" in warning for warning in image.warnings())
    assert not any("grid" in warning for warning in image.warnings(grid=(32, 32)))


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["permuteformer-lm"], ["causal, 8 heads", "permute, decay", "0.8808", "r^(i−j)", "repeat after"]),
        (["permuteformer-image", "--distance", 16], ["order", "similarity", "columns and"]),
        (["permuteformer-decay-text"], ["bidirectional", "r^|i−j|", "1,024"]),
        (["permuteformer-decay-image", "--grid", 20, 10], ["r^|i−j|", "row by row", "column by column", "20 x 10"]),
    ],
)
def test_the_command(words, shown, tmp_path):
    output = run("inspect", *words, "--picture", tmp_path / "a.png")
    assert [text for text in shown if text not in output] == []
    with Image.open(tmp_path / "a.png") as image:
        assert image.size[0] > 500


def test_the_command_refuses(tmp_path):
    assert "did you mean 'permuteformer-lm'?" in run("inspect", "permutformer-lm", code=1)
    assert "config.json" in run("inspect", tmp_path, code=1)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert "'bert'" in run("inspect", tmp_path, code=1)
    assert "got 0 5" in run("inspect", "permuteformer-image", "--grid", 0, 5, code=1)
    assert "neither permutation nor decay" in run("inspect", "transformer-text")
    assert "--picture" in run("inspect", "transformer-text", "--picture", tmp_path / "c.png", code=1)
    assert not (tmp_path / "c.png").exists()
