import json
import re
from pathlib import Path

import checks
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertLMHeadModel,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    T5Config,
)
from typer.testing import CliRunner

from permuteformer import (
    PermuteFormerForCausalLM,
    PermuteFormerForMaskedLM,
    PermuteFormerForSequenceClassification,
    PermuteFormerModel,
)
from permuteformer.cli import app
from permuteformer.models.convert import ConversionReport, convert, convert_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:positions on axis")  # heads this small repeat early

SOFTMAX = {"attention": {"name": "softmax"}}
KEEP = {**SOFTMAX, "position": [{"name": "learned", "max_length": 24}]}


def scrambled(model):
    """Every tensor random: new norms are all ones and new biases zero, so that swapping them would not show."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape))
    return model.eval()


def gpt2(kind=GPT2LMHeadModel, **fields):
    config = {"vocab_size": 61, "n_positions": 24, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_inner": 40, "eos_token_id": 60}
    return scrambled(kind(GPT2Config(**{**config, "bos_token_id": 60, **fields})))


def bert(kind=BertForMaskedLM, **fields):
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40}
    return scrambled(kind(BertConfig(**{**sizes, "max_position_embeddings": 24, **fields})))


def classifier():
    return bert(BertForSequenceClassification)


def ids_of(batch=3, length=17):
    return torch.randint(3, 60, (batch, length))


def equal_models(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one)


def tensors(model):
    return dict(model.named_parameters(remove_duplicate=False))


class TestGPT2:
    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"n_inner": None, "activation_function": "relu", "layer_norm_epsilon": 1e-2},
            {"scale_attn_weights": False},
            {"scale_attn_by_inverse_layer_idx": True},
            {"tie_word_embeddings": False},
        ],
        ids=["plain", "other sizes", "unscaled", "scaled by layer", "untied"],
    )
    def test_with_softmax_and_its_positions_it_is_the_source(self, fields):
        source = gpt2(**fields).double()
        model, report = convert(source, **KEEP)
        assert type(model) is PermuteFormerForCausalLM
        assert model.dtype == torch.float64
        assert (report.new, report.dropped) == ([], {})
        ids = ids_of()
        expected = source(ids).logits
        checks.assert_close(model(ids).logits, expected)
        query, value = model.model.layers[1].attention.query.weight, model.model.layers[1].attention.value.weight
        with torch.no_grad():  # the broken twin: one third of c_attn for another
            query.copy_(value)
        assert (model(ids).logits - expected).abs().max() > 1e-3

    def test_padded_on_the_right_and_on_the_left(self):
        source = gpt2().double()
        model, _ = convert(source, **KEEP)
        ids = ids_of()
        right = torch.ones_like(ids)
        right[0, 9:], right[1, 16:] = 0, 0
        for mask in (right, right.flip(1)):
            positions = (mask.cumsum(1) - 1).clamp(min=0)  # GPT-2 counts padding unless told; generate tells it this
            expected = source(ids, attention_mask=mask, position_ids=positions).logits
            checks.assert_close(model(ids, attention_mask=mask).logits[mask.bool()], expected[mask.bool()])
        expected = source(ids, attention_mask=right).logits  # on the right it need not be told
        checks.assert_close(model(ids, attention_mask=right).logits[right.bool()], expected[right.bool()])

    def test_it_writes_what_the_source_writes(self):
        source = gpt2().double()
        model, _ = convert(source, **KEEP)
        ids, mask = ids_of(2, 6), torch.ones(2, 6, dtype=torch.int64)
        mask[0, :3] = 0
        how = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        assert torch.equal(model.generate(ids, **how), source.generate(ids, **how))

    def test_without_a_head(self):
        source = gpt2(GPT2Model).double()
        model, report = convert(source, **KEEP)
        assert type(model) is PermuteFormerModel
        assert report.new == []
        ids = ids_of()
        checks.assert_close(model(ids).last_hidden_state, source(ids).last_hidden_state)

    def test_by_default_attention_is_linear_and_positions_relative(self):
        source = gpt2()
        model, report = convert(source)
        config = model.config
        assert config.attention == {"name": "linear", "feature_multiplier": 1}
        assert config.position == [{"name": "permute"}, {"name": "decay"}]
        assert (config.hidden_act, config.pooling, config.pad_token_id, config.eos_token_id) == ("gelu_new", "last", None, 60)
        assert report.dropped == {"transformer.wpe.weight": "positions are by 'permute', 'decay' now"}
        assert {name.rsplit(".", 1)[1] for name in report.new} == {"permutation", "log_r"}
        assert set(report.taken) | set(report.new) == set(model.state_dict())
        assert torch.equal(model.model.layers[2].attention.key.weight, source.transformer.h[2].attn.c_attn.weight[:, 16:32].t())
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert not model.training
        assert model(ids_of(1, 100)).logits.isfinite().all()  # longer than the source's table

    def test_the_source_is_neither_changed_nor_shared(self):
        source = gpt2()
        before = {name: weight.clone() for name, weight in source.state_dict().items()}
        model, _ = convert(source, **KEEP)
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()
        assert all(torch.equal(weight, before[name]) for name, weight in source.state_dict().items())

    def test_fewer_positions_are_the_first_ones(self):
        source = gpt2()
        model, report = convert(source, position=[{"name": "permute"}, {"name": "learned", "max_length": 5}])
        name = "model.position.encodings.0.axis_tables.0.weight"
        assert report.taken[name] == "transformer.wpe.weight"
        assert torch.equal(model.state_dict()[name], source.transformer.wpe.weight[:5])

    def test_a_head_of_its_own_is_not_tied_by_force(self):
        source = gpt2(tie_word_embeddings=False)
        model, report = convert(source, tie_word_embeddings=True)
        assert torch.equal(model.model.embed_tokens.weight, source.transformer.wte.weight)
        assert "tied" in report.dropped["lm_head.weight"]
        untied, report = convert(gpt2(), tie_word_embeddings=False)
        assert untied.lm_head.weight is not untied.model.embed_tokens.weight
        assert torch.equal(untied.lm_head.weight, untied.model.embed_tokens.weight)

    @pytest.mark.parametrize(
        "overrides",
        [
            {"attention": {"name": "linear", "feature_multiplier": 4}},
            {"attention": {"name": "linear", "feature_multiplier": 2}, "position": []},
        ],
    )
    def test_projections_of_another_size_are_new(self, overrides):
        model, report = convert(gpt2(), **overrides)
        assert {"model.layers.0.attention.query.weight", "model.layers.0.attention.key.bias"} <= set(report.new)
        assert "model.layers.0.attention.value.weight" in report.taken
        reason = report.dropped["transformer.h.0.attn.c_attn.weight"]
        assert "attention.query.weight is" in reason
        assert "attention.key.weight is" in reason
        assert "value" not in reason
        assert model(ids_of()).logits.isfinite().all()


def bert_names(layers=2):
    """The whole mapping of the backbone, module by module, as it is meant."""
    names = {"layers.0.attention_norm": "embeddings.LayerNorm", "norm": f"encoder.layer.{layers - 1}.output.LayerNorm"}
    for n in range(layers):
        for here, there in {
            "attention.query": "attention.self.query",
            "attention.key": "attention.self.key",
            "attention.value": "attention.self.value",
            "attention.output": "attention.output.dense",
            "feed_forward_norm": "attention.output.LayerNorm",
            "expand": "intermediate.dense",
            "contract": "output.dense",
        }.items():
            names[f"layers.{n}.{here}"] = f"encoder.layer.{n}.{there}"
        if n:
            names[f"layers.{n}.attention_norm"] = f"encoder.layer.{n - 1}.output.LayerNorm"
    both = {f"{here}.{tensor}": f"{there}.{tensor}" for here, there in names.items() for tensor in ("weight", "bias")}
    return {"embed_tokens.weight": "embeddings.word_embeddings.weight", **both}


HEADS = {
    BertModel: (PermuteFormerModel, {}),
    BertForMaskedLM: (
        PermuteFormerForMaskedLM,
        {
            "dense": "cls.predictions.transform.dense",
            "dense_norm": "cls.predictions.transform.LayerNorm",
            "lm_head": "cls.predictions.decoder",
        },
    ),
    BertForSequenceClassification: (
        PermuteFormerForSequenceClassification,
        {"pooler.dense": "bert.pooler.dense", "classifier": "classifier"},
    ),
}
HEADS[BertForPreTraining] = HEADS[BertForMaskedLM]


class TestBERT:
    @pytest.mark.parametrize("kind", HEADS, ids=lambda kind: kind.__name__)
    def test_every_tensor_taken_over_is_the_sources(self, kind):
        source = bert(kind, num_labels=3)
        model, report = convert(source)
        target, head = HEADS[kind]
        here, there = ("", "") if kind is BertModel else ("model.", "bert.")
        expected = {here + one: there + other for one, other in bert_names().items()}
        expected |= {f"{one}.{tensor}": f"{other}.{tensor}" for one, other in head.items() for tensor in ("weight", "bias")}
        assert type(model) is target
        assert report.taken == expected
        weights, given = model.state_dict(), tensors(source)
        for name, origin in report.taken.items():
            assert torch.equal(weights[name], given[origin]), name
        assert {name.rsplit(".", 1)[1] for name in report.new} == {"permutation"}
        accounted = {id(given[name]) for name in (*report.taken.values(), *report.dropped)}
        assert accounted == {id(weight) for weight in given.values()}
        assert not set(report.dropped) & set(report.taken.values())
        assert f"{there}embeddings.position_embeddings.weight" in report.dropped
        assert report.dropped[f"{there}embeddings.token_type_embeddings.weight"] == "there are no token types here"

    def test_the_configuration_is_the_sources(self):
        source = bert(BertForSequenceClassification, id2label={0: "bad", 1: "so", 2: "good"}, label2id={"bad": 0, "so": 1, "good": 2})
        config = convert(source)[0].config
        assert (config.num_labels, config.id2label[2], config.layer_norm_eps, config.pooling) == (3, "good", 1e-12, "cls")
        assert (config.causal, config.position) == (False, [{"name": "permute"}])

    def test_the_first_attention_reads_and_gives_what_it_did(self):
        """With softmax and learned positions, up to the first residual sum: embeddings, positions, first norm and heads are right."""
        source = bert(BertModel).double()
        with torch.no_grad():
            source.embeddings.token_type_embeddings.weight.zero_()  # which are dropped
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

    def test_the_report_says_what_norms_mean(self):
        _, report = convert(bert())
        text = str(report)
        assert text.startswith("BertForMaskedLM to PermuteFormerForMaskedLM: ")
        assert "model.layers.0.attention_norm.weight <- bert.embeddings.LayerNorm.weight" in text
        assert "the residual path is not normalised any more" in text
        assert "bert.embeddings.position_embeddings.weight: positions are by 'permute' now" in text

    def test_other_labels_make_a_new_classifier(self):
        model, report = convert(bert(BertForSequenceClassification), num_labels=5)
        assert model(ids_of()).logits.shape == (3, 5)
        assert {"classifier.weight", "classifier.bias"} <= set(report.new)
        assert report.dropped["classifier.weight"] == "classifier.weight is 5x16 here, and would be 2x16"
        _, report = convert(bert(BertForSequenceClassification), pooling="mean")
        assert report.dropped["bert.pooler.dense.weight"] == "there is no pooler.dense.weight here"

    def test_one_projection_for_queries_and_keys_takes_the_queries(self):
        _, report = convert(bert(BertModel), attention={"name": "reformer"}, position=[])
        assert "layers.0.attention.query.weight" in report.taken
        assert report.dropped["encoder.layer.0.attention.self.key.weight"] == "there is no layers.0.attention.key.weight here"
        assert report.dropped["embeddings.position_embeddings.weight"] == "there are no positions now"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [gpt2, bert, classifier])
def test_saved_and_loaded_it_is_the_same(make, dtype, tmp_path):
    model, _ = convert(make().to(dtype))
    assert model.dtype == dtype
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert equal_models(loaded, model)
    ids = ids_of()
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_the_same_seed_gives_the_same_model():
    source, models = bert(BertForSequenceClassification), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(convert(source, num_labels=5)[0])
    assert equal_models(models[0], models[1])
    assert not equal_models(models[0], models[2])  # the classifier is new


@pytest.mark.parametrize(
    "kind",
    [BertModel, BertForMaskedLM, BertForPreTraining, BertForSequenceClassification, GPT2Model, GPT2LMHeadModel],
    ids=lambda k: k.__name__,
)
def test_from_a_folder_it_is_as_from_the_model(kind, tmp_path):
    source = (gpt2 if kind.__name__.startswith("GPT2") else bert)(kind)
    source.save_pretrained(tmp_path)
    for path in (tmp_path, str(tmp_path)):
        model, report = convert(path)
        expected, expected_report = convert(source)
        assert equal_models(model, expected)
        assert report == expected_report


def test_what_a_checkpoint_lacks_is_not_said_to_be_taken_over(tmp_path):
    bert(BertModel).save_pretrained(tmp_path)
    change_config(tmp_path, architectures=["BertForMaskedLM"])
    _, report = convert(tmp_path)
    assert {"dense.weight", "dense_norm.bias", "lm_head.bias"} <= set(report.new)
    assert not any(name.startswith("cls.predictions.transform") for name in (*report.taken.values(), *report.dropped))
    assert "model.layers.0.expand.weight" in report.taken
    assert report.dropped["pooler.dense.weight"] == "only a classifier has a pooler here"
    change_config(tmp_path, architectures=None)  # as of old checkpoints
    assert type(convert(tmp_path)[0]) is PermuteFormerModel


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def saved(config, folder):
    config.save_pretrained(folder)
    return folder


BAD = {
    "a T5": (
        lambda path: convert(saved(T5Config(architectures=["T5Model"]), path)),
        "is a T5Model of the family 't5': only 'bert' and 'gpt2'",
    ),
    "a Llama": (
        lambda path: convert(
            LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=8
                )
            )
        ),
        "LlamaForCausalLM of the family 'llama'",
    ),
    "our own": (lambda path: convert(convert(gpt2())[0]), "of the family 'permuteformer'"),
    "a configuration": (lambda path: convert(GPT2Config()), "source is GPT2Config, which has no weights"),
    "a Llama configuration": (lambda path: convert(LlamaConfig()), "LlamaConfig of the family 'llama'"),
    "nothing": (lambda path: convert(None), "only 'bert' and 'gpt2'"),
    "another head": (lambda path: convert(bert(BertForTokenClassification)), "BertForTokenClassification, whose head has no counterpart"),
    "another saved head": (lambda path: convert(saved(BertConfig(architectures=["BertForQuestionAnswering"]), path)), "whose head has no"),
    "a decoder": (lambda path: convert(bert(BertLMHeadModel, is_decoder=True)), "BertLMHeadModel with is_decoder=True"),
    "a saved decoder": (
        lambda path: convert(saved(BertConfig(is_decoder=True, architectures=["BertModel"]), path)),
        "BertModel with is_decoder=True",
    ),
    "cross-attention": (lambda path: convert(gpt2(GPT2Model, add_cross_attention=True)), "GPT2Model with cross-attention"),
    "cross-attention in a BERT": (lambda path: convert(bert(BertModel, is_decoder=True, add_cross_attention=True)), "with cross-attention"),
    "width": (lambda path: convert(gpt2(), hidden_size=32), "hidden_size=32 does not fit the source, whose hidden_size is 16"),
    "heads": (lambda path: convert(bert(), num_attention_heads=4), "num_attention_heads=4 .* whose num_attention_heads is 2"),
    "layers": (lambda path: convert(gpt2(), num_hidden_layers=2), "num_hidden_layers=2 .* whose num_hidden_layers is 3"),
    "feed-forward": (lambda path: convert(gpt2(), intermediate_size=64), "intermediate_size=64 .* whose intermediate_size is 40"),
    "vocabulary": (lambda path: convert(gpt2(), vocab_size=64), "vocab_size=64 .* is 61.*resize_token_embeddings"),
    "positions": (lambda path: convert(gpt2(), position=[{"name": "learned", "max_length": 25}]), "max_length=25 .* has 24 positions"),
    "a misspelt field": (lambda path: convert(gpt2(), hiden_act="relu"), "did you mean 'hidden_act'"),
    "parts that do not fit": (lambda path: convert(gpt2(), **SOFTMAX), "'softmax' cannot be combined .* 'decay'"),
    "a causal masked model": (lambda path: convert(bert(), causal=True), "sees both sides"),
    "no folder": (lambda path: convert(path / "none"), "none' is not a folder"),
    "no folder, as text": (lambda path: convert(str(path / "none")), "none' is not a folder"),
    "a relative path": (lambda path: convert("./none"), "'./none' is not a folder"),
    "an empty folder": (lambda path: convert(path), "has no config.json"),
    "no weights": (lambda path: convert(saved(GPT2Config(architectures=["GPT2Model"]), path)), "no weights that can be loaded"),
    "meta": (lambda path: convert(gpt2().to("meta")), "meta device"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused(what, tmp_path):
    make, message = BAD[what]
    with pytest.raises(Exception, match=message) as error:
        make(tmp_path)
    assert any(isinstance(cause, (ValueError, TypeError, OSError)) for cause in (error.value, error.value.__cause__))


def test_a_family_that_transformers_does_not_know(tmp_path):
    saved(GPT2Config(architectures=["Nonesuch"]), tmp_path)
    change_config(tmp_path, model_type="nonesuch")
    with pytest.raises(ValueError, match="a Nonesuch of the family 'nonesuch'"):
        convert(tmp_path)


def test_a_name_that_the_hub_does_not_have(monkeypatch):
    def unreachable(name):
        raise OSError("no such repository")

    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", unreachable)
    with pytest.raises(FileNotFoundError, match="'someone/none' is neither a folder here nor a model that can be had from the hub"):
        convert("someone/none")


class TestCheckpoint:
    def source(self, folder):
        source = gpt2()
        source.save_pretrained(folder / "source")
        return source, folder / "source"

    @pytest.mark.parametrize("where", ["output", "empty", "new/deeper"])
    def test_it_is_the_converted_model(self, where, tmp_path):
        source, path = self.source(tmp_path)
        (tmp_path / "empty").mkdir()
        report = convert_checkpoint(path, tmp_path / where, positions_per_layer=True)
        model, expected = convert(source, positions_per_layer=True)
        assert equal_models(AutoModelForCausalLM.from_pretrained(tmp_path / where), model)
        assert report == expected
        assert ConversionReport(**json.loads((tmp_path / where / "report.json").read_text())) == expected
        assert not list((tmp_path / where).parent.glob(".*"))

    def test_nothing_is_overwritten(self, tmp_path):
        _, path = self.source(tmp_path)
        before = {file: file.read_bytes() for file in path.iterdir()}
        (tmp_path / "file").write_text("mine")
        for output in (path, tmp_path / "file"):
            with pytest.raises(FileExistsError, match="exists and is not an empty folder"):
                convert_checkpoint(path, output)
        assert {file: file.read_bytes() for file in path.iterdir()} == before
        assert (tmp_path / "file").read_text() == "mine"

    def test_where_it_fails_nothing_is_left(self, tmp_path, monkeypatch):
        _, path = self.source(tmp_path)
        with pytest.raises(ValueError, match="does not fit"):
            convert_checkpoint(path, tmp_path / "new" / "output", hidden_size=32)

        def breaks(model, folder):
            (Path(folder) / "model.safetensors").write_text("half")
            raise OSError("disk full")

        monkeypatch.setattr(PermuteFormerForCausalLM, "save_pretrained", breaks)
        with pytest.raises(OSError, match="disk full"):
            convert_checkpoint(path, tmp_path / "output")
        assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_the_documentation_runs_and_weights_go_back_bit_for_bit(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "convert.md").read_text(encoding="utf-8")
    first, second, third = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names = {"source": gpt2(), "folder": tmp_path}
    expected = {name: weight.clone() for name, weight in names["source"].state_dict().items()}
    exec(first + second, names)
    assert (tmp_path / "config.json").exists()
    names["source"] = gpt2()
    assert not torch.equal(names["source"].lm_head.weight, expected["lm_head.weight"])
    exec(third, names)
    assert all(torch.equal(weight, expected[name]) for name, weight in names["source"].state_dict().items())


def test_the_command_line_converts_and_refuses(tmp_path):
    source, output = tmp_path / "source", tmp_path / "output"
    gpt2().save_pretrained(source)
    (source / "vocab.json").write_text('{"a": 0}')
    run = CliRunner()
    result = run.invoke(app, ["convert", str(source), str(output), "--field", 'pooling="mean"'])
    assert result.exit_code == 0, result.output
    assert (output / "report.json").exists()
    assert (output / "vocab.json").read_text() == '{"a": 0}'
    assert PermuteFormerForCausalLM.from_pretrained(output).config.pooling == "mean"
    again = run.invoke(app, ["convert", str(source), str(output)])
    assert again.exit_code == 1
    assert "nothing is overwritten" in again.output.replace("\n", " ")
    assert run.invoke(app, ["convert", str(source), str(tmp_path / "x"), "--field", "pooling=mean"]).exit_code == 2
    missing = run.invoke(app, ["convert", str(tmp_path / "nowhere"), str(tmp_path / "x")])
    assert missing.exit_code == 1
    assert not (tmp_path / "x").exists()
