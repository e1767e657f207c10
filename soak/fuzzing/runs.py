"""What training leaves: run folders, results files, checkpoints, prepared data."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image

from permuteformer.demo import answers as demo_answers
from permuteformer.demo import playground
from permuteformer.demo.answers import Answers
from permuteformer.experiments.base import Experiment
from permuteformer.folders import parsed
from permuteformer.models import PermuteFormerConfig, PermuteFormerForSequenceClassification
from permuteformer.report.content import Report, Section, report_of
from permuteformer.report.groups import group
from permuteformer.report.html import page
from permuteformer.report.latex import latex
from permuteformer.report.load import load as load_runs
from permuteformer.report.markdown import markdown
from permuteformer.report.spreadsheet import spreadsheet
from permuteformer.report.tables import build_tables
from permuteformer.tasks.prepare import Prepared, is_whole
from permuteformer.train import checkpoint, saved
from permuteformer.train.predict import predict
from permuteformer.train.resume import put_in_place
from permuteformer.train.state import Cursor, model_tensors, optimizer_tensors, random_state
from soak.fuzzing.judge import Cut, Target, Wrong, cut
from soak.fuzzing.models import TINY
from soak.fuzzing.mutation import changed_bytes, changed_data, changed_json

DRAWN = 200
"""Of so many reports one is made with its figures, which take a second."""

EXPERIMENT: dict[str, Any] = {
    "format": 1,
    "version": "0",
    "experiment": Experiment(task="classify", model="permuteformer-text", task_options={"path": "a.csv"}, steps=9).to_json(),
    "cell": {"table": "1", "row": "permuteformer", "column": "text", "seed": 0, "preset": "small"},
    "task": {
        "name": "classify",
        "title": "texts",
        "kind": "classify",
        "metric": "accuracy",
        "greater_is_better": True,
        "notes": ["a note"],
        "labels": ["bad", "good"],
        "baselines": {"always 'good'": 0.5},
        "grid": None,
        "max_length": 16,
        "unit": None,
        "input": {"alphabet": {"count": 256, "pad": 0, "first": 3, "cls": 1, "sep": 2}, "max_length": 16},
        "columns": {"text": "text", "id": "id"},
    },
    "config": {"hidden_size": 8},
}
RESULT = {"status": "finished", "metric": "accuracy", "value": 0.5, "test": {"accuracy": 0.5, "loss": 0.7}, "parameters": 99, "steps": 9}
RESULT |= {"best_step": 5, "seconds": 3.5, "memory_bytes": 10**8}
ENVIRONMENT = {
    "started": "2026-01-01T00:00:00",
    "command": ["permuteformer", "train"],
    "device": "cpu",
    "versions": {"torch": "2"},
    "cores": 2,
}
EVENTS: list[dict[str, Any]] = [
    {"event": "train", "step": 1, "epoch": 0.1, "loss": 2.0, "seconds": 1.0},
    {"event": "evaluation", "step": 2, "epoch": 0.2, "split": "validation", "metrics": {"accuracy": 0.4}, "seconds": 2.0},
    {"event": "test", "step": 9, "split": "test", "metrics": {"accuracy": 0.5}},
    {"event": "length", "step": 9, "split": "test", "length": 512, "metrics": {"perplexity": 5.0}},
]
RECORD = {
    "format": 1,
    "kind": "training",
    "run": "table1/text/permuteformer-seed0",
    "command": "permuteformer reproduce",
    "parameters": 99,
    **{name: EXPERIMENT["cell"][name] for name in ("table", "row", "column", "preset", "seed")},
    **{name: EXPERIMENT[name] for name in ("experiment", "task", "config")},
    "environment": ENVIRONMENT,
    "result": RESULT,
    "evaluations": EVENTS[1:],
    "losses": [[1, 2.0, 1.0], [2, 1.0, 2.0]],
}


class Reports:
    """Run folders and results files, read and written as every part of a report."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "runs"
        run = self.folder / "run"
        run.mkdir(parents=True)
        (run / "results.jsonl").write_text(json.dumps(RECORD))
        report_of(load_runs([run]))  # the first figure looks for fonts, by a program of the system

    def attempt(self, random: Random) -> bool:
        shutil.rmtree(self.folder, ignore_errors=True)
        run = self.folder / "run"
        run.mkdir(parents=True)
        if random.random() < 0.5:
            self._run_folder(random, run)
        else:
            lines = [RECORD, *(changed_data(random, RECORD) for _ in range(2))]
            text = "\n".join(map(json.dumps, lines)).encode("utf-8", "surrogatepass")
            (run / "results.jsonl").write_bytes(changed_bytes(random, text) if random.random() < 0.2 else text)
            looks = {"run": RECORD["run"], "looks": {"format": 1, "kernels": []}}
            (run / "looks.jsonl").write_bytes(changed_json(random, looks))
        given = run if random.random() < 0.5 and (run / "experiment.json").exists() else self.folder
        loaded = load_runs([given])
        if random.randrange(DRAWN) == 0:
            report = report_of(loaded)
        else:
            groups = group(loaded.records)
            sections = tuple(Section(table.name, table.title, table, ()) for table in build_tables(groups))
            report = Report(loaded.records, tuple(groups), sections, loaded.left_out)
        written = [page(report, self.folder), markdown(report, self.folder), latex(report.tables), *map(spreadsheet, report.tables)]
        if any("\x1b" in text or "\x9b" in text or "\u202e" in text for text in written):
            raise Wrong("a control character was written as it is")
        if "</script><script>" in written[0]:
            raise Wrong("a script was written as it is")
        return not loaded.left_out

    def _run_folder(self, random: Random, run: Path) -> None:
        files: dict[str, Any] = {"experiment.json": EXPERIMENT, "environment.json": ENVIRONMENT, "result.json": RESULT}
        files["looks.json"] = {"format": 1, "kernels": []}
        chosen = random.sample(sorted(files), 2)
        for name, content in files.items():
            (run / name).write_bytes(changed_json(random, content) if name in chosen else json.dumps(content).encode())
        events = changed_data(random, EVENTS)
        text = "".join(json.dumps(event) + "\n" for event in (events if isinstance(events, list) else [events])).encode()
        (run / "metrics.jsonl").write_bytes(changed_bytes(random, text) if random.random() < 0.2 else text)


class RunFolders:
    """A run folder whose notes are changed, and a table to be labelled by its model; the model is that of ``from_pretrained``."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.run, self.table = folder / "run", folder / "table.csv"
        (self.run / "model").mkdir(parents=True)
        model = PermuteFormerForSequenceClassification(PermuteFormerConfig(**{**TINY, "vocab_size": 259})).eval()
        saved._model = lambda *_: model
        self.text = b"text,id\nsome words,1\nother words,2\n"

    def attempt(self, random: Random) -> bool:
        (self.run / "experiment.json").write_bytes(changed_json(random, EXPERIMENT))
        self.table.write_bytes(changed_bytes(random, self.text) if random.random() < 0.3 else self.text)
        trained = saved.load(self.run, device="cpu")
        for prediction in predict(trained, self.table):
            if prediction.label not in trained.labels:
                raise Wrong(f"the label is {prediction.label!r}")
        return True


class Requests:
    """What is sent to the demo's page, of a model of texts and one of images; what would take long is cut off where it begins."""

    BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/api/positions", {"features": 16, "permutation": "random", "seed": 1, "head": 0, "r": 0.9, "axes": 1, "alike": False}),
        ("/api/predict", {"texts": ["some words"]}),
        ("/api/explain", {"texts": ["some words", "others"]}),
        ("/api/generate", {"prompt": "some", "tokens": 5, "temperature": 0.5, "seed": 1}),
    )

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        model = PermuteFormerForSequenceClassification(PermuteFormerConfig(**{**TINY, "vocab_size": 259})).eval()
        saved._model = lambda *_: model
        self.answers = []
        task = EXPERIMENT["task"]
        image = {**EXPERIMENT, "task": {**task, "grid": [4, 4], "input": {**task["input"], "grid": [4, 4]}}}
        for name, content in {"text": EXPERIMENT, "image": image}.items():
            (folder / name / "model").mkdir(parents=True)
            (folder / name / "experiment.json").write_text(json.dumps(content))
            self.answers.append(Answers(saved.load(folder / name, device="cpu")))
        self.answers[1].routes["/api/generate"] = self.answers[1].generate
        picture = io.BytesIO()
        Image.new("L", (4, 4)).save(picture, "PNG")
        self.bodies = [*self.BODIES, ("/api/predict", {"image": base64.b64encode(picture.getvalue()).decode()})]
        for module, names in {playground: ("look",), demo_answers: ("explain", "generate", "probabilities")}.items():
            for name in names:
                setattr(module, name, cut)

    def attempt(self, random: Random) -> bool:
        answers = random.choice(self.answers)
        path, body = random.choice([each for each in self.bodies if each[0] in answers.routes])
        content = parsed(changed_json(random, body), "the request")
        if not isinstance(content, dict):
            raise ValueError("the request is no object, which the server says")
        with contextlib.suppress(Cut):
            answers.routes[path](content)
        return True


class Checkpoints:
    """A checkpoint whose files are changed, their sums with them or not; then it is put in place, or refused."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.folder = folder / "checkpoints"
        self.model = PermuteFormerForSequenceClassification(PermuteFormerConfig(**TINY))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.tensor([[1, 2]])).logits.sum().backward()
        self.optimizer.step()
        state = {
            "cursor": Cursor(step=3).to_json(),
            "random": [random_state(torch.device("cpu"))],
            "items": 5,
            "shard": False,
            "recorded": 0,
        }
        tensors = {"model": model_tensors(self.model), "optimizer": optimizer_tensors(self.model, self.optimizer)}
        path = checkpoint.save(self.folder, 3, state, tensors)
        self.path, self.files = path, {file.name: file.read_bytes() for file in path.iterdir()}
        self.state = state

    def attempt(self, random: Random) -> bool:
        files = dict(self.files)
        name = random.choice(("state.json", "state.json", "model.safetensors", "optimizer.safetensors", "sums.json"))
        if name == "state.json":
            files[name] = changed_json(random, self.state)
        elif name == "sums.json":
            files[name] = changed_json(random, json.loads(files[name]))
        else:
            files[name] = changed_bytes(random, files[name])
        if name != "sums.json" and random.random() < 0.8:
            sums = {file: hashlib.sha256(content).hexdigest() for file, content in files.items() if file != "sums.json"}
            files["sums.json"] = json.dumps(sums).encode()
        for file, content in files.items():
            (self.path / file).write_bytes(content)
        latest, problems = checkpoint.load_latest(self.folder)
        if latest is None:
            raise ValueError("; ".join(problems))
        put_in_place(latest, self.model, self.optimizer, torch.device("cpu"), 0)
        return True


class PreparedData:
    """Prepared data whose Arrow file or notes are changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "prepared"
        self.folder.mkdir()
        schema = pa.schema([("value", pa.binary()), ("label", pa.int64()), ("token", pa.uint16())])
        columns = [[b"a" * n for n in range(9)], list(range(9)), list(range(9))]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as stream:
            stream.write_batch(pa.record_batch(columns, schema=schema))
        self.arrow = sink.getvalue().to_pybytes()
        self.info: dict[str, Any] = {"task": "a", "title": "b", "note": "", "splits": {"train": 9}, "problems": {"count": 0, "shown": []}}

    def attempt(self, random: Random) -> bool:
        arrow = changed_bytes(random, self.arrow)
        info = {**self.info, "sizes": {"train.arrow": len(arrow)}}
        (self.folder / "train.arrow").write_bytes(arrow)
        (self.folder / "info.json").write_bytes(changed_json(random, info) if random.random() < 0.3 else json.dumps(info).encode())
        if not is_whole(self.folder):
            raise ValueError("it is not whole, and would be made anew")
        items = Prepared(self.folder).open("train")
        for n in range(min(len(items), 50)):
            items[n]
        int(np.sum(items.column("label"))) if "label" in items.names else 0
        if "value" in items.names:
            items.byte_lengths("value")
        return True


TARGETS: dict[str, type[Target]] = {
    "reports": Reports,
    "run folders": RunFolders,
    "requests of the demo": Requests,
    "checkpoints": Checkpoints,
    "prepared data": PreparedData,
}
