"""`restore`, models within models, and what `accelerate` refuses."""

import functools
import inspect
import pickle
import sys
import typing
import warnings

import pytest
import torch
import transformers
from hf.pairs import CONFIGS, SEQLEN, SIZES, accelerated, assert_fell_back, assert_packed, batch, build, pair
from small_models import DEVICE
from torch import nn

import fastbert


@pytest.mark.parametrize("family", CONFIGS)
def test_restore_puts_everything_back(family):
    original, model, report, inputs = pair(family, "tokens")
    model(**inputs)
    fastbert.restore(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(**inputs).logits, original(**inputs).logits)
    assert report.packed == 1 and not report.active
    with pytest.raises(ValueError, match="is not accelerated"):
        fastbert.restore(model)
    again = fastbert.accelerate(model)
    model(**inputs)
    assert again is not report
    assert_packed(again)


def test_restore_under_a_wrapper_of_someone_else():
    """A wrapper put around forward later, as Hugging Face's accelerate does, stays, and then calls the original."""
    original, model, report, inputs = pair()
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    assert fastbert.accelerate(model) is report
    model(**inputs)
    assert_packed(report)
    fastbert.restore(model)
    assert torch.equal(model(**inputs)[0], original(**inputs)[0])
    assert_packed(report)


def test_restore_brings_back_a_forward_that_was_there_before():
    original = build()
    inner = original.forward
    wrapper = lambda *args, **kwargs: inner(*args, **kwargs)  # noqa: E731
    original.forward = wrapper
    fastbert.accelerate(original)
    assert original.forward is not wrapper
    fastbert.restore(original)
    assert vars(original)["forward"] is wrapper


@pytest.mark.parametrize("head", ["base", "tokens"])
def test_a_replacement_looks_like_the_function_it_stands_for(head):
    original = build("bert", head)
    model, report = accelerated(original)
    for name, module in model.named_modules():
        if "forward" not in vars(module):
            continue
        ours, theirs = module.forward, original.get_submodule(name).forward
        for attribute in ("__name__", "__qualname__", "__module__", "__doc__", "__code__", "__defaults__"):
            assert getattr(ours, attribute) == getattr(theirs, attribute), (name, attribute)
        assert inspect.signature(ours) == inspect.signature(theirs)
        assert inspect.getsource(ours) == inspect.getsource(theirs)
        assert typing.get_type_hints(ours) == typing.get_type_hints(theirs)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = model.forward.nonsense
    assert not hasattr(pickle.loads(pickle.dumps(model.forward)), "nonsense")


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("bert", "mpnet"))) for name in CONFIGS]
)
def test_torch_export_sees_the_original(family, strict):
    if strict and family == "deberta-v2":
        pytest.skip("torch.export loses tensors that the original makes behind a replaced forward")
    original, model, report, inputs = pair(family, "tokens")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        programs = [torch.export.export(each, (), inputs, strict=strict) for each in (model, original)]
    one, two = (program.module()(**inputs).logits for program in programs)
    assert torch.equal(one, two) and torch.equal(one, original(**inputs).logits)
    assert report.packed == 0


def test_accelerator_wraps_and_unwraps(accelerate):
    """Accelerator.unwrap_model binds the forward that it finds to the model a second time, which must not matter."""
    original, model, report, inputs = pair("bert", "tokens", dtype=torch.float32)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    inputs = {name: x.cpu() for name, x in inputs.items()}
    model, original = accelerator.prepare(model), original.cpu()
    assert model(**inputs).logits.dtype == torch.float32
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    full = original(**inputs).logits[inputs["attention_mask"].bool()]
    for output in (model(**inputs), model(inputs["input_ids"], inputs["attention_mask"])):
        assert (output.logits[inputs["attention_mask"].bool()] - full).abs().max() < 1e-4
    assert_packed(report, 3)
    fastbert.restore(model)
    assert torch.equal(model(**inputs).logits, original(**inputs).logits)
    assert torch.equal(model(inputs["input_ids"], inputs["attention_mask"]).logits, original(**inputs).logits)
    assert_packed(report, 3)


def test_a_model_that_was_wrapped_and_restored_may_be_accelerated_again():
    """The first replacement stays inside the wrapper, unused."""
    model, _ = accelerated(build())
    forward = model.forward
    model.forward = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))
    fastbert.restore(model)
    report = fastbert.accelerate(model)
    model(**batch(model))
    assert_packed(report)


def test_accelerating_twice_gives_the_same_report():
    model, report = accelerated(build("bert", "tokens"))
    assert fastbert.accelerate(model) is report and fastbert.accelerate(model.bert) is report
    model(**batch(model))
    assert_packed(report)
    assert list(report.replaced) == ["bert"] and report.not_replaced == {}


def test_one_of_two_models_may_be_restored():
    both = nn.ModuleDict({"one": build(), "two": build()})
    report = fastbert.accelerate(both)
    fastbert.restore(both["one"])
    for each in both.values():
        each(**batch(each))
    assert_packed(report)
    assert report.active and fastbert.accelerate(both["two"]) is report
    fastbert.restore(both)
    assert not report.active and not any("forward" in vars(module) for module in both.modules())


def test_models_may_share_embeddings():
    both = nn.ModuleDict({"one": build(), "two": build()})
    both["two"].embeddings = both["one"].embeddings
    report = fastbert.accelerate(both)
    for each in both.values():
        each(**batch(each))
    assert_packed(report, 2)
    fastbert.restore(both)
    assert not report.active and not any("forward" in vars(module) for module in both.modules())


def test_a_layer_without_attention_runs_the_original():
    class Skip(nn.Module):
        def forward(self, hidden, *_, **__):
            return hidden

    original = build()
    original.encoder.layer[1] = Skip()
    model, report = accelerated(original)
    inputs = batch(model)
    with pytest.warns(RuntimeWarning, match="a Skip computes something of its own"):
        assert torch.equal(model(**inputs)[0], original(**inputs)[0])
    assert_fell_back(report, "Skip")
    fastbert.restore(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_that_cannot_be_read_is_unchanged():
    both = nn.ModuleDict({"one": build(), "two": build()})
    del both["two"].encoder.layer
    with pytest.raises(AttributeError):
        fastbert.accelerate(both)
    assert not any("forward" in vars(module) for module in both.modules())


def gpt2():
    return transformers.GPT2Model(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9))


def test_what_is_refused():
    with pytest.raises(ValueError, match="GPT2Model .*'gpt2'.*expected one of BERT, RoBERTa"):
        fastbert.accelerate(gpt2())
    with pytest.raises(TypeError, match="holds no transformers model"):
        fastbert.accelerate(nn.Linear(2, 2))
    for function in (fastbert.accelerate, fastbert.restore):
        with pytest.raises(TypeError, match="given a str"):
            function("bert-base-uncased")
    with torch.device("meta"):
        model = transformers.BertModel(transformers.BertConfig(**SIZES))
    with pytest.raises(ValueError, match="embeddings.word_embeddings.weight is on the meta device"):
        fastbert.accelerate(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_old_transformers_are_refused(monkeypatch):
    model = build()
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    for call in (lambda: fastbert.accelerate(model), fastbert.hf.register):
        with pytest.raises(RuntimeError, match="4.57.1; expected 5.0 or newer"):
            call()
    assert "forward" not in vars(model)


def test_a_subclass_with_its_own_forward_is_not_taken_for_bert():
    class Mine(transformers.BertModel):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    with pytest.raises(ValueError, match="Mine .*'bert'.* has a forward of its own in place of BertModel's"):
        fastbert.accelerate(Mine(transformers.BertConfig(**SIZES)))


def test_other_models_inside_are_reported():
    both = nn.ModuleDict({"one": build("bert", "tokens"), "two": gpt2()})
    report = fastbert.accelerate(both)
    assert list(report.replaced) == ["one.bert"] and list(report.not_replaced) == ["two"]
    assert "gpt2" in report.not_replaced["two"]


def test_models_within_a_replaced_one_are_parts_of_it():
    model = build("bert", "tokens")
    model.bert.embeddings.other = gpt2()
    report = fastbert.accelerate(model)
    assert list(report.replaced) == ["bert"] and not report.not_replaced


def test_bad_input_is_said_and_changes_nothing():
    _, model, report, inputs = pair("bert", "tokens")
    with pytest.raises(ValueError, match=r"attention_mask has shape \(3, 9\); expected .* \(3, 12\)"):
        model(inputs["input_ids"], attention_mask=inputs["attention_mask"][:, :9])
    with pytest.raises(IndexError, match="out of"):
        model(**inputs, labels=torch.full((3, SEQLEN), 7, device=DEVICE))
    with pytest.raises(IndexError, match=r"input_ids.* is 99; expected 0 <= input_ids < 99"):
        model(torch.full((3, SEQLEN), 99, device=DEVICE), attention_mask=inputs["attention_mask"])
    with pytest.warns(RuntimeWarning), pytest.raises(ValueError, match="exactly one of input_ids"):
        model()
    model(**inputs)
    assert report.packed == 2  # the call with wrong labels, and the last one
