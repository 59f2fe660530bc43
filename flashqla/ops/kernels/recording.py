"""A forward call laid out once, to be launched again for other tensors of the same shapes, strides and dtypes.

Laying out a call takes longer than launching it: every view, every allocation and every description of a tensor for a kernel costs about a
microsecond. A recording keeps the descriptions in the form that kernels take, DLPack's DLTensor, and a run puts its addresses into them.
"""

from array import array
from collections.abc import Callable
from ctypes import Structure, addressof, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p, sizeof
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashqla.ops.checks import Problem
from flashqla.ops.kernels import launch
from flashqla.ops.plan import Plan

INPUTS = ("q", "k", "v", "g", "beta", "initial_state")
ALIGNMENT = 256  # bytes, of tensors in scratch memory: what PyTorch's allocator would give them, and more than kernels ask for
CUDA = 2  # DLPack's device type
DTYPES = {torch.int32: (0, 32), torch.float16: (2, 16), torch.float32: (2, 32), torch.bfloat16: (4, 16)}  # DLPack's type code, and bits


class DLTensor(Structure):
    _fields_ = (
        ("data", c_uint64),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("type_code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", c_void_p),
        ("strides", c_void_p),
        ("byte_offset", c_uint64),
    )


class View(NamedTuple):
    """A tensor that a kernel gets: `offset` bytes behind one of the addresses of a run, by number."""

    address: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Call(NamedTuple):
    """A launch. Offsets are a tensor of PyTorch: it is from one of those that TVM's FFI learns which stream is current."""

    function: Callable[..., None]
    before: tuple[Any, ...]  # arguments in front of the offsets
    after: tuple[Any, ...]


class Table:
    """DLTensors of all views, and the calls that take them. Of one run at a time: kernels read it while other threads run."""

    def __init__(self, views: list[View], calls: list[Call], device: int) -> None:
        self.places = [(view.address, view.offset) for view in views]
        self.tensors = (DLTensor * len(views))()
        self.addresses = memoryview(self.tensors).cast("B").cast("Q")[:: sizeof(DLTensor) // 8]  # each tensor's first word
        self.sizes = []  # the tensors point to them
        pointers = {}
        for tensor, view in zip(self.tensors, views, strict=True):
            shape, strides = ((c_int64 * len(sizes))(*sizes) for sizes in (view.shape, view.strides))
            self.sizes += [shape, strides]
            tensor.device_type, tensor.device_id, tensor.ndim = CUDA, device, len(view.shape)
            (tensor.type_code, tensor.bits), tensor.lanes = DTYPES[view.dtype], 1
            tensor.shape, tensor.strides = addressof(shape), addressof(strides)
            pointers[view] = c_void_p(addressof(tensor))
        self.calls = [
            Call(function, *(tuple(pointers[x] if isinstance(x, View) else x for x in part) for part in (before, after)))
            for function, before, after in calls
        ]


@dataclass(frozen=True)
class Recording:
    """Addresses of a run are those of the inputs that there are, of o, of the final state if it is asked for, and of scratch memory.

    o, final_state and scratch are empty or one element expanded: like what there is to allocate.
    """

    views: list[View]
    calls: list[Call]
    device: int
    o: Tensor
    final_state: Tensor | None
    scratch: Tensor
    scratch_bytes: int
    offsets: Tensor | None  # of a batch; those of a pack come with each run
    free: list[Table] = field(default_factory=list)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """o and the final state, as of `launch.forward`."""
        # Sizes as Python numbers would take longer to hand over than the allocations take.
        o = torch.empty_like(self.o, memory_format=torch.contiguous_format)
        final_state = None
        if self.final_state is not None:
            final_state = torch.empty_like(self.final_state, memory_format=torch.contiguous_format)
        scratch = self.scratch.new_empty(self.scratch_bytes)
        offsets = self.offsets if cu_seqlens is None else launch._int32(cu_seqlens)
        addresses = [x.data_ptr() for x in (q, k, v, g, beta, initial_state, o, final_state, scratch) if x is not None]
        try:
            table = self.free.pop()
        except IndexError:  # none yet, or as many runs at a time as there are tables
            table = Table(self.views, self.calls, self.device)
        table.addresses[:] = array("Q", [addresses[n] + offset for n, offset in table.places])
        for function, before, after in table.calls:
            function(*before, offsets, *after)
        self.free.append(table)
        return o, final_state


class Memory:
    """Finds where a tensor of the layout lies. What has a storage of its own, and is not known, is scratch memory."""

    def __init__(self, known: list[Tensor]) -> None:
        self.known = [x.untyped_storage() for x in known]
        self.scratch: list[tuple[torch.UntypedStorage, int]] = []  # and where they begin
        self.bytes = 0

    def view(self, x: Tensor) -> View:
        address, begin = self._find(x.untyped_storage())
        return View(address, begin + x.storage_offset() * x.itemsize, tuple(x.shape), x.stride(), x.dtype)

    def _find(self, storage: torch.UntypedStorage) -> tuple[int, int]:
        for n, known in enumerate(self.known):
            if known is storage:
                return n, 0
        for known, begin in self.scratch:
            if known is storage:
                return len(self.known), begin
        begin = self.bytes
        self.scratch.append((storage, begin))
        self.bytes += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        return len(self.known), begin


def record(problem: Problem, plan: Plan) -> Recording | None:
    """What `launch.forward` launches for a problem without h, or None if it would copy an input first.

    Laid out on tensors without memory, one for each input: in a call two of them may be one. q, k and v of a run must be aligned to 16 bytes.
    """
    inputs = {
        name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        for name in INPUTS
        if (x := getattr(problem, name)) is not None
    }
    batch_offsets = None
    if problem.cu_seqlens is None:
        batch_offsets = launch._even_offsets(problem.batch, problem.tokens, problem.q.device)
    offsets = torch.empty_like(problem.cu_seqlens if batch_offsets is None else batch_offsets, device="meta")
    launched: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def kernel(*key: Any) -> Callable[..., None]:
        return lambda *arguments: launched.append((launch._kernel(*key), arguments))

    results = launch.forward(replace(problem, cu_seqlens=offsets, **inputs), plan, kernel=kernel)
    outputs = [x for x in (results.o, results.final_state) if x is not None]
    memory = Memory([*inputs.values(), *outputs])
    calls = []
    for function, arguments in launched:
        at = next(n for n, x in enumerate(arguments) if isinstance(x, Tensor) and x.untyped_storage() is offsets.untyped_storage())
        parts = (tuple(memory.view(x) if isinstance(x, Tensor) else x for x in part) for part in (arguments[:at], arguments[at + 1 :]))
        calls.append(Call(function, *parts))
    views = list(dict.fromkeys(x for call in calls for part in (call.before, call.after) for x in part if isinstance(x, View)))
    if not {view.address for view in views}.issuperset(range(len(inputs))):
        return None
    o, *final_state = (problem.v.new_empty((), dtype=x.dtype).expand(x.shape) for x in outputs)
    scratch = problem.v.new_empty(0, dtype=torch.uint8)
    device = problem.q.device.index or 0
    return Recording(views, calls, device, o, final_state[0] if final_state else None, scratch, memory.bytes, batch_offsets)
