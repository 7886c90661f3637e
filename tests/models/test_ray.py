"""Corpora embedded on a local Ray cluster give the files of a single process, even if a worker is killed."""

import os
import random
import signal

import local_ray
import numpy as np
import pytest
from local_ray import processes, ray
from serving.served import TEXTS, same, save_models

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.slow

import fastbert.inference.ray  # noqa: E402
from fastbert import cli  # noqa: E402
from fastbert.inference import SentenceEncoder, embed_corpus  # noqa: E402
from fastbert.inference.ray import BatchEmbedder, RayEngine  # noqa: E402

RNG = random.Random(0)
WORDS = " ".join(TEXTS).split()
CORPUS = [" ".join(RNG.choices(WORDS, k=RNG.randint(2, 6))) for _ in range(4000)]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_ray.cluster():
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models")) / "sentences"


@pytest.fixture
def file(tmp_path):
    (tmp_path / "corpus.txt").write_text("".join(f"{text}\n" for text in CORPUS))
    return tmp_path / "corpus.txt"


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix in (".parquet", ".json")}


def test_a_worker_that_is_killed_costs_nothing(directory, file, tmp_path):
    encoder = SentenceEncoder.from_pretrained(directory)
    whole = embed_corpus(encoder, file, tmp_path / "whole", shard_rows=50)
    killed, seen = [], []

    def kills(count):
        seen.append(count)
        if len(seen) in (10, 30) and (alive := processes("_Worker")):
            os.kill(RNG.choice(alive), signal.SIGKILL)
            killed.append(len(seen))

    engine = RayEngine(directory, workers=3)
    embed_corpus(encoder, file, tmp_path / "killed", shard_rows=50, engine=engine, progress=kills)
    assert killed == [10, 30] and sum(seen) == len(CORPUS)
    assert files_of(tmp_path / "killed") == files_of(whole.directory)


def test_more_workers_than_ray_has_room_for(directory, file, tmp_path):
    """Four CPUs have room for four."""
    encoder = SentenceEncoder.from_pretrained(directory)
    whole = embed_corpus(encoder, file, tmp_path / "whole", shard_rows=100)
    embed_corpus(encoder, file, tmp_path / "by_ray", shard_rows=100, engine=RayEngine(directory, workers=6))
    assert files_of(tmp_path / "by_ray") == files_of(whole.directory)


def test_workers_with_gpus_use_them(directory):
    assert RayEngine(directory, num_gpus=0.5).options == {"device": "cuda"}
    assert RayEngine(directory, num_gpus=1, device="cuda:0").options == {"device": "cuda:0"}
    assert not RayEngine(directory).options


def test_what_a_worker_finds_wrong_is_raised(directory, file, tmp_path):
    encoder = SentenceEncoder.from_pretrained(directory, max_length=9)
    with pytest.raises(Exception, match="another encoder than embed_corpus has"):
        embed_corpus(encoder, file, tmp_path / "out", engine=RayEngine(directory))
    with pytest.raises(ValueError, match="workers is 0"):
        RayEngine(directory, workers=0)


def test_a_part_that_kills_its_workers_ends_the_job(directory, file, tmp_path, monkeypatch):
    """A part that is too large for a machine's memory would do so."""
    encoder = SentenceEncoder.from_pretrained(directory)

    class Dies(fastbert.inference.ray._Worker):
        def write(self, part):
            if part.first == 1000:
                os._exit(137)
            return super().write(part)

    monkeypatch.setattr(fastbert.inference.ray, "_Worker", Dies)
    with pytest.raises(RuntimeError, match="a worker died 6 times, of .*part-00002.parquet"):
        embed_corpus(encoder, file, tmp_path / "out", shard_rows=500, engine=RayEngine(directory))


def test_texts_that_a_worker_cuts_are_said(directory, tmp_path):
    encoder = SentenceEncoder.from_pretrained(directory, max_length=9)
    (tmp_path / "corpus.txt").write_text("a cat\n" + "a cat sits outside " * 9 + "\n")
    with pytest.warns(UserWarning, match="1 of 2 texts are longer than 9 tokens: cut there"):
        embed_corpus(encoder, tmp_path / "corpus.txt", tmp_path / "out", engine=RayEngine(directory, max_length=9))


def test_ray_data(directory):
    encoder = SentenceEncoder.from_pretrained(directory)
    data = ray.data.from_items([{"id": i, "text": text} for i, text in enumerate(CORPUS[:300])])
    options = {"batch_size": 64, "compute": ray.data.ActorPoolStrategy(size=2)}
    found = data.map_batches(BatchEmbedder, fn_constructor_args=[str(directory)], **options)
    rows = sorted(found.take_all(), key=lambda row: row["id"])
    assert [row["text"] for row in rows] == CORPUS[:300]
    vectors = np.stack([row["embedding"] for row in rows])
    same(vectors, encoder.encode(CORPUS[:300]))
    with pytest.raises(TypeError, match="text has None; expected texts"):
        BatchEmbedder(directory)({"text": np.array(["a", None], object)})


def test_the_command(directory, file, tmp_path, capsys):
    words = ["embed", str(file), "--model", str(directory), "--output", str(tmp_path / "out"), "--shard-rows", "500"]
    assert cli.main([*words, "--engine", "ray", "--workers", "2"]) == 0
    assert f"({len(CORPUS)}, 48) float32 in 8 files" in capsys.readouterr().out
    assert cli.main([*words, "--workers", "2"]) == 2
    assert "expected --engine ray" in capsys.readouterr().err
