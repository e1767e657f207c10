"""What a model is made of: configurations, experiments, saved folders, tokenizers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import torch

from permuteformer.experiments.base import Experiment, Measurement
from permuteformer.models import (
    ByteTokenizer,
    PermuteFormerCache,
    PermuteFormerConfig,
    PermuteFormerForCausalLM,
    PermuteFormerForSequenceClassification,
)
from permuteformer.models.loading import silence_transformers
from permuteformer.models.presets import PRESETS
from permuteformer.models.tokenizer import word_tokenizer
from permuteformer.train.saved import vocabulary
from soak.fuzzing.judge import Target
from soak.fuzzing.mutation import changed_data, changed_json, changed_safetensors

TINY = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "num_labels": 2}


class Configurations:
    """Configurations as JSON, of every attention and position."""

    def __init__(self, folder: Path) -> None:
        shapes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
        self.examples = [PermuteFormerConfig.preset(name, **shapes).to_dict() for name in PRESETS]

    def attempt(self, random: Random) -> bool:
        content = changed_data(random, random.choice(self.examples))
        PermuteFormerConfig.from_dict(content if isinstance(content, dict) else {"attention": content})
        return True


class Experiments:
    """Experiments and measurements as run folders and jobs hold them."""

    def __init__(self, folder: Path) -> None:
        self.training = Experiment(task="classify", model="permuteformer-text", steps=5, model_fields={"hidden_size": 8}, test_lengths=(8,))
        self.measuring = Measurement(kind="training", task="lra-text", model="permuteformer-text", length=64)

    def attempt(self, random: Random) -> bool:
        work = random.choice((self.training, self.measuring))
        content = json.loads(json.dumps(changed_data(random, work.to_json())))
        json.dumps(type(work).from_json(content).to_json())
        return True


class Saved:
    """A saved model, of which one file or two are changed, read by ``from_pretrained``."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.whole, self.folder = folder / "whole", folder / "model"
        PermuteFormerForSequenceClassification(PermuteFormerConfig(**TINY)).save_pretrained(self.whole)
        self.files = {file.name: file.read_bytes() for file in self.whole.iterdir() if file.suffix in (".json", ".safetensors")}
        self.config = json.loads(self.files["config.json"])
        self.weights = self.files["model.safetensors"]
        self.names = sorted(json.loads(self.weights[8 : 8 + int.from_bytes(self.weights[:8], "little")]))

    def attempt(self, random: Random) -> bool:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        files = dict(self.files)
        kind = random.random()
        if kind < 0.25:
            files["config.json"] = changed_json(random, self.config)
        if kind > 0.2:
            files["model.safetensors"] = changed_safetensors(random, self.weights)
        if kind > 0.98:
            index = {"metadata": {}, "weight_map": dict.fromkeys(self.names, "model.safetensors")}
            files["model.safetensors.index.json"] = changed_json(random, index)
            files[random.choice(("part.safetensors", "model.safetensors"))] = files.pop("model.safetensors")
        for name, content in files.items():
            (self.folder / name).write_bytes(content)
        with silence_transformers():
            PermuteFormerForSequenceClassification.from_pretrained(self.folder, local_files_only=True)
        return True


class States:
    """A saved state of a model, changed; what is read is gone on from."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.file = folder / "state.safetensors"
        self.models, self.states = [], []
        for attention in ("linear", "softmax"):
            config = PermuteFormerConfig(**TINY, causal=True, attention={"name": attention}, position=[])
            self.models.append(PermuteFormerForCausalLM(config).eval())
            with torch.no_grad():
                self.models[-1](torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values.save(self.file)
            self.states.append(self.file.read_bytes())

    def attempt(self, random: Random) -> bool:
        kind = random.randrange(2)
        self.file.write_bytes(changed_safetensors(random, self.states[kind]))
        cache = PermuteFormerCache.load(self.file)
        with torch.no_grad():
            self.models[kind](torch.tensor([[4]]), past_key_values=cache)
        return True


class Tokenizers:
    """Files of both tokenizers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tokenizer"
        self.kinds: list[dict[str, Any]] = []
        for tokenizer in (ByteTokenizer(), word_tokenizer(["the cat sat", "on a mat"])):
            tokenizer.save_pretrained(self.folder)
            self.kinds.append({file.name: json.loads(file.read_bytes()) for file in self.folder.iterdir() if file.suffix == ".json"})
            shutil.rmtree(self.folder)

    def attempt(self, random: Random) -> bool:
        self.folder.mkdir(exist_ok=True)
        for file in self.folder.iterdir():
            file.unlink()
        kind = random.randrange(2)
        for name, content in self.kinds[kind].items():
            (self.folder / name).write_bytes(changed_json(random, content))
        if kind == 0:
            ByteTokenizer.from_pretrained(self.folder, local_files_only=True)("text")
        else:
            vocabulary(self.folder / "tokenizer.json", 16)
        return True


TARGETS: dict[str, type[Target]] = {
    "configurations": Configurations,
    "experiments": Experiments,
    "from_pretrained": Saved,
    "tokenizers": Tokenizers,
    "states": States,
}
