"""Launches that come again at the same addresses, as one CUDA graph: 7 us on the host for each kernel through TVM, or one call for all.

A graph is captured from the launches themselves, once, the second time that they come. It holds what they were given, addresses and numbers,
and no values, so that it launches the same wherever all of that is the same; where anything differs, kernels are launched one by one.

Nothing is captured while other threads of Python run: until a capture ends, CUDA refuses `torch.cuda.synchronize()` to all of
them. Graphs that are there are launched from any thread and on any stream, each behind its own launch before.
"""

import warnings
from collections.abc import Callable, Hashable
from ctypes import CDLL, POINTER, byref, c_char_p, c_int, c_uint64, c_void_p
from functools import cache
from threading import Lock, active_count
from typing import Any
from weakref import finalize

import torch

from flashqla.ops.bounded import note

MOST = 256  # graphs; the oldest goes
MOST_SEEN = 1024  # launches that may come again, likewise
# Where there are as many graphs as may be, and another would take the place of one. Capturing takes as long as many launches: an estimate,
# and no measurement.
RUNS_PER_CAPTURE = 32

THREAD_LOCAL = 1  # CUstreamCaptureMode: what other threads do meanwhile is their own affair
HANDLE, RESULT = c_void_p, POINTER(c_void_p)
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuStreamBeginCapture_v2": (HANDLE, c_int),
    "cuStreamEndCapture": (HANDLE, RESULT),
    "cuGraphInstantiateWithFlags": (RESULT, HANDLE, c_uint64),
    "cuGraphLaunch": (HANDLE, HANDLE),
    "cuGraphExecDestroy": (HANDLE,),
    "cuGraphDestroy": (HANDLE,),
}


@cache
def _driver() -> Any:
    driver = CDLL("libcuda.so.1")
    for name, types in FUNCTIONS.items():
        function = getattr(driver, name)
        function.argtypes, function.restype = types, c_int
    return driver


def _call(name: str, *arguments: Any) -> None:
    _check(name, getattr(_driver(), name)(*arguments))


def _check(name: str, error: int) -> None:
    if error:
        of_cuda = c_char_p()
        _driver().cuGetErrorName(error, byref(of_cuda))
        raise RuntimeError(f"{name}: {of_cuda.value.decode() if of_cuda.value else f'CUDA error {error}'}")


class Graph:
    """An executable graph. It goes with the last reference to it; one that still runs is freed by CUDA when it has."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self._enqueue = _driver().cuGraphLaunch
        # What it returns is for no one: a context that has failed says so at the next call. At exit graphs go with the driver.
        finalize(self, _driver().cuGraphExecDestroy, handle).atexit = False

    def launch(self, stream: int) -> None:
        _check("cuGraphLaunch", self._enqueue(self.handle, stream))


def capture(device: int, launch: Callable[[], None]) -> Graph:
    """A graph of what `launch` launches on the current stream. Runs nothing."""
    graph, executable = c_void_p(), c_void_p()
    side = _side_stream(device)
    stream = side.cuda_stream
    with torch.cuda.stream(side):
        _call("cuStreamBeginCapture_v2", stream, THREAD_LOCAL)
        try:
            launch()
        except BaseException:
            # The stream must not stay as it is. What CUDA says to that is no news, and there may be half a graph.
            if _driver().cuStreamEndCapture(stream, byref(graph)) == 0:
                _call("cuGraphDestroy", graph)
            raise
        _call("cuStreamEndCapture", stream, byref(graph))
    try:
        _call("cuGraphInstantiateWithFlags", byref(executable), graph, 0)
    finally:
        _call("cuGraphDestroy", graph)
    return Graph(executable.value)


@cache
def _side_stream(device: int) -> Any:
    """Where launches are captured: the legacy stream, which is PyTorch's default one, cannot be."""
    return torch.cuda.Stream(device)


class Graphs:
    """Graphs by what they launch, and what came once and may come again."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, Graph] = {}
        self._seen: dict[Hashable, None] = {}
        self._runs = 0  # without a graph, since the last capture
        self._failed = False
        self._changing = Lock()
        self._capturing = Lock()  # one stream is there for it

    def launch(self, key: Hashable, device: int, launch: Callable[[], None]) -> None:
        """Do what `launch` does: launch, on the current stream, what is the same whenever the key is."""
        graph = self._graphs.get(key) or self._captured(key, device, launch)
        if graph is None:
            launch()
        else:
            graph.launch(_current_stream(device))

    def _captured(self, key: Hashable, device: int, launch: Callable[[], None]) -> Graph | None:
        with self._changing:
            self._runs += 1
            again = key in self._seen
            if not again:
                note(self._seen, key, None, MOST_SEEN)
            full = len(self._graphs) >= MOST and self._runs < RUNS_PER_CAPTURE
        # Threads that Python does not count may come here, too: those in which autograd runs.
        if not again or full or self._failed or active_count() > 1 or not self._capturing.acquire(blocking=False):
            return None
        try:
            graph = capture(device, launch)
        except Exception as error:
            # Launched one by one, the kernels either run, or say themselves what is wrong.
            self._failed = True
            warnings.warn(f"flashqla launches kernels one by one from now on: no CUDA graph could be made ({error})", RuntimeWarning, stacklevel=2)
            return None
        finally:
            self._capturing.release()
        with self._changing:
            self._runs = 0
            return note(self._graphs, key, graph, MOST)


def _current_stream(device: int) -> int:
    """What `torch.cuda.current_stream` gives, without making an object of it."""
    return torch._C._cuda_getCurrentRawStream(device)


kept = Graphs()
