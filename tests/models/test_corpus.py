"""Corpora are embedded to Parquet, every text once and in order, however often the job is ended; then searched."""

import csv
import gzip
import json
import pickle
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from serving.served import TEXTS, save_models
from small_models import sentence_encoder

from fastbert import cli
from fastbert.data.rows import texts_of_file
from fastbert.inference import Dense, EmbeddedCorpus, SentenceEncoder, embed_corpus
from fastbert.inference.fingerprint import fingerprint
from fastbert.inference.vectors import nearest

arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

RNG = random.Random(0)
WORDS = " ".join(TEXTS).split()
CORPUS = list(dict.fromkeys(" ".join(RNG.choices(WORDS, k=RNG.randint(2, 6))) for _ in range(60)))[:52]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models")) / "sentences"


@pytest.fixture(scope="module")
def encoder(directory):
    return SentenceEncoder.from_pretrained(directory)


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "corpus.txt", CORPUS)


def write(path, texts):
    """Writes the format that the name ends in; all formats but plain lines of text get a second column."""
    rows = [{"number": number, "text": text} for number, text in enumerate(texts)]
    if path.suffix == ".parquet":
        parquet.write_table(arrow.Table.from_pylist(rows), path)
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="") as out:
            writer = csv.DictWriter(out, ["number", "text"], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    else:
        lines = [json.dumps(row) for row in rows] if ".jsonl" in path.name else texts
        data = "".join(line + "\n" for line in lines).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != ".lock"}


# ---- the job


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.jsonl.gz", "x.csv", "x.tsv", "x.parquet", "x"])
def test_every_text_once_and_in_order(encoder, tmp_path, name):
    seen = []
    texts = write(tmp_path / name, CORPUS)
    corpus = embed_corpus(encoder, texts, tmp_path / "out", shard_rows=20, progress=seen.append)
    assert len(corpus) == len(CORPUS) == sum(seen) and len(corpus.parts) == 3
    assert corpus.texts(range(len(CORPUS))) == CORPUS
    table = arrow.concat_tables(parquet.read_table(part) for part in corpus.parts)
    assert table["row"].to_pylist() == list(range(len(CORPUS)))
    assert table.schema.field("embedding").type == arrow.list_(arrow.float32(), encoder.width)
    expected = torch.cat([encoder.encode(CORPUS[first : first + 20]) for first in (0, 20, 40)])
    assert torch.equal(torch.cat([corpus.vectors(part) for part in corpus.parts]), expected)
    assert np.array_equal(np.array(table["embedding"].to_pylist(), np.float32), expected.numpy())


def test_several_files_prompts_and_smaller_vectors(encoder, tmp_path):
    files = [write(tmp_path / "a.csv", CORPUS[:9]), write(tmp_path / "b.jsonl", CORPUS[9:])]
    corpus = embed_corpus(encoder, files, tmp_path / "out", prompt_name="query", precision="float16", keep_texts=False)
    (part,) = corpus.parts
    assert torch.equal(corpus.vectors(part), encoder.encode(CORPUS, prompt_name="query").half())
    assert parquet.read_schema(part).names == ["row", "embedding"]
    with pytest.raises(ValueError, match="has no texts"):
        corpus.texts([0])


def test_what_was_ended_anywhere_goes_on_to_the_same_files(encoder, file, tmp_path, monkeypatch):
    embed_corpus(encoder, file, tmp_path / "whole", shard_rows=7)
    encode, calls, rng = encoder.encode, 0, random.Random(0)

    def ends(*args, **options):
        nonlocal calls
        calls += 1
        if rng.random() < 0.6:
            raise KeyboardInterrupt
        return encode(*args, **options)

    monkeypatch.setattr(encoder, "encode", ends)
    for _ in range(100):
        try:
            embed_corpus(encoder, file, tmp_path / "ended", shard_rows=7)
            break
        except KeyboardInterrupt:
            with pytest.raises(ValueError, match="not complete"):
                EmbeddedCorpus(tmp_path / "ended")
    assert calls > 8
    assert files_of(tmp_path / "ended") == files_of(tmp_path / "whole")
    computed = calls
    embed_corpus(encoder, file, tmp_path / "ended", shard_rows=7)
    assert calls == computed  # everything was there already


@pytest.mark.slow
def test_killed_at_twenty_moments(directory, tmp_path):
    file = write(tmp_path / "corpus.jsonl", CORPUS * 400)
    command = [sys.executable, "-m", "fastbert.cli", "embed", str(file), "--model", str(directory)]
    command += ["--shard-rows", "512", "--threads", "1", "--output"]
    start = time.monotonic()
    subprocess.run([*command, str(tmp_path / "whole")], check=True, capture_output=True)
    took, rng, kills = time.monotonic() - start, random.Random(1), 0
    while True:
        process = subprocess.Popen([*command, str(tmp_path / "killed")], stderr=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            _, said = process.communicate(timeout=None if kills == 20 else took * rng.uniform(0.3, 1.0))
            assert process.returncode == 0, said
            if kills == 20:
                break
            for part in rng.sample(sorted((tmp_path / "killed").glob("part-*")), 9):  # not killed: redo 9
                part.unlink()
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            kills += 1
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda file: {"prompt": "about: "}, "another prompt: '', now 'about: '"),
        (lambda file: {"precision": "float16"}, "another precision"),
        (lambda file: {"shard_rows": 8}, "another shard_rows: 7, now 8"),
        (lambda file: {"keep_texts": False}, "another keep_texts"),
        (
            lambda file: {"files": write(file.with_name("other.txt"), CORPUS)},
            r"other files: .* bytes, \w+\), now other.txt \(",
        ),
        (lambda file: {"files": write(file, [*CORPUS[:-1], CORPUS[-1].upper()])}, "other files"),
        (lambda file: {"max_length": 9}, "another encoder"),
    ],
)
def test_another_job_is_refused(directory, encoder, file, tmp_path, change, says):
    embed_corpus(encoder, file, tmp_path / "out", shard_rows=7)
    before = files_of(tmp_path / "out")
    options = {"files": file, "shard_rows": 7} | change(file)
    if "max_length" in options:
        encoder = SentenceEncoder.from_pretrained(directory, max_length=options.pop("max_length"))
    with pytest.raises(ValueError, match=says):
        embed_corpus(encoder, options.pop("files"), tmp_path / "out", **options)
    assert files_of(tmp_path / "out") == before


def test_what_is_not_right_is_refused(encoder, file, tmp_path):
    out = tmp_path / "out"
    embed_corpus(encoder, file, out, shard_rows=20)
    part = out / "part-00001.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[:-50])
    with pytest.raises(ValueError, match="part-00001.parquet is missing or damaged: .*delete it"):
        embed_corpus(encoder, file, out, shard_rows=20)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    part.write_bytes(flipped)
    with pytest.raises(ValueError, match="part-00001.parquet is missing or damaged: .*delete it"):
        EmbeddedCorpus(out).search(encoder, encoder.encode(TEXTS), 1)
    part.write_bytes((out / "part-00002.parquet").read_bytes())
    with pytest.raises(ValueError, match="1.parquet has 12 rows from 40 on, .*; expected 20 from 20 on, 48 numbers"):
        embed_corpus(encoder, file, out, shard_rows=20)
    part.unlink()
    with pytest.raises(ValueError, match="part-00001.parquet is missing"):
        EmbeddedCorpus(out).search(encoder, encoder.encode(TEXTS), 1)
    embed_corpus(encoder, file, out, shard_rows=20)
    assert part.read_bytes() == whole
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").unlink()
    with pytest.raises(ValueError, match="no manifest.json"):
        embed_corpus(encoder, file, out, shard_rows=20)
    with pytest.raises(FileNotFoundError, match="no manifest.json"):
        EmbeddedCorpus(out)
    (out / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="manifest.json is damaged"):
        EmbeddedCorpus(out)
    for change, words in (({"rows": "80"}, "damaged: rows is '80'"), ({"shard_rows": 0}, "damaged: shard_rows is 0")):
        (out / "manifest.json").write_text(json.dumps(manifest | change))
        with pytest.raises(ValueError, match=f"manifest.json is {words}"):
            EmbeddedCorpus(out)
    with pytest.raises(ValueError, match="precision is 'int8'"):
        embed_corpus(encoder, file, tmp_path / "new", precision="int8")
    with pytest.raises(ValueError, match="holds no text"):
        embed_corpus(encoder, write(tmp_path / "empty.txt", []), tmp_path / "new")


def test_a_run_without_a_part_binds_nobody(encoder, file, tmp_path):
    bad, out = write(tmp_path / "bad.jsonl", [1]), tmp_path / "out"
    with pytest.raises(ValueError, match="line 1 of"):
        embed_corpus(encoder, bad, out)
    assert len(embed_corpus(encoder, file, out)) == len(CORPUS)
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "manifest.json").write_text('{"of": "somebody else"}')
    with pytest.raises(ValueError, match="manifest.json is not of embeddings"):
        embed_corpus(encoder, file, tmp_path / "else")
    assert (tmp_path / "else" / "manifest.json").read_text() == '{"of": "somebody else"}'


def test_one_process_at_a_time(encoder, file, tmp_path):
    seen = []

    def again(count):
        if not seen:
            seen.append(count)
            with pytest.raises(RuntimeError, match="another run writes"):
                embed_corpus(encoder, file, tmp_path / "out")

    embed_corpus(encoder, file, tmp_path / "out", progress=again)
    assert seen


def test_fewer_numbers(encoder, file, tmp_path):
    corpus = embed_corpus(encoder, file, tmp_path / "out", shard_rows=20, truncate_dim=24)
    assert corpus.width == 24
    assert torch.equal(corpus.vectors(corpus.parts[0]), encoder.encode(CORPUS[:20], truncate_dim=24))
    with pytest.raises(ValueError, match="another width: 24, now 12"):
        embed_corpus(encoder, file, tmp_path / "out", shard_rows=20, truncate_dim=12)


def test_files_that_change_meanwhile(encoder, tmp_path):
    file = write(tmp_path / "corpus.txt", CORPUS)
    with pytest.raises(ValueError, match="the files changed while they were read"):
        embed_corpus(encoder, file, tmp_path / "out", progress=lambda count: write(file, [*CORPUS, "more"]))
    with pytest.raises(ValueError, match="not complete"):
        EmbeddedCorpus(tmp_path / "out")


def test_a_configuration_that_the_weights_do_not_show_is_another_encoder(encoder):
    config = encoder.model.config
    changed = config.changed(num_attention_heads=config.num_attention_heads // 2)
    model = type(encoder.model)(changed, add_pooling_layer=False)
    model.load_state_dict(encoder.model.state_dict())
    one, other = (fingerprint(SentenceEncoder(given, encoder.tokenizer)) for given in (encoder.model, model))
    assert one != other


def test_other_dense_layers_are_another_encoder():
    one, other = (sentence_encoder(dense=[Dense(48, 8)]) for _ in range(2))
    other.dense[0].linear.load_state_dict(one.dense[0].linear.state_dict())
    assert fingerprint(one) == fingerprint(other)
    other.dense[0].linear.weight.data[0, 0] += 1
    assert fingerprint(one) != fingerprint(other)


def test_an_encoder_that_was_saved_is_the_same(tmp_path):
    made = sentence_encoder()
    made.save_pretrained(tmp_path)
    assert fingerprint(SentenceEncoder.from_pretrained(tmp_path)) == fingerprint(made)


# ---- files


@pytest.mark.parametrize(
    "name, data, says",
    [
        ("x.csv", "a,text\n1,b\n2\n", "row 2 of .*x.csv has fewer fields"),
        ("x.csv", "a,text\n1,b,c\n", "row 1 of .*x.csv has more fields"),
        ("x.csv", 'a,text\n1,b\n1,"b\n', "row 2 of .*x.csv is no CSV"),
        ("x.csv", "a,b\n1,2\n", "row 1 of .*x.csv has no column 'text'"),
        ("x.jsonl", '{"text": "a"}\n{"text": 3}\n', "line 2 of .*x.jsonl has a int"),
        ("x.jsonl", '{"text": null}\n', "line 1 of .*x.jsonl has null"),
        ("x.jsonl", '["text"]\n', "line 1 of .*x.jsonl has no column 'text'"),
        ("x.jsonl", '{"text"\n', "line 1 of .*x.jsonl is no JSON"),
        ("x.jsonl", "[" * 100_000, "line 1 of .*x.jsonl is no JSON"),
        ("x.jsonl", '{"text": "a"}\n{"text": "\\ud800"}\n', "line 2 of .*x.jsonl: text is not text at character 0"),
        ("x.CSV", "a,b\n1,2\n", "row 1 of .*x.CSV has no column 'text'"),
        ("x.TSV.GZ", gzip.compress(b"a\ttext\n1\n", mtime=0), "row 1 of .*x.TSV.GZ has fewer fields"),
        ("x.txt", b"good\nb\xffd\n", "x.txt is not UTF-8 at byte 6"),
        ("x.parquet", "text", "x.parquet is no Parquet"),
        ("x.txt.gz", "text", "x.txt.gz is damaged"),
    ],
)
def test_damaged_files(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(ValueError, match=says):
        list(texts_of_file(tmp_path / name))


def test_lines_of_text_have_no_column(tmp_path):
    with pytest.raises(ValueError, match="x.txt is read as lines of text; .* because of 'text'"):
        list(texts_of_file(write(tmp_path / "x.txt", ["a"]), "text"))


def test_fields_with_line_ends_and_very_long_ones(tmp_path):
    texts = ['one, "quoted"\nand a second line', "x" * 1_000_000, "", "größer 🙂"]
    for name in ("x.csv", "x.tsv", "x.jsonl", "x.parquet"):
        assert list(texts_of_file(write(tmp_path / name, texts))) == texts


# ---- search


@pytest.fixture(scope="module")
def corpus(encoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return embed_corpus(encoder, write(folder / "x.txt", CORPUS), folder / "out", shard_rows=20)


def test_search_is_exact(encoder, corpus):
    queries = encoder.encode(TEXTS).double()
    vectors = torch.cat([corpus.vectors(part) for part in corpus.parts]).double()
    for k in (1, 5, 40, 99):
        scores, rows = corpus.search(encoder, queries, k)
        expected = nearest(queries, vectors, k, encoder.similarity)
        assert torch.equal(rows, expected[1])
        torch.testing.assert_close(scores, expected[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("measure", ["cosine", "dot", "euclidean", "manhattan"])
def test_an_index_finds_what_search_finds(directory, tmp_path, measure):
    pytest.importorskip("usearch")
    given = SentenceEncoder.from_pretrained(directory)
    encoder = SentenceEncoder(given.model, given.tokenizer, normalize=False, similarity=measure)
    corpus = embed_corpus(encoder, write(tmp_path / "x.txt", CORPUS), tmp_path / "out", shard_rows=20)
    with pytest.raises(FileNotFoundError, match="no index.usearch; .*fastbert index"):
        corpus.search(encoder, encoder.encode(TEXTS), 3, index=True)
    if measure == "manhattan":
        with pytest.raises(ValueError, match="similarity is 'manhattan'"):
            corpus.build_index()
        return
    corpus.build_index("float32")
    queries = encoder.encode([*TEXTS, "another text"])
    expected, found = (corpus.search(encoder, queries, 4, index=index) for index in (False, True))
    assert torch.equal(found[1], expected[1])
    for part in (tmp_path / "out").glob("part-*"):
        part.unlink()
    other = embed_corpus(encoder, write(tmp_path / "y.txt", CORPUS[::-1]), tmp_path / "out", shard_rows=20)
    with pytest.raises(FileNotFoundError, match="no index.usearch"):  # the old one is not used
        other.search(encoder, queries, 4, index=True)
    rounding = encoder.width * torch.finfo(torch.float32).eps  # usearch adds up `width` products in its own order
    torch.testing.assert_close(found[0], expected[0], rtol=rounding, atol=rounding)
    for some in (queries[:1], queries[:0]):
        assert corpus.search(encoder, some, 4, index=True)[1].shape == (len(some), 4)
    for index in (False, True):
        with pytest.raises(ValueError, match=r"queries\[0\] has NaN or infinity"):
            corpus.search(encoder, queries * torch.nan, 4, index=index)
    (corpus.directory / "index.usearch").write_bytes(b"no index")
    with pytest.raises(ValueError, match="index.usearch is damaged, or of other embeddings: build it again"):
        EmbeddedCorpus(corpus.directory).search(encoder, queries, 1, index=True)


def test_searches_that_make_no_sense(directory, encoder, corpus):
    queries = encoder.encode(TEXTS)
    for wrong in (queries[0], queries[:, 1:]):
        with pytest.raises(ValueError, match="search: queries has shape"):
            corpus.search(encoder, wrong, 1)
    with pytest.raises(ValueError, match="search: k is 0; expected an int of at least 1"):
        corpus.search(encoder, queries, 0)
    with pytest.raises(TypeError, match="search: queries are torch.int8; expected a floating-point type"):
        corpus.search(encoder, queries.to(torch.int8), 1)
    assert corpus.search(encoder, queries.half(), 1)[0].dtype == torch.float32  # stored vectors are not narrowed
    with pytest.raises(TypeError, match="search: given a ndarray; expected a Tensor"):
        corpus.search(encoder, queries.numpy(), 1)
    found = corpus.search(encoder, queries, 1)
    assert corpus.texts(found[1][:, 0]) == corpus.texts(found[1][:, 0].tolist())
    assert corpus.texts(found[1][:, 0].numpy()) == corpus.texts(found[1][:, 0])
    for rows in (found[1], found[0][:, 0], ["0"], torch.tensor(1)):
        with pytest.raises(TypeError, match="(?s)texts: rows are .*; expected integers"):
            corpus.texts(rows)
    again = pickle.loads(pickle.dumps(corpus)).search(encoder, queries, 1)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    with pytest.raises(ValueError, match="another encoder"):
        corpus.search(SentenceEncoder.from_pretrained(directory, max_length=9), queries, 1)
    with pytest.raises(IndexError, match="no row 52; expected 0 to 51"):
        corpus.texts([0, 52])


def test_the_commands(directory, file, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["embed", str(file), "--model", str(directory), "--output", str(out), "--shard-rows", "20"]) == 0
    assert "out: (52, 48) float32 in 3 files" in capsys.readouterr().out
    encoder = SentenceEncoder.from_pretrained(directory, dtype=torch.float32)  # as the command loads it
    _, rows = EmbeddedCorpus(out).search(encoder, encoder.encode_query(["a cat?"]), 2)
    search = ["search", "a cat?", "--corpus", str(out), "--model", str(directory), "--top", "2"]
    assert cli.main(search) == 0
    found = capsys.readouterr().out
    assert re.findall(r"row (\d+) ", found) == [str(row) for row in rows[0].tolist()] and CORPUS[rows[0, 0]] in found
    pytest.importorskip("usearch")
    assert cli.main(["index", str(out)]) == 0 and "52 vectors" in capsys.readouterr().out
    assert cli.main([*search, "--index"]) == 0 and capsys.readouterr().out == found
    assert cli.main(["embed", str(file), "--model", str(directory), "--output", str(out)]) == 2
    assert "another shard_rows: 20, now 16384" in capsys.readouterr().err
    assert cli.main(["search", "a", "--corpus", str(tmp_path), "--model", str(directory)]) == 2


# ---- int8 keeps directions alone; what is not a number is not kept


def unit(encoder, measure, normalize=True):
    return SentenceEncoder(encoder.model, encoder.tokenizer, normalize=normalize, similarity=measure)


@pytest.mark.parametrize("measure", ["cosine", "dot", "euclidean"])
def test_an_index_of_int8_has_the_measure_s_scores(encoder, tmp_path, measure):
    pytest.importorskip("usearch")
    short = unit(encoder, measure)
    corpus = embed_corpus(short, write(tmp_path / "x.txt", CORPUS), tmp_path / "out", shard_rows=20)
    corpus.build_index("int8")
    queries = short.encode(TEXTS)
    exact, rows = corpus.search(short, queries, len(CORPUS))
    found, places = corpus.search(short, queries, 5, index=True)
    expected = exact.gather(1, rows.argsort(1).gather(1, places))  # the exact score of each row that was found
    step = 2 * short.width**0.5 / 127  # of cosines: each number is off by half a step of 1/127 at most
    if measure == "euclidean":
        found, expected = found.square() / 2, expected.square() / 2
    assert ((found - expected).abs() <= step).all() and (found - expected).abs().max() > 0
    if measure != "cosine":
        long = unit(encoder, measure, normalize=False)
        corpus = embed_corpus(long, write(tmp_path / "x.txt", CORPUS), tmp_path / "long")
        with pytest.raises(ValueError, match=f"int8 keeps no lengths, which '{measure}' needs; expected float16"):
            corpus.build_index("int8")


def test_an_index_finds_every_row(encoder, tmp_path):
    """In any build. (Built by several threads, one in seven lacked rows.)"""
    pytest.importorskip("usearch")
    corpus = embed_corpus(encoder, write(tmp_path / "x.txt", CORPUS), tmp_path / "out")
    for _ in range(20):
        corpus.build_index()
        _, rows = corpus.search(encoder, encoder.encode(TEXTS), len(CORPUS), index=True)
        assert torch.equal(rows.sort().values, torch.arange(len(CORPUS)).expand(len(TEXTS), -1))
    with pytest.raises(ValueError, match="the index's measure is 'cosine', and the encoder's is 'dot'"):
        corpus.search(unit(encoder, "dot"), encoder.encode(TEXTS), 1, index=True)


@pytest.mark.parametrize("size", [torch.nan, 1e6])
def test_an_embedding_that_is_not_finite_is_refused(directory, tmp_path, size):
    encoder = SentenceEncoder.from_pretrained(directory, normalize=False)
    token = encoder.tokenize(["Zürich"])[0][1]
    with torch.no_grad():
        encoder.model.embeddings.LayerNorm.bias[0] = 0  # a row of its own for the token, past LayerNorm
        encoder.model.embeddings.word_embeddings.weight[token] = size if size != size else 1.0
        if size == size:
            encoder.model.encoder.layer[-1].output.LayerNorm.weight.mul_(size)
    with pytest.raises(ValueError, match=r"the embedding of row \d+ is not finite in float16: "):
        embed_corpus(encoder, write(tmp_path / "x.txt", CORPUS), tmp_path / "out", precision="float16")
    assert not list((tmp_path / "out").glob("*.parquet"))


def test_another_encoder_may_search(directory, encoder, corpus):
    half = SentenceEncoder.from_pretrained(directory, dtype="bfloat16")
    queries = half.encode(TEXTS)
    with pytest.raises(ValueError, match="embeddings of another encoder"):
        corpus.search(half, queries, 1)
    assert corpus.search(half, queries, 1, any_encoder=True)[1].shape == (len(TEXTS), 1)


def test_a_fingerprint_is_of_what_decides_vectors(directory, encoder):
    found = fingerprint(encoder)
    same = {"prompts": {"other": "x: "}, "similarity": "dot"}
    other = {"pooling": "cls", "normalize": True, "max_length": 9}
    for name, value in (same | other).items():
        changed = SentenceEncoder.from_pretrained(directory, **{name: value})
        assert (fingerprint(changed) == found) == (name in same), name
    layers = [SentenceEncoder(encoder.model, encoder.tokenizer, dense=[dense]) for dense in dense_layers(encoder)]
    assert len({fingerprint(each) for each in layers}) == len(layers)


def dense_layers(encoder):
    """The same weights under two activations, and added to what goes in."""
    torch.manual_seed(0)
    made = [Dense(encoder.width, encoder.width, True, *more) for more in (("Tanh",), ("ReLU",), ("Tanh", True))]
    for dense in made[1:]:
        dense.linear.load_state_dict(made[0].linear.state_dict())
    return made
