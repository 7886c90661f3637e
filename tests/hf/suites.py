"""Downloads the tests of transformers and sentence-transformers, which test_suites.py runs through fastbert.

    PYTHONPATH=tests python -m hf.suites [transformers=PATH] [sentence-transformers=PATH]

`make suites` runs this too, after it has installed what those tests import. PATH is a local git repository to use in
place of the one on GitHub. The tests go to the directory that FASTBERT_SUITES names, or else to
~/.cache/fastbert/suites, never into this repository. Beside them go stand-ins for what sentence-transformers' tests
load from the hub, under the same names: tiny models with random weights, and pairs of texts.

transformers' common tests come from the source package of the installed version. The models' tests, which use them, are
only in the repository. As all tests of CamemBERT and XLM-RoBERTa need the network, these two get RoBERTa's as well.
"""

import io
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

from small_models import minilm

REPOSITORIES = {  # URL, commit, the paths that are needed
    "transformers": (
        "https://github.com/huggingface/transformers",
        "decba1d2ea4ed3cbf0495d1828abad4b2dba1846",
        ("tests", "utils", "conftest.py", "pyproject.toml"),
    ),
    "sentence-transformers": (
        "https://github.com/huggingface/sentence-transformers",
        "cad211983f36ce458e9b3360f3e11b29fc54cbd8",
        ("tests", "pyproject.toml"),
    ),
}
LIKE_ROBERTA = {"camembert": "Camembert", "xlm_roberta": "XLMRoberta"}


def cache() -> Path:
    return Path(os.environ.get("FASTBERT_SUITES", "~/.cache/fastbert/suites")).expanduser()


def tests_of(project: str) -> Path:
    return cache() / f"{project}-{version(project)}"


def fill(repositories: dict[str, str]) -> None:
    """Fills the cache. repositories: paths or URLs by name. The cache is replaced only once everything is there."""
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache()) as directory:
        new = Path(directory)
        for name, (url, commit, paths) in REPOSITORIES.items():
            take(repositories.get(name, url), commit, paths, new / tests_of(name).name)
        of_installed_version(new / tests_of("transformers").name)
        like_roberta(new / tests_of("transformers").name / "tests/models")
        hub(new / "hub")
        stsb(new / "datasets")
        for part in list(new.iterdir()):
            shutil.rmtree(cache() / part.name, ignore_errors=True)
            part.rename(cache() / part.name)


def take(source: str, commit: str, paths: tuple[str, ...], into: Path) -> None:
    """Unpacks the files of one commit."""
    with tempfile.TemporaryDirectory() as fetched:
        if not Path(source).is_dir():
            subprocess.run(["git", "init", "--quiet", "--bare", fetched], check=True)
            subprocess.run(["git", "-C", fetched, "fetch", "--quiet", "--depth=1", source, commit], check=True)
            source = fetched
        command = ["git", "-C", source, "archive", commit, *paths]
        archive = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    unpack(io.BytesIO(archive), into)


def of_installed_version(into: Path) -> None:
    """Adds the common tests of the installed transformers, which the models' tests expect beside them."""
    with tempfile.TemporaryDirectory() as fetched:
        wanted = f"transformers=={version('transformers')}"
        options = ["--quiet", "--no-deps", "--no-binary=:all:", "--dest", fetched]
        pip = [sys.executable, "-m", "pip", "download", *options, wanted]
        subprocess.run(pip, check=True)
        unpack(io.BytesIO(next(Path(fetched).iterdir()).read_bytes()), Path(fetched))
        for test in Path(fetched).glob("transformers-*/tests/*.py"):
            shutil.copy(test, into / "tests")
    import transformers

    (into / "src").mkdir()
    (into / "src/transformers").symlink_to(Path(transformers.__file__).parent)


def unpack(archive: io.BytesIO, into: Path) -> None:
    with tarfile.open(fileobj=archive) as tar:
        tar.extractall(into, filter="data")


def like_roberta(models: Path) -> None:
    text = (models / "roberta/test_modeling_roberta.py").read_text()
    for name, classes in LIKE_ROBERTA.items():
        changed = text.replace("Roberta", classes).replace("roberta", name)
        (models / name / "test_modeling_like_roberta.py").write_text(changed)


# ---- tiny models


def hub(root: Path) -> None:
    """Makes a hub cache of BERTs with two layers, random weights and all-MiniLM-L6-v2's vocabulary, which is BERT's."""
    import torch
    from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from sentence_transformers.sparse_encoder.modules import Router, SparseStaticEmbedding, SpladePooling
    from transformers import BertForMaskedLM, BertModel

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        plain, masked = bert(BertModel, f"{directory}/plain"), bert(BertForMaskedLM, f"{directory}/masked")
        words = Transformer(plain)
        dense = SentenceTransformer(modules=[words, Pooling(words.get_embedding_dimension())], device="cpu")
        tokens = Transformer(masked, transformer_task="fill-mask")
        sparse = SparseEncoder(modules=[tokens, SpladePooling()], device="cpu")
        weighed = SparseStaticEmbedding(tokens.tokenizer, weight=torch.rand(len(tokens.tokenizer)))
        routes = Router.for_query_document(query_modules=[weighed], document_modules=[tokens, SpladePooling()])
        save(dense, root, "sentence-transformers-testing/stsb-bert-tiny-safetensors")
        for name in ("reranker-bert-tiny-gooaq-bce", "reranker-bert-tiny-gooaq-bce-STv54"):
            save(CrossEncoder(plain, num_labels=1, device="cpu"), root, f"cross-encoder-testing/{name}")
        save(sparse, root, "sparse-encoder-testing/splade-bert-tiny-nq")
        inference_free = SparseEncoder(modules=[routes], device="cpu")
        save(inference_free, root, "sparse-encoder-testing/inference-free-splade-bert-tiny-nq")


def bert(cls: type, directory: str) -> str:
    """Saves a model and its tokenizer, and returns the directory."""
    from transformers import AutoTokenizer, BertConfig

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    cls(BertConfig(**sizes, initializer_range=0.1)).save_pretrained(directory)
    AutoTokenizer.from_pretrained(minilm()).save_pretrained(directory)
    return directory


def save(model, root: Path, name: str) -> None:
    """Saves a model where the hub's cache keeps the model of that name."""
    kept = root / f"models--{name.replace('/', '--')}"
    commit = "0" * 40
    (kept / "refs").mkdir(parents=True)
    (kept / "refs/main").write_text(commit)
    model.save_pretrained(str(kept / "snapshots" / commit), create_model_card=False)


def stsb(root: Path) -> None:
    """Makes a cache of data sets with pairs of texts in place of the STS benchmark.

    A pair's score is the share of the words that its texts have in common.
    """
    from datasets import load_dataset

    words = [word for word in (minilm() / "vocab.txt").read_text().split() if word.isalpha()]
    choose = random.Random(0)
    with tempfile.TemporaryDirectory() as directory:
        files = Path(directory) / "stsb"
        files.mkdir()
        for split, rows in (("train", 600), ("validation", 200), ("test", 200)):
            with (files / f"{split}.csv").open("w") as file:
                print("sentence1,sentence2,score", file=file)
                for _ in range(rows):
                    text, shared = choose.choices(words, k=8), choose.randrange(9)
                    other = text[:shared] + choose.choices(words, k=8 - shared)
                    print(" ".join(text), " ".join(other), shared / 8, sep=",", file=file)
        load_dataset(str(files), cache_dir=str(root))
    (root / "stsb").rename(root / "sentence-transformers___stsb")  # the name that is looked up without a network


if __name__ == "__main__":
    fill(dict(argument.split("=", 1) for argument in sys.argv[1:]))
