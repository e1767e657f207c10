"""``save_pretrained`` writes a model card and keeps an existing one."""

import inspect
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData
from transformers import modeling_utils
from transformers.utils import hub

from permuteformer.models import PermuteFormerConfig, PermuteFormerForCausalLM
from permuteformer.models.card import CARRIED, UNKNOWN, is_template


@pytest.fixture
def model():
    config = PermuteFormerConfig.preset("permuteformer-lm", vocab_size=20, hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
    return PermuteFormerForCausalLM(config)


def test_a_new_model_gets_a_card(model, tmp_path):
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other" / "README.md").exists()
    model.save_pretrained(tmp_path)
    _, front, body = (tmp_path / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "permuteformer"
    parameters = f"{sum(p.numel() for p in model.parameters()):,} parameters"
    headings = [f"\n## {heading}\n" for heading in ("Data", "Numbers", "Use", "Made by", "Limits")]
    for text in (UNKNOWN, parameters, "attention `linear`, positions `permute`, `decay`", *headings):
        assert text in body


def test_a_card_stays_and_goes_with_its_weights(model, tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "README.md").write_text("trained on tea leaves\n")
    model.save_pretrained(tmp_path / "first")
    assert (tmp_path / "first" / "README.md").read_text() == "trained on tea leaves\n"
    for source, target in (("first", "second"), ("second", "third")):
        PermuteFormerForCausalLM.from_pretrained(tmp_path / source).save_pretrained(tmp_path / target)
        assert (tmp_path / target / "README.md").read_text() == f"trained on tea leaves\n\n{CARRIED}\n"


@pytest.mark.parametrize("existing", [None, "card of the hub\n"])
@pytest.mark.parametrize("way", ["push_to_hub", "save_pretrained"])
def test_an_upload_to_the_hub_has_the_card(model, tmp_path, monkeypatch, existing, way):
    sent = {}

    class Api:
        def create_repo(self, repo_id, **options):
            return type("Repository", (), {"repo_id": repo_id})

        def create_commit(self, operations, **options):
            sent.update({each.path_in_repo: Path(each.path_or_fileobj).read_text(errors="replace") for each in operations})

    def card_of_the_hub(repo_id, tags=None, token=None):
        template = "This is the model card of a transformers model. This model card has been automatically generated."
        made = ModelCard.from_template(ModelCardData(library_name="transformers"), model_description=template)
        return made if existing is None else ModelCard(existing)

    for module in (modeling_utils, hub):
        monkeypatch.setattr(module, "hf_api", Api)
        monkeypatch.setattr(module, "create_and_tag_model_card", card_of_the_hub)
    if way == "push_to_hub":
        model.push_to_hub("me/model")
    else:
        model.save_pretrained(tmp_path, push_to_hub=True, repo_id="me/model")
    assert "model.safetensors" in sent
    assert (existing or UNKNOWN) in sent["README.md"]


def test_the_template_of_transformers_is_recognised(tmp_path):
    (tmp_path / "README.md").write_text(inspect.getsource(hub.create_and_tag_model_card))
    assert is_template(tmp_path / "README.md")
