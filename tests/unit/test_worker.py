"""The worker process: results, clocks, ends of all kinds, and nothing left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import Any

import pytest

from flashqla.errors import FlashqlaError
from flashqla.worker import Lost, Worker

SUPPORT = Path(__file__).parents[1] / "support"
NAMES = ("first", "second", "idle")
Make = Callable[..., Worker]


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SUPPORT)
    import worker_tasks

    return worker_tasks


@pytest.fixture
def make(tasks: Any) -> Iterator[Make]:
    workers = []

    def make(timeout_s: float = 20.0, **options: Any) -> Worker:
        workers.append(Worker(options.pop("start", tasks.start), NAMES, timeout_s, **options))
        return workers[-1]

    yield make
    for worker in workers:
        worker.kill()


def gone(pid: int, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":  # ended; whoever adopted it has yet to take note
            return True
        time.sleep(0.02)
    return False


def test_tasks_share_a_process_that_ends_when_told(make: Make) -> None:
    worker = make()
    value, pid = worker.ask(("echo", {"a": [1, 2]}))
    assert value == {"a": [1, 2]}
    assert worker.ask(("echo", None)) == (None, pid)
    assert pid != os.getpid()
    worker.close()
    assert gone(pid)


@pytest.mark.parametrize(
    ("task", "status", "reason", "name"),
    [
        (("hang", "second"), "timeout", "running took more than 0.5 s", "second"),
        (("hang", None), "timeout", "running took more than 0.5 s", None),
        (("compile_for", [0.01, 60]), "timeout", "compiling took more than 0.5 s", "first"),
        (("leave", 3), "failed", "the process died: exit code 3", "second"),
        (("fault", 0), "failed", "the process died: SIGSEGV", "first"),
        (("lose", "second"), "failed", "the GPU was lost", "second"),
    ],
)
def test_an_end_is_told_and_the_next_task_gets_a_new_process(
    make: Make, task: Any, status: str, reason: str, name: str | None
) -> None:
    worker = make(timeout_s=0.5)
    worker.start = make().start
    _, pid = worker.ask(("echo", 0))
    with pytest.raises(Lost) as caught:
        worker.ask(task)
    assert (caught.value.status, caught.value.reason, caught.value.name) == (status, reason, name)
    assert gone(pid)
    assert worker.ask(("echo", 1))[0] == 1


def test_compiling_has_a_clock_of_its_own(make: Make) -> None:
    told: list[tuple[str, bool]] = []
    worker = make(timeout_s=0.6, tell=lambda text, compiling: told.append((text, compiling)))
    worker.ask(("echo", 0))
    told.clear()
    assert worker.ask(("compile_for", [0.3] * 4)) == "compiled"  # 1.2 s of it, and 0.2 s of running
    assert told == [("compiling first", True), ("running second", False)] * 4


def test_a_start_that_fails_is_told_apart(make: Make, tasks: Any) -> None:
    worker = make(start=tasks.start_badly)
    with pytest.raises(Lost, match=None) as caught:
        worker.ask(("echo", 0))
    assert (caught.value.starting, caught.value.name, caught.value.reason) == (
        True,
        "first",
        "the process died: exit code 7",
    )
    worker.start = tasks.start
    assert worker.ask(("echo", 1))[0] == 1


def test_a_bug_brings_its_traceback(make: Make) -> None:
    worker = make()
    with pytest.raises(FlashqlaError, match=r"(?s)a bug in the worker.*in fail.*ZeroDivisionError: some text"):
        worker.ask(("fail", "some text"))
    assert worker.ask(("echo", 1))[0] == 1


def test_what_it_prints_reaches_stderr(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    worker = make()
    worker.ask(("shout", "compiling\n"))
    worker.close()
    assert capfd.readouterr() == ("", "compiling\n" * 2)


def test_ctrl_c_does_not_reach_a_process_that_is_starting() -> None:
    """The first process of its parent: with it starts a tracker, around which CPython unblocks what we blocked."""
    code = f"""
import os, signal, sys
from multiprocessing import util
sys.path.insert(0, {str(SUPPORT)!r})
import worker_tasks
from flashqla.worker import Worker

def spawn(*arguments, usual=util.spawnv_passfds):
    pid = usual(*arguments)
    os.kill(pid, signal.SIGINT)  # the terminal sends it to the whole group
    return pid

util.spawnv_passfds = spawn
worker = Worker(worker_tasks.start, {NAMES!r}, 60.0)
print(worker.ask(("echo", 1))[0])
worker.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_ctrl_c_waits_until_a_process_has_started(
    make: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whichever thread gets it: torch has some, in which nothing is blocked."""
    usual, pids, go = util.spawnv_passfds, [], threading.Event()

    def interrupt() -> None:
        go.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    def spawn(*arguments: Any) -> int:
        pids.append(usual(*arguments))  # it has yet to be told what to do
        go.set()
        thread.join()
        return pids[-1]

    thread = threading.Thread(target=interrupt)
    thread.start()
    resource_tracker.ensure_running()
    monkeypatch.setattr(util, "spawnv_passfds", spawn)
    worker = make()
    with pytest.raises(KeyboardInterrupt):
        worker.ask(("echo", 0))
    worker.kill()
    assert gone(pids[0])
    assert capfd.readouterr() == ("", "")


def test_sigterm_is_held_back_only_until_it_has_started(make: Make) -> None:
    worker = make()
    _, pid = worker.ask(("echo", 0))
    os.kill(pid, signal.SIGTERM)
    with pytest.raises(Lost, match=None) as caught:
        worker.ask(("echo", 1))
    assert caught.value.reason == "the process died: SIGTERM"


@pytest.mark.parametrize("verb", ["breed", "share"])
def test_killing_takes_its_compilers_along(make: Make, tmp_path: Path, verb: str) -> None:
    path = tmp_path / "pids"
    worker = make(timeout_s=2.0)
    with pytest.raises(Lost):
        worker.ask((verb, str(path)))
    assert len(path.read_text().split()) >= 2
    assert all(gone(int(pid)) for pid in path.read_text().split())


@pytest.mark.parametrize("verb", ["breed", "share"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_its_parent(tmp_path: Path, number: signal.Signals, verb: str) -> None:
    path = tmp_path / "pids"
    code = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
import worker_tasks
from flashqla.worker import Worker
worker = Worker(worker_tasks.start, {NAMES!r}, 60.0)
try:
    worker.ask(({verb!r}, {str(path)!r}))
finally:
    worker.kill()
"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as parent:
        deadline = time.monotonic() + 30
        while not (path.exists() and path.read_text().endswith("\n")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        worker, compiler, *_ = map(int, path.read_text().split())
        assert not gone(worker, within_s=0.1)
        parent.send_signal(number)
    assert gone(worker)
    if number == signal.SIGKILL and verb == "breed":  # a compiler ends when it has compiled
        os.kill(compiler, signal.SIGKILL)
    assert gone(compiler)
