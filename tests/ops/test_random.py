"""The random-number contract, against a scalar implementation written from its description and published answers."""

import pytest
import torch

from fastbert import random


def philox7(counter, key):
    """Philox4x32-7 on Python integers, as in Salmon et al. 2011."""
    c, k = list(counter), list(key)
    for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def halves(key, site):
    key = (key + site * 0x9E3779B97F4A7C15) % 2**64
    return key % 2**32, key >> 32


def test_known_answers():
    words = random.philox((0, 0, 0, 0), torch.tensor([0]))
    assert " ".join(f"{int(w):08x}" for w in words) == "5f6fb709 0d893f64 4f121f81 4f730a48"
    # Random123's known-answer file, philox4x32-7 with all ones
    ones = 2**32 - 1
    words = random.philox((ones,) * 4, torch.tensor([-1]))
    assert " ".join(f"{int(w):08x}" for w in words) == "5207ddc2 45165e59 4d8ee751 8c52f662"


@pytest.mark.parametrize("key", [0, 0x123456789ABCDEF0, -1, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("site", [0, 1, 36])
def test_row_bits(key, site):
    bits = random.row_bits(torch.tensor([key]), site, 5, 21)
    for token in range(5):
        for channel in range(21):
            words = philox7((channel // 8, token, 0, 0), halves(key, site))
            data = b"".join(w.to_bytes(4, "little") for w in words)
            at = 2 * (channel % 8)
            assert bits[token, channel] == int.from_bytes(data[at : at + 2], "little")


@pytest.mark.parametrize("key", [0, 0x123456789ABCDEF0, -(2**63)])
def test_attention_bits(key):
    """The mma accumulator's order: key 8j + 2c + low of a block is byte 2j + low of group 4 block + c."""
    bits = random.attention_bits(torch.tensor([key]), 4, 2, 3, 2, 130)
    places = [(0, 0, 0, 0), (1, 2, 1, 1), (0, 1, 1, 2), (1, 0, 0, 63), (1, 2, 0, 64), (0, 2, 1, 129)]
    for sequence, head, query, k in places:
        block, j, c, low = k // 64, k % 64 // 8, k % 8 // 2, k % 2
        words = philox7((4 * block + c, query, head, sequence), halves(key, 4))
        data = b"".join(w.to_bytes(4, "little") for w in words)
        assert bits[sequence, head, query, k] == data[2 * j + low]


def test_masks_do_not_depend_on_the_size_around_them():
    key = random.new_key()
    assert torch.equal(random.row_bits(key, 1, 9, 40)[:3, :17], random.row_bits(key, 1, 3, 17))
    larger = random.attention_bits(key, 1, 3, 4, 70, 70)
    assert torch.equal(larger[:2, :1, :5, :66], random.attention_bits(key, 1, 2, 1, 5, 66))


def test_sites_differ_and_bits_are_uniform():
    key = random.new_key()
    a, b = (random.row_bits(key, site, 400, 400) for site in (0, 1))
    assert (a == b).double().mean() < 1e-3
    assert abs(a.double().mean() / 32767.5 - 1) < 0.01  # 160,000 numbers: the standard error is 0.0014
    assert abs((a >= 6554).double().mean() - (1 - 6554 / 65536)) < 0.005


def test_the_key_comes_from_torch_s_generator():
    torch.manual_seed(5)
    one = random.new_key("cpu")
    torch.manual_seed(5)
    assert torch.equal(random.new_key("cpu"), one) and not torch.equal(random.new_key("cpu"), one)
    assert one.dtype == torch.int64 and one.shape == (1,)


@pytest.mark.parametrize(
    ("p", "bits", "dropped"), [(0.1, 16, 6554), (0.1, 8, 26), (0.5, 8, 128), (0.0, 8, 0), (1 / 256, 8, 1)]
)
def test_threshold(p, bits, dropped):
    assert random.threshold(p, bits) == dropped
    assert random.keep_scale(p, bits) == 2**bits / (2**bits - dropped)


@pytest.mark.parametrize(("p", "bits"), [(0.001, 8), (1e-6, 16), (0.999, 8), (1.0, 16), (-0.1, 16), (float("nan"), 16)])
def test_probabilities_that_bits_cannot_express_are_refused(p, bits):
    with pytest.raises(ValueError, match="dropout_p is"):
        random.threshold(p, bits)


def test_inductor_computes_the_keys_of_sites_that_are_symbolic():
    """Its symbolic arithmetic does not wrap as the key does."""
    rng = random.new_key()
    compiled = torch.compile(random.site_key, dynamic=True)
    for site in (1, 36, random.CONVOLUTION_SITE, random.position_site(23)):
        assert torch.equal(compiled(rng, site), random.site_key(rng, site))
