"""Fine-tune a pretrained model on a small CSV of your own.

The script generates customer messages from templates, trains a classifier of topics on 2,000 of them, and saves it. Then it loads the model
with a new output layer for a smaller table with other labels: 24 messages, and which of two teams answers them. For comparison it also
trains a model with new weights on the 24 messages.

    python examples/finetune_csv.py [--output runs/finetune]

It prints the accuracy on 200 other messages: before and after fine-tuning, and of the model with new weights (chance: 50 %).
To train on your own file, use ``permuteformer train classify FILE.csv``.
"""

from __future__ import annotations

import argparse
import csv
import random
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from permuteformer import PermuteFormerConfig, PermuteFormerForSequenceClassification
from permuteformer.tasks import Task
from permuteformer.tasks.classify import Classify
from permuteformer.train.build import model_inputs
from permuteformer.train.data import BatchSampler
from permuteformer.train.step import evaluate

TOPICS = {
    "delivery": ("parcel", "courier", "tracking"),
    "device": ("screen", "battery", "charger"),
    "billing": ("invoice", "refund", "payment"),
    "account": ("password", "username", "login"),
}
TEAMS = {"delivery": "workshop", "device": "workshop", "billing": "office", "account": "office"}
BEGINNINGS = ("hello", "good morning", "dear team", "hi there", "help", "excuse me")
ENDINGS = ("does not work", "is wrong again", "came twice", "was lost", "takes for ever", "makes me angry", "is a riddle to me")


def write_table(path: Path, rows: dict[str, int], names: dict[str, str], seed: int) -> None:
    """Write a CSV of messages. ``rows`` are the numbers of rows by split, ``names`` the label of each topic."""
    chance = random.Random(seed)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["text", "label", "split"])
        for split, count in rows.items():
            for number in range(count):
                topic = list(TOPICS)[number % len(TOPICS)]
                text = (
                    f"{chance.choice(BEGINNINGS)}, my {chance.choice(TOPICS[topic])} {chance.choice(ENDINGS)} no {chance.randrange(10**6)}"
                )
                table.writerow([text, names[topic], split])


def labels_of(task: Task) -> dict[str, Any]:
    """Return the fields of a configuration that name the labels."""
    labels = task.input.labels
    return {"id2label": dict(enumerate(labels)), "label2id": {name: n for n, name in enumerate(labels)}}


def new_model(task: Task) -> PermuteFormerForSequenceClassification:
    """Return a byte classifier with one layer. Its r halves a weight every two bytes, since the letters of a word are close."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128, "hidden_dropout": 0.0}
    attention = {"name": "linear", "feature_multiplier": 2}
    position = [{"name": "permute"}, {"name": "decay", "r": 0.7, "two_sided": True}]
    config = PermuteFormerConfig(
        vocab_size=task.input.vocab_size, **sizes, attention=attention, position=position, pooling="mean", **labels_of(task)
    )
    return PermuteFormerForSequenceClassification(config)


def fit(model: PermuteFormerForSequenceClassification, task: Task, epochs: int, learning_rate: float) -> None:
    """Train with Adam on the training split."""
    optimizer, items = torch.optim.Adam(model.train().parameters(), lr=learning_rate), task.items("train")
    for epoch in range(epochs):
        order = BatchSampler(len(items), 16, epoch=epoch)
        for numbers in order:
            batch = task.input.collate([items[n] for n in numbers])
            loss = model(**model_inputs(batch, model.config), labels=batch.labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def accuracy(model: PermuteFormerForSequenceClassification, task: Task) -> str:
    """Return the accuracy on the test split, for printing."""
    return f"{100 * evaluate(model, task, 'test', batch_size=100)['accuracy']:5.1f} % right"


def main() -> None:
    """Pretrain, save, load for the table, fine-tune."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/finetune"), help="folder of tables and model (default: %(default)s)")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it would tell that the new output is new
    torch.manual_seed(0)

    write_table(folder / "topics.csv", {"train": 2000, "test": 200}, dict(zip(TOPICS, TOPICS, strict=True)), seed=0)
    topics = Classify(str(folder / "topics.csv"))
    model = new_model(topics)
    fit(model, topics, 2, 5e-3)
    model.save_pretrained(folder / "pretrained")
    print(f"topics, pretrained on 2,000 messages:   {accuracy(model, topics)} (guessing: 25 %)")

    write_table(folder / "teams.csv", {"train": 24, "test": 200}, TEAMS, seed=1)
    teams = Classify(str(folder / "teams.csv"))
    model = PermuteFormerForSequenceClassification.from_pretrained(folder / "pretrained", **labels_of(teams), ignore_mismatched_sizes=True)
    print(f"teams, before fine-tuning:              {accuracy(model, teams)} (guessing: 50 %)")
    fit(model, teams, 20, 1e-3)
    print(f"teams, after fine-tuning on 24:         {accuracy(model, teams)}")
    model = new_model(teams)
    fit(model, teams, 20, 1e-3)
    print(f"teams, new weights trained on the 24:   {accuracy(model, teams)}")


if __name__ == "__main__":
    main()
