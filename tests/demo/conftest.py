"""A running server, with models of random weights."""

import json
import threading
from contextlib import contextmanager
from http.client import HTTPConnection

import pytest
import torch

from permuteformer.demo.api import Api
from permuteformer.demo.server import HOST, PLACES, Server
from permuteformer.models import PermuteFormerConfig, PermuteFormerForCausalLM, PermuteFormerForSequenceClassification
from permuteformer.train.trained_model import load

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32, "vocab_size": 259}


@contextmanager
def serving(trained=None, places=PLACES):
    server = Server(Api(trained), 0, places)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.stop()


def model(folder, kind):
    torch.manual_seed(0)
    if kind == "lm":
        made = PermuteFormerForCausalLM(PermuteFormerConfig.preset("permuteformer-lm", **SIZES, tie_word_embeddings=False))
    else:
        names = {0: "bad", 1: "good"}
        made = PermuteFormerForSequenceClassification(
            PermuteFormerConfig.preset("permuteformer-text", **SIZES, num_labels=2, id2label=names)
        )
    with torch.no_grad():
        for weight in made.parameters():  # large weights, so that answers differ
            weight.add_(torch.randn_like(weight) / weight.shape[-1] ** 0.5)
    made.save_pretrained(folder)
    return load(folder)


@pytest.fixture(scope="session")
def classifier(tmp_path_factory):
    return model(tmp_path_factory.mktemp("classifier"), "classify")


@pytest.fixture(scope="session")
def speaker(tmp_path_factory):
    return model(tmp_path_factory.mktemp("speaker"), "lm")


def ask(server, path, body=None, method=None, headers=None, raw=None):
    """Return status, headers and the decoded body: for a POST that succeeds, its lines of JSON."""
    connection = HTTPConnection(HOST, server.server_port, timeout=120)
    content = raw if raw is not None else None if body is None else json.dumps(body).encode()
    given = {"Content-Type": "application/json"} if content is not None else {}
    connection.request(method or ("GET" if content is None else "POST"), path, content, {**given, **(headers or {})})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    kind = answer.getheader("Content-Type", "")
    if "ndjson" in kind:
        return answer.status, dict(answer.getheaders()), [json.loads(line) for line in text.splitlines()]
    return answer.status, dict(answer.getheaders()), json.loads(text) if "json" in kind and text else text
