"""Every family and head against transformers: outputs, losses, gradients, names, directories; padded and packed."""

import copy
import json
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load, load_file, save_file
from small_models import (
    CONFIGS,
    DEVICE,
    LOGITS,
    SIZES,
    assert_gradients,
    copies,
    integers,
    packed,
    randomised,
    reference_masks,
)

import fastbert
from fastbert import BertConfig, BertModel, backends, checkpoint, random, reference, testing
from fastbert.config import PRESETS
from fastbert.families import BY_MODEL_TYPE
from fastbert.testing import Result

LENGTHS, SEQLEN, CLASSES = [7, 1, 12, 4], 12, 3
# The heads of each family, written out here: fastbert's own table has to agree.
HEADS = {
    "bert": "PreTraining MaskedLM NextSentencePrediction SequenceClassification TokenClassification QuestionAnswering "
    "MultipleChoice",
    "electra": "MaskedLM ReplacedTokenDetection SequenceClassification TokenClassification QuestionAnswering "
    "MultipleChoice",
    "albert": "PreTraining MaskedLM SequenceClassification TokenClassification QuestionAnswering MultipleChoice",
} | dict.fromkeys(
    ("roberta", "xlm-roberta", "camembert", "distilbert", "deberta-v2", "mpnet"),
    "MaskedLM SequenceClassification TokenClassification QuestionAnswering MultipleChoice",
)
MODELS = [(family, kind) for family in CONFIGS for kind in ("Model", *(f"For{head}" for head in HEADS[family].split()))]


def marked(family, kind, *more):
    """A case; a slow one if the classes and the code are RoBERTa's, but for one kind of head."""
    twin = family in ("xlm-roberta", "camembert") and kind != "ForMaskedLM"
    return pytest.param(family, kind, *more, marks=[pytest.mark.slow] * twin)


every_model = pytest.mark.parametrize(("family", "kind"), [marked(*model) for model in MODELS])


def their(family, kind="Model", **changes):
    """transformers' model with random weights; its biases and LayerNorms are not trivial."""
    labels = 2 if kind in ("ForQuestionAnswering", "ForPreTraining") else CLASSES
    if (family, kind) == ("deberta-v2", "ForSequenceClassification"):  # else its loss is rounded to float32
        changes = {"problem_type": "single_label_classification"} | changes
    config = transformers.AutoConfig.for_model(family, **CONFIGS[family] | {"num_labels": labels} | changes)
    name = {"ForReplacedTokenDetection": "ForPreTraining"}.get(kind, kind)
    return randomised(getattr(transformers, type(config).__name__.removesuffix("Config") + name)(config))


def our(theirs, kind="Model", **changes):
    """Our model with the weights and configuration of theirs."""
    config = BertConfig.from_dict(theirs.config.to_dict()).changed(**changes)
    model = getattr(fastbert, f"Bert{kind}")(config).to(theirs.device, theirs.dtype)
    model.load_state_dict(theirs.state_dict())
    return model.train(theirs.training)


def example(model, kind, lengths=LENGTHS, side="right"):
    """A padded batch and labels. Question answering has no padding: transformers scores padding, fastbert does not."""
    size, config = len(lengths), model.config
    lengths = [SEQLEN] * size if kind == "ForQuestionAnswering" else lengths
    mask = (torch.arange(SEQLEN) < torch.tensor(lengths)[:, None]).long().to(DEVICE)
    mask = mask.flip(1) if side == "left" else mask
    inputs = {"input_ids": integers(5, 99, size, SEQLEN).where(mask != 0, config.pad_token_id), "attention_mask": mask}
    if BY_MODEL_TYPE[config.model_type].token_types and config.type_vocab_size:
        inputs["token_type_ids"] = integers(0, config.type_vocab_size, size, SEQLEN)
    tokens = integers(0, 2 if kind == "ForReplacedTokenDetection" else CLASSES, size, SEQLEN)
    ignored = (mask == 0) | (torch.rand(mask.shape).to(DEVICE) < 0.6 * (kind != "ForReplacedTokenDetection"))
    labels = {"labels": tokens.masked_fill(ignored, -100)}
    if kind == "ForPreTraining":
        labels[BY_MODEL_TYPE[config.model_type].heads[kind].pair_label] = integers(0, 2, size)
    elif kind == "ForQuestionAnswering":
        labels = {"start_positions": integers(0, SEQLEN, size), "end_positions": integers(0, SEQLEN, size)}
    elif kind == "ForMultipleChoice":
        inputs = {name: value.unflatten(0, (size // 2, 2)) for name, value in inputs.items()}
        labels = {"labels": integers(0, 2, size // 2)}
    elif kind in ("ForSequenceClassification", "ForNextSentencePrediction"):
        labels = {"labels": integers(0, 2, size)}
    return inputs, {} if kind == "Model" else labels


def outputs(out, visible):
    """The outputs that both libraries have, at visible tokens."""
    named = {name: getattr(out, name, None) for name in ("loss", "last_hidden_state", "pooler_output", *LOGITS)}
    named["seq_relationship_logits"] = getattr(out, "sop_logits", named["seq_relationship_logits"])
    named |= {f"state {i}": state for i, state in enumerate(out.hidden_states or ())}
    named = {name: tensor for name, tensor in named.items() if tensor is not None}
    return {name: t[visible] if t.shape[:2] == visible.shape else t for name, t in named.items()}


def run(model, inputs, labels):
    """Outputs; gradients of hidden states, and of parameters under transformers' names, zeros where there is none."""
    model.zero_grad()
    visible = inputs["attention_mask"].flatten(0, -2).bool()
    out = model(**inputs, **labels, output_hidden_states=True)
    for state in out.hidden_states:
        state.retain_grad()
    found = outputs(out, visible)
    ends = [found[name].sin().sum() for name in ("last_hidden_state", "pooler_output") if name in found]
    torch.autograd.backward([found["loss"]] if labels else ends)
    parameters = model.named_parameters(remove_duplicate=False)
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters}
    if isinstance(model, fastbert.model.Saveable):
        gradients = model.to_hugging_face(gradients)
    gradients |= {f"state {i}": state.grad[visible] for i, state in enumerate(out.hidden_states)}
    return Result({name: t.detach() for name, t in found.items()}, gradients)


def assert_accurate(mine, truth, contenders=()):
    """The accuracy rule: hidden states within 3 e, logits and losses within 2 e."""
    scores = ("loss", *LOGITS)
    rows = [row for row in testing.compare(mine, truth, contenders, factor=3.0) if row.name not in scores]
    testing.assert_rows(rows + [row for row in testing.compare(mine, truth, contenders) if row.name in scores])


# ---- the same numbers


def test_the_heads_are_those_of_transformers():
    names = [name for name in dir(transformers) if "For" in name and not name.endswith("ForCausalLM")]
    for family, known in BY_MODEL_TYPE.items():
        assert [kind for name, kind in MODELS if name == family] == ["Model", *known.heads]
        theirs = {name for name in names if name.startswith(f"{known.classes}For")}
        assert theirs == {known.class_name(kind) for kind in known.heads}


FEW = ("ForMultipleChoice", "ForSequenceClassification", "ForNextSentencePrediction")  # few scores a text
# With padding on the left, transformers' poolers and heads read column 0, ours the first token; masked LM neither.
CASES = [(*model, "right") for model in MODELS] + [(family, "ForMaskedLM", "left") for family in CONFIGS]


@pytest.mark.parametrize(("family", "kind", "side"), [marked(*case) for case in CASES])
def test_as_accurate_as_transformers(family, kind, side):
    """Hidden states, logits, loss and all gradients: float32 by the accuracy rule, float64 to 1e-12."""
    theirs = their(family, kind)
    eager = copy.deepcopy(theirs)
    eager.set_attn_implementation("eager")
    exact = copy.deepcopy(eager).double()
    inputs, labels = example(theirs, kind, LENGTHS * 4 if kind in FEW else LENGTHS, side)
    truth = run(exact, inputs, labels)
    if kind == "ForReplacedTokenDetection":  # transformers rounds this loss to float32
        target = labels["labels"][inputs["attention_mask"].bool()].double()
        truth.outputs["loss"] = F.binary_cross_entropy_with_logits(truth.outputs["logits"], target)
    contenders = [run(model, inputs, labels) for model in (theirs, eager)]
    for source, others in ((theirs, contenders), (exact, [])):
        assert_accurate(run(our(source, kind), inputs, labels), truth, others)


OPS = {"embedding": 1, "attention": 2, "add_layer_norm": 4, "dense_gelu": 2, "linear": None, "padding": None}
IN_ONE = {"embedding": 1, "encoder_layer": 2, "padding": None}


@pytest.mark.parametrize("backend", backends.BACKENDS)
@pytest.mark.parametrize(
    "family",  # roberta: a frozen position; distilbert: no token types; albert: two widths
    ["roberta", *[pytest.param(name, marks=pytest.mark.slow_on("triton")) for name in ("distilbert", "albert")]],
)
@pytest.mark.parametrize("ops", [OPS, IN_ONE], ids=["single-ops", "layers-in-one"])
def test_every_backend(family, backend, ops, monkeypatch):
    """Each op runs on the backend asked for, as often as the table says for two layers, and obeys the accuracy rule.
    CUDA has no products of its own."""
    if ops is OPS:
        monkeypatch.setattr(backends, "find", lambda *args, **kwargs: None)
    elif backend == "reference":
        pytest.skip("plain PyTorch has no layer of its own to prefer")
    elsewhere = {"linear": None} if backend == "cuda" else {}
    for op in {*ops, "linear"} - {*elsewhere}:  # linear: the projection between ALBERT's two widths
        if reason := backends.why_not(backend, op, DEVICE, torch.float32, backward=True):
            pytest.skip(f"{backend}: {reason}")
    theirs = their(family, **{"n_layers" if family == "distilbert" else "num_hidden_layers": 2})
    inputs, _ = example(theirs, "Model")
    truth, contender = run(copy.deepcopy(theirs).double(), inputs, {}), run(theirs, inputs, {})
    before = backends.calls()
    with fastbert.backend(backend, **elsewhere):
        assert_accurate(run(our(theirs), inputs, {}), truth, [contender])
    ran = {key: n - before.get(key, 0) for key, n in backends.calls().items() if n > before.get(key, 0)}
    assert {name for op, name in ran if op.split("_")[0] not in elsewhere} == {backend}
    for op, times in ops.items():
        for direction in ("fwd", "bwd") if times else ():
            assert ran[f"{op}_{direction}", backend] == times, op


@pytest.mark.parametrize("training", [True, False])
@every_model
def test_packed_equals_padded(family, kind, training):
    """Packed and padded input give the same bits, in training too."""
    model = our(their(family, kind), kind).train(training)
    inputs, labels = example(model, kind)
    visible = inputs["attention_mask"].flatten(0, -2).bool()
    results = []
    for arguments in (inputs | labels, packed(inputs, labels), packed(inputs, labels) | {"max_seqlen": None}):
        torch.manual_seed(5)
        results.append(outputs(model(**arguments, output_hidden_states=True), visible))
    for other in results[1:]:
        assert results[0].keys() == other.keys() and results[0]
        for name, value in results[0].items():
            assert torch.equal(value.flatten(), other[name].flatten()), name


@every_model
def test_trains_with_dropout(family, kind):
    """The seed determines the dropout, and every parameter gets a gradient."""
    changes = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
    model = our(their(family, kind), kind, **changes)
    inputs, labels = example(model, kind)
    evaluated = run(model, inputs, labels).outputs
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(run(model.train(), inputs, labels))
    for name in losses[0].outputs:  # a masked LM computes no logits in training
        value, (one, again, other) = evaluated[name], (each.outputs[name] for each in losses)
        assert torch.equal(one, again) and not torch.equal(one, other) and not torch.equal(one, value), name
    still = {"classifier.bias"} if kind == "ForMultipleChoice" else set()  # equal for all choices: gradient 0
    gradients = {name: gradient for name, gradient in losses[0].gradients.items() if name not in still}
    assert all(gradient.abs().sum() > 0 for gradient in gradients.values())


DROPOUTS = {
    "bert": {"hidden_dropout_prob": 0.2},  # heads without a dropout field of their own use it
    "electra": {"classifier_dropout": 0.3, "summary_last_dropout": 0.4},
    "distilbert": {"dropout": 0.2, "seq_classif_dropout": 0.3, "qa_dropout": 0.4},
    "albert": {"hidden_dropout_prob": 0.2, "classifier_dropout_prob": 0.3},
    "deberta-v2": {"hidden_dropout_prob": 0.2, "cls_dropout": 0.3, "pooler_dropout": 0.4},
    "mpnet": {"hidden_dropout_prob": 0.2},
} | dict.fromkeys(("roberta", "xlm-roberta", "camembert"), {"hidden_dropout_prob": 0.2, "classifier_dropout": 0.3})


@pytest.mark.parametrize(("family", "kind"), [marked(*model) for model in MODELS if model[1] != "Model"])
def test_the_head_drops_as_transformers_does(family, kind):
    """With dropout only in the head and no padding, both draw the same masks from torch's generator (in float64)."""
    theirs = their(family, kind, **DROPOUTS[family]).double().train()
    for module in theirs.base_model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model = our(theirs, kind)
    for module in model.bert.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    inputs, labels = example(theirs, kind, [SEQLEN] * 4)
    results = []
    for each in (model, theirs):
        torch.manual_seed(7)
        results.append(outputs(each(**inputs, **labels), inputs["attention_mask"].flatten(0, -2).bool()))
    one, two = results
    if kind == "ForReplacedTokenDetection":
        del two["loss"]  # in float32
    for name in one.keys() & two.keys():
        assert (one[name] - two[name]).abs().max() <= 1e-12 * two[name].abs().max(), name
    one, two = ({m.p for m in each.modules() if isinstance(m, torch.nn.Dropout)} - {0.0} for each in (model, theirs))
    assert one == two


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("distilbert", {}),  # no dropout after attention
        ("albert", {"embedding_size": 48}),  # one layer with other masks in each run; no dropout after its second half
        ("albert", {"embedding_size": 48, "num_hidden_groups": 2}),
    ],
)
def test_training_with_dropout_is_exact(family, changes, monkeypatch):
    """Equal, in float64, to the reference: a BERT with shared weights copied to all layers and the documented masks."""
    dropout = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2, "num_hidden_layers": 4}
    layers = {"n_layers" if family == "distilbert" else "num_hidden_layers": 4}
    model = our(their(family, **changes, **layers).double(), **dropout).train()
    if family == "albert":
        torch.nn.init.eye_(model.embeddings.project.weight)
        torch.nn.init.zeros_(model.embeddings.project.bias)
    fields = {name: getattr(model.config, name) for name in (*SIZES, "hidden_act", *dropout)}
    truth = reference.BertModel(BertConfig(**fields)).to(DEVICE).double().train()
    truth.pooler = torch.nn.Identity()
    truth.load_state_dict(spread(model))
    inputs, _ = example(model, "Model")
    key = random.new_key(DEVICE)
    monkeypatch.setattr(random, "new_key", lambda device: key)
    masks = reference_masks(model, key, LENGTHS, SEQLEN)
    absent = 1 if family == "distilbert" else 2  # which of a layer's three sites has no dropout
    for layer in range(4):
        masks[random.layer_sites(layer)[absent]].fill_(1)
    result = model(**inputs, output_hidden_states=True)
    states, _ = truth(**inputs, masks=masks)
    visible = inputs["attention_mask"].bool()
    for state, expected in zip(result.hidden_states, states, strict=True):
        assert (state - expected)[visible].abs().max() <= 1e-12 * expected.abs().max()
    result.last_hidden_state[visible].sin().sum().backward()
    states[-1][visible].sin().sum().backward()
    gradients = checkpoint.to_hugging_face({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    expected = {}
    for name, parameter in truth.named_parameters():
        name = shared(model, name)
        expected[name] = expected.get(name, 0) + parameter.grad
    projection = {"embeddings.project.weight", "embeddings.project.bias"}  # the reference has no projection
    found = {name: gradient for name, gradient in gradients.items() if name not in projection}
    unused = {"embeddings.token_type_embeddings.weight"} if family == "distilbert" else set()
    assert expected.keys() - found.keys() == unused, expected.keys() ^ found.keys()
    assert_gradients(found, {name: gradient for name, gradient in expected.items() if name in found})


def shared(model, name):
    """The name, in a model whose layers may be shared, of a parameter of the reference."""
    start, _, rest = name.partition("encoder.layer.")
    index, _, part = rest.partition(".")
    groups = model.config.layer_groups
    return f"encoder.layer.{int(index) * groups // 4}.{part}" if rest and groups and not start else name


def spread(model):
    """The state dict of a BERT without shared layers that computes the same."""
    state = checkpoint.to_hugging_face(model.state_dict())
    names = reference.BertModel(BertConfig(**{n: getattr(model.config, n) for n in SIZES})).state_dict()
    zeros = {"embeddings.token_type_embeddings.weight": torch.zeros(2, 48, dtype=torch.float64)}  # for DistilBERT
    state = zeros | state
    return {name: state[shared(model, name)].clone() for name in names if not name.startswith("pooler.")}


# ---- positions that count from padding_idx


COUNTED = ("roberta", "camembert")


@pytest.mark.parametrize("family", COUNTED)
def test_padding_tokens_in_visible_places_count_as_padding(family):
    """Their position is padding_idx, whose row gets no gradient. They do not advance positions; masked tokens do."""
    theirs = their(family).double()
    model, pad = our(theirs), theirs.config.pad_token_id
    inputs, _ = example(theirs, "Model")
    inputs["input_ids"][0, 2] = inputs["input_ids"][2, 0] = inputs["input_ids"][2, 5] = pad
    inputs["input_ids"][1, 3] = 7  # an ordinary token that is masked
    one, two = run(model, inputs, {}), run(theirs, inputs, {})
    assert_accurate(one, two)
    assert one.gradients["embeddings.position_embeddings.weight"][pad].abs().sum() == 0
    arguments = packed(inputs, {})
    result = model(**arguments)
    assert torch.equal(result.last_hidden_state, model(**inputs).last_hidden_state[inputs["attention_mask"].bool()])
    hole = torch.ones_like(inputs["attention_mask"]).index_fill_(1, integers(3, 4, 1), 0)
    interior = inputs | {"attention_mask": hole}
    assert_accurate(run(model, interior, {}), run(theirs, interior, {}))


@pytest.mark.parametrize("family", COUNTED)
def test_positions_of_embeddings_are_columns(family):
    theirs = their(family).double()
    model, (inputs, _) = our(theirs), example(theirs, "Model")
    words = theirs.embeddings.word_embeddings(inputs.pop("input_ids")).detach()
    one, two = (run(each, inputs | {"inputs_embeds": words}, {}) for each in (model, theirs))
    assert_accurate(one, two)
    visible = inputs["attention_mask"].bool()
    arguments = packed(inputs | {"input_ids": visible.long()}, {}) | {"input_ids": None}
    last = model(**arguments, inputs_embeds=words[visible]).last_hidden_state
    assert torch.equal(last, one.outputs["last_hidden_state"])


def test_the_longest_sequence():
    model = our(their("camembert"))
    assert model.config.max_sequence_length == 27
    ids = integers(5, 99, 1, 30)
    assert model(ids[:, :27]).last_hidden_state.shape == (1, 27, 48)
    with pytest.raises(ValueError, match="sequences are 28 tokens long; the model has 27 positions after pad_token_id"):
        model(ids[:, :28])
    mask = (torch.arange(30, device=DEVICE) < 27)[None]
    assert torch.equal(model(torch.where(mask, ids, 4), mask).last_hidden_state[:, :27], model(ids[:, :27])[0])
    with pytest.raises(IndexError, match=r"position_ids\[27\] is 32; expected 0 <= position_ids < 32"):
        model(ids[0], cu_seqlens=torch.tensor([0, 30], dtype=torch.int32, device=DEVICE))


@pytest.mark.parametrize("family", CONFIGS)
def test_an_empty_batch(family):
    model = our(their(family))
    assert model(torch.zeros(0, 5, dtype=torch.int64, device=DEVICE)).last_hidden_state.shape == (0, 5, 48)
    assert model(torch.zeros(2, 0, dtype=torch.int64, device=DEVICE)).last_hidden_state.shape == (2, 0, 48)
    nothing = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    empty = model(nothing[:0].long(), cu_seqlens=nothing)
    assert empty.last_hidden_state.shape == (0, 48) and (model.pooler is None or empty.pooler_output.shape == (0, 48))
    masked = model(integers(5, 99, 2, 3), torch.zeros(2, 3, device=DEVICE))
    assert masked.last_hidden_state.abs().sum() == 0
    masked.last_hidden_state.sum().backward()


# ---- checkpoints


@every_model
def test_directories_are_transformers_bit_for_bit(family, kind, tmp_path):
    theirs = their(family, kind).to("cpu")
    theirs.save_pretrained(tmp_path / "theirs")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = getattr(fastbert, f"Bert{kind}").from_pretrained(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours")
    one, two = (load_file(tmp_path / who / "model.safetensors") for who in ("theirs", "ours"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    state = fastbert.hf.state_dict(model)
    back = type(theirs).from_pretrained(tmp_path / "ours")
    assert back.state_dict().keys() == theirs.state_dict().keys() == state.keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor) and torch.equal(state[name], tensor), name
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["architectures"] == [type(theirs).__name__]
    given = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert {name: value for name, value in config.items() if name in given} == given
    again = getattr(fastbert, f"Bert{kind}")(model.config)
    again.load_state_dict(model.state_dict())
    inside = torch.nn.ModuleDict({"model": getattr(fastbert, f"Bert{kind}")(model.config)})
    inside.load_state_dict({f"model.{name}": tensor for name, tensor in one.items()})
    for other in (again, inside["model"]):
        assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("family", CONFIGS)
def test_a_body_gets_a_head_and_a_head_gives_its_body(family, tmp_path):
    theirs = their(family)
    theirs.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="initialised anew, to be trained") as caught:
        model = fastbert.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    named = str(caught[0].message).partition(" lacks ")[2].partition(": ")[0].split(", ")
    state, prefix = fastbert.hf.state_dict(model), f"{theirs.base_model_prefix}."
    assert sorted(named) == sorted(name for name in state if not name.startswith(prefix))
    assert model.config.num_labels == 5
    model.save_pretrained(tmp_path / "head")
    body = BertModel.from_pretrained(tmp_path / "head", add_pooling_layer=None if model.bert.pooler else False)
    expected = load_file(tmp_path / "model.safetensors")
    for name, tensor in fastbert.hf.state_dict(body).items():
        assert torch.equal(tensor, expected[name]) and torch.equal(tensor, state[prefix + name]), name


ALBERT_LAYER = "encoder.albert_layer_groups.0.albert_layers"


@pytest.mark.parametrize(
    ("family", "missing", "extra"),
    [
        ("distilbert", "transformer.layer.1.attention.k_lin.bias", "transformer.layer.7.ffn.lin1.bias"),
        ("roberta", "encoder.layer.1.attention.self.key.bias", "encoder.layer.7.output.dense.bias"),
        ("electra", "embeddings_project.weight", "encoder.something.bias"),
        ("albert", f"{ALBERT_LAYER}.0.ffn_output.bias", f"{ALBERT_LAYER}.1.ffn.bias"),
        ("bert", "encoder.layer.1.output.dense.bias", "encoder.layer.9.x"),
    ],
)
def test_what_does_not_fit_is_refused_in_the_family_s_words(family, missing, extra, tmp_path):
    their(family, "ForTokenClassification").save_pretrained(tmp_path)
    tensors = load((tmp_path / "model.safetensors").read_bytes())  # not mapped: the file is written to below
    whole, changed = dict(tensors), f"wrong shape: {family}.{missing}: (3,), expected"
    before = tensors.pop(f"{family}.{missing}")
    for words, state in (
        (f"missing: {family}.{missing}", tensors),
        (f"unexpected: {family}.{extra}", whole | {f"{family}.{extra}": before.clone()}),
        (changed, tensors | {f"{family}.{missing}": torch.zeros(3)}),
    ):
        if words == changed and ".k" in missing:
            continue  # q, k and v of unequal shapes are not merged and count as missing
        save_file(state, tmp_path / "model.safetensors")
        with pytest.raises(RuntimeError, match=re.escape(words)):
            fastbert.BertForTokenClassification.from_pretrained(tmp_path)
        with pytest.raises(RuntimeError, match=re.escape(words.replace(f"{family}.", "", 1))):
            BertModel.from_pretrained(tmp_path, add_pooling_layer=False)


@pytest.mark.parametrize("family", CONFIGS)
def test_old_names(family):
    """State dicts may have gamma and beta, a decoder's own bias, saved position_ids, or our own names."""
    theirs = their(family, "ForMaskedLM")
    state = {re.sub("([Nn]orm).weight$", r"\1.gamma", name): tensor for name, tensor in theirs.state_dict().items()}
    state = {re.sub("([Nn]orm).bias$", r"\1.beta", name): tensor for name, tensor in state.items()}
    state[f"{theirs.base_model_prefix}.embeddings.position_ids"] = torch.arange(32)[None]
    assert any(name.endswith("gamma") for name in state)
    state.pop("cls.predictions.bias", None)  # BERT's decoder has a copy of it
    model = our(theirs, "ForMaskedLM")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for given in (state, expected):
        torch.nn.init.zeros_(model.bert.embeddings.LayerNorm.weight)
        model.load_state_dict(given)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("family", CONFIGS)
def test_an_untied_decoder_is_refused(family):
    theirs = their(family, "ForMaskedLM", tie_word_embeddings=False)
    model = fastbert.BertForMaskedLM(BertConfig.from_dict(theirs.config.to_dict() | {"tie_word_embeddings": True}))
    decoder = next(name for name in theirs.state_dict() if name.endswith(("decoder.weight", "head.weight", "r.weight")))
    with pytest.raises(RuntimeError, match=f"{decoder} differs from {theirs.base_model_prefix}.embeddings.word_emb"):
        model.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("family", CONFIGS)
def test_the_encoder_alone(family):
    theirs = their(family).double()
    stack, name = (theirs.transformer, "transformer") if family == "distilbert" else (theirs.encoder, "encoder")
    state = {n: t for n, t in stack.state_dict().items() if not n.startswith("embedding_hidden")}  # ALBERT's projection
    model = fastbert.BertEncoder(BertConfig.from_dict(theirs.config.to_dict())).to(DEVICE).double().eval()
    model.load_state_dict(state)
    assert fastbert.hf.state_dict(model).keys() == state.keys()
    hidden = torch.randn(2, 5, 48, dtype=torch.float64, device=DEVICE)
    if family == "albert":
        stack.embedding_hidden_mapping_in = torch.nn.Identity()
    visible = torch.ones(2, 5, device=DEVICE) if family == "deberta-v2" else None
    expected = stack(hidden, visible, return_dict=True).last_hidden_state
    assert (model(hidden).last_hidden_state - expected).abs().max() <= 1e-12 * expected.abs().max(), name


def test_distilbert_s_sinusoids():
    config = transformers.DistilBertConfig(**CONFIGS["distilbert"], sinusoidal_pos_embds=True)
    theirs, model = transformers.DistilBertModel(config), BertModel(BertConfig.from_dict(config.to_dict()))
    expected = theirs.embeddings.position_embeddings.weight
    assert (model.embeddings.position_embeddings.weight - expected).abs().max() <= torch.finfo(torch.float32).eps
    assert model.embeddings.position_embeddings.weight.requires_grad


# ---- choosing a model


LARGE = [name for name in PRESETS if "large" in name]  # as a base, but for the numbers in _size


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LARGE)) for n in PRESETS])
def test_presets_have_the_parameters_of_transformers(name):
    config = fastbert.create_model_config(name)
    values = config.to_dict()
    with torch.device("meta"):
        theirs = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**values))
    count = sum(parameter.numel() for parameter in theirs.parameters())
    size, published = PRESETS[name][0], float(PRESETS[name][0].removesuffix("M"))
    assert fastbert.count_parameters(config) == count and abs(count / 1e6 - published) <= 0.025 * published
    short = name.rpartition("/")[2]
    assert BertConfig.preset(f"{name} ({size})") == BertConfig.preset(short) == BertConfig.preset(f"{short} ({size})")


# Published by KerasHub for its ports of google/electra-*, which also have a pooler (hidden_size ** 2 + hidden_size).
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("electra-small-discriminator", 13548800),
        ("electra-small-generator", 13548800),
        ("electra-base-discriminator", 109482240),
        ("electra-base-generator", 33576960),
        ("electra-large-discriminator", 335141888),
        ("electra-large-generator", 51065344),
    ],
)
def test_sizes_of_electra_are_the_published_ones(name, count):
    config = BertConfig.preset(name)
    assert fastbert.count_parameters(config) + config.hidden_size * (config.hidden_size + 1) == count


AUTO = ("", "ForPreTraining", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification",
        "ForQuestionAnswering", "ForMultipleChoice")  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
def test_auto_classes_choose_as_transformers_does(family, tmp_path):
    config = BertConfig.from_dict({"model_type": family, **CONFIGS[family]})
    for kind in AUTO:
        auto = getattr(fastbert, f"AutoModel{kind}")
        model = auto.from_config(config)
        their_config = transformers.AutoConfig.for_model(**config.to_dict())
        theirs = getattr(transformers, f"AutoModel{kind}").from_config(their_config)
        model.save_pretrained(tmp_path)
        assert config.family.class_name(model.kind) == type(theirs).__name__
        again = auto.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert type(again) is type(model) and next(again.parameters()).dtype == torch.bfloat16


# ---- bad input


def test_an_unknown_family_lists_the_known_ones(tmp_path):
    transformers.RoFormerConfig().save_pretrained(tmp_path)
    for read in (fastbert.AutoModel.from_pretrained, fastbert.BertForMaskedLM.from_pretrained):
        with pytest.raises(ValueError, match="model_type is 'roformer'; expected one of bert, roberta, xlm-roberta"):
            read(tmp_path)
    with pytest.raises(TypeError, match="AutoModelForMaskedLM is made by from_pretrained"):
        fastbert.AutoModelForMaskedLM()


@pytest.mark.parametrize(
    ("family", "kind", "changes", "words"),
    [
        ("roberta", "ForPreTraining", {}, "PreTraining: RoBERTa has no such head; expected one of BertForMaskedLM, "),
        ("albert", "ForNextSentencePrediction", {}, "ALBERT has no such head"),
        ("electra", "ForPreTraining", {}, "expected one of .*BertForReplacedTokenDetection"),
        ("bert", "ForReplacedTokenDetection", {}, "BERT has no such head"),
        ("electra", "ForMultipleChoice", {"summary_type": "mean"}, "summary_type is 'mean'; expected 'first'"),
        ("electra", "ForMultipleChoice", {"summary_use_proj": False}, "summary_use_proj is False; expected True"),
        ("distilbert", "ForQuestionAnswering", {"num_labels": 3}, "num_labels is 3; expected 2, for DistilBERT"),
        ("albert", "ForPreTraining", {"num_labels": 3}, "num_labels is 3; expected 2, for ALBERT"),
        ("roberta", "ForMaskedLM", {"tie_word_embeddings": False}, "tie_word_embeddings is False; expected True"),
    ],
)
def test_a_head_that_is_not_there_is_refused(family, kind, changes, words):
    with pytest.raises(ValueError, match=words):
        getattr(fastbert, f"Bert{kind}")(BertConfig.from_dict({"model_type": family, **CONFIGS[family], **changes}))


IDS, PAIRS, RTD = torch.full((2, 5), 7), torch.full((2,), 7), "ForReplacedTokenDetection"


@pytest.mark.parametrize(
    ("family", "kind", "arguments", "error", "words"),
    [
        ("distilbert", "Model", {"token_type_ids": IDS * 0}, ValueError, "_type_ids is given; expected None, Disti"),
        ("albert", "Model", {"input_ids": None, "inputs_embeds": torch.ones(2, 5, 48)}, ValueError, r"\(\.\.\., 32\)"),
        ("roberta", "Model", {"token_type_ids": IDS // 7}, IndexError, "token_type_ids"),
        ("electra", RTD, {"labels": IDS}, IndexError, r"labels\[0, 0\] is 7; expected 0 <= labels"),
        ("electra", RTD, {"labels": IDS / 7}, TypeError, "labels is torch.float32"),
        ("electra", RTD, {"labels": IDS[0]}, ValueError, r"labels has shape \(5,\)"),
        ("albert", "ForPreTraining", {"next_sentence_label": PAIRS // 7}, ValueError, "has sentence_order_label"),
        ("bert", "ForPreTraining", {"sentence_order_label": PAIRS // 7}, ValueError, "BERT has next_sentence_label"),
        ("albert", "ForPreTraining", {"sentence_order_label": PAIRS}, IndexError, r"sentence_order_label\[0\] is 7"),
    ],
)
def test_bad_input_is_refused(family, kind, arguments, error, words):
    model = getattr(fastbert, f"Bert{kind}")(BertConfig.from_dict({"model_type": family, **CONFIGS[family]}))
    with pytest.raises(error, match=words):
        model(**{"input_ids": IDS} | arguments)


@pytest.mark.parametrize("family", ["distilbert", "electra"])
def test_a_pooler_that_is_not_there_is_refused(family):
    config = BertConfig.from_dict({"model_type": family, **CONFIGS[family]})
    assert BertModel(config)(IDS).pooler_output is None
    with pytest.raises(ValueError, match="add_pooling_layer is True; .* has no pooler"):
        BertModel(config, add_pooling_layer=True)


def test_nothing_replaced_or_kept_gives_zero_and_zero_gradients():
    model = our(their("electra", "ForReplacedTokenDetection"), "ForReplacedTokenDetection").train()
    inputs, labels = example(model, "ForReplacedTokenDetection")
    out = model(**inputs, labels=torch.full_like(labels["labels"], -100))
    out.loss.backward()
    assert out.loss == 0 and all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)


# ---- the rest of PyTorch


COMPILED = [
    ("bert", "ForPreTraining", 1),
    *(("bert", f"For{head}", 1) for head in ("MultipleChoice", "TokenClassification", "QuestionAnswering")),
    ("roberta", "ForSequenceClassification", 1),
    ("albert", "ForMaskedLM", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind", "layers"), COMPILED)
def test_compiles_to_one_graph(family, kind, layers):
    """Padded and packed, forward and backward give the same numbers, though a padded graph sums over padding rows."""
    still = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"), 0.0)
    model = our(their(family, kind, num_hidden_layers=layers), kind, **still)
    inputs, labels = example(model, kind)
    compiled = torch.compile(model.train(), fullgraph=True, backend="aot_eager")
    for arguments in (inputs | labels, packed(inputs, labels)):
        results = []
        for call in (model, compiled):
            model.zero_grad()
            loss = call(**arguments).loss
            loss.backward()
            results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        largest = max(float(t.abs().max()) for t in results[0])
        assert all((a - b).abs().max() <= 1e-6 * largest for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("family", CONFIGS)
def test_autocast_keeps_a_float32_stream(family):
    theirs = their(family)
    model, (inputs, _) = our(theirs), example(theirs, "Model")
    if model.pooler is not None:
        model.pooler = theirs.pooler = None  # poolers compute in half precision in both libraries
    visible = inputs["attention_mask"].bool()
    with torch.no_grad():
        truth = copy.deepcopy(theirs).double()(**inputs, output_hidden_states=True)
        with torch.autocast(DEVICE, torch.bfloat16):
            one, two = (each(**inputs, output_hidden_states=True) for each in (model, theirs))
    assert {state.dtype for state in one.hidden_states} == {torch.float32}
    assert_accurate(*(Result(outputs(each, visible), {}) for each in (one, truth)), [Result(outputs(two, visible), {})])


@pytest.mark.parametrize(
    ("family", "kind"), [model for model in MODELS if model[0] == "bert" or model[1] == "ForSequenceClassification"]
)
def test_survives_copy_save_and_half(family, kind):
    model = our(their(family, kind), kind)
    inputs, labels = example(model, kind)
    visible = inputs["attention_mask"].flatten(0, -2).bool()
    expected = outputs(model(**inputs, **labels), visible)
    for other in copies(model):
        found = outputs(other(**inputs, **labels), visible)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    half = outputs(copy.deepcopy(model).bfloat16()(**inputs, **labels), visible)
    assert {name: tensor.dtype for name, tensor in half.items()} == {
        name: torch.float32 if name == "loss" else torch.bfloat16 for name in expected
    }
