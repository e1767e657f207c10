"""The Trainer and the pipelines of Hugging Face accept these models."""

import pytest
import torch
from transformers import Trainer, TrainingArguments, pipeline

from permuteformer import PermuteFormerConfig, PermuteFormerForCausalLM, PermuteFormerForSequenceClassification
from permuteformer.models.tokenizer import ByteTokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and accelerate about each other

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def test_trainer_learns_and_saves_a_model_for_a_pipeline(tmp_path):
    """Texts of one letter or the other are classified after a few steps."""
    tokenizer = ByteTokenizer()
    encoded = tokenizer(["a" * n if label else "b" * n for n in range(3, 19) for label in (0, 1)], padding=True)
    rows = zip(encoded["input_ids"], encoded["attention_mask"], strict=True)
    items = [{"input_ids": ids, "attention_mask": mask, "labels": n % 2} for n, (ids, mask) in enumerate(rows)]
    config = PermuteFormerConfig(**SMALL, hidden_dropout=0.0, id2label={0: "b", 1: "a"}, label2id={"b": 0, "a": 1})
    options = {"max_steps": 25, "per_device_train_batch_size": 8, "learning_rate": 5e-3, "logging_steps": 5, "save_strategy": "no"}
    arguments = TrainingArguments(str(tmp_path / "run"), **options, report_to=[], use_cpu=True, disable_tqdm=True)
    model = PermuteFormerForSequenceClassification(config)
    trainer = Trainer(model, arguments, train_dataset=items, eval_dataset=items, processing_class=tokenizer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.3 * losses[0]
    assert trainer.evaluate()["eval_loss"] < 0.3
    trainer.save_model(str(tmp_path / "model"))
    classify = pipeline("text-classification", model=str(tmp_path / "model"), tokenizer=str(tmp_path / "model"), device="cpu")
    assert [answer["label"] for answer in classify(["aaaaa", "bbbbbbbb"])] == ["a", "b"]


def test_a_pipeline_generates(tmp_path):
    config = PermuteFormerConfig.preset("permuteformer-lm", vocab_size=259, **SMALL)
    PermuteFormerForCausalLM(config).save_pretrained(tmp_path)
    ByteTokenizer(prompts=True, padding_side="left").save_pretrained(tmp_path)
    generate = pipeline("text-generation", model=str(tmp_path), tokenizer=str(tmp_path), device="cpu")
    (answer,) = generate("hello", max_new_tokens=5, do_sample=False, return_tensors=True)
    prompt = [1, *(byte + 3 for byte in b"hello")]
    model = PermuteFormerForCausalLM.from_pretrained(tmp_path)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False)[0].tolist()
    assert answer["generated_token_ids"] == expected
    assert expected[:6] == prompt
