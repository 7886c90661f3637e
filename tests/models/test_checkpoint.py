"""Checkpoints in and out: bit for bit with transformers, and nothing changes when a file does not fit."""

import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from small_models import DEVICE, TINY, batch, hugging_face, minilm, ours

import fastbert
from fastbert import BertConfig, BertEncoder, BertModel, checkpoint


@pytest.fixture
def saved(tmp_path):
    """A directory written by transformers."""
    hugging_face().save_pretrained(tmp_path)
    return tmp_path


def rewrite(directory, change):
    tensors = load_file(directory / "model.safetensors")
    save_file(change(tensors), directory / "model.safetensors", metadata={"format": "pt"})


def test_round_trip_through_transformers_is_bit_for_bit(tmp_path):
    theirs = hugging_face()
    model = ours(theirs)
    model.save_pretrained(tmp_path)
    back = transformers.BertModel.from_pretrained(tmp_path).to(DEVICE)
    expected = theirs.state_dict()
    assert back.state_dict().keys() == expected.keys() == fastbert.hf.state_dict(model).keys()
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, expected[name]) and torch.equal(fastbert.hf.state_dict(model)[name], tensor), name
    assert back.config.num_attention_heads == TINY.num_attention_heads
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_from_pretrained_reads_what_transformers_writes(saved):
    theirs = transformers.BertModel.from_pretrained(saved).to(DEVICE)
    model = BertModel.from_pretrained(saved).to(DEVICE)
    inputs = batch([3, 5], 5)
    visible = inputs["attention_mask"].bool()
    one, two = model(**inputs).last_hidden_state, theirs(**inputs).last_hidden_state
    assert not model.training and (one - two)[visible].abs().max() < 1e-5
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype(saved, dtype):
    assert {p.dtype for p in BertModel.from_pretrained(saved, dtype=dtype).parameters()} == {dtype}
    BertModel.from_pretrained(saved, dtype=dtype).save_pretrained(saved)
    assert {p.dtype for p in BertModel.from_pretrained(saved).parameters()} == {dtype}
    assert json.loads((saved / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_names_of_old_checkpoints_and_of_larger_models(saved):
    """gamma and beta, a bert. prefix, position_ids, heads."""
    expected = BertModel.from_pretrained(saved).state_dict()

    def old(tensors):
        renamed = {
            "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
            for name, t in tensors.items()
        }
        extra = {"bert.embeddings.position_ids": torch.arange(32)[None], "cls.predictions.bias": torch.zeros(99)}
        extra["linear.weight"] = torch.zeros(3, 48)  # a custom head
        return renamed | extra

    rewrite(saved, old)
    for name, tensor in BertModel.from_pretrained(saved).state_dict().items():
        assert torch.equal(tensor, expected[name])


def test_pickled_checkpoints_hold_tensors_only(saved):
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    torch.save(tensors, saved / "pytorch_model.bin")
    BertModel.from_pretrained(saved)
    torch.save({"weights": print}, saved / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin is corrupt or truncated"):
        BertModel.from_pretrained(saved)


def test_without_pooler(saved):
    rewrite(saved, lambda tensors: {n: t for n, t in tensors.items() if "pooler" not in n})
    with pytest.raises(RuntimeError, match="the checkpoint has no pooler; pass add_pooling_layer=False"):
        BertModel.from_pretrained(saved)
    model = BertModel.from_pretrained(saved, add_pooling_layer=False)
    assert model(torch.ones(1, 3).long()).pooler_output is None


def without(name):
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


BIAS, KEY = "encoder.layer.1.output.dense.bias", "encoder.layer.1.attention.self.key.bias"
WORDS, EXTRA = "embeddings.word_embeddings.weight", "encoder.layer.7.output.dense.bias"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without(BIAS), f"missing: {BIAS}"),
        (without(KEY), f"missing: {KEY}"),
        (lambda t: t | {EXTRA: torch.zeros(48)}, f"unexpected: {EXTRA}"),
        (lambda t: t | {WORDS: torch.zeros(98, 48)}, rf"wrong shape: {WORDS}: \(98, 48\), expected \(99, 48\)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(saved, change, words):
    rewrite(saved, change)
    with pytest.raises(RuntimeError, match=words):
        BertModel.from_pretrained(saved)
    model = BertModel(TINY)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=words):
        model.load_state_dict(load_file(saved / "model.safetensors"))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items()), "a weight changed"


@pytest.mark.parametrize("size", [0, 7, 200, -100])
def test_a_truncated_file_is_refused(saved, size):
    data = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(data[:size])
    with pytest.raises(ValueError, match="model.safetensors is corrupt or truncated"):
        BertModel.from_pretrained(saved)


def test_a_corrupt_header_is_refused(saved):
    data = bytearray((saved / "model.safetensors").read_bytes())
    data[8:40] = b"\xff" * 32
    (saved / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="corrupt or truncated"):
        BertModel.from_pretrained(saved)


@pytest.mark.parametrize("content", [[1], {"state_dict": {}}, {1: torch.zeros(1)}, "text"])
def test_a_pickle_that_holds_no_state_dict_is_refused(saved, content):
    (saved / "model.safetensors").unlink()
    torch.save(content, saved / "pytorch_model.bin")
    with pytest.raises((ValueError, RuntimeError), match="holds no state dict|does not fit|no pooler"):
        BertModel.from_pretrained(saved)


def test_a_damaged_pickle_is_refused(saved):
    """Whatever a damaged byte makes the unpickler raise, the message names the file."""
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    torch.save({"w": tensors["pooler.dense.bias"]}, saved / "pytorch_model.bin")
    data = (saved / "pytorch_model.bin").read_bytes()
    for at in range(0, len(data), 37):
        damaged = bytearray(data)
        damaged[at] ^= 0xFF
        (saved / "pytorch_model.bin").write_bytes(damaged)
        with pytest.raises((ValueError, RuntimeError), match="corrupt or truncated|holds no state dict|no pooler"):
            BertModel.from_pretrained(saved)


def test_tied_parameters_are_written_twice(tmp_path):
    model = ours(hugging_face())
    model.encoder.layer[1].intermediate.dense.weight = model.encoder.layer[0].intermediate.dense.weight
    model.save_pretrained(tmp_path)
    state = BertModel.from_pretrained(tmp_path).encoder.layer
    assert torch.equal(state[0].intermediate.dense.weight, state[1].intermediate.dense.weight)


def test_old_names_inside_another_module():
    theirs = hugging_face().to("cpu")
    state = {f"bert.{n.replace('LayerNorm.weight', 'LayerNorm.gamma')}": t for n, t in theirs.state_dict().items()}
    state["bert.embeddings.position_ids"] = torch.arange(32)[None]
    wrapper = torch.nn.ModuleDict({"bert": BertModel(TINY)})
    wrapper.load_state_dict(state)
    expected = theirs.embeddings.LayerNorm.weight
    assert torch.equal(wrapper["bert"].embeddings.LayerNorm.weight, expected)


def test_missing_files(tmp_path, saved):
    with pytest.raises(FileNotFoundError):
        BertModel.from_pretrained(tmp_path / "nowhere")
    (saved / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor pytorch_model.bin"):
        BertModel.from_pretrained(saved)


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    model = ours(hugging_face())
    model.save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def full(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before and len(os.listdir(tmp_path)) == 2


def test_the_encoder_loads_by_either_name_and_inside_other_modules():
    theirs, encoder = hugging_face().to("cpu"), BertEncoder(TINY)
    encoder.load_state_dict(theirs.encoder.state_dict())
    other = torch.nn.ModuleDict({"body": BertEncoder(TINY)})
    other.load_state_dict({f"body.{name}": t for name, t in theirs.encoder.state_dict().items()})
    again = BertEncoder(TINY)
    again.load_state_dict(encoder.state_dict())
    for one in (other["body"], again):
        assert all(torch.equal(t, encoder.state_dict()[name]) for name, t in one.state_dict().items())
    assert encoder.load_state_dict({}, strict=False).missing_keys


def test_minilm_round_trip(tmp_path):
    model = BertModel.from_pretrained(minilm())
    model.save_pretrained(tmp_path)
    original, copy = load_file(minilm() / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    original.pop("embeddings.position_ids", None)
    assert original.keys() == copy.keys() and all(torch.equal(t, copy[name]) for name, t in original.items())
    assert BertConfig.from_pretrained(tmp_path).to_dict().items() >= {"hidden_size": 384, "use_cache": True}.items()
