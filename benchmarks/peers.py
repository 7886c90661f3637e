"""Inference engines for CPUs as contenders, where they are installed: `pip install openvino ctranslate2`.

Both run the very weights of transformers' model. OpenVINO computes the padding, CTranslate2 skips it.
"""

import importlib.util
import json
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn


class OpenVino:
    """BertModel compiled by OpenVINO, for one thread a core and one request at a time."""

    def __init__(self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, dtype: torch.dtype) -> None:
        import openvino

        example = {"input_ids": input_ids, "attention_mask": attention_mask}
        precision = {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
        options = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
        }
        converted = openvino.convert_model(model.float(), example_input=example)
        self.compiled = openvino.compile_model(converted, "CPU", options)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        result = self.compiled({"input_ids": input_ids.numpy(), "attention_mask": attention_mask.numpy()})
        return (torch.from_numpy(result[0]),)


class CTranslate2:
    """BertModel converted to CTranslate2. Its input is lists of ids, made once."""

    def __init__(self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> None:
        import ctranslate2
        import transformers

        transformers.logging.set_verbosity_error()  # the converter loads a pooler that is not there
        with tempfile.TemporaryDirectory() as folder:
            _save(model, Path(folder))
            converted = str(Path(folder) / "converted")
            ctranslate2.converters.TransformersConverter(folder).convert(converted)
            self.encoder = ctranslate2.Encoder(
                converted, compute_type="float32", inter_threads=1, intra_threads=torch.get_num_threads()
            )
        self.lists = [row[keep.bool()].tolist() for row, keep in zip(input_ids, attention_mask, strict=True)]
        self.seqlen = input_ids.shape[1]

    def __call__(self, **_: Tensor) -> tuple[Tensor]:
        import numpy

        hidden = torch.from_numpy(numpy.asarray(self.encoder.forward_batch(self.lists).last_hidden_state))
        return (nn.functional.pad(hidden, (0, 0, 0, self.seqlen - hidden.shape[1])),)


def _save(model: nn.Module, folder: Path) -> None:
    """A checkpoint that CTranslate2's converter reads: it asks for a vocabulary and for an entry that is gone."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(config["vocab_size"] - 5))]
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    config |= {"position_embedding_type": "absolute", "architectures": ["BertModel"]}
    (folder / "config.json").write_text(json.dumps(config))


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
