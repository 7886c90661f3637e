"""Accelerates GLiNER's encoder, which uses DeBERTa. Skipped unless GLiNER is installed, as by `make suites`."""

from types import SimpleNamespace

import pytest
import torch
from small_models import CONFIGS

import fastbert
from fastbert import testing

encoder = pytest.importorskip("gliner.modeling.encoder", reason="GLiNER is not installed (`make suites` installs it)")


@pytest.fixture
def model():
    from transformers import DebertaV2Config

    config = DebertaV2Config(**CONFIGS["deberta-v2"] | {"vocab_size": 100, "conv_kernel_size": 0})
    settings = {"labels_encoder_config": None, "vocab_size": -1, "_attn_implementation": None, "fuse_layers": False}
    return encoder.Transformer("", SimpleNamespace(encoder_config=config, **settings)).eval()


def evaluated(model, ids, mask):
    hidden = model(ids, attention_mask=mask)[mask.bool()]
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(hidden.square().sum(), parameters.values())
    return testing.Result({"hidden": hidden.detach()}, dict(zip(parameters, gradients, strict=True)))


def test_texts_of_any_length(model):
    ids = torch.randint(1, 100, (3, 20))
    mask = (torch.arange(20) < torch.tensor([[20], [7], [13]])).long()
    plain, truth = evaluated(model, ids, mask), evaluated(model.double(), ids, mask)
    report = fastbert.accelerate(model.float())
    ours = evaluated(model, ids, mask)
    assert report.packed == 1 and not report.fallbacks
    testing.assert_rows(testing.compare(ours, truth, [plain], factor=3.0))


def test_texts_that_gliner_packed_itself(model):
    """Two texts in one row, with a mask over pairs of tokens: GLiNER then calls parts of the model itself."""
    ids = torch.randint(1, 100, (1, 20))
    first = torch.arange(20) < 8
    pairs = (first[:, None] == first)[None]
    call = lambda: model(ids, attention_mask=torch.ones_like(ids), pair_attention_mask=pairs)  # noqa: E731
    with torch.no_grad():
        expected = call()
        fastbert.accelerate(model)
        assert torch.equal(call(), expected)
