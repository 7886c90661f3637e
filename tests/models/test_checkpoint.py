"""Checkpoints are read and written bit for bit as by transformers; a file that does not fit changes nothing."""

import errno
import json
import os
import resource
import shutil
import stat
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from small_models import TINY, hugging_face, minilm, ours

import fastbert
from fastbert import BertConfig, BertEncoder, BertModel, checkpoint, files, hub


@pytest.fixture
def saved(tmp_path):
    """A directory written by transformers."""
    hugging_face().save_pretrained(tmp_path)
    return tmp_path


def rewrite(directory, change):
    tensors, new = load_file(directory / "model.safetensors"), directory / "new"
    save_file(change(tensors), new, metadata={"format": "pt"})
    new.replace(directory / "model.safetensors")  # models that were loaded have the old file mapped


def test_what_is_saved_is_no_view_and_two_files(tmp_path):
    """No two tensors of a state share memory. Round trips through transformers, bit for bit, are in test_family.py."""
    model = ours(hugging_face())
    model.save_pretrained(tmp_path)
    state = fastbert.hf.state_dict(model)
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(state)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype(saved, dtype):
    model = BertModel.from_pretrained(saved, dtype=dtype)
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {(dtype, True)} and not model.training
    model.save_pretrained(saved)
    assert {p.dtype for p in BertModel.from_pretrained(saved).parameters()} == {dtype}
    assert json.loads((saved / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_names_of_old_checkpoints_and_of_larger_models(saved):
    """A checkpoint may have gamma and beta, the prefix "bert.", position_ids and the parameters of heads."""
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
    with pytest.raises(ValueError, match="pytorch_model.bin holds more than tensors"):
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
ONE, MORE, QKV = (
    "encoder.layer.1.attention.self.",
    "encoder.layer.7.attention.self.",
    ("query.bias", "key.bias", "value.bias"),
)
WORDS, EXTRA = "embeddings.word_embeddings.weight", "encoder.layer.7.output.dense.bias"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without(BIAS), f"missing: {BIAS}"),
        (without(KEY), f"missing: {KEY}$"),  # though without it queries' and values' are of no use either
        (lambda t: t | {EXTRA: torch.zeros(48)}, f"unexpected: {EXTRA}"),
        (
            lambda t: t | {MORE + n: t[ONE + n].clone() for n in QKV},
            f"unexpected: {MORE}key.bias, {MORE}query.bias, {MORE}value",
        ),
        (lambda t: {f"model.{n}": x for n, x in t.items()}, "missing: .*; unexpected: model.embeddings.LayerNorm.bias"),
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


QUERY, BARE = "encoder.layer.0.attention.self.query.weight", "bert.embeddings.LayerNorm.bias"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t | {QUERY: torch.zeros(47, 48)}, rf"one shape for queries, keys and values; {QUERY}: \(47, 48\)"),
        (lambda t: t | {BARE: torch.zeros(48)}, "comes twice, by two names"),
        (lambda t: {n: x.to(torch.float8_e4m3fn) for n, x in t.items()}, "is torch.float8_e4m3fn; expected one of"),
        (lambda t: t | {WORDS: t[WORDS].bfloat16()}, "the tensors are torch.bfloat16, torch.float32; pass the dtype"),
    ],
)
def test_what_is_wrong_with_a_tensor_is_said(saved, change, words):
    rewrite(saved, change)
    with pytest.raises(RuntimeError, match=words):
        BertModel.from_pretrained(saved)


def test_tensors_of_several_dtypes_become_the_one_that_is_asked_for(saved):
    rewrite(saved, lambda tensors: tensors | {WORDS: tensors[WORDS].bfloat16()})
    assert {p.dtype for p in BertModel.from_pretrained(saved, dtype="float32").parameters()} == {torch.float32}


@pytest.mark.parametrize(("given", "dtype"), [("bfloat16", torch.bfloat16), ("auto", torch.float32)])
def test_dtypes_have_names(saved, given, dtype):
    assert {p.dtype for p in BertModel.from_pretrained(saved, dtype=given).parameters()} == {dtype}


@pytest.mark.parametrize("given", ["bf16", torch.int8, "int8", 16])
def test_other_dtypes_are_refused(saved, given):
    with pytest.raises(ValueError, match="expected 'auto' or one of torch.float32"):
        BertModel.from_pretrained(saved, dtype=given)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_what_wrappers_put_before_names_is_left_out(saved, prefix):
    expected = BertModel.from_pretrained(saved).state_dict()
    rewrite(saved, lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()})
    for name, tensor in BertModel.from_pretrained(saved).state_dict().items():
        assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize("layers", [10**9, 5000])
@pytest.mark.parametrize("kind", ["bert", "albert"])
def test_more_layers_than_the_file_has_tensors_are_not_built(saved, layers, kind):
    path = saved / "config.json"
    config = json.loads(path.read_text()) | {"model_type": kind, "num_hidden_layers": layers}
    if kind == "albert":
        config |= {"num_hidden_groups": layers, "classifier_dropout": 0.1}
    path.write_text(json.dumps(config))
    with pytest.raises((RuntimeError, ValueError), match=r"has 5000 layers; the file has fewer|at most 10000"):
        BertModel.from_pretrained(saved)


def test_deep_json_is_refused(saved):
    (saved / "config.json").write_text("[" * 10**5)
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        BertModel.from_pretrained(saved)


# ---- shards


@pytest.fixture
def sharded(tmp_path):
    directory = tmp_path / "model"
    hugging_face().save_pretrained(directory, max_shard_size="40KB")
    assert len(list(directory.glob("model-*.safetensors"))) > 2
    return directory


def test_shards_are_read_together(sharded):
    expected = transformers.BertModel.from_pretrained(sharded).state_dict()
    found = fastbert.hf.state_dict(BertModel.from_pretrained(sharded))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_missing_shards_and_names_are_said(sharded):
    index = sharded / "model.safetensors.index.json"
    names = json.loads(index.read_text())
    last = sorted(names["weight_map"].values())[-1]
    index.write_text(json.dumps({"weight_map": names["weight_map"] | {"new": last}}))
    with pytest.raises(ValueError, match="names new and 1 in all that no file holds"):
        BertModel.from_pretrained(sharded)
    save_file({"new": torch.zeros(1)}, sharded.parent / "outside.safetensors")
    for outside in ("../outside.safetensors", "nowhere.safetensors"):
        index.write_text(json.dumps({"weight_map": names["weight_map"] | {"new": outside}}))
        with pytest.raises(FileNotFoundError, match=f"names {outside}, which"):
            BertModel.from_pretrained(sharded)
    index.write_text("{}")
    with pytest.raises(ValueError, match="index.json is corrupt or truncated"):
        BertModel.from_pretrained(sharded)


# ---- by name


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """The hub's cache with one model in it, used offline."""
    from huggingface_hub import constants

    folder = tmp_path / "models--someone--small"
    revision = "0123456789abcdef0123456789abcdef01234567"
    hugging_face().save_pretrained(folder / "snapshots" / revision)
    (folder / "refs").mkdir()
    for name in ("main", "v1"):
        (folder / "refs" / name).write_text(revision)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder / "snapshots" / revision


@pytest.mark.parametrize("name", ["someone/small", "someone/small@v1"])
def test_a_model_by_its_name_comes_from_the_hub_s_cache(cached, name):
    expected = BertModel.from_pretrained(cached).state_dict()
    assert BertConfig.from_pretrained(name).hidden_size == TINY.hidden_size
    for kind in (BertModel, fastbert.AutoModel):
        state = kind.from_pretrained(name).state_dict()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in state.items())


@pytest.mark.parametrize("pickled", [False, True])
def test_weights_in_a_folder_of_sentence_transformers_come_from_the_hub_s_cache(cached, pickled):
    folder = cached / "0_Transformer"
    folder.mkdir()
    (cached / "model.safetensors").rename(folder / "model.safetensors")
    shutil.copy(cached / "config.json", folder)
    if pickled:
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    assert hub.directory_of("someone/small") == cached


def test_sharded_tensors_are_not_written(tmp_path):
    with pytest.raises(RuntimeError, match=r"a is sharded \(FSDP2\): gather"):
        checkpoint.write(tmp_path, {}, {"a": SimpleNamespace(full_tensor=None)})
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_cannot_be_had_says_how_to_get_it(cached):
    for name in ("someone/large", "bert-base-uncased", "someone/small@v2"):
        with pytest.raises(FileNotFoundError, match=rf"there is no directory {name.partition('@')[0]}.*`hf download"):
            BertModel.from_pretrained(name)
    (cached / "model.safetensors").unlink()
    assert BertConfig.from_pretrained("someone/small").hidden_size == TINY.hidden_size
    with pytest.raises(FileNotFoundError, match="has not all of someone/small: run `hf download someone/small`"):
        BertModel.from_pretrained("someone/small")
    with pytest.raises(FileNotFoundError, match="there is no directory /nowhere"):
        BertModel.from_pretrained("/nowhere")


def test_a_directory_goes_before_a_name(cached, monkeypatch, tmp_path):
    other = BertModel(TINY.changed(num_hidden_layers=1))
    other.save_pretrained(tmp_path / "here" / "someone" / "small")
    monkeypatch.chdir(tmp_path / "here")
    assert BertModel.from_pretrained("someone/small").config.num_hidden_layers == 1


def test_without_huggingface_hub_names_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match="pip install huggingface_hub"):
        BertModel.from_pretrained("someone/small")


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
        with pytest.raises((ValueError, RuntimeError), match=r"/pytorch_model.bin (is corrupt|holds)|: the "):
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
    with pytest.raises(FileNotFoundError, match="no model.safetensors and no pytorch_model.bin, nor an index"):
        BertModel.from_pretrained(saved)


def test_a_save_that_is_killed_between_its_files_leaves_one_model(tmp_path, monkeypatch):
    """The weights of one model are never read with the configuration of the other."""
    old, new = BertModel(TINY), BertModel(TINY.changed(num_attention_heads=2, hidden_act="gelu_new"))
    old.save_pretrained(tmp_path)
    replace, calls = os.replace, []

    def killed(source, target):
        calls.append(target)
        if len(calls) > until:
            raise KeyboardInterrupt
        replace(source, target)

    for until, expected in ((0, old), (1, new), (2, new)):
        calls.clear()
        monkeypatch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt) if until < 2 else nullcontext():
            new.save_pretrained(tmp_path)
        monkeypatch.setattr(os, "replace", replace)
        with pytest.warns(UserWarning, match="saving was interrupted") if until == 1 else nullcontext():
            found = BertModel.from_pretrained(tmp_path)
        assert found.config.num_attention_heads == expected.config.num_attention_heads, until
        assert found.config.hidden_act == expected.config.hidden_act
        assert torch.equal(found.encoder.layer[0].output.dense.weight, expected.encoder.layer[0].output.dense.weight)
    found.config.hidden_act = "gelu"  # an edit after a complete save counts
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("gelu_new", "gelu"))
    assert BertModel.from_pretrained(tmp_path).config.hidden_act == "gelu"


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_have_the_umask_s_mode(tmp_path, umask):
    before = os.umask(umask)
    try:
        BertModel(TINY).save_pretrained(tmp_path)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~umask}


def test_threads_may_save_to_one_directory(tmp_path):
    models = [BertModel(TINY) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda model: model.save_pretrained(tmp_path), models))
    found = BertModel.from_pretrained(tmp_path).pooler.dense.weight
    assert any(torch.equal(found, model.pooler.dense.weight) for model in models)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_what_a_killed_process_left_is_removed_a_day_later(tmp_path):
    for name in ("config.json.0123abcd.part", "model.safetensors.0123abcd.part"):
        (tmp_path / name).write_text("half")
    os.utime(tmp_path / "config.json.0123abcd.part", (0, 0))
    BertModel(TINY).save_pretrained(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors", "model.safetensors.0123abcd.part"]


@pytest.mark.parametrize("words", ["full (os error 28)", "IoError(Os { code: 28, kind: StorageFull })"])
def test_a_full_disk_in_safetensors_words_is_an_oserror_that_names_the_file(tmp_path, words):
    with pytest.raises(OSError, match="No space left on device: .*file'"), files.replacing(tmp_path / "file"):
        raise SafetensorError(words)


def test_a_full_disk_is_an_oserror_that_names_the_file(tmp_path):
    model = BertModel(TINY)
    model.save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="model.safetensors'") as raised:
            model.save_pretrained(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.errno == errno.EFBIG
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


def test_a_whole_file_comes_before_an_index(tmp_path):
    hugging_face().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    BertModel.from_pretrained(tmp_path)


def test_saving_again_and_saving_transposed_memory(tmp_path):
    model = BertModel(TINY)
    weight = model.encoder.layer[0].output.dense.weight
    weight.data = weight.data.T.contiguous().T
    for _ in range(2):
        model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = BertModel.from_pretrained(tmp_path)
    assert torch.equal(again.encoder.layer[0].output.dense.weight, weight)


def test_pickled_shards_are_read_together(saved):
    expected = BertModel.from_pretrained(saved).state_dict()
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    names = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        torch.save({name: tensors[name] for name in tensors if names[name] == file}, saved / file)
    (saved / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    found = BertModel.from_pretrained(saved).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_weights_of_a_variant_do_not_stand_for_all(cached):
    (cached / "model.safetensors").rename(cached / "model.fp16.safetensors")
    with pytest.raises(FileNotFoundError, match="run `hf download someone/small`"):
        BertModel.from_pretrained("someone/small")


def test_a_disk_that_cannot_be_written_is_no_missing_network(cached, monkeypatch):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(OSError, match="No space left on device"):
        BertModel.from_pretrained("someone/small")


def test_a_file_system_that_syncs_no_directories_is_written_to(tmp_path, monkeypatch):
    sync = os.fsync

    def picky(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", picky)
    BertModel(TINY).save_pretrained(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_a_decoder_of_its_own_matters_to_masked_lm_heads_alone(tmp_path):
    config = hugging_face().config
    config.tie_word_embeddings = False
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="initialised anew"):
        fastbert.BertForTokenClassification.from_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": True}))
    with pytest.raises(RuntimeError, match="differs from bert.embeddings.word_embeddings.weight"):
        fastbert.BertForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", [fastbert.BertForMaskedLM, fastbert.BertForTokenClassification])
def test_word_embeddings_may_be_stored_as_the_decoder_alone(tmp_path, kind):
    """Of tied tensors a file may have either name."""
    theirs = transformers.BertForMaskedLM(hugging_face().config)
    theirs.save_pretrained(tmp_path)
    name = "bert.embeddings.word_embeddings.weight"
    rewrite(
        tmp_path, lambda tensors: {{name: "cls.predictions.decoder.weight"}.get(n, n): x for n, x in tensors.items()}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the classifier, which is new
        found = kind.from_pretrained(tmp_path)
    assert torch.equal(found.bert.embeddings.word_embeddings.weight, theirs.bert.embeddings.word_embeddings.weight)
