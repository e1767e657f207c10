"""Integrated gradients add up, find the byte or pixel that decides, and find nothing in a model that learned nothing."""

import pytest
import torch

from permuteformer.models import (
    PermuteFormerConfig,
    PermuteFormerForCausalLM,
    PermuteFormerForMatching,
    PermuteFormerForSequenceClassification,
    attribution,
)
from permuteformer.models.attribution import LEAST, TOLERANCE, Question, integrated_gradients, without_spans
from permuteformer.tokens import PAPER, image_tokens

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": PAPER.size}
LENGTH, SIDE = 24, 6
BLANK = PAPER.first + ord(" ")


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def texts(count, generator):
    """Random letters with one digit, labelled by whether it is 5 or more: ids ``b l``, index of the digit, label."""
    letters = torch.randint(97, 123, (count, LENGTH), generator=generator)
    letters[torch.rand(count, LENGTH, generator=generator) < 0.2] = ord(" ")
    places, digits = torch.randint(LENGTH, (count,), generator=generator), torch.randint(10, (count,), generator=generator)
    letters[torch.arange(count), places] = 48 + digits
    edge = torch.ones(count, 1, dtype=torch.int64)
    ids = torch.cat([edge * PAPER.cls, letters + PAPER.first, edge * PAPER.sep], 1)
    return {"input_ids": ids}, places + 1, (digits >= 5).long()


def images(count, generator):
    """Dark noise with one bright pixel, labelled by its shade."""
    pixels = 10 * torch.randint(0, 5, (count, SIDE * SIDE), generator=generator)
    places, labels = torch.randint(SIDE * SIDE, (count,), generator=generator), torch.randint(2, (count,), generator=generator)
    pixels[torch.arange(count), places] = 180 + 60 * labels
    ids, positions = image_tokens(pixels.view(count, SIDE, SIDE))
    return {"input_ids": ids, "position_ids": positions}, places + 1, labels


def classifier(preset="permuteformer-text"):
    config = PermuteFormerConfig.preset(preset, **SIZES, num_labels=2, hidden_dropout=0.0, pooling="mean", initializer_range=0.1)
    return PermuteFormerForSequenceClassification(config).eval()


def trained(preset, draw):
    torch.manual_seed(0)
    model, generator = classifier(preset).train(), seeded(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        inputs, _, labels = draw(32, generator)
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    return model.eval()


@pytest.fixture(scope="module")
def reader():
    return trained("permuteformer-text", texts)


def blank_of(ids, blank=BLANK):
    return torch.where(ids < PAPER.first, ids, blank)


def question_of(model, ids, **inputs):
    return Question(model, {"input_ids": ids[None], **inputs}, blank_of(ids))


def found_first(model, draw, count, blank=BLANK):
    """The number of inputs whose deciding token has the largest value, and for which blanking it costs most."""
    inputs, places, _ = draw(count, seeded(2))
    by_value = by_blank = 0
    for n, place in enumerate(places.tolist()):
        question = Question(model, {name: x[n : n + 1] for name, x in inputs.items()}, blank_of(inputs["input_ids"][n], blank))
        by_value += int(integrated_gradients(question).values.abs().argmax()) == place
        spans = list(torch.arange(len(question.tokens))[:, None])
        by_blank += int(torch.tensor(without_spans(question, spans)).abs().argmax()) == place
    return by_value, by_blank


def test_the_token_that_decides_is_found(reader):
    assert min(found_first(reader, texts, 20)) >= 18
    assert min(found_first(trained("permuteformer-image", images), images, 12, PAPER.first + 20)) >= 11
    torch.manual_seed(7)
    assert max(found_first(classifier(), texts, 20)) <= 5  # learned nothing: by luck one of 24


def test_values_add_up_to_the_difference_of_the_log_odds(reader):
    for row in texts(5, seeded(4))[0]["input_ids"]:
        question = question_of(reader, row)
        found = integrated_gradients(question)
        logits = [reader(x[None]).logits[0].detach().double() for x in (row, blank_of(row))]
        odds = [float(x[question.answer] - x[1 - question.answer]) for x in logits]
        assert (found.log_odds, found.without) == pytest.approx(odds, abs=1e-4)
        assert abs(float(found.values.sum()) - (odds[0] - odds[1])) <= TOLERANCE * max(abs(odds[0] - odds[1]), LEAST) + 1e-4
        assert found.exact
        assert question.probability == pytest.approx(float(logits[0].softmax(-1).max()), abs=1e-6)


def test_limits_of_gradients_and_time_are_kept_and_the_error_is_reported(reader, monkeypatch):
    question = question_of(reader, texts(1, seeded(5))[0]["input_ids"][0])
    monkeypatch.setattr(attribution, "NODES", (0.0,) * 4)  # all at one end of each piece: far too coarse
    assert integrated_gradients(question).gradients > 8
    rough = integrated_gradients(question, most=8)
    assert (rough.exact, rough.gradients) == (False, 8)
    assert rough.missing > TOLERANCE * abs(rough.log_odds - rough.without)
    monkeypatch.setattr(attribution, "SECONDS", 0.0)
    assert integrated_gradients(question).gradients == 8


@pytest.mark.parametrize("preset", ["transformer", "reformer", "linformer", "nystromformer", "performer", "permuteformer-decay"])
def test_every_attention_is_explained(preset):
    found = integrated_gradients(question_of(classifier(f"{preset}-text"), texts(1, seeded(10))[0]["input_ids"][0]))
    difference = found.log_odds - found.without
    assert found.missing == pytest.approx(abs(float(found.values.sum()) - difference), abs=1e-9)
    assert found.exact == (found.missing <= TOLERANCE * max(abs(difference), LEAST))
    assert found.exact or preset == "reformer"  # whose hashing jumps
    assert found.values.abs().sum() > 0


def test_padding_and_special_tokens_have_exactly_no_share(reader):
    row = texts(1, seeded(6))[0]["input_ids"][0]
    padded = torch.cat([row, torch.full((7,), PAPER.pad)])
    mask = torch.arange(len(padded)) < len(row)
    alone = integrated_gradients(question_of(reader, row)).values
    blank = torch.where(mask, torch.cat([blank_of(row), row.new_zeros(7)]), PAPER.first + 90)  # also if padding has another blank
    found = integrated_gradients(Question(reader, {"input_ids": padded[None], "attention_mask": mask[None]}, blank)).values
    assert found[0] == found[len(row) - 1] == found[len(row) :].abs().sum() == 0
    assert torch.allclose(found[: len(row)], alone, atol=1e-4)


def test_a_blank_text_has_no_shares_and_a_single_byte_has_all(reader):
    blank = torch.tensor([PAPER.cls, *[BLANK] * 9, PAPER.sep])
    assert integrated_gradients(question_of(reader, blank)).values.abs().sum() == 0
    one = blank.clone()
    one[4] = PAPER.first + ord("7")
    found = integrated_gradients(question_of(reader, one))
    assert found.values.nonzero().flatten().tolist() == [4]
    (fall,) = without_spans(question_of(reader, one), [torch.tensor([4])])
    assert fall == pytest.approx(found.log_odds - found.without, abs=1e-4)


def test_another_answer(reader):
    question = question_of(reader, texts(1, seeded(8))[0]["input_ids"][0])
    other = question.about(1 - question.answer)
    assert other.probability == pytest.approx(1 - question.probability)
    assert torch.allclose(integrated_gradients(other).values, -integrated_gradients(question).values, atol=1e-4)
    with pytest.raises(ValueError, match=r"answer.*got 2"):
        question.about(2)


def test_two_documents_and_language_models():
    first, second = (texts(1, seeded(n))[0]["input_ids"] for n in (0, 1))
    matcher = PermuteFormerForMatching(PermuteFormerConfig.preset("permuteformer-retrieval", **SIZES)).eval()
    found = integrated_gradients(
        Question(matcher, {"input_ids": first, "second_input_ids": second}, blank_of(torch.cat([first[0], second[0]])))
    )
    assert (len(found.values), found.exact) == (2 * (LENGTH + 2), True)
    assert found.values[LENGTH + 2 :].abs().sum() > 0
    lm = PermuteFormerForCausalLM(PermuteFormerConfig.preset("permuteformer-lm", **SIZES)).eval()
    question = Question(lm, {"input_ids": first[:, :-1]}, blank_of(first[0, :-1]), allowed=torch.arange(2, PAPER.size))
    assert integrated_gradients(question).exact
    assert not lm.model.embed_tokens._forward_hooks


def test_logits_that_are_not_finite_are_refused():
    model = classifier()
    torch.nn.init.constant_(model.classifier.weight, torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        question_of(model, texts(1, seeded(9))[0]["input_ids"][0])
