"""Graphs give what the models that they replay give, for all lengths and whatever unused memory holds.

On a GPU these are CUDA graphs. Elsewhere `Again` stands in for them. It runs the same function over the same memory
again, so that everything but the capture itself is tested.
"""

import copy
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import small_models
import torch
from replays import RECORDER, Again, AgainWithoutWaiting
from small_models import DEVICE, TINY, batch, hugging_face, ours, packed

import fastbert
from fastbert import BertConfig, BertModel, distances, testing
from fastbert.families import BY_MODEL_TYPE
from fastbert.graphs import GraphedModel, graph
from fastbert.graphs.buckets import Bucket, Field, Form
from fastbert.ops import checks
from fastbert.padding import Packing
from fastbert.prepared import PreparedLinear
from fastbert.testing import Result
from fastbert.triton.common import recorded

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")

SIZES = {"max_tokens": (8, 24, 48), "max_sequences": 4, "max_seqlen": 16}
LENGTHS = ([7, 1, 12], [3], [16, 16, 16], [5, 0, 2, 1], [8], [16, 8], [1, 1, 1, 1], [12, 12], [7, 1, 12])
CONFIG = TINY.changed(num_labels=3, num_hidden_layers=2)
HEADS = [kind.__name__ for kind in GraphedModel.MODELS if kind is BertModel or kind.kind in CONFIG.family.heads]
FAMILY = small_models.SIZES | {"num_labels": 3}


def graphed(model, recorder=RECORDER, **sizes):
    return GraphedModel(model, recorder=recorder, **{**SIZES, **sizes})


def our(name="BertModel", dtype=torch.float64, config=CONFIG):
    """A model with random weights, including those of biases and LayerNorms."""
    model = getattr(fastbert, name)(config)
    for parameter_name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.1)
        if parameter_name.endswith("LayerNorm.weight"):
            parameter.data += 1
    return model.eval().to(DEVICE, dtype)


def example(name, lengths, form="padded"):
    """A batch with one more column than its longest row; for multiple choice, with two choices."""
    inputs = batch(lengths, max(lengths) + 1, side="left" if sum(lengths) % 2 else "right")
    if form == "packed":
        return packed(inputs) | ({"num_choices": 2} if name == "BertForMultipleChoice" else {})
    if name == "BertForMultipleChoice":
        return {key: value.unflatten(0, (-1, 2)) for key, value in inputs.items()}
    return inputs


def assert_same(out, expected):
    """Every field agrees, to float64's rounding."""
    assert type(out) is type(expected)
    for field, tensor, truth in zip(out._fields, out, expected, strict=True):
        assert (tensor is None) == (truth is None), field
        if tensor is not None:
            assert tensor.shape == truth.shape and tensor.dtype == truth.dtype and tensor.device == truth.device, field
            # The lowest number of a dtype, which marks padding, would hide every other difference.
            assert torch.equal(tensor < -1e300, truth < -1e300), field
            difference = torch.where(truth < -1e300, 0, tensor - truth)
            largest = truth.masked_fill(truth < -1e300, 0).abs().max() if truth.numel() else 0
            assert not truth.numel() or difference.abs().max() <= 1e-12 * largest, field


def bits(out):
    return [tensor.clone() for tensor in out if tensor is not None]


def assert_bits(out, expected):
    assert all(torch.equal(a, b) for a, b in zip(bits(out), expected, strict=True))


# ---- what the model gives


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_gives_what_the_model_gives(name, form):
    """For all heads, buckets and forms of input, with lengths that change from replay to replay."""
    model = our(name)
    replayed = graphed(model)
    even = [lengths for lengths in LENGTHS if len(lengths) % 2 == 0]
    calls = even if name == "BertForMultipleChoice" else LENGTHS
    for lengths in calls:
        inputs = example(name, lengths, form)
        assert_same(replayed(**inputs), model(**inputs))
    assert replayed.report.replays.total() == len(calls) and not replayed.report.direct


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("xlm-roberta", "camembert")))  # RoBERTa's code
        for name in BY_MODEL_TYPE
        if name != "bert"
    ],
)
@torch.inference_mode()
def test_families(model_type, form):
    """Other families count positions from pad_token_id + 1, lack token types, project embeddings or share layers."""
    widths = {"embedding_size": 32} if model_type in ("albert", "electra") else {}
    config = BertConfig(model_type=model_type, **FAMILY, **widths)
    heads = ["ForSequenceClassification", "ForMaskedLM", "ForReplacedTokenDetection"]
    for name in ["BertModel"] + [f"Bert{head}" for head in heads if head in config.family.heads]:
        model = our(name, config=config)
        replayed = graphed(model, max_seqlen=None)
        assert replayed.buckets[-1].longest == config.max_sequence_length
        for lengths in LENGTHS:
            inputs = example(name, lengths, form)
            inputs["input_ids"][..., -1:] = 1  # RoBERTa's padding token, sometimes in a visible place
            if not config.family.token_types:
                del inputs["token_type_ids"]
            assert_same(replayed(**inputs), model(**inputs))
        assert not replayed.report.direct


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_as_accurate_as_pytorch(dtype):
    """Errors are at most 3 e, where e is the worse of transformers' eager and SDPA models in the same dtype."""
    models = [hugging_face(), hugging_face(attention="sdpa")]
    models[1].load_state_dict(models[0].state_dict())
    rounded = [copy.deepcopy(model).to(dtype) for model in models]
    truth_model = copy.deepcopy(rounded[0]).double()
    replayed = graphed(ours(rounded[0]))
    for lengths in LENGTHS:
        if 0 in lengths:
            continue  # transformers defines no result for an empty row
        inputs = batch(lengths, max(lengths))
        visible = inputs["attention_mask"].bool()
        truth, mine, *contenders = (
            Result({"last": out.last_hidden_state[visible], "pooled": out.pooler_output}, {})
            for out in (model(**inputs) for model in (truth_model, replayed, *rounded))
        )
        testing.assert_rows(testing.compare(mine, truth, contenders, factor=3.0))


@torch.inference_mode()
def test_without_a_mask_and_with_positions():
    model = our()
    replayed = graphed(model)
    ids = batch([6, 6], 6)["input_ids"]
    row = torch.tensor([[5, 0, 1, 2, 3, 31]], device=DEVICE)
    calls = ({}, {"position_ids": row}, {"position_ids": row.repeat(2, 1)}, {"attention_mask": torch.ones_like(ids)})
    for more in calls:
        assert_same(replayed(ids, **more), model(ids, **more))
        assert_same(replayed(ids.int(), **more), model(ids.int(), **more))
    pack = packed(batch([6, 3], 6)) | {"position_ids": row[0].repeat(2)[:9]}
    assert_same(replayed(**pack), model(**pack))
    pack.pop("max_seqlen")
    assert_same(replayed(**pack), model(**pack))
    empty = {"input_ids": ids[:0], "attention_mask": ids[:0]}
    assert_same(replayed(**empty), model(**empty))
    assert not replayed.report.direct


def test_without_a_pooler():
    model = BertModel(CONFIG, add_pooling_layer=False).eval().to(DEVICE).double()
    inputs = batch([7, 1], 7)
    with torch.no_grad():
        assert_same(graphed(model)(**inputs), model(**inputs))


# ---- memory that is reused


def test_spare_sequences_hold_spare_tokens():
    """The buffer equals a literal table: 4 tokens of two sequences, in a bucket of 9 whose sequences have at most 3."""
    bucket = Bucket(tokens=9, sequences=2, longest=3)
    assert bucket.slots == 2 + 3
    form = Form(bucket, Field("labels", 5, fill=-100))
    buffer = torch.full((form.size,), 2**31 - 1, dtype=torch.int32)
    rows = {"input_ids": torch.tensor([11, 12, 13, 14]), "position_ids": torch.tensor([0, 1, 2, 0])}
    rows["labels"] = torch.tensor([7, 8])
    form.write(buffer, rows, Packing(torch.tensor([0, 3, 4]).int(), 3, tokens=4, batch=2))
    assert {name: view.tolist() for name, view in form.views(buffer).items()} == {
        "labels": [7, 8, -100, -100, -100],
        "input_ids": [11, 12, 13, 14, 0, 0, 0, 0, 0],
        "token_type_ids": [0] * 9,
        "position_ids": [0, 1, 2, 0, 0, 0, 0, 0, 0],
        "cu_seqlens": [0, 3, 4, 4, 6, 9],
    }


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_nothing_leaks_from_spare_memory(name):
    """Garbage in every buffer, and NaN in every output and in all that spare tokens compute, change no bit."""
    model = our(name)
    replayed = graphed(model)
    inputs = example(name, [7, 2])  # 9 tokens in a bucket of 24; ids begin at 1
    expected = bits(replayed(**inputs))
    for part in replayed._graphs.values():
        part.buffer.random_(-(2**31), 2**31 - 1)
        for output in part.outputs:
            if output is not None:
                output.fill_(torch.nan)
    bert = model if name == "BertModel" else model.bert
    bert.embeddings.word_embeddings.weight[0] = torch.nan
    out = replayed(**inputs)
    if name in ("BertForMaskedLM", "BertForPreTraining"):  # tied to the decoder: token 0's score is NaN
        logits, *rest = bits(out)
        assert logits[..., 0].isnan().any() and torch.equal(logits[..., 1:], expected[0][..., 1:])
        assert all(torch.equal(a, b) for a, b in zip(rest, expected[1:], strict=True))
    else:
        assert_bits(out, expected)


@torch.inference_mode()
def test_a_call_does_not_depend_on_those_before():
    model, rows = our(dtype=torch.float32), []
    used = graphed(model)
    for lengths in LENGTHS:
        inputs = batch(lengths, 16)
        rows.append((inputs, bits(used(**inputs))))
    for inputs, expected in rows:
        assert_bits(graphed(model)(**inputs), expected)


@pytest.mark.parametrize("form", ["padded", "full", "packed"])
@pytest.mark.parametrize("name", ["BertModel", "BertForQuestionAnswering", "BertForMaskedLM"])
@torch.inference_mode()
def test_results_are_the_callers(name, form):
    """Later calls in the same bucket do not overwrite earlier results, nor see what the caller writes to those."""
    replayed = graphed(our(name))
    one, two = (
        batch([6, 6], 6) if form == "full" else example(name, lengths, form) for lengths in ([5, 3], [2, 4, 1, 1])
    )
    first = replayed(**one)
    kept = bits(first)
    replayed(**two)
    assert_bits(first, kept)
    for tensor in first:
        if tensor is not None:
            tensor.fill_(torch.nan)
    assert_bits(replayed(**one), kept)


@torch.no_grad()
def test_inputs_are_left_alone():
    replayed, inputs = graphed(our()), batch([6, 2], 8)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    replayed(**inputs)
    assert all(torch.equal(inputs[name], before[name]) for name in inputs)


# ---- what a capture would not allow


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()  # in inference mode, a dispatch mode does not see Tensor.item
def test_what_is_captured_asks_for_no_value(name, backend, monkeypatch):
    """No op reads a value on the host. Argument checks, which do so on CPUs only, are off. For Triton, only its
    host side runs, as on Hopper; nothing is launched."""
    if reason := fastbert.backends.why_not(backend, "attention", "cpu", torch.float32):
        pytest.skip(reason)
    monkeypatch.setattr(checks, "values_visible", lambda tensor: False)
    model = our(name, torch.float32).cpu()
    launched = []
    launches = recorded(90, lambda kernel, *rest: launched.append(kernel)) if backend == "triton" else nullcontext()
    with fastbert.backend(backend), launches:
        replayed = graphed(model, AgainWithoutWaiting)
        inputs = {key: value.cpu() for key, value in example(name, [5, 3], "padded").items()}
        replayed(**inputs)
    assert replayed.report.replays == {8: 1}
    assert bool(launched) == (backend == "triton")


def test_what_is_captured_does_without_values():
    """The models run on meta tensors, where reading a value is an error in PyTorch."""
    with torch.device("meta"), torch.no_grad():
        form, ids = Form(Bucket(24, 4, 16)), torch.empty(9, dtype=torch.int64)
        buffer, ends = torch.empty(form.size, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
        names = ("input_ids", "token_type_ids", "position_ids")
        form.write(buffer, dict.fromkeys(names, ids), Packing(ends, 7, tokens=9, batch=2))
        input_ids, token_type_ids, position_ids, ends = form.views(buffer).values()
        for name in HEADS:
            model = getattr(fastbert, name)(CONFIG).eval()
            choices = {"num_choices": 1} if name == "BertForMultipleChoice" else {}
            out = model(input_ids, None, token_type_ids, position_ids, cu_seqlens=ends, max_seqlen=16, **choices)
            assert next(tensor for tensor in out if tensor is not None).is_meta


@torch.no_grad()
def test_a_planted_question_is_noticed(monkeypatch):
    monkeypatch.setattr(checks, "values_visible", lambda tensor: False)
    model, inputs = our().cpu(), {key: value.cpu() for key, value in batch([5], 5).items()}
    for question in (lambda x: x * float(x[0, 0]), lambda x: x[x[:, 0] > 0], lambda x: x + len(x.nonzero())):
        monkeypatch.setattr(model.pooler, "forward", question)
        with pytest.raises(AssertionError, match="asks"):
            graphed(model, AgainWithoutWaiting)(**inputs)


# ---- buckets


@pytest.mark.parametrize(
    ("lengths", "bucket"),
    [
        ([8], 8),  # exactly full
        ([8, 1], 24),
        ([1, 1, 1, 1], 8),  # the largest number of sequences
        ([16, 8], 24),  # the longest sequence
        ([16, 9], 48),
        ([16, 16, 16], 48),
        ([16, 16, 16, 1], "a batch has more than 48 tokens"),
        ([1] * 5, "a batch has more than 4 sequences"),
        ([17, 1], "a sequence has more than 16 tokens"),
        ([0, 0], 8),  # no token at all
    ],
)
@pytest.mark.parametrize("form", ["padded", "packed"])
@torch.inference_mode()
def test_the_smallest_bucket_that_holds_the_batch(lengths, bucket, form):
    model = our()
    replayed = graphed(model)
    assert replayed.report.captures == {8: 1, 24: 1, 48: 1}
    inputs = example("BertModel", lengths, form)
    if isinstance(bucket, int):
        assert_same(replayed(**inputs), model(**inputs))
        assert replayed.report.replays == {bucket: 1} and not replayed.report.direct
    else:
        with pytest.warns(RuntimeWarning, match=bucket):
            assert_same(replayed(**inputs), model(**inputs))
        assert_same(replayed(**inputs), model(**inputs))  # one warning, but counted twice
        assert replayed.report.direct == {bucket: 2} and not replayed.report.replays
        assert f"2 directly where {bucket}" in str(replayed.report)
    assert replayed.report.captures == {8: 1, 24: 1, 48: 1}


@torch.inference_mode()
def test_max_seqlen_may_say_more_than_there_is():
    """Callers often pass the model's maximum: the number of tokens in the batch limits it."""
    model = our()
    replayed, inputs = graphed(model, max_seqlen=None), packed(batch([5, 2], 5)) | {"max_seqlen": 512}
    assert_same(replayed(**inputs), model(**inputs))
    assert replayed.report.replays == {8: 1}


def test_sizes():
    model = our()
    assert graphed(model, max_tokens=[48, 8, 8]).buckets == (Bucket(8, 4, 8), Bucket(48, 4, 16))
    assert graphed(model, max_seqlen=None).buckets[-1] == Bucket(48, 4, 32)  # the model's positions
    wrong = {"max_tokens": [(), 8, (8, 0), (8.0,)], "max_sequences": [0], "max_seqlen": [-1, 0]}
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        with pytest.raises(ValueError, match=name):
            graphed(model, **{name: value})


def test_checks_run_the_model(monkeypatch):
    """FASTBERT_CHECK=1 runs the model directly: its checks can be neither captured nor replayed."""
    monkeypatch.setenv("FASTBERT_CHECK", "1")
    model, inputs = our(), batch([5, 2], 5)
    replayed = graphed(model)
    with torch.inference_mode():
        with pytest.warns(RuntimeWarning, match="FASTBERT_CHECK=1"):
            assert_same(replayed(**inputs), model(**inputs))
        assert not replayed.report.captures
        monkeypatch.delenv("FASTBERT_CHECK")
        assert_same(replayed(**inputs), model(**inputs))
        assert replayed.report.captures == {8: 1}


# ---- the model changes


def new_weights(model):
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)


def one_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


@pytest.mark.parametrize(
    "change",
    [new_weights, one_step, lambda model: model.load_state_dict(our("BertForSequenceClassification").state_dict())],
    ids=["data", "optimizer", "load_state_dict"],
)
def test_weights_that_change_in_place_are_seen(change):
    model, inputs = our("BertForSequenceClassification"), batch([7, 1], 7)
    replayed = graphed(model)
    with torch.inference_mode():
        before = replayed(**inputs)
    change(model)
    with torch.no_grad():
        out = replayed(**inputs)
        assert_same(out, model(**inputs))
    assert not torch.equal(out.logits, before.logits)
    assert replayed.report.captures == {8: 1, 24: 1, 48: 1}


def assign(model):
    model.load_state_dict(our("BertForSequenceClassification").state_dict(), assign=True)


def new_data(model):
    model.bert.pooler.dense.weight.data = torch.randn_like(model.bert.pooler.dense.weight)


def new_classifier(model):
    model.classifier = torch.nn.Linear(CONFIG.hidden_size, 5, device=DEVICE, dtype=torch.float64).eval()


def fewer_layers(model):
    del model.bert.encoder.layer[-1]


def no_bias(model):
    model.classifier.bias = None


@pytest.mark.parametrize(
    "change",
    [assign, new_data, new_classifier, fewer_layers, no_bias, lambda m: m.float(), lambda m: m.float().double()],
    ids=["assign", "data", "module", "layers", "bias", "dtype", "dtype and back"],
)
def test_replaced_tensors_and_modules_are_noticed_in_debugging_and_captures(change, monkeypatch):
    """A replay itself does not look: it reads the weights that were captured, which therefore stay in memory."""
    model, inputs = our("BertForSequenceClassification"), batch([7, 1], 7)
    replayed, weights = graphed(model), [parameter.detach().clone() for parameter in model.parameters()]
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    with torch.inference_mode():
        replayed(**inputs)
        change(model)
        for debugging in ("0", "1"):
            monkeypatch.setenv("FASTBERT_CHECK", debugging)
            with (
                fastbert.backend("reference"),
                pytest.raises(RuntimeError, match="or changed its mode; make a new graph"),
            ):
                replayed(**inputs)
    kept = {tensor.data_ptr(): tensor for tensor in replayed._snapshot.memory}
    assert all(torch.equal(kept[address], weight) for address, weight in zip(addresses, weights, strict=True))


def test_what_graphs_read_and_the_model_may_drop_is_kept():
    """Position keys of a prepared DeBERTa, which a call makes anew after a change, and slots of many distances."""
    config = BertConfig.from_dict({**small_models.CONFIGS["deberta-v2"], "model_type": "deberta-v2"})
    model, inputs = fastbert.prepare(BertModel(config).eval(), "fp32"), {"input_ids": IDS}
    replayed, parts = graphed(model, Again), [m for m in model.modules() if isinstance(m, PreparedLinear) and m.kept]
    read = [weakref.ref(tensor) for part in parts for tensor in part.kept[1].values()]
    read.append(weakref.ref(distances.disentangled(8, 16, 16, IDS.device)[0]))
    with torch.no_grad():
        model.encoder.rel_embeddings.weight.mul_(2)
        model(**inputs)
        for slot in range(1100):
            distances._kept((slot,), 0, IDS.device)
        assert len(read) > 1 and all(tensor() is not None for tensor in read)
        with fastbert.backend("reference"), pytest.raises(RuntimeError, match="make a new graph"):
            replayed(**inputs)


@torch.inference_mode()
def test_the_backend_is_obeyed():
    """Each forced backend gets graphs of its own, or an error where it cannot run."""
    replayed, inputs = graphed(our(dtype=torch.float32)), batch([7, 1], 7)
    expected, ran = bits(replayed(**inputs)), ("attention_fwd", "reference")
    with fastbert.backend("reference"):
        before = fastbert.backends.calls().get(ran, 0)
        replayed(**inputs)
        assert fastbert.backends.calls()[ran] > before
        replayed(**inputs)
        with fastbert.backend(None):
            assert_bits(replayed(**inputs), expected)
    assert replayed.report.captures == {8: 2, 24: 1, 48: 1}
    double = graphed(our())
    with fastbert.backend("triton"), pytest.raises(RuntimeError, match="'triton' cannot run"):
        double(**inputs)


def test_modes_may_change_from_call_to_call():
    """Graphs made in one mode work in the other, although tensors of inference mode cannot be written to outside it."""
    model, inputs = our().requires_grad_(False), batch([7, 1], 7)
    for first, second in ((torch.inference_mode, nullcontext), (nullcontext, torch.inference_mode)):
        with first():
            replayed = graphed(model)
            expected = model(**inputs)
            assert_same(replayed(**inputs), expected)
        with second():
            out = replayed(**inputs)
            assert_same(out, model(**inputs))
            assert out.last_hidden_state.is_inference() == (second is torch.inference_mode)


def test_threads_take_turns():
    """Each thread gets its own results, bit for bit those of a call without other threads."""
    replayed = graphed(our(dtype=torch.float32))
    work = [batch(lengths, 16) for lengths in LENGTHS]
    with torch.inference_mode():
        expected = [bits(replayed(**inputs)) for inputs in work]
    wrong = []

    def run(seed):
        order = list(range(len(work))) * 5
        random.Random(seed).shuffle(order)
        with torch.inference_mode():
            for index in order:
                out = bits(replayed(**work[index]))
                wrong.extend(index for a, b in zip(out, expected[index], strict=True) if not torch.equal(a, b))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    assert not wrong and replayed.report.replays.total() == len(work) * 21


# ---- what is refused


def test_a_model_that_is_not_on_a_gpu():
    with pytest.raises(ValueError, match="the model is on cpu; CUDA graphs need a GPU"):
        graph(our().cpu())
    scattered = our("BertForSequenceClassification").cpu()
    scattered.classifier.to("meta")
    with pytest.raises(ValueError, match="on cpu, meta; expected one GPU"):
        graph(scattered)


def test_a_model_of_another_kind():
    for model in (our().encoder, hugging_face(), torch.nn.Sequential(our()), None):
        given = rf"given a \w+\.{type(model).__name__}"
        with pytest.raises(TypeError, match=rf"{given}; expected one of fastbert\.BertModel"):
            graph(model)


@torch.inference_mode()
def test_what_a_replay_would_not_do(monkeypatch):
    model, inputs = our("BertForSequenceClassification"), batch([7, 1], 7)
    replayed = graphed(model)

    def refused(match, when_called=None):
        """Making a graph is an error, and so is a call: always or, if when_called is given, with FASTBERT_CHECK=1."""
        with pytest.raises(RuntimeError, match=match):
            graphed(model)
        if when_called:
            monkeypatch.setenv("FASTBERT_CHECK", "1")
        with pytest.raises(RuntimeError, match=when_called or match):
            replayed(**inputs)
        monkeypatch.delenv("FASTBERT_CHECK", raising=False)

    model.train()
    refused("training mode")
    model.eval()
    model.dropout.train()  # one part is enough
    refused("training mode", when_called="changed its mode")
    model.eval()
    handles = (model.bert.encoder.layer[0].register_forward_hook(print), model.register_forward_pre_hook(print))
    for handle in handles:
        refused("forward hooks", when_called="forward hooks")
        handle.remove()
    dense = model.bert.pooler.dense
    model.bert.pooler.dense = torch.nn.Sequential(dense).eval()  # such as an adapter, which may change between calls
    refused("a Sequential, whose Python a replay does not run", when_called="replaced")
    model.bert.pooler.dense = dense
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        refused("autocast is on")
    with torch.inference_mode(False), pytest.raises(RuntimeError, match="gradients are live"):
        replayed(**inputs)
    assert_same(replayed(**inputs), model(**inputs))


def test_a_model_may_be_frozen_later():
    """As the error advises: the calls that follow replay, and capture what they need for other settings."""
    model, inputs = our(), batch([7, 1], 7)
    replayed = graphed(model)
    for backend in (None, "reference"):
        model.requires_grad_(True)
        with fastbert.backend(backend):
            with pytest.raises(RuntimeError, match="gradients are live"):
                replayed(**inputs)
            model.requires_grad_(False)
            assert_same(replayed(**inputs), model(**inputs))
    assert replayed.report.replays.total() == 2


@pytest.mark.parametrize("more", [{"output_attentions": True}, {"labels": torch.tensor([0])}, {"inputs_embeds": None}])
@torch.inference_mode()
def test_other_arguments(more):
    with pytest.raises(TypeError, match=f"no graph takes {next(iter(more))}; call the model itself"):
        graphed(our("BertForSequenceClassification"))(**batch([3], 3), **more)


IDS = torch.randint(1, 99, (2, 6))
ENDS = torch.tensor([0, 4, 12], dtype=torch.int32)
FLAT = {"input_ids": IDS.flatten(), "cu_seqlens": ENDS, "max_seqlen": 8}


@pytest.mark.parametrize(
    "inputs",
    [
        {"input_ids": None},
        {"input_ids": IDS.tolist()},
        {"input_ids": IDS.float()},
        {"input_ids": IDS[0]},  # one sequence without a batch dimension
        {"input_ids": IDS, "cu_seqlens": ENDS},
        {"input_ids": IDS, "max_seqlen": 6},
        {"input_ids": IDS, "token_type_ids": IDS[:, :3]},
        {"input_ids": IDS, "position_ids": IDS[0]},
        {"input_ids": IDS, "attention_mask": torch.ones(2, 5)},
        {"input_ids": IDS, "attention_mask": torch.ones(6, 6).tril().expand(2, 1, 6, 6)},  # causal
        {"input_ids": torch.ones(1, 33, dtype=torch.int64)},  # more than the model has positions for
        {**FLAT, "attention_mask": torch.ones(2, 6)},
        {**FLAT, "cu_seqlens": ENDS.long()},
        {**FLAT, "cu_seqlens": ENDS.tolist()},
        {**FLAT, "cu_seqlens": ENDS[None]},
    ],
)
@torch.inference_mode()
def test_bad_input_is_refused_as_by_the_model(inputs):
    model = our()
    inputs = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    with pytest.raises((ValueError, TypeError)):
        model(**inputs)
    with pytest.raises((ValueError, TypeError), match="fastbert.graph|BertModel|attention_mask"):
        graphed(model)(**inputs)


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        ({"input_ids": IDS + 98}, IndexError),
        ({"input_ids": -IDS}, IndexError),
        ({"input_ids": IDS, "token_type_ids": IDS + 1}, IndexError),
        ({"input_ids": IDS, "position_ids": IDS + 32}, IndexError),
        ({**FLAT, "cu_seqlens": ENDS + 1}, ValueError),
        ({**FLAT, "cu_seqlens": ENDS.flip(0)}, ValueError),
        ({**FLAT, "cu_seqlens": ENDS[:2]}, ValueError),
        ({**FLAT, "max_seqlen": 7}, ValueError),
    ],
)
@torch.inference_mode()
def test_values_are_checked_on_the_host(inputs, error):
    """The values of inputs on the host are checked, wherever the model is."""
    with pytest.raises(error, match="fastbert.graph|BertModel"):
        graphed(our())(**inputs)


@torch.inference_mode()
def test_choices():
    replayed, ids = graphed(our("BertForMultipleChoice")), IDS.to(DEVICE)
    flat = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in FLAT.items()}
    for inputs in ({"input_ids": ids}, flat, {**flat, "num_choices": 3}):
        with pytest.raises(ValueError, match="BertForMultipleChoice takes"):
            replayed(**inputs)
    with pytest.raises(ValueError, match=f"num_choices is 8; expected that of the input, {len(ids)}"):
        replayed(ids[None], num_choices=8)
    with pytest.raises(TypeError, match="num_choices goes with BertForMultipleChoice"):
        graphed(our())(**flat, num_choices=2)


# ---- on a GPU


@on_gpu
class TestOnGpu:
    """What the stand-in cannot show."""

    @torch.inference_mode()
    def test_graphs_are_captured(self):
        replayed = graph(our(dtype=torch.float16), **SIZES)
        assert all(type(part.replay.__self__) is torch.cuda.CUDAGraph for part in replayed._graphs.values())
        before, inputs = fastbert.backends.calls(), packed(batch([7, 1], 7))
        replayed(**inputs)
        assert fastbert.backends.calls() == before  # nothing but the replay ran

    @pytest.mark.parametrize("backend", ["reference", "triton", None])
    @torch.inference_mode()
    def test_random_lengths(self, backend):
        """Every backend obeys the accuracy rule. The contender is the reference in float16, the truth the reference in
        float64, for which the other backends have no kernels."""
        model, generator = our(dtype=torch.float16), random.Random(0)
        truth_model = copy.deepcopy(model).double()
        with fastbert.backend(backend):
            replayed = graph(model, **SIZES)
        for _ in range(60):
            lengths = [generator.randint(1, 12) for _ in range(generator.randint(1, 4))]
            inputs = batch(lengths, max(lengths) + 1)
            with fastbert.backend("reference"):
                truth, contender = truth_model(**inputs), model(**inputs)
            with fastbert.backend(backend):
                out = replayed(**inputs)
            rows = [Result(result._asdict() | {"hidden_states": None}, {}) for result in (out, truth, contender)]
            mine, exact, theirs = (Result({k: v for k, v in r.outputs.items() if v is not None}, {}) for r in rows)
            testing.assert_rows(testing.compare(mine, exact, [theirs], factor=3.0))
        assert len(replayed.report.replays) == 3 and not replayed.report.direct

    @torch.inference_mode()
    def test_input_on_the_host(self):
        """Input in pinned or pageable memory, padded or packed, gives the same bits as input on the device."""
        replayed = graph(our(dtype=torch.float16), **SIZES)
        for lengths in LENGTHS:
            for form in ("padded", "packed"):
                inputs = example("BertModel", lengths, form)
                expected = bits(replayed(**inputs))
                host = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
                pinned = {k: v.pin_memory() if isinstance(v, torch.Tensor) else v for k, v in host.items()}
                assert_bits(replayed(**host), expected)
                with fastbert.backend("triton"):  # as by default; packing on the host is not forced
                    assert_bits(replayed(**pinned), expected)
        with pytest.warns(RuntimeWarning, match="more than 4 sequences"):
            ids = torch.randint(1, 99, (5, 3))
            assert_bits(replayed(ids), bits(replayed(ids.to(DEVICE))))
        with pytest.raises(ValueError, match="one device"):
            replayed(host["input_ids"], token_type_ids=inputs["token_type_ids"], cu_seqlens=host["cu_seqlens"])

    @torch.inference_mode()
    def test_host_input_may_be_written_to_at_once(self):
        """Calls are queued behind a slow kernel, and each reads its input as it was at the time of the call."""
        replayed = graph(our(dtype=torch.float16), **SIZES)
        rows = [torch.randint(1, 99, (2, 8)) for _ in range(20)]
        expected = [bits(replayed(row)) for row in rows]
        torch.cuda.synchronize()
        ids, outs = torch.empty(2, 8, dtype=torch.int64).pin_memory(), []
        torch.cuda._sleep(100_000_000)
        for row in rows:
            ids.copy_(row)
            outs.append(replayed(ids))
        for out, bit in zip(outs, expected, strict=True):
            assert_bits(out, bit)

    @torch.inference_mode()
    def test_streams(self):
        """Replays on several streams that do not wait for each other share memory without conflict."""
        replayed = graph(our(dtype=torch.float16), **SIZES)
        work = [packed(batch(lengths, 16)) for lengths in LENGTHS]
        expected = [bits(replayed(**inputs)) for inputs in work]
        torch.cuda.synchronize()
        streams, outs = [torch.cuda.Stream() for _ in range(4)], []
        for call in range(40):
            with torch.cuda.stream(streams[call % 4]):
                if call % 7 == 0:
                    torch.cuda._sleep(10_000_000)
                outs.append((call % len(work), replayed(**work[call % len(work)])))
        torch.cuda.synchronize()
        for index, out in outs:
            assert_bits(out, expected[index])

    @torch.inference_mode()
    def test_memory_does_not_grow(self):
        replayed = graph(our(dtype=torch.float16), **SIZES)
        work = [batch(lengths, 16) for lengths in LENGTHS]
        work += [{name: tensor.cpu() for name, tensor in inputs.items()} for inputs in work]

        def run(calls):
            for call in range(calls):
                replayed(**work[call % len(work)])
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

        assert run(200) == run(200)

    def test_one_pool(self):
        """Small buckets reuse the memory of the largest: all together take little more than the largest alone."""

        def reserved(sizes):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            replayed = graph(model, max_tokens=sizes, max_sequences=4)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return torch.cuda.memory_reserved() - before, replayed

        config = fastbert.BertConfig(num_hidden_layers=2, max_position_embeddings=512)
        model = BertModel(config).eval().to(DEVICE, torch.float16)
        reserved((4096,))  # allocates the workspaces of libraries beforehand
        alone, _ = reserved((4096,))
        together, _ = reserved((2048, 2560, 3072, 3584, 4096))  # separately they would take 3.75 times as much
        assert together <= 2 * alone

    @torch.inference_mode()
    def test_nothing_that_a_graph_reads_is_freed(self):
        """Other graphs come and go, PyTorch frees what it can, and free memory is set to NaN: results stay the same."""
        config = fastbert.BertConfig(num_hidden_layers=2)
        model = BertModel(config).eval().to(DEVICE, torch.float16)
        replayed, inputs = graph(model), batch([90, 30], 90, vocabulary=30522)
        expected = bits(replayed(**inputs))
        for _ in range(40):  # more graphs than PyTorch has streams
            graph(our(dtype=torch.float16), max_tokens=(8,))(**batch([3], 3))
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        filling = [torch.full((1 << 20,), torch.nan, device=DEVICE) for _ in range(200)]
        assert_bits(replayed(**inputs), expected)
        assert all(part.isnan().all() for part in filling)

    @torch.inference_mode()
    def test_within_a_capture(self):
        replayed, inputs = graph(our(dtype=torch.float16), **SIZES), batch([7, 1], 7)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=DEVICE)
            with pytest.raises(RuntimeError, match="while a graph is being captured"):
                replayed(**inputs)

    @torch.no_grad()
    def test_a_model_that_left_the_gpu(self):
        """A replay goes on with the weights that were captured, wherever the model is now."""
        model = our(dtype=torch.float16)
        replayed, inputs = graph(model, **SIZES), batch([7, 1], 7)
        expected = bits(replayed(**inputs))
        model.cpu()
        filling = [torch.full((1 << 20,), torch.nan, device=DEVICE) for _ in range(20)]
        assert_bits(replayed(**inputs), expected)
        assert all(part.isnan().all() for part in filling)

    @torch.inference_mode()
    def test_the_precision_of_float32_products_is_obeyed(self):
        replayed, inputs = graph(our(dtype=torch.float32), **SIZES), batch([16, 8], 16)
        before, outs = torch.backends.cuda.matmul.fp32_precision, []
        try:
            for precision in ("ieee", "tf32", "ieee", "tf32"):
                torch.backends.cuda.matmul.fp32_precision = precision
                outs.append((bits(replayed(**inputs)), replayed.report.captures[24]))
        finally:
            torch.backends.cuda.matmul.fp32_precision = before
        (ieee, _), (tf32, captures), (ieee_again, _), (tf32_again, captures_in_the_end) = outs
        assert not torch.equal(ieee[0], tf32[0]) and captures == captures_in_the_end
        assert torch.equal(ieee[0], ieee_again[0]) and torch.equal(tf32[0], tf32_again[0])
