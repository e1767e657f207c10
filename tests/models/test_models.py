import copy
import itertools
import math
import subprocess
import sys

import checks
import pytest
import torch
from commands import run
from safetensors.torch import save, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig

from permuteformer import (
    PermuteFormerConfig,
    PermuteFormerForCausalLM,
    PermuteFormerForMaskedLM,
    PermuteFormerForMatching,
    PermuteFormerForSequenceClassification,
    PermuteFormerForTokenClassification,
    PermuteFormerModel,
)
from permuteformer.attention import KVState
from permuteformer.models import PRESETS, PermuteFormerCache
from permuteformer.models.inspection import summarize
from permuteformer.models.streaming import encode_in_blocks
from permuteformer.ops.call import LinearState
from permuteformer.positions.permute import Permute
from permuteformer.tokens import image_tokens

pytestmark = pytest.mark.filterwarnings("ignore:positions on axis")  # heads this small repeat early

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "hidden_dropout": 0.0,
}
SOFTMAX, LINFORMER = {"attention": {"name": "softmax"}}, {"attention": {"name": "linformer", "max_length": 9}}
LANGUAGE_MODELS = [name for name in PRESETS if name.endswith(("-lm", "-no-decay", "-no-permutation"))]
ENCODERS = [name for name in PRESETS if name not in LANGUAGE_MODELS]


def small(name, **overrides):
    return PermuteFormerConfig.preset(name, **{**SMALL, **overrides})


def model_of(name, **overrides):
    config = small(name, **overrides)
    kind = PermuteFormerForCausalLM if config.causal else PermuteFormerForSequenceClassification
    torch.manual_seed(0)
    return kind(config).eval()


def call(model, ids, **arguments):
    if model.config.axes == 2:
        rows = torch.arange(ids.shape[1])
        arguments.setdefault("position_ids", torch.stack([rows % 4, rows // 4], dim=-1).expand(len(ids), -1, -1))
    return model(ids, **arguments).logits


def ids_of(batch=2, length=21):
    return torch.randint(3, 100, (batch, length))


@pytest.mark.parametrize("name", PRESETS)
def test_saved_and_loaded_it_is_the_same(name, tmp_path):
    """In float32 and bfloat16, with permutations of another seed than the default: bit for bit."""
    model = model_of(name)
    for module in model.modules():
        if isinstance(module, Permute):
            module.load_state_dict({"permutation": module.permutation.flip(0)})
    ids = ids_of()
    model.save_pretrained(tmp_path)
    auto = AutoModelForCausalLM if model.config.causal else AutoModelForSequenceClassification
    loaded = auto.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(call(loaded, ids), call(model, ids))
    half = auto.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(call(half, ids), call(copy.deepcopy(model).bfloat16(), ids))


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_generation(name):
    """With the state it is as without, in chunks as in one call, and of a padded prompt as of the prompt alone."""
    model, ids = model_of(name), ids_of(3, 9)
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, :1] = 0, 0

    def generate(ids, **options):
        torch.manual_seed(1)
        return model.generate(ids, **{"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, **options})

    for how in ({}, {"num_beams": 3}, {"do_sample": True}):
        assert torch.equal(*(generate(ids, attention_mask=mask, use_cache=use_cache, **how) for use_cache in (True, False)))
    together = generate(ids, attention_mask=mask)
    assert torch.equal(generate(ids, attention_mask=mask, prefill_chunk_size=4), together)
    for row in range(3):
        assert torch.equal(together[row, -12:], generate(ids[row : row + 1, mask[row].bool()])[0, -12:])


def test_the_state_does_not_grow():
    model = model_of("permuteformer-lm")
    with torch.no_grad():
        few = model(ids_of(1, 10)).past_key_values
        many = model(ids_of(1, 100_000), logits_to_keep=1).past_key_values
    assert many.nbytes == few.nbytes
    assert many.get_seq_length() == 100_000


@pytest.mark.parametrize("name", ENCODERS)
def test_a_row_does_not_depend_on_its_batch(name):
    model = model_of(name).double()
    ids = ids_of(3, 21)
    mask = torch.ones_like(ids)
    mask[0, 9:], mask[1, 17:] = 0, 0
    together = call(model, ids, attention_mask=mask)
    for row, real in enumerate(mask.sum(1).tolist()):
        checks.assert_close(together[row : row + 1], call(model, ids[row : row + 1, :real]))


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_packed_is_separate(name):
    model = model_of(name).double()
    ids = ids_of(1, 20)
    segments = torch.tensor([[0] * 8 + [1] * 12])
    packed = model(ids, segment_ids=segments).logits
    checks.assert_close(packed[:, :8], model(ids[:, :8]).logits)
    checks.assert_close(packed[:, 8:], model(ids[:, 8:]).logits)
    for cut in (5, 8, 11):
        first = model(ids[:, :cut], segment_ids=segments[:, :cut], use_cache=True)
        rest = model(ids[:, cut:], segment_ids=segments[:, cut:], past_key_values=first.past_key_values)
        checks.assert_close(rest.logits, packed[:, cut:])


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_padding_anywhere_and_in_any_piece_changes_nothing(name):
    """On the left, on the right, in the middle, a whole piece of it: a row comes out as without it, in one call and in pieces."""
    model = model_of(name).double()
    ids = ids_of(3, 16)
    mask = torch.ones(3, 16, dtype=torch.int64)
    mask[0, :9], mask[1, 5:8], mask[2, 13:] = 0, 0, 0
    for given, size in itertools.product((None, mask), (4, 5)):
        whole = model(ids, attention_mask=given).logits
        cache, parts = None, []
        for start in range(0, 16, size):
            piece = slice(start, start + size)
            out = model(ids[:, piece], attention_mask=None if given is None else given[:, piece], past_key_values=cache, use_cache=True)
            cache = PermuteFormerCache.from_state_dict(out.past_key_values.state_dict())
            parts.append(out.logits)
        real = torch.ones_like(mask).bool() if given is None else mask.bool()
        checks.assert_close(torch.cat(parts, dim=1)[real], whole[real])
        assert cache.get_seq_length() == 16
    for row in range(3):
        real = mask[row].bool()
        checks.assert_close(whole[row, real], model(ids[row : row + 1, real]).logits[0])


def test_a_state_with_a_mask_is_saved(tmp_path):
    model = model_of("transformer-lm")
    cache = model(ids_of(2, 9), attention_mask=torch.ones(2, 9)).past_key_values
    cache.save(tmp_path / "state.safetensors")
    loaded = PermuteFormerCache.load(tmp_path / "state.safetensors")
    assert loaded.get_seq_length() == 9
    for name, value in cache.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


def test_a_file_that_is_no_state_is_refused(tmp_path):
    cache = model_of("permuteformer-lm")(ids_of(2, 9)).past_key_values
    cache.save(tmp_path / "state.safetensors")
    whole = (tmp_path / "state.safetensors").read_bytes()
    tensors = cache.state_dict()
    lacking = {name: x for name, x in tensors.items() if not name.endswith(".z")}
    name, place = "0.LinearState.kv", "0.LinearState.next_position"
    changed = [{**tensors, **more} for more in ({name: tensors[name][0]}, {name: tensors[name].long()}, {place: torch.zeros(3).long()})]
    others = (save({"weight": torch.ones(3)}), save({"seen": torch.tensor(9)}), save(lacking), *map(save, changed))
    for wrong in (b"", whole[:-1], *others):
        (tmp_path / "wrong").write_bytes(wrong)
        with pytest.raises(ValueError, match=r"wrong.*PermuteFormerCache\.save"):
            PermuteFormerCache.load(tmp_path / "wrong")


@pytest.mark.parametrize("name", ["permuteformer-text", "permuteformer-lm", "transformer-text", "roformer-text"])
def test_gradient_checkpointing_gives_the_same_gradients(name):
    found = []
    for checkpointing in (False, True):
        model = model_of(name, hidden_dropout=0.1).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        ids = torch.arange(3, 24).repeat(2, 1)
        torch.manual_seed(2)
        model(ids, labels=ids if model.config.causal else torch.tensor([0, 1])).loss.backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["permuteformer-text", "permuteformer-lm"])
def test_compiled_and_exported(name):
    model = model_of(name)
    ids = ids_of()
    expected = model(ids, use_cache=False).logits if model.config.causal else model(ids).logits
    arguments = {"use_cache": False} if model.config.causal else {}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, **arguments)
    torch.testing.assert_close(compiled.logits, expected)
    compiled.logits.square().sum().backward()
    for any_length in (None, {"input_ids": {1: torch.export.Dim("length", min=2, max=10**6)}, **dict.fromkeys(arguments)}):
        exported = torch.export.export(model, (ids,), arguments, dynamic_shapes=any_length).module()
        torch.testing.assert_close(exported(ids, **arguments).logits, expected)
    longer = ids.repeat(1, 150)
    torch.testing.assert_close(exported(longer, **arguments).logits, model(longer, **arguments).logits)


def test_losses_are_those_of_torch():
    ids = ids_of()
    model = model_of("permuteformer-lm")
    out = model(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    config = small("permuteformer-text", num_labels=3)
    classifier = PermuteFormerForSequenceClassification(config)
    labels = torch.tensor([2, 0])
    out = classifier(ids, labels=labels)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits, labels))
    matcher = PermuteFormerForMatching(config)
    out = matcher(ids, ids[:, :9], labels=labels)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits, labels))
    for kind, classes in ((PermuteFormerForMaskedLM, 100), (PermuteFormerForTokenClassification, 3)):
        targets = torch.full_like(ids, -100)
        targets[:, 3:6] = torch.randint(0, classes, (2, 3))
        out = kind(config)(ids, labels=targets)
        expected = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        torch.testing.assert_close(out.loss, expected)


@pytest.mark.parametrize(
    ("problem", "labels", "loss"),
    [
        ("regression", torch.randn(2, 3), torch.nn.functional.mse_loss),
        ("multi_label_classification", torch.tensor([[1.0, 0, 1], [0, 0, 1]]), torch.nn.functional.binary_cross_entropy_with_logits),
    ],
)
def test_other_problems(problem, labels, loss):
    for model in (
        PermuteFormerForSequenceClassification(small("permuteformer-text", num_labels=3, problem_type=problem)),
        PermuteFormerForMatching(small("permuteformer-text", num_labels=3, problem_type=problem)),
    ):
        ids = ids_of()
        documents = (ids, ids[:, :9]) if isinstance(model, PermuteFormerForMatching) else (ids,)
        out = model.eval()(*documents, labels=labels)
        torch.testing.assert_close(out.loss, loss(out.logits, labels))


def test_a_preset_is_not_changed_by_what_is_done_to_its_configuration():
    config = small("permuteformer-lm")
    config.position[0]["seed"] = 7
    assert "seed" not in PRESETS["permuteformer-lm"]["position"][0]


def test_weights_put_in_place_by_hand_bring_their_permutations():
    source, target = (model_of("permuteformer-lm", position=[{"name": "permute", "seed": seed}]) for seed in (5, 0))
    ids = ids_of()
    target(ids)
    for name, value in source.state_dict().items():
        parent, _, leaf = name.rpartition(".")
        module = target.get_submodule(parent)
        kind = torch.nn.Parameter if leaf in module._parameters else torch.Tensor.clone
        setattr(module, leaf, kind(value))
    target.tie_weights()
    assert torch.equal(target(ids).logits, source(ids).logits)


@pytest.mark.parametrize(
    "name", ["permuteformer-lm", "performer-lm", "roformer-text", "performer-t5-text", "permuteformer-orthogonal-text"]
)
@pytest.mark.parametrize("assign", [False, True])
def test_loaded_onto_a_model_without_memory(name, assign):
    source = model_of(name)
    with torch.device("meta"):
        target = type(source)(source.config).eval()
    if not assign:
        target.to_empty(device="cpu")
    target.load_state_dict(source.state_dict(), assign=assign)
    ids = ids_of()
    assert torch.equal(call(target, ids), call(source, ids))


@pytest.mark.parametrize(
    "kind",
    [PermuteFormerForCausalLM, PermuteFormerForMaskedLM, PermuteFormerForSequenceClassification, PermuteFormerForTokenClassification],
)
def test_every_head_has_the_standard_outputs(kind):
    name = "permuteformer-lm" if kind is PermuteFormerForCausalLM else "permuteformer-text"
    model = kind(small(name)).eval()
    ids = ids_of()
    out, with_states = model(ids), model(ids, output_hidden_states=True)
    assert [x.shape for x in with_states.hidden_states] == [(2, 21, 32)] * 3
    torch.testing.assert_close(with_states.logits, out.logits)
    assert isinstance(model(ids, return_dict=False), tuple)
    assert isinstance(kind(small(name, return_dict=False)).eval()(ids), tuple)
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, out.logits)
    assert torch.equal(model(ids, token_type_ids=torch.zeros_like(ids)).logits, out.logits)
    with pytest.raises(TypeError, match=r"unknown argument of the model: 'atention_mask'.*did you mean 'attention_mask'"):
        model(ids, atention_mask=ids)
    with pytest.raises(ValueError, match="token_type_ids"):
        model(ids, token_type_ids=torch.ones_like(ids))
    model.resize_token_embeddings(120)
    logits = model(torch.full((1, 3), 119)).logits
    if hasattr(model, "lm_head"):
        assert logits.shape[-1] == 120
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_dropout_is_for_training():
    model = PermuteFormerForSequenceClassification(small("permuteformer-text", hidden_dropout=0.5))
    ids = ids_of()
    assert not torch.equal(model.train()(ids).logits, model(ids).logits)
    assert torch.equal(model.eval()(ids).logits, model(ids).logits)


def test_initialisation_follows_the_papers():
    bert = PermuteFormerModel(PermuteFormerConfig.preset("permuteformer-text"))
    block = bert.layers[0]
    for weight in (block.attention.query.weight, block.expand.weight, bert.embed_tokens.weight[1:]):
        assert abs(weight.std().item() / 0.02 - 1) < 0.05
    assert not bert.embed_tokens.weight[0].any()
    assert not block.expand.bias.any()
    fairseq = PermuteFormerModel(PermuteFormerConfig.preset("permuteformer-lm", vocab_size=1000))
    block = fairseq.layers[0]
    for layer, gain in ((block.attention.query, 2**-0.5), (block.attention.value, 2**-0.5), (block.attention.output, 1), (block.expand, 1)):
        bound = gain * math.sqrt(6 / sum(layer.weight.shape))
        assert 0.98 * bound < layer.weight.abs().max() <= bound
        assert not layer.bias.any()
    assert abs(fairseq.embed_tokens.weight[1:].std().item() / 512**-0.5 - 1) < 0.05


def test_pairs_of_images_are_matched():
    model = PermuteFormerForMatching(small("permuteformer-image", vocab_size=259)).eval()
    (first, at), (second, there) = (image_tokens(torch.randint(0, 256, (2, 4, size), dtype=torch.uint8)) for size in (4, 6))
    out = model(first, second, position_ids=at, second_position_ids=there)
    assert out.logits.shape == (2, 2)


def test_images_are_sequences_with_a_grid():
    tokens, positions = image_tokens(torch.randint(0, 256, (2, 5, 7), dtype=torch.uint8))
    assert tokens.shape == (2, 37)
    assert positions[0, 8].tolist() == [0, 1]
    with pytest.raises(ValueError, match="float32"):
        image_tokens(torch.rand(2, 5, 7))
    with pytest.raises(ValueError, match="255.*300"):
        image_tokens(torch.tensor([[[0, 300]]]))


def continue_with_another_batch():
    model = model_of("permuteformer-lm")
    return model(ids_of(3), past_key_values=model(ids_of(2)).past_key_values)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PermuteFormerConfig(hiden_size=5), "'hiden_size'.*'hidden_size'"),
        (lambda: PermuteFormerConfig.preset("permuteformer-txt"), "'permuteformer-txt'.*'permuteformer-text'"),
        (lambda: PermuteFormerConfig(hidden_size=30, num_attention_heads=4), "num_heads=4"),
        (lambda: PermuteFormerConfig(**SOFTMAX, position=[{"name": "decay"}], causal=True), "'softmax'.*'decay'"),
        (lambda: PermuteFormerConfig(**LINFORMER, position=[], causal=True), "'linformer'.*'causal'"),
        (lambda: PermuteFormerConfig(position=[{"name": "permute", "sed": 1}]), "'sed'.*'seed'"),
        (lambda: PermuteFormerConfig(attention={"kind": "linear"}), "attention.*'linear'"),
        (lambda: PermuteFormerConfig(position=["permute"]), "position"),
        (lambda: PermuteFormerConfig(pooling="last"), "pooling.*causal"),
        (lambda: PermuteFormerConfig(hidden_dropout=3.0), "hidden_dropout.*3.0"),
        (lambda: PermuteFormerConfig(hidden_act="geluu"), "'geluu'.*'gelu'"),
        (lambda: PermuteFormerConfig(pooling="max"), "pooling.*'cls', 'mean', 'last'.*max"),
        (lambda: PermuteFormerConfig(layer_norm_eps="a"), "layer_norm_eps.*'a'"),
        (lambda: PermuteFormerConfig(initializer_range=math.nan), "initializer_range.*nan"),
        (lambda: PermuteFormerConfig(num_hidden_layers=-1), "num_hidden_layers.*-1"),
        (lambda: PermuteFormerForCausalLM(small("permuteformer-text")), "causal=True"),
        (lambda: PermuteFormerForMaskedLM(small("permuteformer-lm")), "causal=False"),
        (lambda: model_of("permuteformer-text")(torch.tensor([[100]])), "input_ids.*99.*100"),
        (lambda: model_of("permuteformer-text")(ids_of(), labels=torch.tensor([0, 2])), "labels.*1.*2"),
        (lambda: model_of("permuteformer-lm")(ids_of(), labels=torch.full((2, 21), 100)), "labels.*99.*100"),
        (lambda: model_of("permuteformer-image")(ids_of()), "position_ids.*axes=2"),
        (lambda: model_of("transformer-image")(ids_of(1, 2000)), "1026.*max_length=1026"),
        (lambda: model_of("linformer-image", position=[])(ids_of(1, 2000)), "max_length=1026.*2000"),
        (lambda: model_of("permuteformer-text")(), "input_ids.*inputs_embeds"),
        (lambda: model_of("permuteformer-text").model(ids_of(), use_cache=True), "use_cache.*causal"),
        (lambda: model_of("permuteformer-text").model(ids_of(), queries=torch.tensor([[0], [21]])), "queries.*20.*21"),
        (lambda: model_of("permuteformer-text").model(ids_of(), global_mask=torch.ones(2, 21, dtype=torch.bool)), "global_mask"),
        (lambda: model_of("permuteformer-lm")(ids_of(), past_key_values=object()), "past_key_values.*PermuteFormerCache.*object"),
        (lambda: model_of("permuteformer-text")(ids_of(), attention_mask=torch.ones(2, 9)), r"attention_mask.*\(2, 9\)"),
        (lambda: model_of("permuteformer-text")(ids_of(), attention_mask=torch.ones(2, 30)), r"attention_mask.*\(2, 30\)"),
        (lambda: model_of("permuteformer-text")(torch.arange(5)), r"\(batch, length\).*\(5,\)"),
        (lambda: continue_with_another_batch(), "past_key_values.*2.*3"),
        (lambda: encode_in_blocks(model_of("permuteformer-text"), ids_of()), "PermuteFormerModel"),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(Exception, match=message) as error:
        make()
    assert isinstance(error.value, (ValueError, TypeError)) or isinstance(error.value.__cause__, (ValueError, TypeError))


def test_a_state_takes_nothing_back():
    model = model_of("permuteformer-lm")
    cache = model(ids_of()).past_key_values
    with pytest.raises(NotImplementedError, match="removed"):
        cache.crop(-1)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert isinstance(AutoConfig.for_model("permuteformer"), PermuteFormerConfig)


@pytest.mark.parametrize(
    "name",
    [
        *("permuteformer-text", "permuteformer-image", "performer-text", "roformer-text", "permuteformer-orthogonal-text"),
        *("permuteformer-decay-text", "permuteformer-decay-image"),
    ],
)
def test_encoding_in_blocks_is_encoding(name):
    model = PermuteFormerModel(small(name)).eval().double()
    ids = ids_of(2, 50)
    mask = torch.ones_like(ids)
    mask[0, 33:] = 0
    rows = torch.arange(50)
    positions = torch.stack([rows % 8, rows // 8], dim=-1).expand(2, -1, -1) if model.config.axes == 2 else None
    expected = model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
    for size in (1, 7, 50, 64):
        actual = encode_in_blocks(model, ids, attention_mask=mask, position_ids=positions, block_size=size)
        checks.assert_close(actual[mask.bool()], expected[mask.bool()])


def test_encoding_in_blocks_is_for_linear_encoders():
    for name in ("permuteformer-lm", "transformer-text", "performer-t5-text"):
        with pytest.raises(ValueError, match="causal=|'softmax'|bias"):
            encode_in_blocks(PermuteFormerModel(small(name)).eval(), ids_of())
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        encode_in_blocks(PermuteFormerModel(small("permuteformer-text")).train(), ids_of())


def test_autocast():
    for name in ("permuteformer-text", "permuteformer-lm"):
        model = model_of(name)
        ids = ids_of()
        expected = call(model, ids)
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype):
                logits = call(model, ids)
            torch.testing.assert_close(logits.float(), expected, atol=0.05, rtol=0.05)


def test_the_decode_step_is_exported():
    """One token and a state in, logits and a state out; the exported step resumes from its own states."""
    model = model_of("permuteformer-lm")
    ids = ids_of(2, 14)
    with torch.no_grad():
        expected = model(ids).logits
        cache = model(ids[:, :9]).past_key_values
        step = torch.export.export(model, (ids[:, 9:10],), {"past_key_values": copy.deepcopy(cache)}).module()
        for i in range(9, 14):
            out = step(ids[:, i : i + 1], past_key_values=cache)
            cache = out.past_key_values
            torch.testing.assert_close(out.logits[:, 0], expected[:, i])


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
@pytest.mark.parametrize(
    "name",
    [
        *("permuteformer-text", "transformer-text", "permuteformer-image", "nystromformer-text", "permuteformer-lm"),
        *("permuteformer-decay-text", "permuteformer-decay-image"),
    ],
)
def test_the_last_block_is_asked_for_what_is_pooled(name, pooling):
    """The answer is that of all hidden states, with padding on either side, and the last block was given no more than it needs."""
    if pooling == "last" and name != "permuteformer-lm":
        pytest.skip("pooling='last' is for causal models")
    torch.manual_seed(0)
    model = PermuteFormerForSequenceClassification(small(name, pooling=pooling)).eval()
    ids = ids_of()
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, 15:] = 0
    lengths = []
    model.model.layers[-1].expand.register_forward_hook(lambda module, arguments, out: lengths.append(out.shape[1]))
    arguments = {"attention_mask": mask}
    if model.config.axes == 2:
        rows = torch.arange(21)
        arguments["position_ids"] = torch.stack([rows % 4, rows // 4], dim=-1).expand(2, -1, -1)
    torch.testing.assert_close(model(ids, **arguments).logits, model(ids, **arguments, output_hidden_states=True).logits)
    assert lengths == [21 if pooling == "mean" else 1, 21]


def test_presets_are_summed_up():
    summary = summarize(PermuteFormerConfig.preset("permuteformer-text"), 4000)
    model = PermuteFormerForSequenceClassification(PermuteFormerConfig.preset("permuteformer-text"))
    assert summary.parameters == sum(p.numel() for p in model.parameters())
    lm = summarize(PermuteFormerConfig.preset("permuteformer-lm", vocab_size=1000), 512)
    assert lm.state_bytes == summarize(PermuteFormerConfig.preset("permuteformer-lm", vocab_size=1000), 64).state_bytes
    assert lm.reach == Permute(8, 64).period


def test_the_command_line_lists_presets():
    shown = run("models", "retrieval")
    assert "permuteformer-retrieval" in shown
    assert "permuteformer-text" not in shown
    assert "'nothing-like-it'" in run("models", "nothing-like-it", code=1)


def test_a_checkpoint_of_another_family_is_refused(tmp_path):
    BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'bert'.*'permuteformer'"):
        PermuteFormerForCausalLM.from_pretrained(tmp_path)


def test_a_changed_field_in_a_saved_configuration_is_noticed(tmp_path):
    model_of("permuteformer-lm").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"hidden_act"', '"hiden_act"'))
    with pytest.raises(TypeError, match="'hiden_act'"):
        PermuteFormerForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "kind",
    [PermuteFormerModel, PermuteFormerForMaskedLM, PermuteFormerForTokenClassification, PermuteFormerForMatching],
)
def test_every_class_is_saved_and_loaded_with_all_its_weights(kind, tmp_path):
    """Draw every number again, so that two exchanged weights are noticed."""
    model = kind(small("permuteformer-text")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_model_and_state_continue_in_another_process(tmp_path):
    model = model_of("permuteformer-lm", position=[{"name": "permute", "seed": 5}, {"name": "decay", "r": 0.7}])
    ids = ids_of(2, 20)
    with torch.no_grad():
        expected = model(ids).logits[:, 12:]
        cache = model(ids[:, :12]).past_key_values
    model.save_pretrained(tmp_path)
    cache.save(tmp_path / "state.safetensors")
    save_file({"ids": ids[:, 12:].contiguous(), "expected": expected.contiguous()}, tmp_path / "rest.safetensors")
    program = f"""
import torch
from safetensors.torch import load_file
from permuteformer import PermuteFormerForCausalLM
from permuteformer.models import PermuteFormerCache
torch.set_num_threads(1)
model = PermuteFormerForCausalLM.from_pretrained({str(tmp_path)!r})
rest = load_file({str(tmp_path / "rest.safetensors")!r})
cache = PermuteFormerCache.load({str(tmp_path / "state.safetensors")!r})
torch.testing.assert_close(model(rest["ids"], past_key_values=cache).logits, rest["expected"])
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_positions_alike_for_all_rows_go_on():
    model, ids = model_of("permuteformer-lm"), ids_of(3, 9)
    positions = torch.arange(9).view(1, 9)
    cache = model(ids[:, :6], position_ids=positions[:, :6], use_cache=True).past_key_values
    more = model(ids[:, 6:], past_key_values=cache, use_cache=True)
    checks.assert_close(more.logits, model(ids).logits[:, 6:])
    assert more.past_key_values.layers[0].state.next_position.tolist() == [9, 9, 9]


@pytest.mark.parametrize("name", ["permuteformer-lm", "transformer-lm"])
def test_rows_of_a_cache_are_selected_with_every_field(name):
    """Of every tensor of every layer's state; a field that is forgotten shows."""
    model, ids = model_of(name), ids_of(3, 8)
    segments = torch.tensor([[0] * 8, [0] * 5 + [1] * 3, [0] * 2 + [4] * 6])
    mask = torch.ones(3, 8)
    mask[1, 6:] = 0
    with torch.no_grad():
        made = model(ids, attention_mask=mask, segment_ids=segments, use_cache=True).past_key_values
    rows = {"batch_select_indices": [2, 0], "reorder_cache": [1, 1, 0], "batch_repeat_interleave": [0, 0, 1, 1, 2, 2]}
    for method, order in rows.items():
        cache = copy.deepcopy(made)
        getattr(cache, method)(2 if method == "batch_repeat_interleave" else torch.tensor(order))
        for layer, before in zip(cache.layers, made.layers, strict=True):
            kind = LinearState if name == "permuteformer-lm" else KVState
            assert type(layer.state) is kind
            assert layer.seen == 8
            for field in kind._fields:
                assert torch.equal(getattr(layer.state, field), getattr(before.state, field)[torch.tensor(order)]), field
        more = torch.randint(3, 100, (len(order), 2))
        alone = model(ids[order], attention_mask=mask[order], segment_ids=segments[order], use_cache=True).past_key_values
        torch.testing.assert_close(model(more, past_key_values=cache).logits, model(more, past_key_values=alone).logits)


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_pooling(pooling):
    model = model_of("permuteformer-lm" if pooling == "last" else "permuteformer-text", pooling=pooling)
    model = PermuteFormerForSequenceClassification(model.config).eval()
    ids = ids_of()
    mask = torch.ones_like(ids)
    mask[0, :6] = mask[1, 15:] = 0
    rows = [row[real.bool()] for row, real in zip(model.model(ids, attention_mask=mask).last_hidden_state, mask, strict=True)]
    pooled = {"cls": lambda x: torch.tanh(model.pooler.dense(x[0])), "mean": lambda x: x.mean(0), "last": lambda x: x[-1]}[pooling]
    logits = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(logits, model.classifier(torch.stack(list(map(pooled, rows)))))
    torch.testing.assert_close(logits[:1], model(ids[:1, 6:]).logits)


@pytest.mark.parametrize("task", ["text", "image"])
def test_classifiers_mark_their_cls_token(task):
    """With a two-sided decay, CLS is a global token where it is pooled, wherever padding is; other heads mark none."""
    model = PermuteFormerForSequenceClassification(small(f"permuteformer-decay-{task}")).eval()
    ids = ids_of(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    given = {"attention_mask": mask}
    if task == "image":
        given["position_ids"] = torch.stack([torch.arange(20) % 5, torch.arange(20) // 5], dim=-1).expand(2, -1, -1)
    marked = torch.zeros(2, 20, dtype=torch.bool)
    marked[0, 3] = marked[1, 0] = True
    hidden = model.model(ids, global_mask=marked, **given).last_hidden_state[marked]
    expected = model.classifier(torch.tanh(model.pooler.dense(hidden)))
    torch.testing.assert_close(model(ids, **given).logits, expected)
    plain = model.model(ids, **given).last_hidden_state
    assert (plain[marked] - hidden).abs().max() > 1e-4
    mean = PermuteFormerForSequenceClassification(small(f"permuteformer-decay-{task}", pooling="mean")).eval()
    assert not mean.pooler.arguments(ids, mask)


def test_an_old_cache_file_is_read(tmp_path):
    """Files of earlier versions also hold the next position and the last segment per layer."""
    model, ids = model_of("permuteformer-lm"), ids_of(2, 12)
    cache = model(ids[:, :9]).past_key_values
    more = {f"{n}.next_position": layer.state.next_position.clone() for n, layer in enumerate(cache.layers)}
    save_file({**cache.state_dict(), **more}, tmp_path / "old.safetensors")
    loaded = PermuteFormerCache.load(tmp_path / "old.safetensors")
    torch.testing.assert_close(model(ids[:, 9:], past_key_values=loaded).logits, model(ids).logits[:, 9:])
