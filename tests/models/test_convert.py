"""Conversion of BERT and GPT-2: the same function where it can be, every tensor accounted for, and refusals."""

import json
import re
from pathlib import Path

import checks
import pytest
import torch
import transformers
from commands import run

from permuteformer import PermuteFormerForCausalLM, PermuteFormerModel
from permuteformer.models.convert import ConversionReport, convert, convert_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:positions on axis")  # heads this small repeat early

SOFTMAX = {"attention": {"name": "softmax"}}
KEEP = {**SOFTMAX, "position": [{"name": "learned", "max_length": 24}]}
BERT = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40}
GPT2 = {"vocab_size": 61, "n_positions": 24, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_inner": 40, "eos_token_id": 60}
LLAMA = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
TARGETS = {
    "GPT2Model": "PermuteFormerModel",
    "GPT2LMHeadModel": "PermuteFormerForCausalLM",
    "BertModel": "PermuteFormerModel",
    "BertForMaskedLM": "PermuteFormerForMaskedLM",
    "BertForPreTraining": "PermuteFormerForMaskedLM",
    "BertForSequenceClassification": "PermuteFormerForSequenceClassification",
}


def source_of(kind="GPT2LMHeadModel", **fields):
    """A model with random norms and biases too, so that swapped tensors show."""
    sizes = {"GPT2": GPT2, "Bert": {**BERT, "max_position_embeddings": 24}, "Llam": LLAMA}[kind[:4]]
    kind = getattr(transformers, kind)
    model = kind(kind.config_class(**{**sizes, **fields}))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape))
    return model.eval()


def ids_of(batch=3, length=17):
    return torch.randint(3, 60, (batch, length))


def equal_models(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kind": "GPT2Model"},
        {"n_inner": None, "activation_function": "relu", "layer_norm_epsilon": 1e-2},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"tie_word_embeddings": False},
    ],
    ids=str,
)
def test_gpt2_with_softmax_and_its_positions_is_the_source(fields):
    source = source_of(**fields).double()
    model, report = convert(source, **KEEP)
    assert model.dtype == torch.float64
    assert (report.new, report.dropped) == ([], {})
    ids = ids_of()
    expected = source(ids)[0]
    checks.assert_close(model(ids)[0], expected)
    attention = model.base_model.layers[1].attention
    with torch.no_grad():  # another third of c_attn must show
        attention.query.weight.copy_(attention.value.weight)
    assert (model(ids)[0] - expected).abs().max() > 1e-3


def test_gpt2_agrees_with_padding_and_in_generation():
    source = source_of().double()
    model, _ = convert(source, **KEEP)
    ids = ids_of()
    right = torch.ones_like(ids)
    right[0, 9:], right[1, 16:] = 0, 0
    left = right.flip(1)
    for mask in (right, left):
        positions = (mask.cumsum(1) - 1).clamp(min=0)  # GPT-2 counts padding by default
        expected = source(ids, attention_mask=mask, position_ids=positions).logits
        checks.assert_close(model(ids, attention_mask=mask).logits[mask.bool()], expected[mask.bool()])
    how = {"attention_mask": left, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **how), source.generate(ids, **how))


def test_by_default_gpt2_becomes_linear_with_relative_positions():
    source = source_of()
    before = {name: weight.clone() for name, weight in source.state_dict().items()}
    model, report = convert(source)
    config = model.config
    assert config.attention == {"name": "linear", "feature_multiplier": 1}
    assert config.position == [{"name": "permute"}, {"name": "decay"}]
    assert (config.hidden_act, config.pooling, config.pad_token_id, config.eos_token_id) == ("gelu_new", "last", None, 60)
    assert list(report.dropped) == ["transformer.wpe.weight"]
    assert {name.rsplit(".", 1)[1] for name in report.new} == {"permutation", "log_r"}
    assert set(report.taken) | set(report.new) == set(model.state_dict())
    assert torch.equal(model.model.layers[2].attention.key.weight, source.transformer.h[2].attn.c_attn.weight[:, 16:32].t())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.training
    assert model(ids_of(1, 100)).logits.isfinite().all()  # longer than the source's table
    for weight in model.parameters():
        torch.nn.init.zeros_(weight)
    assert all(torch.equal(weight, before[name]) for name, weight in source.state_dict().items())  # not shared


def test_positions_and_outputs_on_request():
    source = source_of(tie_word_embeddings=False)
    model, report = convert(source, tie_word_embeddings=True, position=[{"name": "permute"}, {"name": "learned", "max_length": 5}])
    table = "model.position.encodings.0.axis_tables.0.weight"
    assert report.taken[table] == "transformer.wpe.weight"
    assert torch.equal(model.state_dict()[table], source.transformer.wpe.weight[:5])  # the first ones
    assert torch.equal(model.model.embed_tokens.weight, source.transformer.wte.weight)
    assert "tied" in report.dropped["lm_head.weight"]
    untied, _ = convert(source_of(), tie_word_embeddings=False)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    assert torch.equal(untied.lm_head.weight, untied.model.embed_tokens.weight)


FOUR = {"attention": {"name": "linear", "feature_multiplier": 4}}
REFORMER = {"attention": {"name": "reformer"}, "position": []}


@pytest.mark.parametrize(
    ("kind", "overrides", "new", "dropped", "reason"),
    [
        ("GPT2Model", FOUR, "layers.0.attention.key.bias", "h.0.attn.c_attn.bias", r"query\.bias is \[64\].*key\.bias is \[64\]"),
        ("GPT2Model", {**FOUR, "position": []}, "layers.0.attention.query.weight", "wpe.weight", "no positions"),
        ("BertForSequenceClassification", {"num_labels": 5}, "classifier.weight", "classifier.weight", r"5, 16.*2, 16"),
        ("BertForSequenceClassification", {"pooling": "mean"}, None, "bert.pooler.dense.weight", r"no pooler\.dense\.weight"),
        ("BertModel", REFORMER, None, "encoder.layer.0.attention.self.key.weight", r"no layers\.0\.attention\.key\.weight"),
    ],
)
def test_parts_that_differ_are_new_and_the_reason_is_given(kind, overrides, new, dropped, reason):
    source, models = source_of(kind), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        model, report = convert(source, **overrides)
        models.append(model)
    assert equal_models(models[0], models[1])
    assert equal_models(models[0], models[2]) == (new is None)
    assert new is None or new in report.new
    assert re.search(reason, report.dropped[dropped])
    assert any(name.endswith("layers.0.attention.value.weight") for name in report.taken)
    assert model(ids_of())[0].isfinite().all()


BERT_LAYER = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "feed_forward_norm": "attention.output.LayerNorm",
    "expand": "intermediate.dense",
    "contract": "output.dense",
}
BERT_HEAD = {"dense": "transform.dense", "dense_norm": "transform.LayerNorm", "lm_head": "decoder"}


@pytest.mark.parametrize("kind", [kind for kind in TARGETS if kind.startswith("Bert")])
def test_every_tensor_of_bert_goes_where_it_should(kind):
    here, there = ("", "") if kind == "BertModel" else ("model.", "bert.")
    modules = {f"layers.{n}.{our}": f"encoder.layer.{n}.{its}" for n in (0, 1) for our, its in BERT_LAYER.items()}
    norms = ["embeddings.LayerNorm", "encoder.layer.0.output.LayerNorm", "encoder.layer.1.output.LayerNorm"]
    modules |= zip(["layers.0.attention_norm", "layers.1.attention_norm", "norm"], norms, strict=True)
    modules = {here + our: there + its for our, its in modules.items()}
    if TARGETS[kind] == "PermuteFormerForMaskedLM":
        modules |= {our: f"cls.predictions.{its}" for our, its in BERT_HEAD.items()}
    elif kind == "BertForSequenceClassification":
        modules |= {"pooler.dense": "bert.pooler.dense", "classifier": "classifier"}
    expected = {f"{our}.{tensor}": f"{its}.{tensor}" for our, its in modules.items() for tensor in ("weight", "bias")}
    expected[f"{here}embed_tokens.weight"] = f"{there}embeddings.word_embeddings.weight"
    source = source_of(kind, id2label={0: "bad", 1: "so", 2: "good"}, label2id={"bad": 0, "so": 1, "good": 2})
    model, report = convert(source)
    config = model.config
    assert (config.layer_norm_eps, config.pooling, config.causal, config.position) == (1e-12, "cls", False, [{"name": "permute"}])
    assert kind != "BertForSequenceClassification" or (config.num_labels, config.id2label[2]) == (3, "good")
    assert report.taken == expected
    assert any("norms" in note for note in report.notes)
    assert f"{here}norm.weight <- {there}{norms[-1]}.weight" in str(report)
    weights, given = model.state_dict(), dict(source.named_parameters(remove_duplicate=False))
    assert all(torch.equal(weights[name], given[origin]) for name, origin in report.taken.items())
    assert {name.rsplit(".", 1)[1] for name in report.new} == {"permutation"}
    assert {id(given[name]) for name in (*report.taken.values(), *report.dropped)} == {id(weight) for weight in given.values()}
    assert not set(report.dropped) & set(report.taken.values())
    assert {f"{there}embeddings.{table}.weight" for table in ("position_embeddings", "token_type_embeddings")} <= set(report.dropped)


def test_the_first_attention_of_bert_computes_what_it_did():
    """Up to the first residual sum, with softmax and learned positions."""
    source = source_of("BertModel").double()
    torch.nn.init.zeros_(source.embeddings.token_type_embeddings.weight)  # which are dropped
    model, report = convert(source, **KEEP)
    assert report.taken["position.encodings.0.axis_tables.0.weight"] == "embeddings.position_embeddings.weight"
    seen = {}
    source.encoder.layer[0].attention.output.dense.register_forward_hook(lambda *call: seen.update(there=call[-1]))
    model.layers[0].attention.register_forward_hook(lambda *call: seen.update(here=call[-1][0]))
    ids, mask = ids_of(), torch.ones(3, 17, dtype=torch.int64)
    mask[0, 9:] = 0
    source(ids, attention_mask=mask)
    model(ids, attention_mask=mask)
    checks.assert_close(seen["here"][mask.bool()], seen["there"][mask.bool()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", TARGETS)
def test_from_a_folder_and_saved_again_it_is_the_same(kind, dtype, tmp_path):
    source = source_of(kind).to(dtype)
    model, report = convert(source)
    assert (type(model).__name__, model.dtype) == (TARGETS[kind], dtype)
    source.save_pretrained(tmp_path / "source")
    for path in (tmp_path / "source", str(tmp_path / "source")):
        again, again_report = convert(path)
        assert equal_models(again, model)
        assert again_report == report
    model.save_pretrained(tmp_path / "converted")
    loaded, ids = type(model).from_pretrained(tmp_path / "converted"), ids_of()
    assert equal_models(loaded, model)
    assert torch.equal(loaded(ids)[0], model(ids)[0])


def saved(folder, config=None, **fields):
    """Save a configuration, or change the saved one."""
    if config is not None:
        getattr(transformers, config)().save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def test_tensors_that_a_checkpoint_lacks_are_new(tmp_path):
    source_of("BertModel").save_pretrained(tmp_path)
    _, report = convert(saved(tmp_path, architectures=["BertForMaskedLM"]))
    assert {"dense.weight", "dense_norm.bias", "lm_head.bias"} <= set(report.new)
    assert not any(name.startswith("cls.predictions.transform") for name in (*report.taken.values(), *report.dropped))
    assert "model.layers.0.expand.weight" in report.taken
    assert "pooler" in report.dropped["pooler.dense.weight"]
    old = saved(tmp_path, architectures=None, _attn_implementation_autoset=True)  # as checkpoints of older versions
    assert type(convert(old)[0]) is PermuteFormerModel


@pytest.mark.parametrize(
    ("kind", "fields", "overrides", "message"),
    [
        ("LlamaForCausalLM", {}, {}, "LlamaForCausalLM.*'llama'"),
        ("BertForTokenClassification", {}, {}, "BertForTokenClassification"),
        ("BertLMHeadModel", {"is_decoder": True}, {}, "BertLMHeadModel.*is_decoder=True"),
        ("GPT2Model", {"add_cross_attention": True}, {}, "GPT2Model.*add_cross_attention"),
        ("BertModel", {"is_decoder": True, "add_cross_attention": True}, {}, "BertModel.*add_cross_attention"),
        ("GPT2Model", {}, {"hidden_size": 32}, "hidden_size.*16.*32"),
        ("BertModel", {}, {"num_attention_heads": 4}, "num_attention_heads.*2.*4"),
        ("GPT2Model", {}, {"num_hidden_layers": 2}, "num_hidden_layers.*3.*2"),
        ("GPT2Model", {}, {"intermediate_size": 64}, "intermediate_size.*40.*64"),
        ("GPT2Model", {}, {"vocab_size": 64}, "vocab_size.*61.*64.*resize_token_embeddings"),
        ("GPT2Model", {}, {"position": [{"name": "learned", "max_length": 25}]}, "max_length.*24.*25"),
        ("GPT2Model", {}, {"hiden_act": "relu"}, "did you mean 'hidden_act'"),
        ("GPT2Model", {}, SOFTMAX, "'softmax'.*'decay'"),
        ("BertForMaskedLM", {}, {"causal": True}, "causal=False"),
    ],
)
def test_models_and_overrides_that_do_not_fit_are_refused(kind, fields, overrides, message):
    with pytest.raises(Exception, match=message) as error:
        convert(source_of(kind, **fields), **overrides)
    assert any(isinstance(cause, (ValueError, TypeError)) for cause in (error.value, error.value.__cause__))


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        ("T5Config", {"architectures": ["T5Model"]}, "T5Model.*'t5'"),
        ("GPT2Config", {"architectures": ["Nonesuch"], "model_type": "none"}, "Nonesuch.*'none'"),
        ("GPT2Config", {"architectures": ["GPT2Model"]}, "no weights"),
    ],
)
def test_folders_that_do_not_fit_are_refused(config, fields, message, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        convert(saved(tmp_path, config, **fields))


def test_other_sources_are_refused(tmp_path, monkeypatch):
    quantized = source_of()
    quantized.transformer.wte.weight = torch.nn.Parameter(torch.zeros(61, 16, dtype=torch.int8), requires_grad=False)
    for source, message in (
        (convert(source_of())[0], "'permuteformer'"),
        (transformers.GPT2Config(), "source.*GPT2Config"),
        (None, "source.*NoneType"),
        (source_of().to("meta"), "meta device"),
        (quantized, "int8.*quantization"),
        (tmp_path / "none", "none'.* folder"),
        (str(tmp_path / "none"), "none'.* folder"),
        ("./none", "'./none'.* folder"),
        (tmp_path, "config.json"),
    ):
        with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
            convert(source)

    def unreachable(name):
        raise OSError("no such repository")

    monkeypatch.setattr(transformers.PreTrainedConfig, "get_config_dict", unreachable)
    with pytest.raises(FileNotFoundError, match=r"'someone/none'.*hub"):
        convert("someone/none")


@pytest.mark.parametrize("where", ["output", "empty", "new/deeper"])
def test_convert_checkpoint_writes_the_converted_model(where, tmp_path):
    source, output = source_of(), tmp_path / where
    source.save_pretrained(tmp_path / "source")
    (tmp_path / "empty").mkdir()
    report = convert_checkpoint(tmp_path / "source", output, positions_per_layer=True)
    model, expected = convert(source, positions_per_layer=True)
    assert equal_models(transformers.AutoModelForCausalLM.from_pretrained(output), model)
    assert report == ConversionReport(**json.loads((output / "report.json").read_text())) == expected
    assert not list(output.parent.glob(".*"))


def test_convert_checkpoint_overwrites_nothing_and_leaves_nothing_if_it_fails(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source_of().save_pretrained(source)
    before = {file: file.read_bytes() for file in source.iterdir()}
    (tmp_path / "file").write_text("mine")
    for output in (source, tmp_path / "file"):
        with pytest.raises(FileExistsError, match="output_path"):
            convert_checkpoint(source, output)
    assert {file: file.read_bytes() for file in source.iterdir()} == before
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ValueError, match="hidden_size"):
        convert_checkpoint(source, tmp_path / "new" / "output", hidden_size=32)

    def breaks(model, folder):
        (Path(folder) / "model.safetensors").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(PermuteFormerForCausalLM, "save_pretrained", breaks)
    with pytest.raises(OSError, match="disk full"):
        convert_checkpoint(source, tmp_path / "output")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "source"]


def test_the_documentation_runs_and_weights_go_back_bit_for_bit(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "convert.md").read_text(encoding="utf-8")
    first, second, third = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names = {"source": source_of(), "folder": tmp_path}
    expected = {name: weight.clone() for name, weight in names["source"].state_dict().items()}
    exec(first + second, names)
    assert (tmp_path / "config.json").exists()
    names["source"] = source_of()
    exec(third, names)
    assert all(torch.equal(weight, expected[name]) for name, weight in names["source"].state_dict().items())


def test_the_command_converts_and_refuses(tmp_path):
    source, output = tmp_path / "source", tmp_path / "output"
    source_of().save_pretrained(source)
    (source / "vocab.json").write_text('{"a": 0}')
    assert str(output) in run("convert", source, output, "--model.pooling", "mean", "--model.axes", "1")
    assert (output / "report.json").exists()
    assert (output / "vocab.json").read_text() == '{"a": 0}'
    assert PermuteFormerForCausalLM.from_pretrained(output).config.pooling == "mean"
    assert "output_path" in run("convert", source, output, code=1)
    assert "--model.axes" in run("convert", source, tmp_path / "x", "--model.axes", "two", code=2)
    assert "nowhere" in run("convert", tmp_path / "nowhere", tmp_path / "x", code=1)
    assert not (tmp_path / "x").exists()
