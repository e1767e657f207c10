"""Where numbers that are not finite began."""

import pytest
import torch
from torch import nn

from permuteformer.models import PermuteFormerConfig, PermuteFormerForSequenceClassification
from permuteformer.train.finite import bad_gradients, bad_weights, first_bad_layer, item_numbers

NAN = float("nan")


@pytest.fixture
def model():
    config = PermuteFormerConfig(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, vocab_size=20)
    return PermuteFormerForSequenceClassification(config)


def where(model, tokens=((1, 5, 6), (1, 7, 8))):
    return first_bad_layer(model, lambda: model(torch.tensor(tokens)))


def test_a_row_of_the_embedding_shows_where_its_token_is(model):
    model.model.embed_tokens.weight.data[7] = NAN
    assert where(model) == "model.embed_tokens, whose weight is not finite"
    assert where(model, [[1, 5, 6]]) == "none when it was computed once more"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("model.layers.1.expand.bias", "model.layers.1.expand, whose bias is not finite"),
        ("model.layers.2.attention.query.weight", "model.layers.2.attention.query, whose weight is not finite"),
        ("classifier.weight", "classifier, whose weight is not finite"),
    ],
)
def test_a_weight(name, told, model):
    model.get_parameter(name).data.view(-1)[0] = NAN
    assert where(model) == told


def test_numbers_that_grow_too_large_name_the_layer_alone(model):
    model.model.layers[1].feed_forward_norm.weight.data *= 1e38
    model.model.layers[1].expand.weight.data *= 1e3
    assert where(model) == "model.layers.1.expand"


def test_a_module_whose_children_are_well(model):
    class Overflow(nn.Module):
        def forward(self, x):
            return x * 1e38 * 1e38

    model.model.layers[1].activation = Overflow()
    assert where(model) == "model.layers.1.activation"


def test_hooks_are_gone_afterwards(model):
    where(model)
    with pytest.raises(ZeroDivisionError):
        first_bad_layer(model, lambda: 1 / 0)
    assert not any(module._forward_hooks for module in model.modules())


def test_gradients_are_named_from_the_loss_back(model):
    assert bad_gradients(model) == ""
    model(torch.tensor([[1, 5]])).logits.sum().backward()
    assert bad_gradients(model) == ""
    model.model.layers[1].expand.weight.grad[0, 0] = NAN
    assert bad_gradients(model) == "model.layers.1.expand.weight"
    model.model.layers[0].expand.weight.grad[0, 0] = float("inf")
    assert bad_gradients(model) == "model.layers.1.expand.weight and 1 more below it"


def test_weights_and_items_in_words(model):
    assert bad_weights(model) == ""
    model.classifier.bias.data[0] = NAN
    assert bad_weights(model) == "classifier.bias"
    assert item_numbers(list(range(25))).endswith("18, 19 and 5 more")
