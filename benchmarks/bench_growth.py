"""How cost grows: with the number of tokens for ops on rows and for a whole layer, with their length for attention.

Ops on rows and the layer run on T = 2^7 to 2^16 tokens (the layer's in sequences of 128), attention on 2^13 tokens in
sequences of 64 to 2^13: all full. Time, memory and the floor, of few contenders.
`python -m benchmarks.run --groups growth`; `python -m benchmarks.report` draws it.
"""

from dataclasses import replace

from benchmarks import bench_encoder, bench_ops, cases
from benchmarks.cases import How, Spec
from benchmarks.contenders import flash_attention, hf_sdpa, ours, ours_packed, pytorch, varlen_attn
from benchmarks.contenders.interface import ENCODER
from benchmarks.harness import Report
from benchmarks.sizes import BASE, SMALL, Size

ROWS = ("layer_norm", "add_layer_norm", "bias_gelu")
PARTS = (*ROWS, ENCODER, "attention")
DIRECTIONS = (cases.FORWARD, cases.BACKWARD)
TOKENS = tuple(2**n for n in range(7, 17))
SEQLENS = tuple(2**n for n in range(6, 14))
LAYER_SEQLEN, ATTENTION_TOKENS = 128, 2**13
NAMES = [c.CONTENDER.name for c in (hf_sdpa, pytorch, ours, ours_packed, varlen_attn, flash_attention)]


def sizes(part: str, name: str = "full") -> list[Size]:
    """In order of size. name: as in benchmarks/sizes.py; small ones are two."""
    config = replace(SMALL[name].config if name in SMALL else BASE, num_hidden_layers=1)
    if part == "attention":
        tokens, lengths = (256, SEQLENS[:2]) if name in SMALL else (ATTENTION_TOKENS, SEQLENS)
        return [Size(tokens // seqlen, seqlen, config) for seqlen in lengths]
    tokens = TOKENS[:2] if name in SMALL else TOKENS
    return [Size(count // LAYER_SEQLEN, LAYER_SEQLEN, config) for count in tokens]


def report(spec: Spec, how: How) -> Report:
    names = [name for name in NAMES if how.names is None or name in how.names]
    setup = (bench_encoder if spec.part == ENCODER else bench_ops).setup(spec, how.device)
    grows = "seqlen" if spec.part == "attention" else "tokens"
    setup.facts.update(grows=grows, tokens=setup.batch.tokens)
    return cases.report(spec, setup, replace(how, names=names))
