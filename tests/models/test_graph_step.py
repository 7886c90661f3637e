"""Training steps as graphs give the same losses and gradients as `loss.backward()`, dropout included.

On a GPU these are CUDA graphs, elsewhere a stand-in (tests/replays.py).
"""

import copy
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from replays import RECORDER, Again, AgainWithoutWaiting
from small_models import CONFIGS, DEVICE, TINY, batch, packed

import fastbert
from fastbert import BertConfig
from fastbert.data import PackingCollator
from fastbert.graphs import GraphedStep, graph
from fastbert.ops import checks
from fastbert.training import to_device

SIZES = {"max_tokens": (16, 40), "max_sequences": 5, "max_seqlen": 12}
CONFIG = TINY.changed(num_labels=3, num_hidden_layers=2)  # dropout 0.1 everywhere
LENGTHS = ([7, 1, 8], [3], [12, 12, 12, 4], [5, 0, 2, 1], [12, 4], [1, 1, 1, 1, 1])
HEADS = {  # with the forms of their labels
    "BertForMaskedLM": ("words", "rows"),
    "BertForPreTraining": ("words", "pairs", "both"),
    "BertForNextSentencePrediction": ("classes",),
    "BertForSequenceClassification": ("classes", "scores", "several scores"),
    "BertForTokenClassification": ("tokens",),
    "BertForQuestionAnswering": ("answers",),
}
CASES = [(name, form) for name, forms in HEADS.items() for form in forms]


def model_of(name, form="", dtype=torch.float64, config=CONFIG, **changes):
    changes = {"num_labels": 1} | changes if form == "scores" else changes
    if form == "several scores":
        changes["problem_type"] = "multi_label_classification"
    model = getattr(fastbert, name)(config.changed(**changes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    if isinstance(dropout := getattr(model, "dropout", None), torch.nn.Dropout):
        dropout.p = 0.0  # the head's: PyTorch draws masks by shape, with spare sequences
    return model.to(DEVICE, dtype).train()


def stepped(model, recorder=RECORDER, **options):
    if isinstance(model, (fastbert.BertForMaskedLM, fastbert.BertForPreTraining)):
        options.setdefault("max_labels", 16)
    return GraphedStep(model, **{**SIZES, **options}, recorder=recorder)


def random_labels(shape, classes, share=0.3):
    """Integers, some of them -100."""
    labels = torch.randint(classes, shape)
    return torch.where(torch.rand(shape) < share, labels, -100).to(DEVICE)


def example(form, lengths, layout, classes=3):
    """A batch with labels of one form."""
    inputs = batch(lengths, max(lengths) + 1, side="left" if layout == "left" else "right")
    if layout == "holes":
        inputs["attention_mask"] = (torch.rand(inputs["attention_mask"].shape) < 0.6).long().to(DEVICE)
    mask, count, labels = inputs["attention_mask"], len(lengths), {}
    if form in ("words", "rows", "both"):
        labels["labels"] = random_labels(mask.shape, 99, 0.2)
    if form == "tokens":
        labels["labels"] = random_labels(mask.shape, classes, 0.7)
    if layout == "packed" or form == "rows":
        inputs = packed(inputs, labels)
    else:
        inputs |= labels
    if form == "rows":
        inputs["labelled_rows"] = (inputs["labels"] != -100).nonzero().squeeze(-1)
    if form in ("pairs", "both"):
        inputs["next_sentence_label"] = random_labels((count,), 2, 0.8)
    if form == "classes":
        inputs["labels"] = random_labels((count,), 2, 0.8)
    if form == "scores":
        inputs["labels"] = torch.randn(count, device=DEVICE)
    if form == "several scores":
        inputs["labels"] = torch.rand(count, classes, device=DEVICE)
    if form == "answers":
        for name in ("start_positions", "end_positions"):
            inputs[name] = torch.randint(-2, 13, (count,), device=DEVICE)
            inputs[name][0] = random.choice((0, 2**32 + 1, 2**63 - 1, -(2**63)))
    return inputs


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_close(mine, truth, what=""):
    assert (mine is None) == (truth is None), what
    if truth is not None:
        assert mine.shape == truth.shape and mine.dtype == truth.dtype and mine.device == truth.device, what
        assert (mine - truth).abs().max() <= 1e-11 * max(truth.abs().max(), 1e-3), what


def assert_gradients(found, expected):
    """found: a model, or gradients by name."""
    found = gradients(found) if isinstance(found, torch.nn.Module) else found
    for name, truth in expected.items():
        assert_close(found[name], truth, name)


def eager(model, inputs, gradient=1.0):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward(torch.as_tensor(gradient, dtype=loss.dtype, device=loss.device))
    return loss.detach(), gradients(model)


def assert_same_step(model, step, inputs, seed=0, gradient=1.0):
    """Without earlier gradients, the loss, all gradients and the generator's state are those of the model itself."""
    torch.manual_seed(seed)
    loss, expected = eager(model, inputs, 1.0 if gradient is None else gradient)
    after = torch.rand(3, device=DEVICE)
    model.zero_grad()
    torch.manual_seed(seed)
    mine = step(**inputs, gradient=gradient)
    assert torch.equal(torch.rand(3, device=DEVICE), after)
    assert_close(mine, loss, "loss")
    assert not mine.requires_grad
    assert_gradients(model, expected)


# ---- what the model gives


@pytest.mark.parametrize(
    "layout", ["packed", "holes", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("padded", "left"))]
)
@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_step_is_that_of_the_model(name, form, layout):
    """For all heads and kinds of labels, with dropout. Lengths, and so the spare room, change from replay to replay."""
    model = model_of(name, form)
    step = stepped(model)
    for seed, lengths in enumerate(LENGTHS):
        assert_same_step(model, step, example(form, lengths, layout), seed)
    assert step.report.replays.total() == len(LENGTHS) and not step.report.direct
    assert step.report.captures == {16: 1, 40: 1}


def test_labels_of_other_types():
    """Integer and several regression targets, labels of shape (B, 1) in int32, and ALBERT's sentence_order_label."""
    scores, inputs = model_of("BertForSequenceClassification", "scores"), example("scores", [7, 2], "packed")
    for labels in (torch.tensor([2**25 + 1, 3]), torch.tensor([[1], [3]], dtype=torch.int32)):
        assert_same_step(scores, stepped(scores), inputs | {"labels": labels.to(DEVICE)})
    several = model_of("BertForSequenceClassification", problem_type="regression")
    assert_same_step(several, stepped(several), inputs | {"labels": torch.randn(2, 3, device=DEVICE).double()})
    classes = model_of("BertForSequenceClassification")
    labels = torch.tensor([[2], [-100]], dtype=torch.int32, device=DEVICE)
    assert_same_step(classes, stepped(classes), inputs | {"labels": labels})
    config = BertConfig.from_dict({**CONFIGS["albert"], "model_type": "albert"})
    albert = model_of("BertForPreTraining", config=config)
    del inputs["labels"]
    order = inputs | {"sentence_order_label": torch.tensor([1, 0], device=DEVICE)}
    assert_same_step(albert, stepped(albert), order)


@pytest.mark.parametrize("model_type", [name for name in CONFIGS if name != "bert"])
def test_families(model_type):
    config = BertConfig.from_dict({**CONFIGS[model_type], "model_type": model_type, "num_labels": 3})
    for head in ("ForMaskedLM", "ForReplacedTokenDetection", "ForTokenClassification"):
        if head not in config.family.heads:
            continue
        model = model_of(f"Bert{head}", config=config)
        step = stepped(model, **({"max_labels": 40} if head == "ForMaskedLM" else {}))
        for lengths in LENGTHS:
            inputs = example("tokens", lengths, "packed", classes=2)
            inputs["token_type_ids"] %= config.type_vocab_size or 2  # without token types, the ids make no difference
            if not config.family.token_types:
                del inputs["token_type_ids"]
            assert_same_step(model, step, inputs)
        assert not step.report.direct


def test_the_collators_batches():
    """A collator's batches on the host, which name the labelled rows, give the model's numbers on the device."""
    collate = PackingCollator(mlm_probability=0.15, mask_token_id=4, vocab_size=99, special_ids=[0, 1], max_tokens=40)
    model = model_of("BertForMaskedLM")
    step = stepped(model)
    for seed in range(6):
        torch.manual_seed(seed)
        texts = [torch.randint(5, 99, (length,)).tolist() for length in (11, 9, 5, 12)]
        inputs = collate([{"input_ids": ids, "token_type_ids": [0] * len(ids)} for ids in texts])
        assert "labelled_rows" in inputs
        on_device = to_device(inputs, DEVICE)
        torch.manual_seed(seed)
        loss, expected = eager(model, on_device)
        model.zero_grad()
        torch.manual_seed(seed)
        assert_close(step(**inputs), loss)
        assert_gradients(model, expected)
    assert step.report.replays == {40: 6}


def test_rows_that_are_named_are_those_that_count():
    """As in the model, labels of other rows are left out, even if no spare token is left for unused label slots."""
    model = model_of("BertForMaskedLM")
    step, inputs = stepped(model, max_labels=12), example("rows", [12, 4], "packed")
    inputs["labels"] = torch.arange(16, device=DEVICE)
    inputs["labelled_rows"] = torch.tensor([2, 7, 11], device=DEVICE)
    assert_same_step(model, step, inputs)
    assert step.report.replays == {16: 1}


def test_nothing_labelled():
    """Without labels, the loss and all gradients are 0, as the model's are; so is the loss without any text."""
    model = model_of("BertForMaskedLM")
    step, inputs = stepped(model), example("words", [7, 3], "packed")
    inputs["labels"].fill_(-100)
    assert_same_step(model, step, inputs)
    scores = model_of("BertForSequenceClassification", "scores")
    nobody = {"input_ids": torch.empty(0, 5, dtype=torch.int64), "labels": torch.empty(0)}
    with pytest.warns(RuntimeWarning, match="no token"):
        assert stepped(scores)(**{name: x.to(DEVICE) for name, x in nobody.items()}) == 0


def test_nothing_leaks_from_spare_memory():
    """Garbage in the buffer, and NaN in all outputs and in the embedding of spare tokens, change no gradient."""
    model = model_of("BertForSequenceClassification", "scores")
    step, inputs = stepped(model), example("scores", [7, 2], "packed")
    torch.manual_seed(1)
    step(**inputs)
    expected = gradients(model)
    for part in step._graphs.values():
        part.buffer.random_(-(2**31), 2**31 - 1)
        for output in part.outputs:
            output.fill_(torch.nan)
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[0] = torch.nan
    model.zero_grad()
    torch.manual_seed(1)
    step(**inputs)
    assert_gradients(model, expected)


# ---- gradients


def test_gradients_add_up():
    """Gradients add up over batches of the same and of other buckets and over direct runs, from None and from zeros."""
    model = model_of("BertForTokenClassification", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    step = stepped(model)
    batches = [example("tokens", lengths, "packed") for lengths in ([7, 1], [3], [12, 12], [12, 12, 12, 12], [2, 2])]
    for set_to_none in (True, False):
        model.zero_grad(set_to_none=set_to_none)
        for inputs in batches:
            model(**inputs).loss.backward()
        expected = gradients(model)
        model.zero_grad(set_to_none=set_to_none)
        with pytest.warns(RuntimeWarning, match="more than 40 tokens") if set_to_none else pytest.MonkeyPatch.context():
            for inputs in batches:
                step(**inputs)
        assert_gradients(model, expected)
    assert step.report.replays == {16: 6, 40: 2} and step.report.direct.total() == 2


class SharedPool(Again):
    """A replay overwrites the outputs of all graphs captured later, as it may where graphs share a memory pool."""

    def __init__(self, device):
        super().__init__(device)
        self.outputs = []

    def capture(self, function):
        replay, outputs = super().capture(function)
        self.outputs.append([output.detach() for output in outputs if output is not None])
        place = len(self.outputs)

        def overwriting():
            for later in self.outputs[place:]:
                for output in later:
                    output.fill_(float("nan"))
            replay()

        return overwriting, outputs


def test_gradients_outlive_the_replay_of_an_earlier_graph():
    """This includes gradients of parameters that get none from the labels of the replayed batch."""
    model = model_of("BertForPreTraining", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    step = stepped(model, SharedPool)
    small, large = example("pairs", [7, 1], "packed"), example("both", [12, 12], "packed")
    for inputs in (small, large):
        step(**inputs)
    model.zero_grad()
    for inputs in (large, small, large):
        model(**inputs).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    for inputs in (large, small, large):
        step(**inputs)
    assert_gradients(model, expected)


def test_gradients_may_be_replaced():
    """The caller may replace them by tensors that share their memory or not: the next replay overwrites none."""
    model = model_of("BertForTokenClassification", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    inputs = example("tokens", [7, 2], "packed")
    _, once = eager(model, inputs)
    changes = {
        "detached": (lambda p: setattr(p, "grad", p.grad.detach()), 2),
        "viewed": (lambda p: setattr(p, "grad", p.grad.view_as(p)), 2),
        "data": (lambda p: setattr(p.grad, "data", p.grad.data * 3), 4),
        "cloned": (lambda p: setattr(p, "grad", p.grad.clone().requires_grad_()), 2),
        "transposed": (lambda p: setattr(p, "grad", p.grad.mT.contiguous().mT if p.dim() == 2 else p.grad), 2),
        "none": (lambda p: setattr(p, "grad", None), 1),
    }
    for name, (change, times) in changes.items():
        step = stepped(model)
        model.zero_grad()
        for _ in range(2):  # the second time from None again
            step(**inputs)
            for parameter in model.parameters():
                change(parameter)
            step(**inputs)
            for key, gradient in gradients(model).items():
                assert_close(gradient.detach(), once[key] * times, f"{name} {key}")
                assert gradient.grad_fn is None or name == "cloned"
            model.zero_grad()


@pytest.mark.parametrize("gradient", [None, 0.25, 1 / 3, torch.tensor(8.0)])
def test_where_the_backward_begins(gradient):
    """`gradient` scales the backward: None, a number such as 1 / n, or a tensor on the device."""
    model = model_of("BertForMaskedLM")
    gradient = gradient.to(DEVICE) if isinstance(gradient, torch.Tensor) else gradient
    step = stepped(model)
    for _ in range(2):
        assert_same_step(model, step, example("words", [7, 9], "packed"), gradient=gradient)
    assert_same_step(model, step, example("words", [7, 9], "packed"))  # then 1 by default


def test_what_is_frozen_gets_none():
    model = model_of("BertForMaskedLM")
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[0].requires_grad_(False)
    step = stepped(model)
    assert_same_step(model, step, example("words", [7, 9], "packed"))
    assert model.bert.embeddings.LayerNorm.weight.grad is None
    pair = model_of("BertForPreTraining")
    assert_same_step(pair, stepped(pair), example("pairs", [7, 9], "packed"))
    assert pair.cls.predictions.bias.grad is None  # unused by this loss


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_training(optimizer):
    """After 21 steps the weights are those of the same training without graphs."""
    models = [model_of("BertForMaskedLM")]
    models.append(copy.deepcopy(models[0]))
    step, runs = stepped(models[0]), []
    torch.manual_seed(5)
    batches = [example("words", lengths, "packed") for lengths in ([7, 1, 8], [12, 9], [3, 2]) for _ in range(7)]
    for model, run in zip(models, (step, lambda **inputs: models[1](**inputs).loss.backward()), strict=True):
        torch.manual_seed(7)
        update = optimizer(model.parameters(), lr=1e-2)
        for inputs in batches:
            run(**inputs)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            update.step()
            update.zero_grad()
        runs.append([parameter.detach() for parameter in model.parameters()])
    assert all((a - b).abs().max() <= 1e-8 for a, b in zip(*runs, strict=True))
    assert step.report.captures == {16: 1, 40: 1} and not step.report.direct


def test_losses_are_the_callers():
    model = model_of("BertForMaskedLM")
    step = stepped(model)
    first = step(**example("words", [7, 9], "packed"))
    kept = first.clone()
    assert step(**example("words", [9, 3], "packed")) != kept
    assert torch.equal(first, kept)


def test_evaluation_mode_trains_too():
    """Evaluation mode trains without dropout; its graph is refused once the model is in training mode."""
    model = model_of("BertForMaskedLM").eval()
    step, inputs = stepped(model), example("words", [7, 9], "packed")
    assert_same_step(model, step, inputs)
    model.train()
    with pytest.raises(RuntimeError, match="the model is in training mode, and the graph of evaluation mode"):
        step(**inputs)


def test_autocast():
    """Autocast gets a separate graph, which does not use the casts of weights that autocast caches."""
    model = model_of("BertForMaskedLM", dtype=torch.float32)
    step, inputs = stepped(model), example("words", [7, 9], "packed")
    step(**inputs)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        for seed in range(2):
            torch.manual_seed(seed)
            loss, expected = eager(model, inputs)
            model.zero_grad()
            torch.manual_seed(seed)
            mine = step(**inputs)
            assert (mine - loss).abs() <= 2e-2 * loss
            for name, gradient in gradients(model).items():
                assert gradient.dtype == torch.float32
                largest = expected[name].abs().max()
                assert (gradient - expected[name]).abs().max() <= 5e-2 * largest + 1e-5, name
    assert step.report.captures == {16: 2}


# ---- what a capture would not allow


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(("name", "form"), CASES)
def test_what_is_captured_asks_for_no_value(name, form, backend, monkeypatch):
    """No op of forward or backward reads a value on the host. Argument checks, which do so on CPUs only, are off."""
    model = model_of(name, form).cpu()
    inputs = to_device(example(form, [5, 3], "packed"), "cpu")
    monkeypatch.setattr(checks, "values_visible", lambda tensor: False)
    step = stepped(model, AgainWithoutWaiting)
    with fastbert.backend(backend):
        step(**inputs)
    assert step.report.replays == {16: 1}


def test_a_graph_of_the_models_own_may_live(monkeypatch):
    """The capture uses leaves of its own: parameters in a living autograd graph remember the stream of that graph."""
    model, seen, grad = model_of("BertForMaskedLM"), [], torch.autograd.grad

    def watched(loss, leaves, *more, **options):
        seen.extend(leaves)
        return grad(loss, leaves, *more, **options)

    monkeypatch.setattr(torch.autograd, "grad", watched)
    step, inputs = stepped(model), example("words", [7, 9], "packed")
    alive = model(**inputs).loss
    step(**inputs)
    parameters = list(model.parameters())
    assert [leaf.data_ptr() for leaf in seen[: len(parameters)]] == [p.data_ptr() for p in parameters]
    assert all(leaf is not p for leaf, p in zip(seen, parameters, strict=False))
    alive.backward()


def test_the_host_work_is_on_no_forced_backend(monkeypatch):
    model, seen = model_of("BertForMaskedLM"), []
    step = stepped(model)
    read = step._reader.read
    monkeypatch.setattr(step._reader, "read", lambda *a: (seen.append(fastbert.backends.forced()), read(*a))[1])
    with fastbert.backend("reference"):
        step(**example("words", [7, 9], "padded"))
    assert seen == [()]


# ---- buckets


def test_what_runs_directly(monkeypatch):
    model = model_of("BertForMaskedLM", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    step = stepped(model, max_labels=3)
    many = example("rows", [7, 9], "packed")
    many["labels"] = torch.arange(16, device=DEVICE)
    many["labelled_rows"] = torch.arange(4, device=DEVICE)
    cases = {
        "a batch has more than 3 labelled tokens (max_labels)": many,
        "a batch has more than 40 tokens": example("words", [12] * 4, "padded"),
        "a sequence has more than 12 tokens": example("words", [13], "packed"),
        "a batch has more than 5 sequences": example("words", [1] * 6, "padded"),
    }
    for reason, inputs in cases.items():
        with pytest.warns(RuntimeWarning) as warned:
            assert_same_step(model, step, inputs)
        assert reason in str(warned[0].message) and step.report.direct[reason] == 1
        step.report.direct.clear()
        with pytest.warns(RuntimeWarning):
            assert_same_step(model, step, inputs, gradient=0.5)
    few = many | {"labelled_rows": torch.arange(3, device=DEVICE)}
    assert_same_step(model, step, few)
    assert step.report.replays == {16: 1}
    monkeypatch.setenv("FASTBERT_CHECK", "1")
    with pytest.warns(RuntimeWarning, match="FASTBERT_CHECK=1"):
        assert_same_step(model, step, few)


def test_a_quarter_of_the_tokens_may_be_labelled():
    model = model_of("BertForMaskedLM")
    step, inputs = stepped(model, max_labels=None), example("rows", [12, 12, 12], "packed")
    for count in (10, 11):
        inputs["labels"] = torch.full((36,), -100, device=DEVICE).index_fill_(0, torch.arange(count, device=DEVICE), 5)
        inputs["labelled_rows"] = torch.arange(count, device=DEVICE)
        if count == 11:
            with pytest.warns(RuntimeWarning, match="more than 10 labelled tokens"):
                step(**inputs)
        else:
            step(**inputs)
    assert step.report.replays == {40: 1} and step.report.direct.total() == 1


def test_the_smallest_bucket_with_room_for_the_labels():
    model = model_of("BertForMaskedLM")
    step, inputs = stepped(model, max_labels=None), example("rows", [12], "packed")
    inputs["labels"] = torch.arange(12, device=DEVICE)
    inputs["labelled_rows"] = torch.arange(5, device=DEVICE)
    assert_same_step(model, step, inputs)
    assert step.report.replays == {40: 1} and not step.report.direct


def test_no_text_runs_the_model():
    """Some gradients are None then, which a graph would make 0."""
    model = model_of("BertForSequenceClassification")
    inputs = {"input_ids": torch.empty(2, 5, dtype=torch.int64), "attention_mask": torch.zeros(2, 5)}
    inputs = {name: x.to(DEVICE) for name, x in inputs.items()} | {"labels": torch.tensor([0, 1], device=DEVICE)}
    inputs["input_ids"].fill_(7)
    with pytest.warns(RuntimeWarning, match="a batch has no token"):
        assert_same_step(model, stepped(model), inputs)


@pytest.mark.filterwarnings("ignore:fastbert.graph")
def test_one_autocast_around_the_loop():
    """PyTorch caches casts of weights until autocast ends; a step never uses outdated ones, in a graph or directly."""
    for max_tokens in (16, 8):  # in a graph, and directly
        losses = []
        for around in (True, False):
            torch.manual_seed(3)
            model = model_of("BertForSequenceClassification", dtype=torch.float32)
            step, inputs = stepped(model, max_tokens=(max_tokens,)), example("classes", [7, 9], "packed")
            inputs["labels"] = torch.tensor([0, 1], device=DEVICE)
            optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []

            def train(times, step=step, inputs=inputs, optimizer=optimizer, found=found):
                for _ in range(times):
                    found.append(float(step(**inputs)))
                    optimizer.step()
                    optimizer.zero_grad()

            if around:
                with torch.autocast(DEVICE, dtype=torch.bfloat16):
                    train(4)
            else:
                for _ in range(4):
                    with torch.autocast(DEVICE, dtype=torch.bfloat16):
                        train(1)
            losses.append(found)
        assert losses[0] == losses[1]


@pytest.mark.filterwarnings("ignore:fastbert.graph")
def test_threads_take_turns():
    """No gradient is lost when threads call the same step, by replays or by direct runs."""
    model = model_of("BertForTokenClassification", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    step = stepped(model)
    work = [example("tokens", lengths, "packed") for lengths in ([7, 1], [12, 12], [12] * 4, [3])] * 3
    model.zero_grad()
    for inputs in work:
        model(**inputs).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    with ThreadPoolExecutor(len(work)) as pool:
        list(pool.map(lambda inputs: step(**inputs), work))
    assert_gradients(model, expected)


# ---- what is refused


def test_models_without_a_step():
    with pytest.raises(TypeError, match="given a fastbert.BertModel; expected one of fastbert.BertForPreTraining"):
        stepped(fastbert.BertModel(CONFIG))
    with pytest.raises(TypeError, match="given a fastbert.BertForMultipleChoice"):
        stepped(fastbert.BertForMultipleChoice(CONFIG))
    with pytest.raises(ValueError, match="CUDA graphs need a GPU"):
        graph(fastbert.BertForMaskedLM(CONFIG), training=True)
    with pytest.raises(RuntimeError, match="no parameter of the model requires a gradient"):
        stepped(model_of("BertForMaskedLM").requires_grad_(False))
    with pytest.raises(TypeError, match="max_labels goes with a masked LM, not BertForTokenClassification"):
        stepped(model_of("BertForTokenClassification"), max_labels=3)
    with pytest.raises(TypeError, match="max_labels goes with training=True"):
        graph(model_of("BertForMaskedLM").eval(), max_labels=3)
    with pytest.raises(TypeError, match="Own has a _loss of its own; a step takes BertForSequenceClassification's"):
        own = {"_loss": lambda *a: None}
        stepped(type("Own", (fastbert.BertForSequenceClassification,), own)(CONFIG).to(DEVICE))
    model = model_of("BertForSequenceClassification")
    model._loss = lambda *a: None
    with pytest.raises(TypeError, match="BertForSequenceClassification has a _loss of its own"):
        stepped(model)
    for sizes in ({"max_labels": 0}, {"max_labels": 2.0}, {"max_tokens": ()}, {"max_sequences": 0}):
        with pytest.raises(ValueError, match=next(iter(sizes))):
            stepped(model_of("BertForMaskedLM"), **sizes)


def test_what_a_replay_would_not_do(monkeypatch):
    """It is refused when a step is made, before each capture and, with FASTBERT_CHECK=1, in every call."""
    model, inputs = model_of("BertForMaskedLM"), example("words", [7, 9], "packed")
    step = stepped(model)

    def refused(match):
        with pytest.raises(RuntimeError, match=match):
            stepped(model)
        refused_in_calls(match)

    def refused_in_calls(match):
        for debugging in ("0", "1"):
            monkeypatch.setenv("FASTBERT_CHECK", debugging)
            with pytest.raises(RuntimeError, match=match):
                step(**inputs)

    weight = model.bert.encoder.layer[0].output.dense.weight
    for register in (
        model.bert.register_forward_hook,
        model.bert.encoder.register_full_backward_hook,
        model.bert.encoder.register_full_backward_pre_hook,
        weight.register_hook,
        weight.register_post_accumulate_grad_hook,
        torch.nn.modules.module.register_module_forward_hook,
    ):
        handle = register(print)
        refused("hooks")
        handle.remove()
    model.gradient_checkpointing_enable()
    refused("gradient checkpointing")
    model.gradient_checkpointing_disable()
    with torch.no_grad(), pytest.raises(RuntimeError, match="gradients are off"):
        step(**inputs)
    model.bert.eval()
    refused_in_calls("changed its mode")
    model.train()
    model.bert.embeddings.requires_grad_(False)
    refused_in_calls("replaced, moved or frozen")


IDS = torch.tensor([3, 99])


def test_bad_batches():
    model = model_of("BertForMaskedLM")
    step, good = stepped(model), example("rows", [7, 9], "packed")
    bad = {
        ValueError: [
            {name: x for name, x in good.items() if name not in ("labels", "labelled_rows")},
            good | {"labels": good["labels"][1:]},
            good | {"labelled_rows": torch.tensor([3, 3], device=DEVICE)},
            good | {"cu_seqlens": None},
            good | {"gradient": torch.ones(1)},
            {name: x for name, x in good.items() if name != "labels"} | {"labels": None},
            example("words", [7, 9], "padded") | {"labelled_rows": good["labelled_rows"]},
        ],
        TypeError: [
            good | {"inputs_embeds": torch.zeros(16, 48)},
            good | {"output_attentions": True},
            good | {"labels": good["labels"].float()},
            good | {"labelled_rows": [0, 1]},
            good | {"labels": good["labels"].tolist()},
            {name: x for name, x in good.items() if name != "input_ids"},
        ],
        IndexError: [
            to_device(good, "cpu") | {"labels": good["labels"].cpu() + 99},
            to_device(good, "cpu") | {"labels": torch.full(good["labels"].shape, -7)},
            to_device(good, "cpu") | {"labelled_rows": IDS},
        ],
    }
    for error, batches in bad.items():
        for inputs in batches:
            with pytest.raises(error, match="fastbert.graph|BertModel"):
                step(**inputs)
    others = {
        "BertForTokenClassification": ({"labels": IDS, "labelled_rows": IDS}, TypeError, "labelled_rows goes with a"),
        "BertForNextSentencePrediction": ({"labels": torch.tensor([0, 2])}, IndexError, r"graph: labels\[1\] is 2"),
        "BertForQuestionAnswering": ({"start_positions": torch.tensor([0, 2])}, ValueError, "expected its labels"),
        "BertForPreTraining": ({"next_sentence_label": IDS // 90, "labelled_rows": IDS}, ValueError, "packed labels"),
    }
    for name, (labels, error, words) in others.items():
        given = {"input_ids": torch.ones(2, 1, dtype=torch.int64)} | labels
        if "Token" in name:
            given["labels"] = torch.zeros(2, 1, dtype=torch.int64)
        with pytest.raises(error, match=words):
            stepped(model_of(name))(**given)
    scores = stepped(model_of("BertForSequenceClassification", "several scores"))
    with pytest.raises(ValueError, match=r"labels has shape \(2, 4\); expected \(B, num_labels\)"):
        scores(**batch([7, 9], 9), labels=torch.zeros(2, 4, device=DEVICE))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_input_on_the_host():
    """Input on the host gives the same bits as input on the device, dropout included."""
    model = model_of("BertForMaskedLM", dtype=torch.float16)
    step = graph(model, **SIZES, training=True)
    inputs, results = example("rows", [7, 9], "packed"), []
    host = to_device(inputs, "cpu")
    for given in (inputs, host):
        model.zero_grad()
        torch.manual_seed(3)
        results.append((step(**given), gradients(model)))
    (loss, one), (same, two) = results
    assert torch.equal(loss, same) and all(torch.equal(one[name], two[name]) for name in one)
