"""Stand-ins for CUDA graphs where there is no GPU."""

from contextlib import nullcontext

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastbert.graphs.capture import CudaGraphs

aten = torch.ops.aten


class Again:
    """Stands in for CudaGraphs where there is no GPU: a replay runs the function again, into the same outputs."""

    def __init__(self, device):
        self.in_order = nullcontext

    def capture(self, function):
        outputs = function()
        memory = [None if output is None else output.detach() for output in outputs]  # kept, whatever becomes of them

        def replay():
            for old, new in zip(memory, function(), strict=True):
                if new is not None:
                    old.copy_(new)

        return replay, outputs


class WithoutReading(TorchFunctionMode):
    """Fails if Python reads a tensor's values on the host, by a method that on a CPU is no op."""

    METHODS = {getattr(torch.Tensor, name) for name in ("tolist", "numpy", "cpu", "__array__")}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in self.METHODS, f"{function} asks for values"
        return function(*args, **(kwargs or {}))


class WithoutWaiting(TorchDispatchMode):
    """Fails if an op of ASKS, or indexing with a mask, reads a tensor's value on the host: a capture would fail."""

    ASKS = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten._unique2)
    ASKS += (aten.unique_consecutive, aten.unique_dim, aten.bincount, aten.allclose)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in self.ASKS:
            raise AssertionError(f"{function} asks for a value")
        if function is aten.repeat_interleave.Tensor:
            assert (kwargs or {}).get("output_size") is not None, f"{function} without output_size asks for a sum"
        if function.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{function} with a mask asks how much of it is true"
        return function(*args, **(kwargs or {}))


class AgainWithoutWaiting(Again):
    def capture(self, function):
        replay, outputs = super().capture(function)

        def guarded():
            with WithoutReading(), WithoutWaiting():
                replay()

        return guarded, outputs


RECORDER = CudaGraphs if torch.cuda.is_available() else Again
