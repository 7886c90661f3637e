"""Accelerated models under torch.compile, Trainer, peft, sentence-transformers, FSDP2 and DDP."""

import copy
import warnings

import pytest
import torch
import transformers
from hf.pairs import CONFIGS, LENGTHS, SEQLEN, accelerated, assert_packed, batch, build, equal, labels, pair, visible
from small_models import DEVICE, assert_gradients, assert_like, minilm
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fastbert


@pytest.mark.slow
def test_compiled_model_is_right():
    """Forward and backward equal the original's while lengths change, with at most four compilations."""
    original = build("bert", "tokens", dropout=0.0, num_hidden_layers=1).train()
    model, report = accelerated(original)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    for lengths, seqlen in ((LENGTHS, 12), ([3, 12, 2], 12), ([4, 2, 8], 10), ([4, 2, 9], 11), ([1, 1, 2], 9)):
        inputs = batch(model, lengths, seqlen=seqlen)
        targets = labels(model, "tokens", inputs)
        results = [each(**inputs, **targets) for each in (compiled, original)]
        equal(*(visible(result, inputs) for result in results))
        for result in results:
            result.loss.backward()
    for one, two in zip(model.parameters(), original.parameters(), strict=True):
        assert (one.grad - two.grad).abs().max() <= 1e-11
    assert 1 <= counter.frame_count <= 4 and report.fallbacks == {}


@pytest.mark.parametrize("family", CONFIGS)
def test_what_is_compiled_is_fused(family, recwarn):
    """A forward that is compiled to the original computation says so."""
    _, model, _, inputs = pair(family)
    for fuses in (True, False):
        torch._dynamo.reset()
        graphs, before = [], len(recwarn)
        compiled = torch.compile(model, backend=lambda module, _, to=graphs: to.append(module.graph) or module)
        with torch.no_grad():
            compiled(**inputs)
        said = [str(each.message) for each in recwarn.list[before:] if "what is compiled" in str(each.message)]
        names = {str(node.target) for graph in graphs for node in graph.nodes}
        assert ("fastbert.embedding_fwd.default" in names) == fuses == (not said), (said, names)
        model.embeddings.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("place", ["attention.self.query", "attention.output", "output.dropout"])
def test_a_compiled_model_notices_a_forward_that_was_set_later(place):
    original, model, _, inputs = pair("bert")
    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(model, backend=lambda module, _: graphs.append(module.graph) or module)
    before = compiled(**inputs).last_hidden_state
    assert sum(node.target is nn.functional.linear for node in graphs[0].nodes) == 1  # the pooler's: the rest is fused
    for each in (original, model):
        each.encoder.layer[1].get_submodule(place).forward = lambda x, *_: torch.zeros_like(x)
    with pytest.warns(RuntimeWarning, match="has a forward of its own"):
        found, expected = (visible(each(**inputs), inputs)["last_hidden_state 0"] for each in (compiled, original))
    assert not torch.allclose(found, before[inputs["attention_mask"].bool()])
    assert torch.equal(found, expected)


def test_trainer(tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs Hugging Face's accelerate")
    _, model, report, inputs = pair("bert", "sequence", dtype=torch.float32)
    rows = [{name: tensor[i] for name, tensor in inputs.items()} | {"labels": i % 2} for i in range(3)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=3, report_to=[], use_cpu=DEVICE == "cpu", bf16=True
    )
    before = model.bert.encoder.layer[0].attention.self.query.weight.clone()
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    trainer.evaluate()
    assert_packed(report, 4)
    assert not torch.equal(before.cpu(), model.bert.encoder.layer[0].attention.self.query.weight.cpu())


@pytest.mark.parametrize("order", ["accelerate, peft", "peft, accelerate"])
def test_lora(order):
    """Adapters run on packed tokens, in either order of acceleration and LoRA, with the original's gradients."""
    peft = pytest.importorskip("peft", reason="LoRA is peft's")
    targets = ["query", "value", "dense", "word_embeddings"]
    config = peft.LoraConfig(target_modules=targets, r=4, lora_dropout=0.0, init_lora_weights=False)
    original = build("bert", "sequence", dropout=0.0).train()
    model = copy.deepcopy(original)
    torch.manual_seed(0)
    truth = peft.get_peft_model(original, config)
    torch.manual_seed(0)
    if order == "accelerate, peft":
        report = fastbert.accelerate(model)
        model = peft.get_peft_model(model, config)
    else:
        model = peft.get_peft_model(model, config)
        report = fastbert.accelerate(model)
    inputs = batch(original)
    for each in (model, truth):
        each(**inputs, labels=torch.tensor([1, 0, 1], device=DEVICE)).loss.backward()
    assert_gradients(model, truth)
    assert_packed(report)


def test_sentence_transformers_on_minilm():
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    model = library.SentenceTransformer(str(minilm()), device=DEVICE)
    texts = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.", "", "A " * 90]
    before = model.encode(texts, convert_to_tensor=True)
    report = fastbert.accelerate(model)
    after = model.encode(texts, convert_to_tensor=True)
    assert (before - after).abs().max() < 1e-5
    published = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]  # sentence-transformers' README
    assert (model.similarity(after[:3], after[:3]).cpu() - torch.tensor(published)).abs().max() < 5e-4
    assert report.packed >= 1 and report.fallbacks.total() == 0


@pytest.mark.parametrize("labels", [1, 3])
def test_cross_encoders_of_sentence_transformers(labels, tmp_path):
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    sizes = {"vocab_size": 30522, "max_position_embeddings": 64, "num_labels": labels}
    build("bert", "sequence", torch.float32, **sizes).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(minilm()).save_pretrained(tmp_path)
    model = library.CrossEncoder(str(tmp_path), device=DEVICE)
    pairs = [("a query", "short"), ("another", "and its longer document"), ("", ""), ("one", "is cut, " * 90)]
    before, exact = model.predict(pairs, convert_to_tensor=True), copy.deepcopy(model)
    exact.model.double()
    report = fastbert.accelerate(model)
    after = model.predict(pairs, convert_to_tensor=True)
    assert_like(after, exact.predict(pairs, convert_to_tensor=True), before)
    assert before.std(0).min() > 1e-3
    assert report.packed == 1 and report.fallbacks.total() == 0


@pytest.mark.parametrize("loss", ["CachedMultipleNegativesRankingLoss", "CoSENTLoss"])
def test_sentence_transformers_losses(loss, tmp_path):
    """Each loss, inside MatryoshkaLoss, has the same value and gradients with an accelerated model as before."""
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from sentence_transformers.sentence_transformer import losses, modules

    build("bert", "base", dropout=0.0, vocab_size=30522, max_position_embeddings=64).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(minilm()).save_pretrained(tmp_path)
    body = modules.Transformer(str(tmp_path), model_kwargs={"dtype": torch.float64})
    original = library.SentenceTransformer(modules=[body, modules.Pooling(48)], device=DEVICE).train()
    model = copy.deepcopy(original)
    report = fastbert.accelerate(model)
    columns = ["a short text", "another", "the third is longer than they are"], ["its pair", "is", "here, as it is"]
    scores = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64, device=DEVICE)
    options, values = {"mini_batch_size": 2} if loss.startswith("Cached") else {}, []
    for each in (original, model):
        features = [library.util.batch_to_device(each.tokenize(column), DEVICE) for column in columns]
        around = losses.MatryoshkaLoss(each, getattr(losses, loss)(each, **options), [48, 16])
        values.append(around(features, scores))
        values[-1].backward()
    assert abs(values[1] - values[0]) <= 1e-12 * values[0]
    assert_gradients(model, original)
    assert report.packed >= 2 and report.fallbacks.total() == 0


@pytest.fixture
def one_process(tmp_path):
    from torch import distributed

    if not distributed.is_available():
        pytest.skip("torch.distributed is not built")
    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo" if DEVICE == "cpu" else "nccl", init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize(("when", "lengths"), [("before", LENGTHS), ("after", LENGTHS), ("after", [SEQLEN] * 2)])
def test_fsdp2(one_process, when, lengths):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    original = build(dtype=torch.float32)
    model, mesh = copy.deepcopy(original), init_device_mesh(DEVICE, (1,))
    report = fastbert.accelerate(model) if when == "before" else None
    for module in (model.embeddings, *model.encoder.layer, model.encoder, model):
        fully_shard(module, mesh=mesh)
    report = report or fastbert.accelerate(model)
    inputs = batch(model, lengths)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*returned a view tensor")
        one = model(**inputs)
    equal(visible(one, inputs), visible(original(**inputs), inputs), bound=1e-5)
    one.last_hidden_state.sum().backward()
    assert_packed(report)


def test_ddp(one_process):
    _, model, report, inputs = pair("bert", "sequence", dtype=torch.float32, train=True)
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped(**inputs, labels=torch.tensor([1, 0, 1], device=DEVICE)).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert_packed(report)
