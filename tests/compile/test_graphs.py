"""Launches that come again, captured as graphs: when, for how long, and what a failure leaves. The driver is a stand-in
that keeps what CUDA would, and a kernel is a word that it is told."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from ctypes import c_void_p
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashqla.ops.kernels import graphs

SIDE, CURRENT = 7, 5  # streams
OUT_OF_MEMORY, INVALIDATED = 2, 901


class Driver:
    def __init__(self) -> None:
        self.ran: list[str] = []
        self.captured: list[str] | None = None
        self.graphs: dict[int, list[str]] = {}
        self.executables: dict[int, list[str]] = {}
        self.made = 0
        self.fails: dict[str, int] = {}

    def kernel(self, name: str) -> None:
        (self.ran if self.captured is None else self.captured).append(name)

    def cuGetErrorName(self, error: int, name: Any) -> int:
        name._obj.value = {2: b"CUDA_ERROR_OUT_OF_MEMORY", 901: b"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"}[error]
        return 0

    def cuStreamBeginCapture_v2(self, stream: int, mode: int) -> int:
        assert (stream, mode, self.captured) == (SIDE, graphs.THREAD_LOCAL, None)
        if error := self.fails.get("cuStreamBeginCapture_v2", 0):
            return error
        self.captured = []
        return 0

    def cuStreamEndCapture(self, stream: int, graph: Any) -> int:
        assert stream == SIDE
        assert self.captured is not None
        kernels, self.captured = self.captured, None
        if error := self.fails.get("cuStreamEndCapture", 0):
            return error
        self._make(self.graphs, graph, kernels)
        return 0

    def cuGraphInstantiateWithFlags(self, executable: Any, graph: c_void_p, flags: int) -> int:
        if error := self.fails.get("cuGraphInstantiateWithFlags", 0):
            return error
        self._make(self.executables, executable, self.graphs[graph.value or 0])
        return 0

    def cuGraphLaunch(self, executable: int, stream: int) -> int:
        assert stream == CURRENT
        if error := self.fails.get("cuGraphLaunch", 0):
            return error
        self.ran += self.executables[executable]
        return 0

    def cuGraphExecDestroy(self, executable: int) -> int:
        del self.executables[executable]
        return 0

    def cuGraphDestroy(self, graph: c_void_p) -> int:
        del self.graphs[graph.value or 0]
        return 0

    def _make(self, made: dict[int, list[str]], handle: Any, kernels: list[str]) -> None:
        self.made += 1
        handle._obj.value = self.made
        made[self.made] = kernels


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(graphs, "_driver", lambda: driver)
    monkeypatch.setattr(graphs, "_side_stream", lambda device: SimpleNamespace(cuda_stream=SIDE))
    monkeypatch.setattr(graphs, "_current_stream", lambda device: CURRENT)
    monkeypatch.setattr(graphs, "active_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return driver


def launch(driver: Driver, kept: graphs.Graphs, key: str) -> bool:
    """Launch two kernels, named for a key. Returns whether they were called for it."""
    called: list[str] = []

    def kernels() -> None:
        for kernel in (f"{key} 1", f"{key} 2"):
            called.append(kernel)
            driver.kernel(kernel)

    driver.ran.clear()
    kept.launch(key, 0, kernels)
    assert driver.ran == [f"{key} 1", f"{key} 2"]
    assert driver.captured is None
    assert not driver.graphs  # an executable one needs it no more
    return bool(called)


def test_what_came_before_is_captured_and_then_launched_as_a_graph(driver: Driver) -> None:
    kept = graphs.Graphs()
    assert launch(driver, kept, "a")
    assert not driver.executables
    assert launch(driver, kept, "a")  # into the graph
    assert len(driver.executables) == 1
    assert [launch(driver, kept, "a") for _ in range(3)] == [False] * 3
    assert len(driver.executables) == 1


def test_other_addresses_are_launched_one_by_one(driver: Driver) -> None:
    kept = graphs.Graphs()
    for _ in range(3):
        launch(driver, kept, "a")
    assert launch(driver, kept, "b")
    assert not launch(driver, kept, "a")


def test_the_oldest_graph_goes(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST", 2)
    monkeypatch.setattr(graphs, "RUNS_PER_CAPTURE", 0)
    kept = graphs.Graphs()
    for key in ("a", "b", "c"):
        for _ in range(2):
            launch(driver, kept, key)
    assert sorted(driver.executables.values()) == [["b 1", "b 2"], ["c 1", "c 2"]]
    assert not launch(driver, kept, "b")
    assert launch(driver, kept, "a")  # which came twice before, and so is captured at once
    assert not launch(driver, kept, "a")
    del kept
    gc.collect()
    assert not driver.executables


def test_graphs_that_push_out_each_other_are_not_captured_at_every_run(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MOST", 2)
    kept = graphs.Graphs()
    for n in range(1000):
        launch(driver, kept, "abc"[n % 3])
    assert driver.made / 2 <= 2 + 1000 / graphs.RUNS_PER_CAPTURE
    assert len(driver.executables) == 2


def test_what_never_comes_again_is_forgotten(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_SEEN", 8)
    kept = graphs.Graphs()
    for n in range(100):
        assert launch(driver, kept, str(n))
    assert len(kept._seen) == 8
    assert driver.made == 0


def raises() -> None:
    raise ValueError("no kernel for that")


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ({"cuStreamBeginCapture_v2": OUT_OF_MEMORY}, "cuStreamBeginCapture_v2: CUDA_ERROR_OUT_OF_MEMORY"),
        ({"cuStreamEndCapture": INVALIDATED}, "cuStreamEndCapture: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"),
        ({"cuGraphInstantiateWithFlags": OUT_OF_MEMORY}, "cuGraphInstantiateWithFlags: CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_a_failed_capture_warns_once_and_leaves_nothing(driver: Driver, fails: dict[str, int], reason: str) -> None:
    kept = graphs.Graphs()
    for _ in range(3):
        launch(driver, kept, "before")
    launch(driver, kept, "a")
    driver.fails = fails
    with pytest.warns(RuntimeWarning, match=reason):
        launch(driver, kept, "a")
    assert list(driver.executables.values()) == [["before 1", "before 2"]]
    for _ in range(3):
        assert launch(driver, kept, "a")
    assert not launch(driver, kept, "before")


def interrupted(driver: Driver, error: BaseException) -> Callable[[], None]:
    def kernels() -> None:
        driver.kernel("first")
        if driver.captured is not None:
            raise error

    return kernels


@pytest.mark.parametrize("fails", [{}, {"cuStreamEndCapture": INVALIDATED}])
def test_kernels_that_cannot_be_captured_are_launched(driver: Driver, fails: dict[str, int]) -> None:
    kept = graphs.Graphs()
    driver.fails = fails
    kernels = interrupted(driver, ValueError("not while a stream is captured"))
    kept.launch("a", 0, kernels)
    with pytest.warns(RuntimeWarning, match="not while a stream is captured"):
        kept.launch("a", 0, kernels)
    kept.launch("a", 0, kernels)
    assert driver.ran == ["first"] * 3
    assert driver.captured is None
    assert not driver.graphs
    assert not driver.executables


def test_an_interrupted_capture_is_ended(driver: Driver) -> None:
    kept = graphs.Graphs()
    launch(driver, kept, "a")
    with pytest.raises(KeyboardInterrupt):
        kept.launch("a", 0, interrupted(driver, KeyboardInterrupt()))
    assert driver.captured is None
    assert not driver.graphs
    assert launch(driver, kept, "a")
    assert not launch(driver, kept, "a")


def test_errors_of_kernels_are_their_own(driver: Driver) -> None:
    kept = graphs.Graphs()
    launch(driver, kept, "a")
    with pytest.warns(RuntimeWarning), pytest.raises(ValueError, match="no kernel"):
        kept.launch("a", 0, raises)


def test_an_error_of_a_launch_has_the_name_that_cuda_gives_it(driver: Driver) -> None:
    kept = graphs.Graphs()
    for _ in range(2):
        launch(driver, kept, "a")
    driver.fails = {"cuGraphLaunch": OUT_OF_MEMORY}
    with pytest.raises(RuntimeError, match="cuGraphLaunch: CUDA_ERROR_OUT_OF_MEMORY"):
        launch(driver, kept, "a")


def test_nothing_is_captured_beside_other_threads(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may wait for the whole device, which CUDA refuses until a capture ends."""
    kept = graphs.Graphs()
    for _ in range(2):
        launch(driver, kept, "a")
    monkeypatch.setattr(graphs, "active_count", lambda: 2)
    assert [launch(driver, kept, "b") for _ in range(3)] == [True] * 3
    assert not launch(driver, kept, "a")
    monkeypatch.setattr(graphs, "active_count", lambda: 1)
    assert launch(driver, kept, "b")
    assert not launch(driver, kept, "b")


def test_one_capture_is_made_at_a_time(driver: Driver) -> None:
    """Threads of autograd, which Python does not count, may come at the same time, and there is one stream for it."""
    kept = graphs.Graphs()
    launch(driver, kept, "a")
    with kept._capturing:
        assert launch(driver, kept, "a")
        assert not driver.executables
    assert launch(driver, kept, "a")
    assert not launch(driver, kept, "a")
