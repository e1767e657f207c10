"""The numbers of the page are those of the library, and of the paper's formulas."""

import pytest
import torch

from permuteformer.demo.playground import DISTANCES, HEADS, STEPS, TOKENS, Choice, look
from permuteformer.positions.permute import Permute


def choice(**fields):
    return Choice(**{"features": 16, "permutation": "random", "seed": 0, "head": 2, "r": "paper", "axes": 1, "alike": True, **fields})


def test_features_stand_where_the_permutation_puts_them():
    found = look(choice())
    power = torch.arange(16)
    permutation = Permute(HEADS, 16).permutation[2]
    for places in found["places"]:
        assert places == power.tolist()
        power = permutation[power]
    assert len(found["places"]) == STEPS
    for cycle in found["cycles"]:
        assert [int(permutation[a]) for a in cycle["features"]] == [*cycle["features"][1:], cycle["features"][0]]


def test_scores_fall_with_r_and_are_flat_without_any_position():
    found, plain = look(choice()), look(choice(r=None))
    assert found["permuteformer"] == pytest.approx([found["r"] ** d * s for d, s in enumerate(plain["permuteformer"])], abs=1e-4)
    assert found["r"] ** found["half_life"] == pytest.approx(0.5)
    order = int(plain["order"][0].replace(",", ""))
    assert order <= DISTANCES
    assert plain["permuteformer"][order] == pytest.approx(1)
    nothing = look(choice(permutation="none", r=None))
    assert nothing["permuteformer"] == nothing["performer"] == [1.0] * (DISTANCES + 1)
    assert "16 of 16 features are never moved." in nothing["warnings"]


def test_weights_of_alike_tokens_depend_on_the_distance_alone():
    found = look(choice())["map"]
    for i in range(TOKENS):
        assert found["performer"][i][: i + 1] == pytest.approx([1 / (i + 1)] * (i + 1), abs=1e-4)
        assert sum(found["permuteformer"][i]) == pytest.approx(1, abs=1e-3)
    last, before = found["permuteformer"][-1], found["permuteformer"][-2]
    shares = [last[j + 1] / before[j] for j in range(TOKENS - 1) if before[j] > 1e-3]
    assert max(shares) / min(shares) < 1.05
    scores = look(choice())["permuteformer"]
    assert last[-4] / last[-1] == pytest.approx(scores[3], rel=0.02)


def test_two_axes():
    found = look(choice(axes=2, r=None, features=32))
    weights = torch.tensor(found["map"]["permuteformer"])
    assert weights.shape == (15, 15)
    assert weights.argmax() == 7 * 15 + 7
    assert weights.std(0).max() > 0
    assert weights.std(1).max() > 0
    assert torch.tensor(found["map"]["performer"]).std() < 1e-6
    assert found["axis"] == [0] * 16 + [1] * 16
    assert len(found["order"]) == 2


def test_a_short_memory_is_told():
    assert any("halves a weight" in warning for warning in look(choice(r=0.5))["warnings"])
