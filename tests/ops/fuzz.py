"""Direct calls of the C++ primitives on CPU tensors, with wrong arguments.

Each call must raise a Python exception, or return tensors of the shapes and dtypes that the fake promises. It must
never crash: an unreadable page follows the memory of each argument, so a kernel that reads beyond it is killed at once.
A description of each call is written to a file first, for the process that started this one (test_fuzz.py).

    python tests/ops/fuzz.py EXAMPLES FILE
"""

import ctypes
import mmap
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fastbert.ops import pack_weight
from fastbert.ops.op import PRIMITIVES
from fastbert.ops.packed_linear import with_sums

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)
ON_CPU = [name for name in PRIMITIVES if torch._C._dispatch_has_kernel_for_dispatch_key(f"fastbert::{name}", "CPU")]


# ---- correct calls


@dataclass
class Sizes:
    """Dimensions and dtypes of a correct call. wide: the dtype of statistics and sums."""

    T: int
    C: int
    K: int
    H: int
    D: int
    dtype: torch.dtype
    parameters: torch.dtype
    residual: torch.dtype

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def promoted(self) -> torch.dtype:
        return torch.promote_types(self.dtype, self.residual)


@st.composite
def sizes(draw) -> Sizes:
    dtype = draw(st.sampled_from(FLOATS))
    others = st.just(dtype) if dtype == torch.float64 else st.sampled_from((dtype, torch.float32))
    tokens, channels, small = st.sampled_from((0, 1, 2, 5, 17, 300)), st.integers(1, 20), st.integers(0, 4)
    T, C, K, H, D = draw(tokens), draw(channels), draw(channels), draw(small), draw(channels)
    return Sizes(T, C, K, H, D, dtype, draw(others), draw(others))


def normal(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def below(end: int, *shape: int) -> Tensor:
    return torch.randint(end, shape, generator=torch.Generator().manual_seed(0))


def right_call(name: str, n: Sizes) -> list:
    """The arguments of a correct call, in the order of the schema."""
    op, direction = name.rsplit("_", 1)
    x, rows, key = normal(n.dtype, n.T, n.C), [normal(n.wide, n.T).abs() for _ in range(2)], torch.tensor([7])
    channels = [normal(n.parameters, n.C) for _ in range(3)]
    dropout = [key, 0.25, 3]
    if op == "layer_norm":
        return [x, *channels[:2], 1e-12] if direction == "fwd" else [x, x, channels[0], *rows, True]
    if op == "add_layer_norm":
        residual, dy = normal(n.residual, n.T, n.C), normal(n.promoted, n.T, n.C)
        if direction == "fwd":
            return [x, residual, *channels, key, 1e-12, *dropout[1:]]
        return [dy, x, residual, channels[0], *rows, channels[1], *dropout, True]
    if op == "bias_gelu":
        return [x, channels[0], "none"] if direction == "fwd" else [x, x, channels[0], "tanh", True]
    if op in ("linear", "dense_gelu"):
        weight, bias, y = normal(n.dtype, n.K, n.C), normal(n.dtype, n.K), normal(n.dtype, n.T, n.K)
        if direction == "bwd":
            return [y, x, weight] + [y, "none"] * (op == "dense_gelu") + [True, True]
        return [x, weight, bias] + ["none", True] * (op == "dense_gelu")
    if op == "linear_max":
        weight, ends = normal(n.dtype, n.K, n.C), torch.tensor([0, n.T // 3, n.T // 3, n.T], dtype=torch.int32)
        if direction == "fwd":
            return [x, weight, normal(n.dtype, n.K), ends, True]
        return [normal(n.dtype, 3, n.K), x, weight, below(n.T + 1, 3, n.K).int() - 1, True, True]
    if op == "cross_entropy":
        weight, labels = normal(n.dtype, n.K, n.C), below(n.K, n.T)
        if direction == "fwd":
            return [x, weight, normal(n.dtype, n.K), labels, -100, True]
        return [normal(n.wide), x, weight, labels, normal(n.dtype, n.T, n.K), -100, True, True]
    if op == "embedding":
        tables = [normal(n.dtype, rows, n.C) for rows in (9, 6, 2)]
        inputs = [below(len(table), n.T) for table in tables] + tables
        if direction == "fwd":
            return [*inputs, *channels[:2], key, 1e-12, *dropout[1:]]
        return [x, *inputs, channels[0], *rows, *dropout, 1, [True] * 4]
    if op == "attention":
        ends = torch.tensor([0, n.T // 3, n.T // 3, n.T], dtype=torch.int32)
        qkv, out = normal(n.dtype, n.T, 3, n.H, n.D), normal(n.dtype, n.T, n.H, n.D)
        rest = [ends, n.T, 0.5, 0.25, key, 3]
        return [qkv, *rest] if direction == "fwd" else [out, qkv, out, normal(n.wide, n.H, n.T), *rest]
    if op == "relative_attention":
        first, *rest = right_call(f"attention_{direction}", n)
        tensors = 0 if direction == "fwd" else 3
        positions = right_positions(n, n.dtype)
        return [first, *rest[:tensors], *positions, *rest[tensors:]] + [True] * (direction == "bwd")
    if op == "packed_linear":
        weight, scale = packed(n, n.K, n.C)
        return [x.to(packable(n)), weight, scale, normal(torch.float32, n.K), n.K, ("", "none", "tanh")[n.H % 3]]
    if op == "packed_linear_max":
        weight, scale = packed(n, n.K, n.C)
        ends = torch.tensor([0, n.T // 3, n.T // 3, n.T], dtype=torch.int32)
        return [x.to(packable(n)), weight, scale, normal(torch.float32, n.K), n.K, ends]
    if op == "packed_layer":
        return right_packed_layer(n, x.to(packable(n)), ends=torch.tensor([0, n.T // 3, n.T], dtype=torch.int32))
    if op == "encoder_layer":
        return right_layer(direction, n, x, ends=torch.tensor([0, n.T // 3, n.T // 3, n.T], dtype=torch.int32), key=key)
    if name == "padding_places":
        return [normal(torch.float32, n.K, n.C) > 0]
    places = torch.arange(0, n.K * n.C, 3)
    padded = normal(n.dtype, n.K, n.C, n.D)
    return [padded, places] if name == "padding_pack" else [padded.flatten(0, 1)[places], places, n.K, n.C]


def right_positions(n: Sizes, dtype: torch.dtype) -> list:
    """Slots, and tables of positions beside activations of this dtype."""
    wide, table = torch.promote_types(dtype, torch.float32), normal(dtype, n.K, n.H, n.D)
    return [below(n.K, 2 * n.C - 1).int(), table, table, normal(wide, n.H, n.K)]


def right_layer(direction: str, n: Sizes, x: Tensor, ends: Tensor, key: Tensor) -> list:
    """Arguments of the whole layer if the number of heads is odd, else of the part that follows attention."""
    whole = n.H % 2
    context = None if whole else normal(n.dtype, n.T, n.H * n.D)
    ends = ends if whole else None
    sizes = [(n.H * n.D, n.C)] * (3 * whole) + [(n.C, n.H * n.D), (n.C,), (n.K, n.C), (n.C, n.K), (n.C,)]
    parameters = [normal(n.parameters, *size) for weight in sizes for size in (weight, weight[:1])]
    positions = right_positions(n, n.dtype) if whole and n.K % 2 else [None] * 4
    settings = [ends, *positions, key, n.T, n.H, 0.5, 0.25, 0.25, 0.25, 3, "none", n.dtype, 1e-12, 1e-12]
    if direction == "fwd":
        return [x, context, parameters, *settings, True, 1]
    rows, needed = normal(n.wide, n.T).abs(), [1, 1 - whole] + [1] * len(parameters) + [int(positions[0] is not None)]
    saved = [normal(n.dtype, n.T, 3, n.H, n.D), normal(n.dtype, n.T, n.H, n.D), normal(n.wide, n.H, n.T)] * whole
    saved += [x, rows, rows, x, normal(n.dtype, n.T, n.K), x, rows, rows]
    return [x, x, context, parameters, saved, *settings, needed]


def packable(n: Sizes) -> torch.dtype:
    """The dtype of x for packed products, which do not take float64."""
    return torch.float32 if n.dtype == torch.float64 else n.dtype


def packed(n: Sizes, channels: int, inner: int) -> tuple[Tensor, Tensor | None]:
    """A packed weight and its scale. The weight is int8 if x is float16 or the number of heads is odd."""
    if packable(n) != torch.float16 and n.H % 2 == 0:
        return pack_weight(normal(packable(n), channels, inner)), None
    weight = (normal(torch.float32, channels, inner) * 40).to(torch.int8)
    return pack_weight(weight), with_sums(torch.ones(channels), weight)


def right_packed_layer(n: Sizes, x: Tensor, ends: Tensor) -> list:
    """A layer with three projections, one or none. If 3 divides the head size, its weight after attention is plain."""
    projections, width = (3, n.H * n.D) if n.H < 3 else (1, 3 * n.H * n.D)
    parameters, scales = [], []
    for place, size in enumerate([(width, n.C)] * projections + [(n.C, n.H * n.D), None, (n.K, n.C), (n.C, n.K), None]):
        if size is None:
            parameters += [normal(torch.float32, n.C) for _ in range(2)]
        elif place == projections and n.D % 3 == 0:
            parameters += normal(x.dtype, *size), normal(x.dtype, size[0])
            scales.append(torch.empty(0))
        else:
            weight, scale = packed(n, *size)
            parameters += weight, normal(torch.float32, size[0])
            scales.append(torch.empty(0) if scale is None else scale)
    if n.K % 2:
        positions = right_positions(n, x.dtype) if n.C % 2 else [None] * 4
        return [x, None, parameters, scales, ends, *positions, n.T, n.H, 0.5, "tanh", 1e-12, 1e-5, 1]
    context = normal(x.dtype, n.T, n.H * n.D)
    parameters, scales = parameters[2 * projections :], scales[projections:]
    return [x, context, parameters, scales, *[None] * 5, n.T, n.H, 0.5, "tanh", 1e-12, 1e-5, 1]


# ---- wrong arguments


@st.composite
def other(draw, value: object) -> object:
    """Something else in place of a correct argument."""
    if isinstance(value, Tensor):
        try:
            return draw(st.sampled_from(TENSORS))(draw, value)
        except (RuntimeError, IndexError):  # the change does not apply to this tensor
            return value
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], *[draw(other(value[place]))] * draw(st.sampled_from((0, 1, 1, 2))), *value[place + 1 :]]
    if isinstance(value, torch.dtype):
        return draw(st.sampled_from(DTYPES))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw(st.sampled_from((-(2**40), -1, 0, 1, value + 1, 2**31, 2**40, 2**62)))
    if isinstance(value, float):
        return draw(st.sampled_from((-1.0, -0.0, 1e-9, 0.5, 1.0, 2.0, float("inf"), float("nan"))))
    if isinstance(value, str):
        return draw(st.sampled_from(("none", "tanh", "erf", "")))
    return draw(st.lists(st.booleans(), max_size=6)) if isinstance(value, list) else draw(st.sampled_from((1, "none")))


def dimension(draw, tensor: Tensor) -> int:
    return draw(st.integers(0, max(0, tensor.dim() - 1)))


def longer(draw, tensor: Tensor) -> Tensor:
    if tensor.dim() == 0 or tensor.numel() == 0:
        return tensor[None]
    return torch.cat([tensor, tensor[:1]])


def shorter(draw, tensor: Tensor) -> Tensor:
    if tensor.dim() == 0:
        return tensor[None]
    dim = dimension(draw, tensor)
    return tensor.narrow(dim, 0, draw(st.integers(0, tensor.shape[dim])))


def filled(draw, tensor: Tensor) -> Tensor:
    wild = (-1, 2, 11, 300, -(2**31), 2**31 - 1) + (2**40,) * (tensor.dtype == torch.int64)
    if tensor.dtype == torch.bool:  # bools whose bytes are neither 0 nor 1
        return (tensor.to(torch.uint8) * draw(st.sampled_from((2, 128, 255)))).view(torch.bool)
    return torch.full_like(tensor, draw(st.sampled_from(wild if not tensor.is_floating_point() else (0, 1e30))))


def one_wild(draw, tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or not tensor.numel():
        return tensor * float("nan")
    flat = tensor.flatten().clone()
    flat[draw(st.integers(0, flat.numel() - 1))] = filled(draw, flat)[0]
    return flat.view(tensor.shape)


TENSORS = (
    longer,
    shorter,
    filled,
    one_wild,
    lambda draw, tensor: None,
    lambda draw, tensor: tensor.to(draw(st.sampled_from(DTYPES))),
    lambda draw, tensor: tensor[:0] if tensor.dim() else tensor[None],
    lambda draw, tensor: tensor.new_empty(()),
    lambda draw, tensor: tensor.unsqueeze(dimension(draw, tensor)),
    lambda draw, tensor: tensor.flatten(),
    lambda draw, tensor: (
        tensor.movedim(0, -1) if tensor.dim() > 1 else tensor.expand(2, -1) if tensor.dim() else tensor
    ),
    lambda draw, tensor: tensor[:1].expand_as(tensor) if tensor.numel() else tensor,
    lambda draw, tensor: torch.stack([tensor, tensor], -1)[..., 0],
    lambda draw, tensor: torch.cat([tensor, tensor])[tensor.shape[0] :] if tensor.dim() else tensor,
    lambda draw, tensor: tensor.to("meta"),
)


class Call:
    def __init__(self, name: str, args: list) -> None:
        self.name, self.args = name, args

    def __repr__(self) -> str:
        return f"torch.ops.fastbert.{self.name}({', '.join(map(described, self.args))})"


def described(arg: object) -> str:
    if isinstance(arg, list):
        return f"[{', '.join(map(described, arg))}]"
    if not isinstance(arg, Tensor):
        return repr(arg)
    integers = not arg.is_floating_point() and not arg.is_complex() and not arg.is_meta and arg.numel() <= 20
    values = f" {arg.tolist()}" if integers else ""
    return f"<{str(arg.dtype).removeprefix('torch.')} {list(arg.shape)} strides {arg.stride()} on {arg.device}{values}>"


@st.composite
def calls(draw) -> Call:
    name = draw(st.sampled_from(ON_CPU))
    args = right_call(name, draw(sizes()))
    for _ in range(draw(st.sampled_from((0, 1, 1, 1, 2, 3)))):
        place = draw(st.integers(0, len(args) - 1))
        args[place] = draw(other(args[place]))
    return Call(name, tree_map_only(Tensor, lambda tensor: tensor if tensor.is_meta else guarded(tensor), args))


# ---- the check


def guarded(tensor: Tensor) -> Tensor:
    """A copy with the same strides, whose last element is followed by an unreadable page."""
    reach = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if not tensor.numel():
        return tensor
    size = reach * tensor.element_size()
    readable = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    area = mmap.mmap(-1, readable + mmap.PAGESIZE)
    behind = ctypes.addressof(ctypes.c_char.from_buffer(area)) + readable
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(behind), mmap.PAGESIZE, 0):
        raise OSError("mprotect failed")
    flat = torch.frombuffer(area, dtype=tensor.dtype, count=reach, offset=readable - size)
    flat.copy_(tensor.as_strided((reach,), (1,)))
    return flat.as_strided(tensor.shape, tensor.stride())


def fake_results(call: Call) -> tuple[Tensor, ...]:
    """The results that the fake promises."""
    return tree_leaves(PRIMITIVES[call.name].fake(*tree_map_only(Tensor, lambda tensor: tensor.to("meta"), call.args)))


def check(call: Call) -> bool:
    """Whether the call returned. Asserts that its results then are what the fake promises."""
    try:
        found = getattr(torch.ops.fastbert, call.name)(*call.args)
    except Exception:  # which is allowed
        return False
    for real, fake in zip(tree_leaves(found), fake_results(call), strict=True):
        assert (real.shape, real.dtype) == (fake.shape, fake.dtype), f"{real.shape} {real.dtype}, not {fake}"
        assert real.is_contiguous() or real.stride() == fake.stride()
    return True


def main(examples: int, file: Path) -> None:
    returned, quiet = [], {"suppress_health_check": list(HealthCheck), "report_multiple_bugs": False}
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))  # results of 2**31 rows raise, and fill no memory
    with open(file, "r+b", buffering=0) as place:

        @settings(max_examples=examples, derandomize=True, deadline=None, **quiet)
        @given(calls())
        def run(call):
            place.seek(0)
            place.truncate()
            place.write(repr(call).encode())
            returned.append(check(call))

        run()
    print(f"{len(returned)} calls, {sum(returned)} returned")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
