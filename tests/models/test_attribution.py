"""Attribution: it adds up, it finds the one byte or pixel that decides, and where nothing was learned it finds nothing."""

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


def texts(count, generator):
    """Random letters and blanks with one digit, and whether the digit is 5 or more: ids ``b l`` with CLS and SEP, places, labels."""
    letters = torch.randint(97, 123, (count, LENGTH), generator=generator)
    letters[torch.rand(count, LENGTH, generator=generator) < 0.2] = ord(" ")
    places, digits = torch.randint(LENGTH, (count,), generator=generator), torch.randint(10, (count,), generator=generator)
    letters[torch.arange(count), places] = 48 + digits
    edge = torch.ones(count, 1, dtype=torch.int64)
    return torch.cat([edge * PAPER.cls, letters + PAPER.first, edge * PAPER.sep], 1), places + 1, (digits >= 5).long()


def images(count, generator):
    """Dark noise with one bright pixel, and which of two shades it has: ids, positions, places, labels."""
    pixels = 10 * torch.randint(0, 5, (count, SIDE * SIDE), generator=generator)
    places, labels = torch.randint(SIDE * SIDE, (count,), generator=generator), torch.randint(2, (count,), generator=generator)
    pixels[torch.arange(count), places] = 180 + 60 * labels
    ids, positions = image_tokens(pixels.view(count, SIDE, SIDE))
    return ids, positions, places + 1, labels


def trained(model, draw, steps=150):
    """Until the answer is right, which takes a few seconds."""
    optimizer, generator = torch.optim.Adam(model.parameters(), lr=1e-2), torch.Generator().manual_seed(1)
    for _ in range(steps):
        *given, _, labels = draw(32, generator)
        arguments = dict(zip(("input_ids", "position_ids"), given, strict=False))
        loss = model(**arguments, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1, f"the model did not learn its one byte: {loss}"
    return model.eval()


def classifier(preset="permuteformer-text"):
    config = PermuteFormerConfig.preset(preset, **SIZES, num_labels=2, hidden_dropout=0.0, pooling="mean", initializer_range=0.1)
    return PermuteFormerForSequenceClassification(config)


@pytest.fixture(scope="module")
def reader():
    torch.manual_seed(0)
    return trained(classifier(), texts)


def blank_of(ids, blank=BLANK):
    return torch.where(ids < PAPER.first, ids, blank)


def found_first(model, count=20):
    """Of how many texts the digit has the largest value, and of how many blanking it out costs most."""
    ids, places, _ = texts(count, torch.Generator().manual_seed(2))
    by_value = by_blank = 0
    for row, place in zip(ids, places.tolist(), strict=True):
        question = Question(model, {"input_ids": row.unsqueeze(0)}, blank_of(row))
        by_value += int(integrated_gradients(question).values.abs().argmax()) == place
        by_blank += int(torch.tensor(without_spans(question, list(torch.arange(len(row))[:, None]))).abs().argmax()) == place
    return by_value, by_blank


def test_the_byte_that_decides_is_found_and_by_a_model_that_learned_nothing_it_is_not(reader):
    by_value, by_blank = found_first(reader)
    assert by_value >= 18
    assert by_blank >= 18
    torch.manual_seed(7)
    by_value, by_blank = found_first(classifier().eval())
    assert by_value <= 5  # by luck it is one of 24
    assert by_blank <= 5


def test_the_pixel_that_decides_is_found():
    torch.manual_seed(0)
    model = trained(classifier("permuteformer-image"), images)
    ids, positions, places, _ = images(12, torch.Generator().manual_seed(3))
    found = 0
    for row, at, place in zip(ids, positions, places.tolist(), strict=True):
        question = Question(model, {"input_ids": row.unsqueeze(0), "position_ids": at.unsqueeze(0)}, blank_of(row, PAPER.first + 20))
        found += int(integrated_gradients(question).values.abs().argmax()) == place
    assert found >= 11


def test_values_add_up_to_the_difference_of_the_log_odds(reader):
    ids, _, _ = texts(5, torch.Generator().manual_seed(4))
    for row in ids:
        question = Question(reader, {"input_ids": row.unsqueeze(0)}, blank_of(row))
        found = integrated_gradients(question)
        logits = [reader(x.unsqueeze(0)).logits[0].detach().double() for x in (row, blank_of(row))]
        odds = [float(x[question.answer] - x[1 - question.answer]) for x in logits]
        assert (found.log_odds, found.without) == pytest.approx(odds, abs=1e-4)
        assert abs(float(found.values.sum()) - (odds[0] - odds[1])) <= TOLERANCE * max(abs(odds[0] - odds[1]), LEAST) + 1e-4
        assert found.exact
        assert question.probability == pytest.approx(float(logits[0].softmax(-1).max()), abs=1e-6)


def test_a_path_that_is_not_followed_to_the_end_says_what_is_missing(reader, monkeypatch):
    row = texts(1, torch.Generator().manual_seed(5))[0][0]
    question = Question(reader, {"input_ids": row.unsqueeze(0)}, blank_of(row))
    monkeypatch.setattr(attribution, "NODES", (0.0,) * 4)  # all at one end of each piece: far too coarse
    rough = integrated_gradients(question, most=8)
    assert not rough.exact
    assert rough.missing > TOLERANCE * abs(rough.log_odds - rough.without)
    assert rough.gradients == 8


@pytest.mark.parametrize("preset", ["transformer-text", "reformer-text", "linformer-text", "nystromformer-text", "performer-text"])
def test_other_attentions_are_explained_too(preset):
    torch.manual_seed(0)
    model = classifier(preset).eval()
    row = texts(1, torch.Generator().manual_seed(10))[0][0]
    found = integrated_gradients(Question(model, {"input_ids": row.unsqueeze(0)}, blank_of(row)))
    difference = found.log_odds - found.without
    assert found.missing == pytest.approx(abs(float(found.values.sum()) - difference), abs=1e-9)
    assert found.exact == (found.missing <= TOLERANCE * max(abs(difference), LEAST))
    assert found.exact or preset == "reformer-text"  # whose hashing jumps
    assert found.values.abs().sum() > 0


def test_no_piece_is_halved_that_would_take_too_long(reader, monkeypatch):
    row = texts(1, torch.Generator().manual_seed(5))[0][0]
    question = Question(reader, {"input_ids": row.unsqueeze(0)}, blank_of(row))
    monkeypatch.setattr(attribution, "NODES", (0.0,) * 4)
    assert integrated_gradients(question).gradients > 8
    monkeypatch.setattr(attribution, "SECONDS", 0.0)
    assert integrated_gradients(question).gradients == 8


def test_padding_and_what_stands_around_a_text_have_exactly_nothing(reader):
    row = texts(1, torch.Generator().manual_seed(6))[0][0]
    padded = torch.cat([row, torch.full((7,), PAPER.pad)])
    mask = torch.arange(len(padded)) < len(row)
    alone = integrated_gradients(Question(reader, {"input_ids": row.unsqueeze(0)}, blank_of(row))).values
    # Even where padding is told to have a blank of its own, no gradient comes from it.
    blank = torch.where(mask, torch.cat([blank_of(row), row.new_zeros(7)]), PAPER.first + 90)
    found = integrated_gradients(Question(reader, {"input_ids": padded[None], "attention_mask": mask[None]}, blank)).values
    assert torch.equal(found[len(row) :], torch.zeros(7, dtype=torch.float64))
    assert found[0] == found[len(row) - 1] == 0
    assert torch.allclose(found[: len(row)], alone, atol=1e-4)


def test_a_blank_text_has_nothing_and_one_byte_has_all(reader):
    blank = torch.tensor([PAPER.cls, *[BLANK] * 9, PAPER.sep])
    assert integrated_gradients(Question(reader, {"input_ids": blank[None]}, blank)).values.abs().sum() == 0
    one = blank.clone()
    one[4] = PAPER.first + ord("7")
    found = integrated_gradients(Question(reader, {"input_ids": one[None]}, blank))
    assert found.values.nonzero().flatten().tolist() == [4]
    (fall,) = without_spans(Question(reader, {"input_ids": one[None]}, blank), [torch.tensor([4])])
    assert fall == pytest.approx(found.log_odds - found.without, abs=1e-4)


def test_the_answer_may_be_another(reader):
    row = texts(1, torch.Generator().manual_seed(8))[0][0]
    question = Question(reader, {"input_ids": row.unsqueeze(0)}, blank_of(row))
    other = question.about(1 - question.answer)
    assert other.probability == pytest.approx(1 - question.probability)
    assert torch.allclose(integrated_gradients(other).values, -integrated_gradients(question).values, atol=1e-4)
    with pytest.raises(ValueError, match="answer must be one of the 2 that the model can give; it is 2"):
        question.about(2)


def test_two_documents_and_language_models_add_up_too():
    torch.manual_seed(0)
    first, second = (texts(1, torch.Generator().manual_seed(n))[0] for n in (0, 1))
    model = PermuteFormerForMatching(PermuteFormerConfig.preset("permuteformer-retrieval", **SIZES)).eval()
    question = Question(model, {"input_ids": first, "second_input_ids": second}, blank_of(torch.cat([first[0], second[0]])))
    found = integrated_gradients(question)
    assert len(found.values) == 2 * (LENGTH + 2)
    assert found.exact
    assert found.values[LENGTH + 2 :].abs().sum() > 0
    speaker = PermuteFormerForCausalLM(PermuteFormerConfig.preset("permuteformer-lm", **SIZES)).eval()
    question = Question(speaker, {"input_ids": first[:, :-1]}, blank_of(first[0, :-1]), allowed=torch.arange(2, PAPER.size))
    assert integrated_gradients(question).exact
    assert not speaker.model.embed_tokens._forward_hooks


def test_an_answer_that_is_no_number_is_refused(reader):
    row = texts(1, torch.Generator().manual_seed(9))[0]
    model = classifier().eval()
    with torch.no_grad():
        model.classifier.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="answer is not a number"):
        Question(model, {"input_ids": row}, blank_of(row[0]))
