"""The numbers of a head, compared with the reference implementation and with closed forms."""

import pytest
import torch

from permuteformer.demo.head_view import DEFAULT, DISTANCES, HEADS, SIDE, STEPS, TOKEN_SEED, TOKENS, Choice, head_view
from permuteformer.ops import reference
from permuteformer.ops.feature_map import relu_eps
from permuteformer.positions.decay import Decay
from permuteformer.positions.permute import Permute

LM, ENCODER, IMAGE = {"axes": 1, "causal": True}, {"axes": 1, "causal": False}, {"axes": 2, "causal": False}


def choice(**fields):
    return Choice(**{"features": 16, "permutation": "random", "seed": 0, "head": 2, "r": DEFAULT, "alike": True, **LM, **fields})


def test_features_by_position_are_powers_of_the_permutation():
    found = head_view(choice())
    power = torch.arange(16)
    permutation = Permute(HEADS, 16).permutation[2]
    for places in found["places"]:
        assert places == power.tolist()
        power = permutation[power]
    assert len(found["places"]) == STEPS
    for cycle in found["cycles"]:
        assert [int(permutation[a]) for a in cycle["features"]] == [*cycle["features"][1:], cycle["features"][0]]


@pytest.mark.parametrize("kind", [LM, ENCODER, IMAGE], ids=["lm", "encoder", "image"])
@pytest.mark.parametrize("head", [2, 3])
@pytest.mark.parametrize("r", [DEFAULT, 0.9, 1.0])
def test_scores_decay_with_the_distance(kind, head, r):
    found, plain = head_view(choice(head=head, r=r, **kind)), head_view(choice(head=head, r=None, **kind))
    assert found["distances"] == list(range(0 if kind is LM else -DISTANCES, DISTANCES + 1))
    for name in ("permuteformer", "similarity"):
        expected = [found["r"] ** abs(d) * s for d, s in zip(found["distances"], plain[name], strict=True)]
        assert found[name] == pytest.approx(expected, abs=2e-5)
        assert max(found[name]) == found[name][found["distances"].index(0)] == 1
    assert found["performer"] == [1.0] * len(found["distances"])
    assert found["two_sided"] is (kind is not LM)


def test_scores_repeat_after_the_order():
    found = head_view(choice(r=None))
    order = int(found["order"][0])
    assert order <= DISTANCES
    assert found["permuteformer"][order] == found["similarity"][order] == 1
    x = relu_eps(tokens(1, 16))[0]
    permutation = Permute(HEADS, 16).permutation[2]
    assert found["permuteformer"][1] == pytest.approx(float(x @ x[permutation] / (x @ x)), abs=1e-5)
    nothing = head_view(choice(permutation="none", r=None))
    assert nothing["permuteformer"] == [1.0] * (DISTANCES + 1)
    assert "16 of 16" in nothing["warnings"][0]


def tokens(count, features):
    return torch.randn(count, features, generator=torch.Generator().manual_seed(TOKEN_SEED), dtype=torch.float64)


def expected_weights(chosen, decay, positions):
    """Weights of one head by the equations, ``l l``."""
    length = positions.shape[1]
    x = tokens(length, chosen.features)
    x = (x[:1].expand_as(x) if chosen.alike else x)[None, None]
    permutation = Permute(HEADS, chosen.features, chosen.axes).permutation
    permutations = [permutation[None, chosen.head, :]]
    if chosen.axes == 2:  # each half of the features is moved by one axis
        index, half = torch.arange(chosen.features), chosen.features // 2
        moved = permutations[0]
        permutations = [torch.where(index < half, moved, index), torch.where(index < half, index, moved)]
    weights = None
    if decay is not None:
        ranks = reference.ranks(positions, chosen.head % chosen.axes)
        weights = reference.decay_weights(decay.r[chosen.head : chosen.head + 1], ranks[:, None])
    return reference.attention(
        x,
        x,
        torch.eye(length, dtype=torch.float64)[None, None],
        permutations=permutations,
        positions=positions,
        visible=torch.ones(length, length, dtype=torch.bool).tril() if chosen.causal else torch.ones(length, length, dtype=torch.bool),
        feature_map=relu_eps,
        decay=weights,
    )[0, 0]


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("r", [DEFAULT, 0.8, None])
@pytest.mark.parametrize("kind", [LM, ENCODER], ids=["lm", "encoder"])
def test_weights_of_a_text(kind, r, alike):
    chosen = choice(r=r, alike=alike, **kind)
    number, length = (None, TOKENS) if r == DEFAULT else (r, None)
    decay = Decay(HEADS, number) if kind is LM else Decay(HEADS, number, two_sided=True, length=length)
    expected = expected_weights(chosen, None if r is None else decay, torch.arange(TOKENS).view(1, TOKENS, 1))
    found = head_view(chosen)
    torch.testing.assert_close(torch.tensor(found["map"]["permuteformer"], dtype=torch.float64), expected, atol=1e-5, rtol=0)
    assert found["r"] == (None if r is None else pytest.approx(float(decay.r[chosen.head])))
    after = torch.tensor(found["map"]["permuteformer"]).triu(1)
    assert bool((after == 0).all()) is (kind is LM)


@pytest.mark.parametrize("head", [4, 5])
@pytest.mark.parametrize("r", [DEFAULT, 0.8, None])
def test_weights_of_the_middle_pixel(head, r):
    chosen = choice(head=head, r=r, alike=False, features=8, **IMAGE)
    decay = Decay(HEADS, two_sided=True, length=SIDE * SIDE, axes=2) if r == DEFAULT else Decay(HEADS, r, two_sided=True, axes=2)
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    positions = torch.stack([columns.flatten(), rows.flatten()], -1)[None]
    expected = expected_weights(chosen, None if r is None else decay, positions)[SIDE * SIDE // 2].view(SIDE, SIDE)
    found = head_view(chosen)
    torch.testing.assert_close(torch.tensor(found["map"]["permuteformer"], dtype=torch.float64), expected, atol=1e-5, rtol=0)
    assert found["decay_axis"] == head % 2
    assert found["axis"] == [0] * 4 + [1] * 4
    assert len(found["order"]) == 2


@pytest.mark.parametrize("head", [4, 5])
def test_a_head_of_an_image_counts_along_its_axis(head):
    found = head_view(choice(head=head, r=0.5, permutation="none", **IMAGE))
    weights = torch.tensor(found["map"]["permuteformer"])
    weights = weights if found["decay_axis"] == 0 else weights.T
    middle = SIDE // 2
    assert (weights[middle, middle + 1] / weights[middle, middle]).item() == pytest.approx(0.5, abs=1e-3)
    assert weights[middle + 1, middle] < 1e-3  # a whole row away
    assert torch.tensor(found["map"]["performer"]).std() < 1e-6


def test_default_half_lives_of_an_encoder():
    text = [head_view(choice(head=head, **ENCODER))["half_life"] for head in range(HEADS)]
    assert (text[0], text[-1]) == pytest.approx((1, TOKENS / 4))
    image = [head_view(choice(head=head, **IMAGE))["half_life"] for head in range(HEADS)]
    assert image[::2] == pytest.approx(image[1::2])
    assert (image[0], image[-1]) == pytest.approx((1, SIDE * SIDE / 4))


def test_a_short_half_life_gives_a_warning():
    assert "r = 0.5" in head_view(choice(r=0.5))["warnings"][0]
    assert head_view(choice(r=0.9))["warnings"] == []
    assert head_view(choice(r=1.0))["half_life"] is None
