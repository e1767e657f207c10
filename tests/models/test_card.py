"""``save_pretrained`` leaves a card, and takes none away."""

from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData

from permuteformer.models import PermuteFormerConfig, PermuteFormerForCausalLM
from permuteformer.models.card import CARRIED, UNKNOWN, is_template


@pytest.fixture
def model():
    config = PermuteFormerConfig.preset("permuteformer-lm", vocab_size=20, hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
    return PermuteFormerForCausalLM(config)


def test_a_model_that_was_not_trained_says_so(model, tmp_path):
    model.save_pretrained(tmp_path)
    _, front, body = (tmp_path / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "permuteformer"
    assert UNKNOWN in body
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in body
    for heading in ("Data", "Numbers", "Use", "Made by", "Limits"):
        assert f"\n## {heading}\n" in body
    assert "attention `linear`, positions `permute`, `decay`" in body


def test_a_card_that_somebody_wrote_stays(model, tmp_path):
    (tmp_path / "README.md").write_text("my words\n")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "my words\n"


def test_a_card_goes_with_its_weights(model, tmp_path):
    model.save_pretrained(tmp_path / "first")
    (tmp_path / "first" / "README.md").write_text("trained on tea leaves\n")
    for source, target in (("first", "second"), ("second", "third")):
        PermuteFormerForCausalLM.from_pretrained(tmp_path / source).save_pretrained(tmp_path / target)
        assert (tmp_path / target / "README.md").read_text() == f"trained on tea leaves\n\n{CARRIED}\n"


def test_only_the_main_process_writes_it(model, tmp_path):
    model.save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / "README.md").exists()


@pytest.mark.parametrize("there", [None, "words of the hub\n"], ids=["an empty repository", "one with a card"])
@pytest.mark.parametrize("way", ["push_to_hub", "save_pretrained"])
def test_what_is_pushed_to_the_hub_has_the_card(model, tmp_path, monkeypatch, there, way):
    """As transformers does it, up to what it hands over to be sent."""
    from transformers import modeling_utils
    from transformers.utils import hub

    sent = {}

    class Api:
        def create_repo(self, repo_id, **options):
            return type("Repository", (), {"repo_id": repo_id})

        def create_commit(self, operations, **options):
            sent.update({each.path_in_repo: Path(each.path_or_fileobj).read_text(errors="replace") for each in operations})

    def loaded(repo_id, tags=None, token=None):
        if there is not None:
            return ModelCard(there)
        words = "This is the model card of a transformers model. This model card has been automatically generated."
        return ModelCard.from_template(ModelCardData(library_name="transformers"), model_description=words)

    for module in (modeling_utils, hub):
        monkeypatch.setattr(module, "hf_api", Api)
        monkeypatch.setattr(module, "create_and_tag_model_card", loaded)
    if way == "push_to_hub":
        model.push_to_hub("me/model")
    else:
        model.save_pretrained(tmp_path, push_to_hub=True, repo_id="me/model")
    assert "model.safetensors" in sent
    assert (there or UNKNOWN) in sent["README.md"]


def test_the_template_of_the_hub_is_known(tmp_path):
    """Its words, as transformers has them."""
    import inspect

    from transformers.utils import hub

    (tmp_path / "README.md").write_text(inspect.getsource(hub.create_and_tag_model_card))
    assert is_template(tmp_path / "README.md")
