"""Token files and loaders: no example is lost or repeated, and batches are the same after a stop, with any workers."""

import itertools
import json
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import test_datasets
import tokenizers
import torch
import transformers
from small_models import TINY
from test_datasets import BPE, WORDPIECE, both

import fastbert
from fastbert.data import (
    BatchLoader,
    BatchSizeSampler,
    MLMDataset,
    PackingCollator,
    TokenFile,
    create_classification_dataloader,
    create_dataloader,
    create_mlm_dataloader,
    read_texts,
    write_tokens,
)

PASSAGES = test_datasets.PASSAGES[:100]


def same(one, two):
    """Whether two examples or batches are equal, bit for bit."""
    return one.keys() == two.keys() and all(torch.equal(*map(torch.as_tensor, (one[k], two[k]))) for k in one)


# ---- files of text


def test_lines_of_files(tmp_path):
    (tmp_path / "a").write_bytes("\ufeffone\r\n\ntwo \u2028 é\n".encode())  # U+2028 does not end a line
    (tmp_path / "b").write_bytes(b"three")
    assert list(read_texts([tmp_path / "a", str(tmp_path / "b")])) == ["one", "", "two \u2028 é", "three"]
    assert list(read_texts(tmp_path / "b")) == ["three"]


@pytest.mark.parametrize("before", ["", "é\n", "x\n" * 100_000])
def test_what_is_not_utf_8_is_refused_with_file_and_byte(tmp_path, before):
    path = tmp_path / "latin-1.txt"
    path.write_bytes(before.encode() + b"caf\xe9 \n")
    place = len(before.encode()) + 3
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} is not UTF-8 at byte {place}: invalid"):
        list(read_texts(path))
    with pytest.raises(ValueError, match=f"at byte {place}"):
        write_tokens(path, WORDPIECE, tmp_path / "out")
    assert os.listdir(tmp_path) == ["latin-1.txt"]


# ---- files of tokens


@both
@pytest.mark.parametrize("max_length", [16, 512])
def test_a_token_file_holds_what_a_data_set_holds(tmp_path, tokenizer, max_length):
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(text.replace("\n", " ") for text in PASSAGES[50:]), encoding="utf-8")
    texts = PASSAGES[:50] + [text.replace("\n", " ") for text in PASSAGES[50:]]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"id": 7, "text": text}) for text in PASSAGES[25:50]))
    write_tokens([*PASSAGES[:25], tmp_path / "x.jsonl", lines], tokenizer, tmp_path / "tokens")
    file = TokenFile(tmp_path / "tokens", max_length)
    dataset = MLMDataset(texts, tokenizer, max_length=max_length, whole_words=True)
    assert len(file) == len(dataset) and torch.equal(file.lengths, dataset.lengths)
    for one, other in zip(file, dataset, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"]) and one["input_ids"].dtype == torch.int64
        if tokenizer is BPE:  # the same words, under other numbers
            assert torch.equal(one["word_ids"] == -1, other["word_ids"] == -1)
            edges = [words[1:] != words[:-1] for words in (one["word_ids"], other["word_ids"])]
            assert torch.equal(*edges)
    assert same(file[-1], file[len(file) - 1]) and file.tokenizer.to_str() == tokenizer.to_str()
    with pytest.raises(IndexError):
        file[len(file)]


def test_the_files_are_numpy_s(tmp_path):
    write_tokens(["a cat", "two dogs sat"], WORDPIECE, tmp_path / "tokens")
    tokens, ends = (np.load(tmp_path / "tokens" / name) for name in ("tokens.npy", "ends.npy"))
    assert tokens.tolist() == WORDPIECE.encode("a cat two dogs sat", add_special_tokens=False).ids
    assert ends.tolist() == [2, 5] and tokens.dtype == np.uint16 and ends.dtype == np.int64
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "tokens")) == 30522


def test_a_large_vocabulary_takes_wider_numbers(tmp_path):
    large = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"token{i}": i for i in range(70_000)}, "token0"))
    large.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    write_tokens(["token69999 token0"], large, tmp_path / "large")
    assert np.load(tmp_path / "large" / "tokens.npy").dtype == np.uint32
    assert TokenFile(tmp_path / "large")[0]["input_ids"].tolist() == large.encode("token69999 token0").ids


def test_a_token_file_is_pickled_by_name(tmp_path):
    file = write_tokens(PASSAGES, WORDPIECE, tmp_path / "tokens")
    len(file)
    copy = pickle.loads(pickle.dumps(file))
    assert len(pickle.dumps(file)) < 500 and all(same(a, b) for a, b in zip(file, copy, strict=True))


def test_empty_lines_are_skipped_and_counted(tmp_path):
    with pytest.warns(UserWarning, match="write_tokens: 3 of 5 texts have no token: skipped") as said:
        file = write_tokens(["a", "", " ", "\u200b", "b"], WORDPIECE, tmp_path / "tokens")
    assert len(file) == 2 and said[0].filename == __file__


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    def texts():
        yield from PASSAGES
        raise RuntimeError("the network is down")

    with pytest.raises(RuntimeError, match="the network is down"):
        write_tokens(texts(), WORDPIECE, tmp_path / "tokens")
    for nothing in ([], ["", " "]):
        with pytest.raises(ValueError, match="there is no text with tokens"):
            write_tokens(nothing, WORDPIECE, tmp_path / "tokens")
    with pytest.raises(ValueError, match="texts are names of files; expected texts, or Path"):
        write_tokens([__file__], WORDPIECE, tmp_path / "tokens")
    for wrong, words in (("a text", "texts is a str"), (["a", 1], r"texts\[1\] is a int; expected a string or a Path")):
        with pytest.raises(TypeError, match=words):
            write_tokens(wrong, WORDPIECE, tmp_path / "tokens")
    assert os.listdir(tmp_path) == []


def test_a_writer_that_is_killed_leaves_no_directory_of_that_name(tmp_path):
    code = """
import os, signal, sys
from fastbert.data import get_tokenizer, write_tokens
from fastbert.cli.demo import minilm
def texts():
    yield from ["a cat"] * 5000
    os.kill(os.getpid(), signal.SIGKILL)
write_tokens(texts(), get_tokenizer(minilm()), sys.argv[1])
"""
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path / "tokens")])
    assert run.returncode == -signal.SIGKILL
    assert not (tmp_path / "tokens").exists() and all(name.endswith(".part") for name in os.listdir(tmp_path))
    assert len(write_tokens(["a cat"], WORDPIECE, tmp_path / "tokens")) == 1  # what it left behind does no harm


def test_what_killed_writers_left_goes_after_a_day(tmp_path):
    """But nothing that others have named alike, and no directory in which a file grows."""
    names = ("tokens.01234567.part", "tokens.abcdef01.part", "tokens.backup.part", "tokens.v2.01234567.part")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokens.npy").touch()
        if name != names[1]:
            os.utime(tmp_path / name / "tokens.npy", (0, time.time() - 90000))
        os.utime(tmp_path / name, (0, time.time() - 90000))
    write_tokens(["a"], WORDPIECE, tmp_path / "tokens")
    assert sorted(os.listdir(tmp_path)) == sorted(["tokens", *names[1:]])


def test_a_missing_file_is_found_first_and_a_full_disk_names_the_file(tmp_path):
    tokens = lambda texts: write_tokens(texts, WORDPIECE, tmp_path / "tokens")  # noqa: E731
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(FileNotFoundError, match="nothing.txt"):
        tokens([tmp_path / "bad.txt", tmp_path / "nothing.txt"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*tokens\.npy'"):
            tokens("cat dog " * 100 for _ in range(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "tokens").exists()


def test_nothing_is_overwritten(tmp_path):
    write_tokens(["a"], WORDPIECE, tmp_path / "tokens")
    with pytest.raises(FileExistsError, match="expected a new directory"):
        write_tokens(["b"], WORDPIECE, tmp_path / "tokens")


def test_damaged_token_files_are_refused(tmp_path):
    directory = tmp_path / "tokens"
    with pytest.raises(FileNotFoundError, match="expected a directory of write_tokens"):
        TokenFile(directory)
    write_tokens(PASSAGES, WORDPIECE, directory)
    with pytest.raises(ValueError, match="max_length is 2; expected at least 3, with the 2 special tokens"):
        TokenFile(directory, 2)
    whole = {name: (directory / name).read_bytes() for name in ("tokens.npy", "ends.npy", "tokens.json")}
    info = json.loads(whole["tokens.json"])
    damages = [
        ("tokens.npy", whole["tokens.npy"][:-100], "tokens.npy is damaged"),
        ("ends.npy", b"", "ends.npy is damaged"),
        ("ends.npy", whole["tokens.npy"], r"ends.npy has shape \(\d+,\); expected \(100,\)"),
        ("tokens.json", json.dumps(info | {"tokens": 7}).encode(), r"tokens.npy has shape .*; expected \(7,\)"),
        ("tokens.json", b"{", "tokens.json is not valid JSON"),
        ("tokens.json", b"{}", "tokens.json lacks before"),
    ]
    for name, data, words in damages:
        (directory / name).write_bytes(data)
        with pytest.raises(ValueError, match=words):
            TokenFile(directory)
        (directory / name).write_bytes(whole[name])
    assert len(TokenFile(directory)) == 100


# ---- loaders


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_tokens(PASSAGES, BPE, tmp_path_factory.mktemp("corpus") / "tokens")


def loader(corpus, **more):
    """A loader of examples of at most 24 tokens, with whole-word masks, by a budget of tokens or by batch_size."""
    file, budget = TokenFile(corpus.directory, 24), {} if "batch_size" in more else {"max_tokens": 200}
    collator = PackingCollator(BPE, mlm_probability=0.3, whole_words=True, seed=5, packed=more.pop("packed", True))
    return create_dataloader(file, collator, seed=3, **budget | more)


def seen(batches):
    """The sequences of packed batches, unmasked and sorted."""
    rows = []
    for batch in batches:
        ids = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
        rows += [tuple(row.tolist()) for row in ids.tensor_split(batch["cu_seqlens"][1:-1].long())]
    return sorted(rows)


@pytest.mark.parametrize(
    "more", [pytest.param({}, marks=pytest.mark.slow, id="tokens"), pytest.param({"batch_size": 7}, id="examples")]
)
def test_two_ranks_of_two_workers_see_every_example_once(corpus, more):
    expected = sorted(tuple(example["input_ids"].tolist()) for example in TokenFile(corpus.directory, 24))
    ranks = [loader(corpus, rank=rank, world_size=2, num_workers=2, **more) for rank in (0, 1)]
    for epoch in (0, 1):
        for one in ranks:
            one.set_epoch(epoch)
        batches = [list(one) for one in ranks]
        assert len(batches[0]) == len(batches[1]) == len(ranks[0])
        assert seen(batches[0] + batches[1]) == expected


def test_ranks_are_those_of_torch_distributed(corpus):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    alone = loader(corpus)
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        second, whole = loader(corpus), loader(corpus, rank=0, world_size=1)
    finally:
        torch.distributed.destroy_process_group()
    assert list(second.batch_sampler) == list(loader(corpus, rank=1, world_size=2).batch_sampler)
    assert list(whole.batch_sampler) == list(alone.batch_sampler)


@pytest.mark.parametrize(
    ("stop", "workers", "later", "persistent"),
    [
        pytest.param(0, 0, 2, True, id="before the first batch", marks=pytest.mark.slow),
        pytest.param(1, 2, 0, False, id="after the first"),
        pytest.param(5, 0, 2, True, id="in between"),
        pytest.param(-1, 2, 0, False, id="at the end of the epoch", marks=pytest.mark.slow),
    ],
)
def test_a_loader_goes_on_where_it_stopped(corpus, stop, workers, later, persistent):
    one = loader(corpus, num_workers=workers)
    one.set_epoch(2)
    stop %= len(one) + 1
    taken = list(itertools.islice(one, stop))
    state = json.loads(json.dumps(one.state_dict()))
    assert (state["epoch"], state["batch"]) == (2, stop) == (2, len(taken))
    expected = loader(corpus)
    expected.set_epoch(2)
    rest = list(expected)[stop:]

    other = loader(corpus, num_workers=later, persistent_workers=persistent)
    other.load_state_dict(state)
    assert other.state_dict() == state
    other.set_epoch(2)  # as a loop over epochs does; the epoch continues
    again = list(other)
    assert len(again) == len(rest) and all(map(same, again, rest))
    assert other.state_dict()["batch"] == len(other)
    for epoch in (2, 3):  # whole epochs from now on
        other.set_epoch(epoch)
        expected.set_epoch(epoch)
        assert all(itertools.starmap(same, zip(other, expected, strict=True)))


KILLED = """
import json, os, signal, sys, pickle
from fastbert.data import PackingCollator, TokenFile, create_dataloader
directory, state, batches, die, workers = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
file = TokenFile(directory, 24)
collator = PackingCollator(file.tokenizer, mlm_probability=0.3, whole_words=True, seed=5)
loader = create_dataloader(file, collator, max_tokens=200, seed=3, num_workers=workers)
if os.path.exists(state):
    loader.load_state_dict(json.load(open(state)))
for epoch in range(loader.state_dict()["epoch"], 2):
    loader.set_epoch(epoch)
    for batch in loader:
        pickle.dump(batch, open(batches, "ab"))
        json.dump(loader.state_dict(), open(state + ".part", "w"))
        os.replace(state + ".part", state)
        if (epoch, loader.state_dict()["batch"]) == (1, die):
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_process_goes_on_with_the_same_batches(corpus, tmp_path):
    """Two workers in the first process, none in the second. Together they give an uninterrupted process's batches."""
    command = [sys.executable, "-c", KILLED, str(corpus.directory), str(tmp_path / "state"), str(tmp_path / "batches")]
    assert subprocess.run([*command, "6", "2"]).returncode == -signal.SIGKILL
    assert subprocess.run([*command, "-1", "0"]).returncode == 0
    whole, found = loader(corpus), []
    with open(tmp_path / "batches", "rb") as file:
        for epoch in (0, 1):
            whole.set_epoch(epoch)
            found += [same(batch, pickle.load(file)) for batch in whole]
        assert all(found) and len(found) > 12 and not file.read()


@pytest.mark.slow
def test_spawned_workers_that_live_on_see_the_epoch(corpus):
    """The data set, the collator and its epoch reach the workers by pickle."""
    more = {"multiprocessing_context": "spawn", "persistent_workers": True, "num_workers": 1}
    one, other = loader(corpus), loader(corpus, **more)
    for epoch in (0, 1):
        one.set_epoch(epoch)
        other.set_epoch(epoch)
        assert all(itertools.starmap(same, zip(one, other, strict=True)))


def test_states_of_other_loaders_are_refused(corpus):
    one = loader(corpus)
    next(iter(one))
    state, wider = one.state_dict(), create_dataloader(corpus, one.collate_fn, max_tokens=512, seed=3)
    for other, words in (
        (loader(corpus, batch_size=5), "sampler TokenBudgetSampler .here BatchSizeSampler."),
        (loader(corpus, shuffle=False), r"shuffle True \(here False\)"),
        (loader(corpus, rank=0, world_size=2), r"world_size 1 \(here 2\)"),
        (wider, r"examples \d+ \(here \d+\), max_tokens 200 \(here 512\)"),
        (
            create_dataloader(one.dataset, PackingCollator(), max_tokens=200, seed=3),
            r"mask_seed 5 \(here None\), mask_pr",
        ),
    ):
        before = other.state_dict()
        with pytest.raises(ValueError, match=f"the state is of another loader: .*{words}"):
            other.load_state_dict(state)
        assert other.state_dict() == before
    with pytest.raises(ValueError, match="it has no epoch and batch"):
        one.load_state_dict({name: value for name, value in state.items() if name != "epoch"})


def test_a_state_of_texts_of_other_lengths_is_refused():
    """As many examples, of the same vocabulary, by batches of examples."""
    one, same, other = (
        create_dataloader(MLMDataset(texts, BPE), PackingCollator(), 2)
        for texts in (["a b", "c"], ["b a", "d"], ["a b c d", "c"])
    )
    same.load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="the state is of another loader: lengths"):
        other.load_state_dict(one.state_dict())


def test_a_state_of_another_vocabulary_is_refused(tmp_path):
    """Only the ids of two tokens are swapped. The data are from texts, from a file, and inside other data sets."""
    other = json.loads(BPE.to_str())
    vocabulary = other["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    other = type(BPE).from_str(json.dumps(other))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=BPE)
    make = {
        "texts": lambda tokenizer: MLMDataset(PASSAGES[:9], tokenizer),
        "file": lambda tokenizer: write_tokens(PASSAGES[:9], tokenizer, tmp_path / str(len(list(tmp_path.iterdir())))),
        "subset": lambda tokenizer: torch.utils.data.Subset(MLMDataset(PASSAGES[:9], tokenizer), range(8)),
        "two": lambda tokenizer: torch.utils.data.ConcatDataset([MLMDataset(PASSAGES[:9], tokenizer)] * 2),
    }
    found = set()
    for data in make.values():
        one, again, wrong = (
            create_dataloader(data(tokenizer), PackingCollator(), 2) for tokenizer in (BPE, theirs, other)
        )
        state = one.state_dict()
        again.load_state_dict(state)
        found.add(state["vocabulary"])
        with pytest.raises(ValueError, match="another loader: vocabulary .* expected the tokenizer of that run, saved"):
            wrong.load_state_dict(state)
    assert len(found) == 1 and len(found.pop()) == 16
    assert create_dataloader([{"input_ids": [1]}], PackingCollator(), 2).state_dict()["vocabulary"] is None


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_s_generator_is_left_alone(corpus, workers):
    """Therefore a resumed run draws the same dropout as an uninterrupted one."""
    torch.manual_seed(0)
    expected = torch.get_rng_state()
    list(loader(corpus, num_workers=workers))
    assert torch.equal(torch.get_rng_state(), expected)


def test_an_iteration_that_is_left_begins_anew(corpus):
    one = loader(corpus)
    first = next(iter(one))
    assert same(next(iter(one)), first) and one.state_dict()["batch"] == 1


# ---- from texts


@both
@pytest.mark.parametrize("packed", [True, False])
def test_a_masked_lm_from_texts(tokenizer, packed):
    more = {"max_length": 40, "whole_words": True, "packed": packed, "seed": 1}
    made = create_mlm_dataloader(PASSAGES, tokenizer, 16, 0.3, **more)
    assert isinstance(made, BatchLoader) and isinstance(made.batch_sampler, BatchSizeSampler)
    batches = list(made)
    assert len(batches) == len(made) and ("cu_seqlens" in batches[0]) == packed
    rows = MLMDataset(PASSAGES, tokenizer, max_length=40, whole_words=True)
    collator = PackingCollator(tokenizer, mlm_probability=0.3, whole_words=True, packed=packed, seed=1)
    expected = [collator([rows[i] for i in batch]) for batch in BatchSizeSampler(len(rows), 16, seed=1)]
    assert all(itertools.starmap(same, zip(batches, expected, strict=True)))
    share = torch.cat([batch["labels"].flatten() != -100 for batch in batches]).sum() / rows.lengths.sum()
    assert 0.2 < share < 0.35  # of all tokens, including special ones, which have no label
    config = TINY.changed(vocab_size=30522, max_position_embeddings=40)
    assert fastbert.BertForMaskedLM(config)(**batches[0]).loss.isfinite()


@pytest.mark.parametrize("packed", [True, False])
def test_a_classifier_from_texts(packed):
    labels = [i % 3 for i in range(len(PASSAGES))]
    more = {"max_tokens": 100, "max_length": 20, "packed": packed, "shuffle": False, "num_labels": 3}
    with pytest.warns(UserWarning, match="pairs have more than max_length, 20, tokens"):
        made = create_classification_dataloader(PASSAGES, labels, WORDPIECE, pairs=PASSAGES[::-1], **more)
    batches = list(made)
    assert torch.cat([batch["labels"] for batch in batches]).tolist() == labels
    assert all(len(batch["labels"]) <= 5 for batch in batches) and "token_type_ids" in batches[0]
    model = fastbert.BertForSequenceClassification(TINY.changed(vocab_size=30522, num_labels=3))
    assert model(**batches[0]).loss.isfinite()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "batch_size is None, max_tokens is None; expected one of them"),
        ({"batch_size": 4, "max_tokens": 99}, "batch_size is 4, max_tokens is 99; expected one of them"),
        ({"batch_size": 4, "rank": 0}, "rank is 0, world_size is None; expected both or neither"),
        ({"max_tokens": 10}, r"example \d+ has \d+ tokens; expected at most max_tokens, 10"),
    ],
)
def test_loaders_that_make_no_sense_are_refused(more, words):
    with pytest.raises(ValueError, match=words):
        create_mlm_dataloader(PASSAGES, WORDPIECE, **more)


def test_data_of_another_kind_is_refused():
    stream = type("Stream", (torch.utils.data.IterableDataset,), {"__iter__": lambda self: iter(())})()
    for dataset, sizes, words in (
        (stream, {"batch_size": 4}, r"a Stream has no length; for a stream: DataLoader\(dataset"),
        (["a text"], {"max_tokens": 90}, r"dataset\[0\] is a str; expected a mapping"),
    ):
        with pytest.raises(TypeError, match=f"create_dataloader: {words}"):
            create_dataloader(dataset, PackingCollator(), **sizes)
    with pytest.raises(TypeError, match="PackingCollator: an example is a str; expected a mapping"):
        next(iter(create_dataloader(["a text"], PackingCollator(), 1)))


def test_accelerate_tells_the_epoch_of_shared_batches(corpus, accelerate):
    """With several processes it wraps the batch sampler; the order and the masks follow the epoch nevertheless."""
    prepare = accelerate.data_loader.prepare_data_loader
    shares = [prepare(loader(corpus), num_processes=2, process_index=i, even_batches=False) for i in range(2)]
    for epoch in (0, 1):
        expected = loader(corpus)
        expected.set_epoch(epoch)
        for share in shares:
            share.set_epoch(epoch)
        found = itertools.chain.from_iterable(zip(*map(list, shares), strict=False))
        assert all(same(mine, batch) for mine, batch in zip(found, expected, strict=False))


def test_accelerate_takes_a_loader(corpus, accelerate):
    prepared = accelerate.Accelerator(cpu=True).prepare(loader(corpus))
    prepared.set_epoch(1)
    expected = loader(corpus)
    expected.batch_sampler.set_epoch(1)  # as accelerate does
    assert all(itertools.starmap(same, zip(prepared, expected, strict=True)))
