import pytest
import torch

from permuteformer.ops.feature_map import FEATURE_MAPS, favor, feature_map, needs_projection, orthogonal_features


def apply(name, x):
    function = FEATURE_MAPS[name]
    projection = [orthogonal_features(x.shape[1], 12, x.shape[-1]).to(x.dtype)] if needs_projection(function) else []
    return function(x, *projection)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_features_are_not_negative_and_have_a_gradient(name):
    x = torch.randn(1, 2, 5, 6, dtype=torch.float64) * 3
    assert (apply(name, x) >= 0).all()
    x = x.requires_grad_()
    torch.manual_seed(1)
    projection = [orthogonal_features(2, 12, 6).double()] if needs_projection(FEATURE_MAPS[name]) else []
    assert torch.autograd.gradcheck(lambda x: FEATURE_MAPS[name](x, *projection), x)


def test_favor_estimates_the_softmax_kernel_without_bias():
    size, heads = 8, 64
    q, k = (torch.randn(2, 1, 1, 6, size, dtype=torch.float64) * 0.5).expand(2, 1, heads, 6, size)
    projection = orthogonal_features(heads, 4096, size, torch.Generator().manual_seed(0)).double()
    estimates = favor(q, projection) @ favor(k, projection).transpose(-1, -2)
    exact = (q @ k.transpose(-1, -2) * size**-0.5).exp()
    standard_error = estimates.std(1) / heads**0.5
    assert ((estimates.mean(1) - exact[:, 0]).abs() < 4 * standard_error + 1e-4).all()
    assert ((estimates.mean(1) - exact[:, 0]).abs() / exact[:, 0]).max() < 0.05


def test_favor_is_finite_for_large_inputs():
    projection = orthogonal_features(2, 256, 64)
    for scale in (0.0, 1.0, 30.0, 1e4):
        features = favor(torch.randn(1, 2, 50, 64) * scale, projection)
        assert features.isfinite().all()
        assert (features @ features.transpose(-1, -2)).isfinite().all()
        assert (features > 0).all()


def test_random_features_are_orthogonal_with_gaussian_lengths():
    w = orthogonal_features(200, 16, 16, torch.Generator().manual_seed(0)).double()
    lengths = w.norm(dim=-1)
    gram = w @ w.transpose(-1, -2) - torch.diag_embed(lengths.square())
    assert gram.abs().max() < 1e-4
    assert abs(lengths.square().mean() - 16) < 0.5
    assert abs(w.mean()) < 0.02


def test_a_name_is_taken_once():
    @feature_map
    def softplus(x):
        return torch.nn.functional.softplus(x)

    try:
        assert FEATURE_MAPS["softplus"] is softplus
        with pytest.raises(ValueError, match="'softplus' is already registered"):
            feature_map(softplus)
    finally:
        del FEATURE_MAPS["softplus"]
