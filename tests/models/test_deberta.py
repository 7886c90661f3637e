"""What is special about DeBERTa-v2 (v3) and MPNet, compared with transformers and with a formula written here.

What they share with the other families is in test_family.py and tests/hf.
"""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
import transformers
from small_models import CONFIGS, DEVICE, assert_gradients, integers, randomised
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

import fastbert
from fastbert import BertConfig, BertModel, backends, config, distances, layer, random

LENGTHS = (20, *range(127, 131), *range(255, 258), *range(511, 514))
SMALL = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48}
V3 = CONFIGS["deberta-v2"] | SMALL | {"position_buckets": 256, "conv_kernel_size": 0, "max_position_embeddings": 512}
VARIANTS = {
    "v3": {},
    "own-projections": {"share_att_key": False},
    "c2p": {"pos_att_type": ["c2p"]},
    "p2c": {"pos_att_type": ["p2c"]},
    "c2p-own": {"pos_att_type": ["c2p"], "share_att_key": False},
    "p2c-own": {"pos_att_type": ["p2c"], "share_att_key": False},
    "neither": {"pos_att_type": []},
    "not-relative": {"relative_attention": False},
    "no-buckets": {"position_buckets": -1, "max_relative_positions": 24},
    "few-buckets": {"position_buckets": 16, "max_relative_positions": 64},
    "no-norm": {"norm_rel_ebd": "none"},
    "conv": {"conv_kernel_size": 3, "conv_act": "gelu"},
    "conv-groups": {"conv_kernel_size": 5, "conv_groups": 4},
    "absolute-too": {"position_biased_input": True, "type_vocab_size": 2, "max_position_embeddings": 600},
    "narrow-embeddings": {"embedding_size": 16, "position_biased_input": True, "max_position_embeddings": 600},
}


def their(family="deberta-v2", kind="Model", **changes):
    """transformers' model in float64 with random weights; its biases and LayerNorms are not trivial."""
    given = V3 if family == "deberta-v2" else SMALL | {"max_position_embeddings": 600}
    made = transformers.AutoConfig.for_model(family, **given | changes)
    return randomised(getattr(transformers, type(made).__name__.removesuffix("Config") + kind)(made)).double()


def our(theirs, kind="Model"):
    model = getattr(fastbert, f"Bert{kind}")(BertConfig.from_dict(theirs.config.to_dict()))
    model = model.to(DEVICE).double()
    model.load_state_dict(theirs.state_dict())
    return model.train(theirs.training)


def batch(lengths, seqlen, side="right"):
    mask = (torch.arange(seqlen) < torch.tensor(lengths)[:, None]).long()
    mask = (mask.flip(1) if side == "left" else mask).to(DEVICE)
    return {"input_ids": integers(5, 50, *mask.shape).where(mask != 0, 1), "attention_mask": mask}


def assert_equal(one, two, name=""):
    assert (one - two).abs().max() <= 1e-12 * two.abs().max(), name


def assert_same(model, theirs, inputs):
    """Last hidden states at visible tokens and all gradients agree. model: one of ours, or an accelerated one."""
    seen, results = inputs["attention_mask"].bool(), []
    for each in (model, theirs):
        each.zero_grad()
        last = each(**inputs).last_hidden_state[seen]
        last.sin().sum().backward()
        results.append((last, {name: p.grad for name, p in each.named_parameters() if p.grad is not None}))
    (last, mine), (expected, truth) = results
    assert_equal(last, expected)
    mine = model.to_hugging_face(mine) if isinstance(model, BertModel) else mine
    largest = max(grad.abs().max() for grad in truth.values())
    for name, grad in truth.items():
        if name not in mine:
            assert grad.abs().max() == 0, name
        else:
            assert (mine[name] - grad).abs().max() <= 1e-12 * largest, name


# ---- slots


def test_slots_are_those_of_transformers():
    for buckets, farthest in ((256, 512), (4, 4), (8, 32), (16, 64), (32, 33), (64, 128), (128, 300), (256, 1024)):
        distance = torch.arange(-farthest, farthest + 1)
        expected = make_log_bucket_position(distance, buckets, farthest).long() + buckets
        expected = expected.clamp(0, 2 * buckets - 1).tolist()
        assert list(distances.disentangled_slots(buckets, farthest)) == expected == sorted(expected)
        assert (expected[0], expected[-1]) == (0, 2 * buckets - 1)
    assert distances.disentangled_slots(-1, 3) == (0, 1, 2, 3, 4, 5, 5)
    distance = torch.arange(-600, 601)
    expected = MPNetEncoder.relative_position_bucket(-distance)
    known = torch.tensor(distances.mpnet_slots())
    assert torch.equal(known[distance.clamp(-128, 128) + 128], expected)


def test_only_the_slots_in_reach_are_projected():
    slots, first, last = distances.disentangled(256, 512, 128, torch.device("cpu"))
    assert slots.shape == (255,) and (first, last) == (129, 384) and torch.equal(slots, torch.arange(255).int())
    slots, first, last = distances.disentangled(256, 512, 2000, torch.device("cpu"))
    assert slots.shape == (1025,) and (first, last) == (0, 512)


def test_activations_have_one_list():
    assert set(layer.ACTIVATIONS) == set(config.ACTIVATIONS)


# ---- the same numbers


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length(length):
    """Lengths around each point where the buckets change, and beyond the farthest distance that they distinguish."""
    theirs = their()
    assert_same(our(theirs), theirs, batch([length, length // 2, 1], length))


@pytest.mark.parametrize(("accelerated", "side"), [(False, "right"), (True, "left")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant, accelerated, side):
    """Hidden states and gradients agree in training mode with dropout probabilities of 0."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    theirs = their(**VARIANTS[variant], **still).train()
    model = copy.deepcopy(theirs) if accelerated else our(theirs)
    report = fastbert.accelerate(model) if accelerated else None
    assert_same(model, theirs, batch([70, 3, 1, 41], 70, side))
    assert report is None or (report.packed, report.fallbacks.total()) == (1, 0), report


@pytest.mark.parametrize("length", [20, 127, 129, 300])
def test_mpnet_of_every_length(length):
    theirs = their("mpnet")
    assert_same(our(theirs), theirs, batch([length, length // 2, 1], length))
    model = copy.deepcopy(theirs)
    report = fastbert.accelerate(model)
    assert_same(model, theirs, batch([length, length // 2, 1], length))
    assert report.packed == 1


@pytest.mark.parametrize("family", ["deberta-v2", "mpnet"])
@pytest.mark.parametrize("grads", [False, True])
def test_attention_weights(family, grads):
    theirs = their(family)
    accelerated = copy.deepcopy(theirs)
    fastbert.accelerate(accelerated)
    inputs = batch([12, 5], 12, "left" if family == "deberta-v2" else "right")  # MPNet's pooler reads the first column
    seen = inputs["attention_mask"].double()
    with torch.set_grad_enabled(grads):
        expected = theirs(**inputs, output_attentions=True).attentions
        for model in (our(theirs), accelerated):
            for one, two in zip(model(**inputs, output_attentions=True).attentions, expected, strict=True):
                assert (one - two * seen[:, None, :, None] * seen[:, None, None, :]).abs().max() <= 1e-12


@pytest.mark.parametrize("legacy", [True, False])
def test_both_masked_lm_layouts(legacy, tmp_path):
    """Loss and logits agree; what either library saves, the other reads bit for bit."""
    theirs = their(kind="ForMaskedLM", legacy=legacy)
    model, inputs = our(theirs, "ForMaskedLM"), batch([9, 4], 9)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    one, two = (each(**inputs, labels=labels) for each in (model, theirs))
    assert_equal(one.loss, two.loss)
    assert_equal(one.logits[labels >= 0], two.logits[labels >= 0])
    model.save_pretrained(tmp_path)
    back = transformers.DebertaV2ForMaskedLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert back.state_dict().keys() == theirs.state_dict().keys()
    second_name = {"lm_predictions.lm_head.weight"}  # of the word embeddings, in transformers up to 5.20
    assert fastbert.hf.state_dict(model).keys() == theirs.state_dict().keys() - second_name
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    again = fastbert.BertForMaskedLM.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    accelerated = copy.deepcopy(theirs)
    fastbert.accelerate(accelerated)
    assert_equal(accelerated(**inputs, labels=labels).loss, two.loss)


def test_position_att_type_as_the_hub_writes_it():
    """deberta-v3's config.json has "p2c|c2p", of which transformers makes a list."""
    one, two = (BertConfig(model_type="deberta-v2", pos_att_type=given) for given in ("p2c|c2p", ["c2p", "p2c"]))
    assert one.position_kinds == two.position_kinds == ("c2p", "p2c")


# ---- training with dropout


def masked(x, keep, bits, p):
    return x * keep.double() * random.keep_scale(p, bits)


def formula(model, ids, key, p):
    """DeBERTa's training forward for sequences of one length, in plain PyTorch, with the masks of docs/random.md."""
    settings = model.config
    state = {name: x.detach().clone().requires_grad_() for name, x in model.state_dict().items()}
    (batch_size, length), width, heads = ids.shape, settings.hidden_size, settings.num_attention_heads
    tokens = batch_size * length

    def rows(x, site):
        return masked(x.reshape(tokens, width), random.row_keep(key, site, tokens, width, p), 16, p).view(x.shape)

    def norm(x, name):
        return F.layer_norm(x, (width,), state[f"{name}.weight"], state[f"{name}.bias"], settings.layer_norm_eps)

    def dense(x, name):
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    hidden = norm(state["embeddings.word_embeddings.weight"][ids], "embeddings.LayerNorm")
    embedded = hidden = rows(hidden, random.EMBEDDING_SITE)
    table = norm(state["encoder.rel_embeddings.weight"], "encoder.LayerNorm")
    place = torch.arange(length, device=ids.device)
    slot = make_log_bucket_position(place[:, None] - place, settings.extra["position_buckets"], settings.farthest)
    slot = (slot.long() + len(table) // 2).clamp(0, len(table) - 1)
    for turn in range(settings.num_hidden_layers):
        name, sites = f"encoder.layer.{turn}", random.layer_sites(turn)
        keep = random.row_keep(key, random.position_site(turn), len(table), width, p)
        positions = masked(table, keep, 16, p)
        q, k, v = dense(hidden, f"{name}.attention.qkv").unflatten(-1, (3, heads, -1)).unbind(2)  # [B, S, H, D]
        pq, pk, _ = dense(positions, f"{name}.attention.qkv").unflatten(-1, (3, heads, -1)).unbind(1)  # [W, H, D]
        scores = torch.einsum("bihd,bjhd->bhij", q, k) + torch.einsum("bihd,ijhd->bhij", q, pk[slot])
        scores = scores + torch.einsum("bjhd,ijhd->bhij", k, pq[slot])
        weights = (scores / torch.tensor(3.0 * q.shape[-1]).sqrt().double()).softmax(-1)
        keep = random.attention_keep(key, sites[0], batch_size, heads, length, p)
        context = torch.einsum("bhij,bjhd->bihd", masked(weights, keep, 8, p), v).flatten(2)
        out = rows(dense(context, f"{name}.attention.output.dense"), sites[1])
        middle = norm(out + hidden, f"{name}.attention.output.LayerNorm")
        wide = F.gelu(dense(middle, f"{name}.intermediate.dense"))
        hidden = norm(rows(dense(wide, f"{name}.output.dense"), sites[2]) + middle, f"{name}.output.LayerNorm")
        if turn == 0:
            kernel, bias = state["encoder.conv.conv.weight"], state["encoder.conv.conv.bias"]
            conv = F.conv1d(embedded.mT, kernel, bias, padding=1).mT
            hidden = norm(torch.tanh(rows(conv, random.CONVOLUTION_SITE)) + hidden, "encoder.conv.LayerNorm")
    return hidden, state


@pytest.mark.parametrize("accelerated", [False, True])
def test_training_with_dropout_is_exact(accelerated, monkeypatch):
    """Masks are drawn for embeddings, relative embeddings, weights, both halves of a layer and the convolution."""
    p = 0.25
    theirs = their(position_buckets=16, hidden_dropout_prob=p, attention_probs_dropout_prob=p, conv_kernel_size=3)
    model = our(theirs.train())
    ids, key = integers(5, 50, 3, 21), random.new_key(DEVICE)
    monkeypatch.setattr(random, "new_key", lambda device: key)
    expected, state = formula(model, ids, key, p)
    expected.sin().sum().backward()
    truth = {name: x.grad for name, x in state.items()}
    if accelerated:
        fastbert.accelerate(theirs)
        truth, model = model.to_hugging_face(truth), theirs
    last = model(ids).last_hidden_state
    assert_equal(last, expected)
    last.sin().sum().backward()
    assert_gradients(model, {name: grad for name, grad in truth.items() if grad is not None})


def test_gradient_checkpointing_drops_the_same_elements():
    model, ids, grads = our(their().train()), integers(5, 50, 2, 9), []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(3)
        model.zero_grad()
        model(ids).last_hidden_state.sin().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))
    with pytest.raises(ValueError, match="use_reentrant is True; expected False"):
        model.gradient_checkpointing_enable({"use_reentrant": True})


def test_what_stays_in_evaluation_mode_does_not_drop():
    """In DeBERTa each nn.Dropout's own mode decides; in BERT's attention, the mode of the attention module does."""
    theirs, ids = their(), integers(5, 50, 2, 9)
    model = copy.deepcopy(theirs)
    report = fastbert.accelerate(model)
    still = model(ids).last_hidden_state
    own = model.encoder.layer[0].attention.self
    own.training = True
    assert torch.equal(model(ids).last_hidden_state, still)
    for dropout in (own.dropout, own.pos_dropout):
        dropout.train()
        assert not torch.equal(model(ids).last_hidden_state, still)
        dropout.eval()
    assert report.packed == 4


# ---- masks


@pytest.mark.parametrize("family", ["deberta-v2", "mpnet"])
def test_padding_between_tokens(family):
    """Distances count columns, which packed tokens lack: an error or, if accelerated, transformers' own computation."""
    theirs, inputs = their(family), batch([9, 5], 9)
    inputs["attention_mask"][0, 3] = 0
    with pytest.raises(ValueError, match="hides tokens between visible ones"):
        our(theirs)(**inputs)
    model = copy.deepcopy(theirs)
    report = fastbert.accelerate(model)
    with pytest.warns(RuntimeWarning, match="padding is between visible tokens"):
        assert torch.equal(model(**inputs)[0], theirs(**inputs)[0])
    assert (report.packed, report.fallbacks.total()) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deberta-v2", "mpnet"])
def test_compiled_code(family):
    """Compiled without graph breaks, a model takes several lengths; padding between tokens raises an error."""
    model = BertModel(BertConfig.from_dict({"model_type": family, **CONFIGS[family]})).to(DEVICE).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (12, 9):
        inputs = batch([length, 4], length)
        one, two = compiled(**inputs)[0], model(**inputs)[0]
        assert (one - two).abs().max() <= 1e-5 * two.abs().max()
    one.sum().backward()
    inputs["attention_mask"][0, 3] = 0
    if DEVICE == "cpu":  # on a GPU the assertion ends the process
        with pytest.raises(RuntimeError, match="hides tokens between visible ones"):
            compiled(**inputs)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deberta-v2", "mpnet"])
def test_compiled_code_of_accelerated_models(family):
    model = their(family)
    fastbert.accelerate(model)
    torch._dynamo.reset()
    compiled, inputs = torch.compile(model, fullgraph=True, backend="aot_eager"), batch([9, 4], 9)
    assert_equal(compiled(**inputs).last_hidden_state, model(**inputs).last_hidden_state)


# ---- what people put into models


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("transformers_model", [False, True])
@pytest.mark.parametrize("family", ["deberta-v2", "mpnet"])
def test_prepared(family, transformers_model, precision):
    if DEVICE != "cpu":
        pytest.skip("prepares for CPUs")
    theirs, inputs = their(family).float(), batch([9, 5], 9)
    model = fastbert.prepare(theirs if transformers_model else our(theirs.double()).float(), precision)
    one, two = (each(**inputs).last_hidden_state[inputs["attention_mask"].bool()] for each in (model, theirs.float()))
    assert F.cosine_similarity(one, two, -1).min() > (1 - 1e-5 if precision == "fp32" else 0.99)


@pytest.mark.parametrize("transformers_model", [False, True])
def test_autocast_has_no_say_where_projections_are_skipped(transformers_model):
    """They project positions as they project tokens, in the call of the prepared layer."""
    if DEVICE != "cpu":
        pytest.skip("prepares for CPUs")
    theirs = their(**VARIANTS["v3"]).float()
    original = theirs if transformers_model else our(theirs.double()).float()
    projections = [name for name, _ in original.named_modules() if name.endswith(("_proj", "attention.qkv"))]
    model, inputs = fastbert.prepare(original, "fp32", skip=projections), batch([9, 5], 9)
    expected = model(**inputs).last_hidden_state
    with torch.autocast("cpu", torch.bfloat16):
        assert projections and torch.equal(model(**inputs).last_hidden_state, expected)


@pytest.mark.parametrize("variant", ["v3", "own-projections", "c2p", "p2c-own", "neither", "no-norm"])
@pytest.mark.parametrize("transformers_model", [False, True])
def test_prepared_layers_make_their_tables_once(transformers_model, variant, monkeypatch):
    """Tables serve all lengths, and are made again when position embeddings change; copies and pickles have none."""
    if DEVICE != "cpu":
        pytest.skip("prepares for CPUs")
    theirs, made, before = their(**VARIANTS[variant]), [], backends.calls()
    original = theirs if transformers_model else our(theirs)
    model = fastbert.prepare(original, "fp32")
    project = layer._project_positions
    monkeypatch.setattr(layer, "_project_positions", lambda *args: made.append(1) or project(*args))
    layers = 0 if variant == "neither" else 2

    def check():
        for lengths in ([9, 5], [3], [40, 1]):
            inputs = batch(lengths, max(lengths))
            found = model(**inputs).last_hidden_state
            with monkeypatch.context() as patch:
                patch.setattr(layer, "_kept_positions", lambda *_: None)
                assert torch.equal(found, model(**inputs).last_hidden_state)

    with torch.inference_mode():
        model(**batch([4], 4))
    assert len(made) == layers
    check()
    assert len(made) == layers + 3 * layers  # `check` makes the latter, to compare with
    with torch.no_grad():
        model.encoder.rel_embeddings.weight.mul_(2)
    check()
    assert len(made) == 8 * layers
    size, inputs = len(pickle.dumps(model)), batch([9], 9)
    assert torch.equal(copy.deepcopy(model)(**inputs)[0], model(**inputs)[0])
    unused = fastbert.prepare(original, "fp32")
    assert size < 1.01 * len(pickle.dumps(unused))
    found, expected = unused(**inputs)[0], original(**inputs)[0]
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    ran = backends.calls()["packed_layer_fwd", "cpu"] - before.get(("packed_layer_fwd", "cpu"), 0)
    assert ran >= 20 or backends.why_not("cpu", "packed_layer", "cpu", torch.float32)


@pytest.mark.parametrize("variant", ["v3", "c2p", "p2c"])
def test_a_replaced_projection_is_called_on_positions_too(variant):
    """LoRA, for example, replaces projections: here our qkv, and transformers' query, key and value projections."""

    class Twice(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    theirs, ids = their(**VARIANTS[variant]), integers(5, 50, 2, 9)
    model = our(theirs)
    for mine, other in zip(model.encoder.layer, theirs.encoder.layer, strict=True):
        mine.attention.qkv.__class__ = Twice
        for name in ("query_proj", "key_proj", "value_proj"):
            getattr(other.attention.self, name).__class__ = Twice
    assert_equal(model(ids).last_hidden_state, theirs(ids).last_hidden_state)


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position_buckets": 7}, "position_buckets is 7; expected -1, or even"),
        ({"position_buckets": 256, "max_position_embeddings": 64}, "position_buckets is 256; expected .* 2 \\* 63"),
        ({"pos_att_type": "p2p"}, "pos_att_type is 'p2p'; expected None, or some of c2p and p2c"),
        ({"norm_rel_ebd": "batch_norm"}, "norm_rel_ebd is 'batch_norm'"),
        ({"conv_kernel_size": 4}, "conv_kernel_size is 4; expected 0 or an odd number"),
        ({"conv_groups": 5}, "conv_groups is 5; expected a divisor of hidden_size"),
        ({"conv_act": "swish"}, "conv_act is 'swish'; expected one of tanh, relu"),
        ({"pooler_hidden_size": 16}, "pooler_hidden_size is 16; expected None or 32"),
        ({"share_att_key": 1}, "share_att_key is 1; expected True or False"),
        ({"type_vocab_size": -1}, "type_vocab_size is -1; expected an integer >= 0"),
    ],
)
def test_a_configuration_that_makes_no_sense(changes, words):
    with pytest.raises(ValueError, match=words):
        BertConfig.from_dict({"model_type": "deberta-v2", **V3, **changes})


def test_mpnet_counts_after_one_with_32_buckets():
    with pytest.raises(ValueError, match="pad_token_id is 0; expected 1: MPNet counts positions after it"):
        BertConfig(model_type="mpnet", pad_token_id=0)
    with pytest.raises(ValueError, match="relative_attention_num_buckets is 16; expected 32"):
        BertConfig(model_type="mpnet", relative_attention_num_buckets=16)


def test_the_first_version_is_refused_by_name():
    with pytest.raises(ValueError, match="model_type is 'deberta': DeBERTa's first version"):
        BertConfig.from_dict({"model_type": "deberta"})
    model = transformers.DebertaModel(transformers.DebertaConfig(**SMALL))
    with pytest.raises(ValueError, match="DebertaModel .* is not supported: DeBERTa's first version"):
        fastbert.accelerate(model)


def test_floats_need_a_problem_type():
    model = our(their(kind="ForSequenceClassification", num_labels=3), "ForSequenceClassification")
    with pytest.raises(ValueError, match="labels are floats and problem_type is None"):
        model(integers(5, 50, 2, 9), labels=torch.ones(2, 3, device=DEVICE))


def test_narrow_embeddings_have_one_masked_lm_layout():
    made = BertConfig(model_type="deberta-v2", **V3, embedding_size=16, legacy=False)
    with pytest.raises(ValueError, match="embedding_size is 16"):
        fastbert.BertForMaskedLM(made)


def test_the_scale_has_its_root_in_float32():
    for size, kinds in ((12, 3), (64, 3), (16, 2), (24, 1)):
        given = ["c2p", "p2c"][: kinds - 1]
        root = torch.sqrt(torch.tensor(size, dtype=torch.float) * kinds).item()
        assert distances.disentangled_scaling(size, given) == 1 / root != 0.0
    assert math.isclose(distances.disentangled_scaling(64, None), 0.125)


def test_a_batch_of_padding_alone():
    ids = torch.ones(2, 5, dtype=torch.int64)
    model = BertModel(BertConfig.from_dict({"model_type": "deberta-v2"} | V3 | VARIANTS["conv"])).eval()
    assert not model.encoder.conv.conv.bias.any()
    assert not model(ids, torch.zeros_like(ids)).last_hidden_state.any()
