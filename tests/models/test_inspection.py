"""Looking into the positions of models."""

import math

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from permuteformer.cli import app
from permuteformer.models import PermuteFormerConfig, PermuteFormerForCausalLM
from permuteformer.models.inspection import Head, inspect, inspection_of
from permuteformer.positions.permute import Permute

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}


def test_cycles_are_those_of_the_permutation():
    found = inspect("permuteformer-image")
    (layers,) = found.layers
    assert layers.numbers == (0, 1, 2)
    permute = Permute(4, 64, axes=2)
    for head, permutation in zip(layers.heads, permute.permutation, strict=True):
        assert [sum(lengths) for lengths in head.cycles] == [32, 32]
        moved, steps = permutation.clone(), 1
        while not torch.equal(moved, torch.arange(64)):
            moved, steps = permutation[moved], steps + 1
            if steps > 100_000:
                break
        else:
            assert math.lcm(*head.order) == steps
    assert found.reach == permute.period


def test_likeness_is_the_score_of_features_that_have_nothing_to_do_with_each_other():
    permute = Permute(3, 32)
    heads = inspection_of(PermuteFormerConfig.preset("permuteformer-lm"), [_attention(permute)]).layers[0].heads
    features = torch.eye(32, dtype=torch.float64).expand(1, 3, -1, -1)  # every feature a token: its score with itself at a distance
    for distance in (0, 1, 2, 7, 60, 420):
        there = permute.transform(features, permute.tables(torch.full((1, 32, 1), distance)))
        score = (features * there).sum((0, 2, 3)) / 32
        assert [head.alike(distance) for head in heads] == pytest.approx(score.tolist())


def _attention(permute):
    from permuteformer.attention import ATTENTIONS

    return ATTENTIONS["linear"](permute.num_heads, permute.feature_size, position=permute)


def test_r_and_half_lives():
    heads = inspect("permuteformer-lm").layers[0].heads
    assert [head.r for head in heads] == pytest.approx([1 / (1 + math.exp(-2 - 3 * h / 8)) for h in range(8)])
    assert heads[0].alike(0) == 1
    for head in heads:
        assert head.r**head.half_life == pytest.approx(0.5)
    assert Head((), 1.0).half_life == math.inf
    assert Head((), None).half_life is None


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
    assert any("layer 1, head 0: r = 0.0474 halves a weight within" in warning for warning in found.warnings())


def test_warnings():
    permutation = torch.tensor([[1, 0, 2, 3], [1, 2, 0, 3]])
    found = inspection_of(PermuteFormerConfig.preset("permuteformer-lm"), [_attention(Permute(2, 4, permutation=permutation))])
    assert found.reach == (6,)
    assert "head 0: 2 of 4 features are never moved" in found.warnings()
    assert not any("look the same" in warning for warning in found.warnings(5))
    assert any("differ by 6 look the same" in warning for warning in found.warnings(6))
    assert inspect("transformer-text").warnings() == ["the attention has neither permutation nor decay: positions are learned"]


def run(*words, code=0):
    result = CliRunner().invoke(app, ["inspect", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.output


def width(picture):
    with Image.open(picture) as image:
        return image.size[0]


def test_the_command(tmp_path):
    said = run("permuteformer-lm", "--picture", tmp_path / "a.png")
    assert "linear attention, causal, 8 heads; positions: permute, decay" in said
    assert "0.8808" in said
    assert "repeat after" in said
    assert width(tmp_path / "a.png") > 500
    assert "order" in run("permuteformer-image", "--picture", tmp_path / "b.png")
    assert width(tmp_path / "b.png") > 500
    assert "neither permutation nor decay" in run("transformer-text")


def test_the_command_given_something_else(tmp_path):
    assert "did you mean 'permuteformer-lm'?" in run("permutformer-lm", code=1)
    assert "is no folder of a model or of a run" in run(tmp_path, code=1)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert "holds a model of type 'bert'" in run(tmp_path, code=1)
    assert "there is nothing to draw" in run("transformer-text", "--picture", tmp_path / "c.png", code=1)
    assert not (tmp_path / "c.png").exists()
