"""A call laid out once, in either direction, to be launched again for other tensors of the same shapes, strides and dtypes.

Laying out a call takes longer than launching it: every view, every allocation and every description of a tensor for a kernel costs about a
microsecond. A recording keeps the descriptions in the form that kernels take, DLPack's DLTensor, and a run puts its addresses into them.
Where all addresses come again, as those that PyTorch's allocator gives do, a run launches a graph of its kernels (`graphs`).
"""

from array import array
from collections.abc import Callable, Sequence
from ctypes import Structure, addressof, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p, sizeof
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashqla.ops.checks import Problem
from flashqla.ops.kernels import graphs, launch, launch_backward
from flashqla.ops.plan import Plan

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


class Part(NamedTuple):
    """Calls that are launched one after the other. `allocated` is allocated before them, and the addresses `freed` are given back after them."""

    views: list[View]
    calls: list[Call]
    allocated: list[Tensor]  # one element expanded: like what there is to allocate
    freed: list[int]
    tables: list["Table"]  # that no run has


class Table:
    """DLTensors of all views of a part, and its calls. Of one run at a time: kernels read it while other threads run."""

    def __init__(self, part: Part, device: int) -> None:
        views = part.views
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
            for function, before, after in part.calls
        ]

    def launch(self, addresses: list[int], offsets: Tensor) -> None:
        self.addresses[:] = array("Q", [addresses[n] + offset for n, offset in self.places])
        for function, before, after in self.calls:
            function(*before, offsets, *after)


@dataclass(frozen=True, eq=False)  # alike in all is another one still: graphs are kept by the recording that they are of
class Recording:
    """Addresses of a run are those of the inputs that there are, and then of what the parts allocate, in order."""

    parts: list[Part]
    device: int
    results: list[tuple[int, torch.dtype] | None]  # by address, and the dtype that each is to have
    offsets: Tensor | None  # of a batch; those of a pack come with each run

    def run(self, inputs: Sequence[Tensor | None], cu_seqlens: Tensor | None) -> list[Tensor | None]:
        """Results for inputs in the order in which they were recorded."""
        offsets = self.offsets if cu_seqlens is None else launch._int32(cu_seqlens)
        memory: list[Tensor | None] = [x for x in inputs if x is not None]
        addresses = [x.data_ptr() for x in memory]
        for n, part in enumerate(self.parts):
            for like in part.allocated:  # sizes as Python numbers would take longer to hand over than allocating takes
                x = torch.empty_like(like, memory_format=torch.contiguous_format)
                memory.append(x)
                addresses.append(x.data_ptr())
            key = (self, n, offsets.data_ptr(), *addresses)
            graphs.kept.launch(key, self.device, partial(self._launch, part, addresses, offsets))
            for freed in part.freed:
                memory[freed] = None
        return [self._result(memory, of) for of in self.results]

    def _launch(self, part: Part, addresses: list[int], offsets: Tensor) -> None:
        try:
            table = part.tables.pop()
        except IndexError:  # none yet, or as many runs at a time as there are tables
            table = Table(part, self.device)
        table.launch(addresses, offsets)
        part.tables.append(table)

    @staticmethod
    def _result(memory: list[Tensor | None], of: tuple[int, torch.dtype] | None) -> Tensor | None:
        if of is None:
            return None
        x = memory[of[0]]
        return x if x is None or x.dtype == of[1] else x.to(of[1])


class Place(NamedTuple):
    """Where a storage of the layout lies in a run."""

    address: int
    offset: int


Launched = tuple[Callable[..., None], tuple[Any, ...]]


def record(problem: Problem, plan: Plan) -> Recording | None:
    """What `launch.forward` launches for a problem without h, or None if it would copy an input first.

    A run takes q, k, v, g, beta and the initial state, and returns o and the final state.
    """

    def lay_out(inputs: list[Tensor | None], offsets: Tensor, kernel: Callable[..., Any]) -> list[Tensor | None]:
        given = dict(zip(("q", "k", "v", "g", "beta", "initial_state"), inputs, strict=True))
        results = launch.forward(replace(problem, cu_seqlens=offsets, **given), plan, kernel=kernel)
        return [results.o, results.final_state]

    p = problem
    return _record(p, [p.q, p.k, p.v, p.g, p.beta, p.initial_state], lay_out, [p.v.dtype, torch.float32], 0)


def record_backward(problem: Problem, plan: Plan, do: Tensor, dht: Tensor | None, sm_count: int) -> Recording | None:
    """What `launch_backward.backward` launches from the inputs alone, or None if it would copy one first.

    A run takes q, k, v, g, beta, the initial state, do and dht, and returns gradients in the order of `Backward`.
    """

    def lay_out(inputs: list[Tensor | None], offsets: Tensor, kernel: Callable[..., Any]) -> list[Tensor | None]:
        *tensors, do, dht = inputs
        given = dict(zip(("q", "k", "v", "g", "beta", "initial_state"), tensors, strict=True))
        p = replace(problem, cu_seqlens=offsets, **given)
        return list(launch_backward.raw_gradients(p, plan, do, dht, None, sm_count, kernel))

    p = problem
    inputs = [p.q, p.k, p.v, p.g, p.beta, p.initial_state]
    dtypes = [torch.float32 if x is None else x.dtype for x in inputs]
    # The gradients kernel, the last one, writes to memory that others have left.
    return _record(p, [*inputs, do, dht], lay_out, dtypes, 1)


def _record(
    problem: Problem,
    inputs: list[Tensor | None],
    lay_out: Callable[[list[Tensor | None], Tensor, Callable[..., Any]], list[Tensor | None]],
    dtypes: list[torch.dtype],
    last: int,
) -> Recording | None:
    """lay_out: given inputs, offsets and what finds a kernel, launches kernels and returns results, of whose dtypes `dtypes` are to be made.

    last: how many launches are a part of their own, before which the memory is free that they do not need.
    Laid out on tensors without memory, one for each input: in a call two of them may be one. Tensors that tensor copy engines read must be
    aligned to 16 bytes in a run.
    """
    stand_ins = [None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in inputs]
    batch_offsets = None
    if problem.cu_seqlens is None:
        batch_offsets = launch._even_offsets(problem.batch, problem.tokens, problem.q.device)
    offsets = torch.empty_like(problem.cu_seqlens if batch_offsets is None else batch_offsets, device="meta")
    launched: list[Launched] = []

    def kernel(*key: Any) -> Callable[..., None]:
        return lambda *arguments: launched.append((launch._kernel(*key), arguments))

    results = lay_out(stand_ins, offsets, kernel)
    runs = [part for part in (launched[: len(launched) - last], launched[len(launched) - last :]) if part]
    given = [x for x in stand_ins if x is not None]
    places, allocated, freed = _places(runs, given, [x for x in results if x is not None], _key(offsets))
    parts = []
    for run, likes, gone in zip(runs, allocated, freed, strict=True):
        calls = [_call(function, arguments, _key(offsets), places) for function, arguments in run]
        views = list(dict.fromkeys(x for call in calls for part in (call.before, call.after) for x in part if isinstance(x, View)))
        parts.append(Part(views, calls, [problem.v.new_empty((), dtype=x.dtype).expand(x.shape) for x in likes], gone, []))
    if not {view.address for part in parts for view in part.views}.issuperset(range(len(given))):
        return None
    of = [None if x is None else (places[_key(x)].address, dtype) for x, dtype in zip(results, dtypes, strict=True)]
    return Recording(parts, problem.q.device.index or 0, of, batch_offsets)


def _places(
    runs: list[list[Launched]], given: list[Tensor], results: list[Tensor], offsets: int
) -> tuple[dict[int, Place], list[list[Tensor]], list[list[int]]]:
    """Where every storage lies, and what each part allocates and frees. A result has memory of its own; the rest shares some, by first and last use."""
    uses: dict[int, list[int]] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    for n, run in enumerate(runs):
        for _, arguments in run:
            for x in arguments:
                if isinstance(x, Tensor):
                    uses.setdefault(_key(x), []).append(n)
                    storages[_key(x)] = x.untyped_storage()
    places = {_key(x): Place(n, 0) for n, x in enumerate(given)}
    address = len(given)
    allocated: list[list[Tensor]] = []
    freed: list[list[int]] = [[] for _ in runs]
    for n in range(len(runs)):
        likes = [x for x in results if uses[_key(x)][0] == n]
        for x in likes:
            places[_key(x)] = Place(address, 0)
            address += 1
        for end in range(n, len(runs)):
            scratch = [key for key, used in uses.items() if key not in places and key != offsets and (used[0], used[-1]) == (n, end)]
            if scratch:
                begin = 0
                for key in scratch:
                    places[key] = Place(address, begin)
                    begin += -(-storages[key].nbytes() // ALIGNMENT) * ALIGNMENT
                likes.append(torch.empty(begin, dtype=torch.uint8, device="meta"))
                freed[end].append(address)
                address += 1
        allocated.append(likes)
    return places, allocated, freed


def _call(function: Callable[..., None], arguments: tuple[Any, ...], offsets: int, places: dict[int, Place]) -> Call:
    at = next(n for n, x in enumerate(arguments) if isinstance(x, Tensor) and _key(x) == offsets)
    before, after = (tuple(_view(x, places) if isinstance(x, Tensor) else x for x in part) for part in (arguments[:at], arguments[at + 1 :]))
    return Call(function, before, after)


def _view(x: Tensor, places: dict[int, Place]) -> View:
    place = places[_key(x)]
    return View(place.address, place.offset + x.storage_offset() * x.itemsize, tuple(x.shape), x.stride(), x.dtype)


def _key(x: Tensor) -> int:
    """Of the storage, while there is one."""
    return x.untyped_storage()._cdata
