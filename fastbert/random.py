"""The random numbers of dropout, in plain PyTorch. They define which elements every backend drops, bit for bit.

Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) is a function of a
key and a counter. The key is one int64 per model forward, drawn from torch's generator and never read by the host; each
place in the model ("site") adds a multiple of the golden ratio to it. Counters are logical positions, so the mask does
not depend on backend, tile size, padding or thread count, and the backward recomputes it instead of storing it.

Kernels reimplement this file, and tests check that they equal it. `docs/random.md` derives the layout.
"""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
ROW_BITS = 16  # random bits per element of a row op
ATTENTION_BITS = 8  # random bits per attention score

EMBEDDING_SITE = 0


def layer_sites(layer: int) -> tuple[int, int, int]:
    """The dropout sites of a BERT layer: attention weights, attention output, layer output."""
    return 3 * layer + 1, 3 * layer + 2, 3 * layer + 3


CONVOLUTION_SITE = 2**20  # beyond the sites of all layers that a model may have


def position_site(layer: int) -> int:
    """The dropout site of DeBERTa's relative embeddings in a layer; their slot takes the place of the token."""
    return CONVOLUTION_SITE + 1 + layer


_LOW = 0xFFFFFFFF


def new_key(device: torch.device | str | None = None) -> Tensor:
    """A key for one forward, int64 of shape (1,) on `device`, from torch's generator there (so `torch.manual_seed`
    determines it)."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def site_key(rng: Tensor, site: int) -> Tensor:
    """The key of one site: rng + site * GOLDEN modulo 2**64, as int64."""
    # In halves: the number may be symbolic, and Inductor computes products of such without wrapping.
    number = torch.full_like(rng, site)
    return rng + (((number * (GOLDEN >> 32) & _LOW) << 32) + number * (GOLDEN & _LOW))


def philox(counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int], key: Tensor) -> tuple[Tensor, ...]:
    """Philox4x32-7: four 32-bit words (int64 tensors) for a 128-bit counter of four words, broadcast together.

    key: int64 tensor; its low half is the first key word. Known answer: key 0, counter 0 gives
    5f6fb709 0d893f64 4f121f81 4f730a48.
    """
    c0, c1, c2, c3 = counter  # ints stay ints: making tensors of them would copy to the device
    k0, k1 = key & _LOW, (key >> 32) & _LOW
    for _ in range(7):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # the signed product wraps, with the right 64 bits
        c0, c1, c2, c3 = (p1 >> 32 & _LOW) ^ c1 ^ k0, p1 & _LOW, (p0 >> 32 & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def is_expressible(p: float, bits: int) -> bool:
    """Whether `bits` random bits an element can drop with probability p: not where p > 0 rounds to 0 or 1."""
    return p == 0 or 0 < round(p * 2**bits) < 2**bits


def threshold(p: float, bits: int) -> int:
    """round(p * 2**bits), half to even: an element is dropped if its `bits` random bits are below this number.

    Raises ValueError for p outside [0, 1), and for p > 0 that would drop nothing or everything after rounding.
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout_p is {p}; expected 0 <= dropout_p < 1")
    dropped = round(p * 2**bits)
    if not is_expressible(p, bits):
        raise ValueError(f"dropout_p is {p}, which {bits} random bits an element round to {dropped} / {2**bits}")
    return dropped


def keep_scale(p: float, bits: int) -> float:
    """The factor for kept elements: 1 / (the share of random values that keep an element)."""
    return 2**bits / (2**bits - threshold(p, bits))


def row_bits(rng: Tensor, site: int, tokens: int, channels: int, first: int = 0) -> Tensor:
    """The 16 random bits of every element of a (tokens, channels) tensor, as int64.

    The counter is (channel // 8, token low, token high, 0). Its four words are cut into eight halves, low half first;
    an element takes the one of number channel % 8. `token` is the packed index, counted from `first`.
    """
    device = rng.device
    token = torch.arange(first, first + tokens, device=device)[:, None]
    group = torch.arange((channels + 7) // 8, device=device)[None, :]
    words = torch.stack(philox((group, token & _LOW, token >> 32, 0), site_key(rng, site)), -1)  # [T, G, 4]
    halves = torch.stack((words & 0xFFFF, words >> 16), -1)  # [T, G, 4, 2]
    return halves.flatten(1)[:, :channels]


def attention_bits(rng: Tensor, site: int, sequences: int, heads: int, queries: int, keys: int) -> Tensor:
    """The random byte of every attention score, (sequences, heads, queries, keys), as int64.

    The counter is (16-key group, query, head, sequence); query and key are positions within their sequence. The order
    of keys is that of the `mma` accumulator: a block of 64 keys has four groups, one for each column pair c, of number
    4 * block + c; bytes 2j and 2j + 1 of a group are for keys 8j + 2c and 8j + 2c + 1 of the block.
    """
    device = rng.device
    blocks = (keys + 63) // 64
    group = torch.arange(4 * blocks, device=device)
    query = torch.arange(queries, device=device)[:, None]
    head = torch.arange(heads, device=device)[:, None, None]
    sequence = torch.arange(sequences, device=device)[:, None, None, None]
    words = torch.stack(philox((group, query, head, sequence), site_key(rng, site)), -1)  # [B, H, Q, 4 * blocks, 4]
    shift = torch.arange(0, 32, 8, device=device)
    data = (words[..., None] >> shift) & 0xFF  # [B, H, Q, 4 * blocks, word, byte]
    data = data.unflatten(3, (blocks, 4)).flatten(-2)  # [B, H, Q, block, c, 2j + low]
    data = data.unflatten(-1, (8, 2)).transpose(-3, -2)  # [B, H, Q, block, j, c, low]
    return data.flatten(3)[..., :keys]


def row_keep(rng: Tensor, site: int, tokens: int, channels: int, p: float, first: int = 0) -> Tensor:
    """Which elements of a (tokens, channels) tensor dropout keeps, bool; multiply those by `keep_scale(p, ROW_BITS)`.

    first: as in `row_bits`.
    """
    return row_bits(rng, site, tokens, channels, first) >= threshold(p, ROW_BITS)


def attention_keep(rng: Tensor, site: int, sequences: int, heads: int, length: int, p: float) -> Tensor:
    """Which scores dropout keeps, (sequences, heads, length, length) bool; multiply those by `keep_scale(p, 8)`."""
    return attention_bits(rng, site, sequences, heads, length, length) >= threshold(p, ATTENTION_BITS)
