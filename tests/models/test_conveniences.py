"""What people expect of a model class: its device and dtype, its vocabulary, recomputation, outputs by key."""

import copy
import io

import numpy
import pytest
import torch
import transformers
from small_models import DEVICE, TINY, batch

import fastbert
from fastbert import BertForMaskedLM, BertForPreTraining, BertForSequenceClassification, BertModel
from fastbert.heads import HEADS

CLASSES = [BertModel, BertForMaskedLM, BertForPreTraining, BertForSequenceClassification]


def result(model, inputs):
    """The last hidden state, or the logits."""
    return model(**inputs)[0 if type(model) is BertModel else 1]


@pytest.mark.parametrize("kind", CLASSES)
def test_device_dtype_and_parameters(kind):
    model = kind(TINY).to(DEVICE, torch.bfloat16)
    assert model.device.type == DEVICE and model.dtype == torch.bfloat16
    assert model.num_parameters() == sum(p.numel() for p in model.parameters())
    tables = sum(table.weight.numel() for table in model.modules() if isinstance(table, torch.nn.Embedding))
    assert tables and model.num_parameters(exclude_embeddings=True) == model.num_parameters() - tables
    model.get_input_embeddings().weight.requires_grad_(False)
    assert model.num_parameters(only_trainable=True) == model.num_parameters() - 99 * 48
    prepared = fastbert.prepare(kind(TINY).eval(), "int8")
    assert prepared.num_parameters() == model.num_parameters() and prepared.num_parameters(only_trainable=True) == 0


@pytest.mark.parametrize("rows", [120, 50])
@pytest.mark.parametrize("kind", CLASSES)
def test_resize_token_embeddings(kind, rows, tmp_path):
    config = copy.deepcopy(TINY)
    model = kind(config).to(DEVICE).eval()
    inputs = batch([5, 9], 9, vocabulary=min(rows, 99))
    before = result(model, inputs)
    old = model.get_input_embeddings().weight.detach().clone()
    table = model.resize_token_embeddings(rows)
    kept = min(rows, 99)
    assert table is model.get_input_embeddings() and table.weight.shape == (rows, 48)
    assert torch.equal(table.weight[:kept], old[:kept]) and model.config.vocab_size == rows and config.vocab_size == 99
    if rows > 99:
        assert 0.01 < table.weight[99:].std() < 0.03
    after = result(model, inputs)
    assert torch.equal(after[..., :kept] if after.shape != before.shape else after, before[..., : after.shape[-1]])
    model.save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path).to(DEVICE)
    assert torch.equal(result(again, inputs), after)
    result(model.train(), inputs).sum().backward()
    assert table.weight.grad is not None
    assert not model.requires_grad_(False).resize_token_embeddings(kept).weight.requires_grad  # a frozen table stays so


def test_a_vocabulary_that_makes_no_sense_is_refused_and_changes_nothing():
    model = BertForMaskedLM(TINY.changed(pad_token_id=98))
    for rows in (0, -3, 2.5, 98):  # 98: pad_token_id would be outside
        with pytest.raises(ValueError, match="vocab_size|pad_token_id"):
            model.resize_token_embeddings(rows)
    assert model.config.vocab_size == 99 and model.get_input_embeddings().weight.shape[0] == 99


@pytest.mark.parametrize("arguments", [None, {"use_reentrant": True}, {"use_reentrant": False}])
@pytest.mark.parametrize("kind", [BertModel, BertForMaskedLM])
def test_gradient_checkpointing_computes_the_same(kind, arguments):
    """With dropout, a layer that is computed again drops the same elements; layers really run twice."""
    model = kind(TINY.changed(hidden_dropout_prob=0.3)).to(DEVICE, torch.float64).train()
    inputs, runs, results = batch([5, 9], 9), [], []
    for turn, layer in enumerate(model._body.encoder.layer):
        layer.register_forward_pre_hook(lambda *_, turn=turn: runs.append(turn))
    for enabled in (False, True):
        if enabled:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
        model.zero_grad()
        runs.clear()
        torch.manual_seed(3)
        result(model, inputs).square().sum().backward()
        assert sorted(runs * (2 - enabled)) == [0, 0, 1, 1, 2, 2]
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(map(torch.equal, *results))
    model.eval()(**inputs)
    runs.clear()
    model.train().gradient_checkpointing_enable(arguments, every_n_layers=2)
    result(model, inputs).sum().backward()
    assert sorted(runs) == [0, 0, 1, 2, 2]
    for wrong in ({"every_n_layers": 0}, {"offload": True}):
        with pytest.raises(ValueError, match="gradient_checkpointing_enable: every_n_layers is"):
            model.gradient_checkpointing_enable(**wrong)
    model.gradient_checkpointing_disable()
    runs.clear()
    result(model, inputs).sum().backward()
    assert sorted(runs) == [0, 1, 2]


@pytest.mark.parametrize("kind", [BertModel, *(head for head in HEADS if head.kind in TINY.family.heads)])
def test_outputs_by_position_name_and_key(kind):
    model = kind(TINY).eval()
    ids = torch.ones(1, 2, 3, dtype=torch.long) if kind.kind == "ForMultipleChoice" else torch.ones(2, 3).long()
    output = model(ids, output_hidden_states=True)
    for index, name in enumerate(output._fields):
        assert output[name] is output[index] is getattr(output, name) and (name in output) == (output[name] is not None)
    assert "nonsense" not in output
    assert all(field is not None for field in output[:])
    with pytest.raises(KeyError, match="has no 'nonsense'; expected one of"):
        output["nonsense"]


OUTPUTS = [getattr(fastbert, name) for name in fastbert.__all__ if name.endswith("Output")]


class Outputs(torch.nn.Module):
    def forward(self, x):
        return tuple(kind(x) for kind in OUTPUTS)


def test_outputs_are_saved_with_an_exported_program():
    file, x = io.BytesIO(), torch.ones(2)
    torch.export.save(torch.export.export(Outputs(), (x,)), file)
    file.seek(0)
    found = torch.export.load(file).module()(x)
    assert [type(output) for output in found] == [type(output) for output in Outputs()(x)]
    assert all(torch.equal(output[0], x) for output in found)


def test_transformers_trainer_switches_recomputation_on(tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs Hugging Face's accelerate")
    model = BertForSequenceClassification(TINY)
    arguments = transformers.TrainingArguments(
        tmp_path, gradient_checkpointing=True, max_steps=1, report_to=[], use_cpu=True, save_strategy="no"
    )
    rows = [{"input_ids": [1, 2, 3], "labels": 1}] * 4
    transformers.Trainer(model, arguments, train_dataset=rows).train()
    assert model.bert.encoder.recomputing == (1, {"use_reentrant": False})


@pytest.mark.parametrize("kind", [head for head in HEADS if head.kind in TINY.family.heads])
def test_labels_that_are_no_tensor_are_refused_by_name(kind):
    ids = torch.ones(1, 2, 3, dtype=torch.long) if kind.kind == "ForMultipleChoice" else torch.ones(2, 3).long()
    names = ("start_positions", "end_positions") if kind.kind == "ForQuestionAnswering" else ("labels",)
    with pytest.raises(TypeError, match=rf"{kind.__name__}: {names[0]} is a?.*list; expected"):
        kind(TINY)(ids, **dict.fromkeys(names, [1, 1]))


def test_numpy_s_integers_are_integers():
    model, cu_seqlens = BertModel(TINY).eval(), torch.tensor([0, 3, 5], dtype=torch.int32)
    ids = torch.arange(5)
    one, two = (model(ids, cu_seqlens=cu_seqlens, max_seqlen=n)[0] for n in (3, numpy.int64(3)))
    assert torch.equal(one, two)
    with pytest.raises(TypeError, match="max_seqlen is a float64; expected an int"):
        model(ids, cu_seqlens=cu_seqlens, max_seqlen=numpy.float64(3))


@pytest.mark.parametrize("value", [torch.inf, torch.nan, -torch.inf])
def test_infinity_and_nan_are_no_mask_s(value):
    mask = torch.ones(2, 3)
    mask[0, 1] = value
    with pytest.raises(ValueError, match="no key-padding mask"):
        BertModel(TINY)(torch.ones(2, 3).long(), mask)


def test_a_resized_vocabulary_keeps_dtype_and_mode():
    model = BertModel(TINY).bfloat16().eval()
    table = model.resize_token_embeddings(120)
    assert table.weight.dtype == torch.bfloat16 and not table.training
    fastbert.prepare(model, "fp32")


def test_initializer_range_is_that_of_embeddings_too():
    model = BertModel(TINY.changed(initializer_range=0.3))
    assert 0.2 < model.embeddings.position_embeddings.weight.std() < 0.4


def test_a_batch_of_padding_alone():
    ids = torch.ones(2, 5, dtype=torch.int64)
    out = BertModel(TINY).eval()(ids, torch.zeros_like(ids), output_attentions=True)
    assert not out.last_hidden_state.any()
    assert all(weights.shape == (2, TINY.num_attention_heads, 5, 5) and not weights.any() for weights in out.attentions)
