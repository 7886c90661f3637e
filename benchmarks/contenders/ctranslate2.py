"""CTranslate2 on the CPU: the one engine that skips padding as well."""

import functools
import json
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.contenders.interface import MODEL, Contender, Subject, Way
from benchmarks.sizes import Batch


def make(subject: Subject, batch: Batch, dtype: torch.dtype, device: str, backward: bool) -> Way:
    engine = converted(subject.theirs)

    def prepare(input_ids: Tensor) -> dict[str, object]:
        return {"inputs": [row.tolist() for row in input_ids.split(batch.lengths)]}

    def run(inputs: list[list[int]]) -> Tensor:
        import numpy

        return torch.from_numpy(numpy.asarray(engine.forward_batch(inputs).last_hidden_state))

    def collect(hidden: Tensor) -> Tensor:
        return torch.cat([row[:length] for row, length in zip(hidden, batch.lengths, strict=True)])

    return Way(run, prepare, collect)


@functools.lru_cache(2)
def converted(model: nn.Module):
    """For one request at a time, on as many threads as PyTorch has."""
    import ctranslate2
    import transformers

    log = transformers.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()  # the converter loads a pooler that is not there
    log.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        _save(model, Path(folder))
        target = str(Path(folder) / "converted")
        ctranslate2.converters.TransformersConverter(folder).convert(target)
        log.set_verbosity(verbosity)
        log.enable_progress_bar() if bars else None
        return ctranslate2.Encoder(
            target, compute_type="float32", inter_threads=1, intra_threads=torch.get_num_threads()
        )


def _save(model: nn.Module, folder: Path) -> None:
    """A checkpoint that CTranslate2's converter reads: it asks for a vocabulary and for an entry that is gone."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(config["vocab_size"] - 5))]
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    config |= {"position_embedding_type": "absolute", "architectures": ["BertModel"]}
    (folder / "config.json").write_text(json.dumps(config))


CONTENDER = Contender(
    "CTranslate2",
    (MODEL,),
    make,
    needs=("ctranslate2",),
    install="pip install ctranslate2",
    devices=("cpu",),
    dtypes=(torch.float32,),
    inference=True,
)
