"""The loops of bench and verify on a CPU: what becomes of backends that are right, wrong, broken or missing."""

import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from flashqla import accuracy, backends, measure, runner
from flashqla import inputs as drawing
from flashqla.backends import Call, Outputs
from flashqla.cases import Case, Direction, suite
from flashqla.inputs import Inputs
from flashqla.measure import Config
from flashqla.records import Record
from flashqla.worker import Watch

CASE = Case(1, 2, (70, 9), tail=5, gate="strong")
QUICK = Config(repeats=2)
EVERY_OTHER = {CASE.lengths, *[case.lengths for case in suite("qwen")][:19:2]}
Change = Callable[[Inputs, Outputs], object]


@dataclass(frozen=True)
class Changed:
    """The op of this package, after which `change` alters its outputs (or does something worse)."""

    change: Change
    name: str = "changed"
    reason: str | None = None
    hint: str = "pip install it"
    compiles: str = "never"
    exact: bool = False
    contract: bool = True

    def uncapturable(self, direction: Direction) -> str | None:
        return "it is a fake"

    def missing(self) -> str | None:
        return self.reason

    def unsupported(self, case: Case, direction: Direction) -> str | None:
        return None

    def representatives(self, cases: Sequence[Case]) -> tuple[Case, ...]:
        return tuple(case for case in cases if case.lengths in EVERY_OTHER)

    def prepare(self, inputs: Inputs, direction: Direction) -> Call:
        run = backends.Flashqla("cpu").prepare(inputs, direction)

        def call() -> Outputs:
            outputs = run()
            self.change(inputs, outputs)
            return outputs

        return call

    def kernels(self, inputs: Inputs, direction: Direction) -> list[str]:
        return ["a kernel"]


def nothing(inputs: Inputs, outputs: Outputs) -> None:
    pass


def scale_o(factor: float) -> Change:
    return lambda inputs, outputs: outputs["o"].mul_(factor)


def verified(change: Change, *others: backends.Backend, case: Case = CASE, **fields: object) -> Record:
    """The record of a changed backend; the others run after it."""
    records: list[Record] = []
    runner.verify([case], [Changed(change, **fields), *others], "cpu", records.append)  # type: ignore[arg-type, list-item]
    assert len(records) == 1 + len(others)
    return records[0]


def test_kernels_say_whether_a_graph_has_named_them(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measure.interleaved

    def captured(*given: Any, **options: Any) -> dict[str, measure.Reading]:
        return {name: replace(reading, kernels=("k1", "k2")) for name, reading in measured(*given, **options).items()}

    records: list[Record] = []
    for how in (measured, captured):
        monkeypatch.setattr(measure, "interleaved", how)
        chosen = backends.create(["flashqla"], "cpu")
        runner.bench(suite("smoke")[2:3], chosen, "cpu", records.append, config=QUICK)
    plain, named = records
    assert (plain.kernels, plain.kernels_from) == (["PyTorch chunk form in float32"], ["backend"])
    assert (named.kernels, named.kernels_from) == ([*plain.kernels, "k1", "k2"], ["backend", "graph"])


def test_verify_passes_what_is_right() -> None:
    records: list[Record] = []
    cases = suite("smoke")[2:5]
    runner.verify(
        cases, backends.create(["flashqla", "torch-chunked", "fla"], "cpu", exact=True), "cpu", records.append
    )
    assert [(r.case_id, r.backend) for r in records] == [
        (case.id, name) for case in cases for name in ("flashqla", "torch-chunked", "fla")
    ]
    for ours, exact, peer in zip(records[::3], records[1::3], records[2::3], strict=True):
        assert (ours.status, ours.passed, ours.deterministic, ours.bound) == ("ok", True, True, accuracy.FLOOR)
        assert 1e-5 < ours.errors["o"].rel_l2 < accuracy.FLOOR
        assert ours.errors["final_state"].rel_l2 < 1e-6
        assert (ours.kernels, ours.kernels_from) == (["PyTorch chunk form in float32"], ["backend"])
        assert (exact.passed, exact.bound, exact.reason) == (True, accuracy.EXACT, None)
        assert exact.errors["o"].rel_l2 < 1e-12
        assert (peer.status, peer.hint) == ("missing", "pip install flash-linear-attention==0.6.0")
        assert peer.passed is None
        assert {r.command for r in (ours, exact, peer)} == {"verify"}


def test_a_wrong_result_fails() -> None:
    record = verified(scale_o(1.5))
    assert (record.status, record.passed, record.reason) == ("ok", False, "off the float64 recurrence")
    assert record.errors["o"].rel_l2 == pytest.approx(0.5, abs=0.01)
    assert record.errors["o"].cosine == pytest.approx(1, abs=1e-3)


def test_nan_fails_and_is_counted() -> None:
    record = verified(lambda inputs, outputs: outputs["final_state"][1, 0, :3, 0].fill_(torch.nan))
    assert record.passed is False
    assert (record.errors["final_state"].nan, record.errors["final_state"].rel_l2) == (3, None)


def test_broken_promises_fail_under_our_contract_only() -> None:
    def dirty(inputs: Inputs, outputs: Outputs) -> None:
        outputs["o"][:, -1] = torch.nan

    record = verified(dirty)
    assert (record.passed, record.reason) == (False, "rows of o past the last offset are not 0")
    assert verified(dirty, contract=False).passed is True


def test_a_backend_that_differs_from_run_to_run_fails() -> None:
    runs = iter(range(9))
    record = verified(lambda inputs, outputs: outputs["o"].mul_(1 + next(runs) / 128))
    assert (record.passed, record.deterministic, record.runs) == (False, False, 2)
    assert record.reason == "run 2 differs from the first"


def test_every_run_asked_for_must_give_the_same_bits() -> None:
    calls: list[int] = []

    def change_the_fifth(inputs: Inputs, outputs: Outputs) -> None:
        calls.append(1)
        if len(calls) == 5:
            outputs["final_state"][0, 0, 0, 0] += 1e-6

    records: list[Record] = []
    for runs, deterministic, compared in ((4, True, 4), (7, False, 5)):
        calls.clear()
        runner.verify([CASE], [Changed(change_the_fifth)], "cpu", records.append, runs=runs)  # type: ignore[list-item]
        assert (records[-1].deterministic, records[-1].runs) == (deterministic, compared)
        assert len(calls) == compared
    assert records[-1].reason == "run 5 differs from the first"


def test_changed_inputs_fail_and_are_restored_for_the_next_backend() -> None:
    def spoil(inputs: Inputs, outputs: Outputs) -> None:
        inputs.v.mul_(1.0 + 2.0**-6)

    records: list[Record] = []
    runner.verify([CASE], [Changed(spoil), Changed(nothing, "next")], "cpu", records.append)  # type: ignore[list-item]
    assert "it changed its inputs" in records[0].reason
    assert records[1].passed is True


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (ValueError("no\nway"), "failed", "ValueError: no"),
        (NotImplementedError("only on Mondays"), "unsupported", "NotImplementedError: only on Mondays"),
        (torch.cuda.OutOfMemoryError("asked for 2 GiB,\n 1 GiB is free"), "oom", "asked for 2 GiB, 1 GiB is free"),
        (RuntimeError("CUDA error: out of memory"), "oom", "CUDA error: out of memory"),
        (MemoryError("no memory"), "oom", "no memory (N GiB are free)"),
        (MemoryError(), "oom", "MemoryError (N GiB are free)"),
        (
            RuntimeError("[enforce] can't allocate memory:\nyou tried 9"),
            "oom",
            "[enforce] can't allocate memory: you tried 9 (N GiB are free)",
        ),
    ],
)
def test_an_error_is_a_status_with_a_reason(error: Exception, status: str, reason: str) -> None:
    def fail(inputs: Inputs, outputs: Outputs) -> None:
        raise error

    ours = backends.create(["flashqla"], "cpu")[0]
    for run in (runner.verify, runner.bench):
        records: list[Record] = []
        run([CASE], [Changed(fail), ours], "cpu", records.append)  # type: ignore[list-item]
        told = re.sub(r"\([0-9.]+ GiB", "(N GiB", records[0].reason or "")
        assert (records[0].status, told, records[0].passed) == (status, reason, None)
        assert records[0].timing is None
        assert (records[1].status, records[1].passed) == ("ok", True)


def test_ours_may_be_a_little_worse_than_the_best_peer() -> None:
    """Errors of 1 %: too many alone, right beside a peer that is as far off, wrong beside a better one."""
    one_percent = scale_o(1.01)
    assert verified(one_percent).passed is False
    as_bad = verified(one_percent, Changed(one_percent, "fla"))  # type: ignore[arg-type]
    assert as_bad.passed is True
    assert as_bad.bound == pytest.approx(0.011, abs=5e-4)
    assert verified(one_percent, Changed(one_percent, "fla"), Changed(nothing, "flash-qla")).passed is False  # type: ignore[arg-type]


def test_a_peer_is_not_excused_by_itself() -> None:
    assert verified(scale_o(1.01), name="fla").passed is False


def test_outside_the_stable_range_nothing_is_judged() -> None:
    case = Case(1, 1, (40,), batch=True, keys="norm5", gate="zero")
    record = verified(scale_o(1.5), case=case)
    assert (record.status, record.passed) == ("ok", None)
    assert record.reason.startswith("outside the stable range: beta |k|^2")


def test_long_sequences_are_judged_by_the_chunk_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "RECURRENCE_TOKENS", 69)
    record = verified(nothing, case=replace(CASE, tail=0))
    assert (record.passed, record.reason) == (True, "truth: float64 chunk form")
    exact = verified(nothing, exact=True)
    assert exact.status == "unsupported"
    assert "70 tokens" in exact.reason


def test_bench_times_and_checks() -> None:
    records: list[Record] = []
    slow = Changed(scale_o(1.5), "slow and wrong")
    missing = Changed(nothing, "gone", reason="it is not here")
    chosen = [*backends.create(["flashqla", "torch-recurrent"], "cpu"), slow, missing]
    runner.bench([CASE, replace(CASE, gate="mixed")], chosen, "cpu", records.append, config=QUICK)  # type: ignore[arg-type]
    assert [r.backend for r in records] == ["flashqla", "torch-recurrent", "slow and wrong", "gone"] * 2
    for ours, recurrent, wrong, gone in (records[:4], records[4:]):
        assert ours.passed is recurrent.passed is True
        assert (wrong.status, wrong.passed, wrong.reason) == ("ok", False, "wrong result")
        for record in (ours, recurrent, wrong):
            assert record.timing.repeats == len(record.timing.samples) == 2
            assert record.timing.clock == "wall"
            assert 0 < record.timing.gpu_ms < 1000 * 60
            assert record.compile_s > 0
            assert record.clocks is record.peak_bytes is record.runs is None  # a CPU has none to tell
            assert record.kernels
        assert (gone.status, gone.reason, gone.hint, gone.timing) == (
            "missing",
            "it is not here",
            "pip install it",
            None,
        )


def test_compiling_is_a_time_of_its_own_and_in_no_sample() -> None:
    """Backends compile when they are first called, as Triton does; so each is called once before it is handed out."""
    records: list[Record] = []
    seconds = 0.3
    waits = iter([seconds])

    class Lazy(Changed):
        def prepare(self, inputs: Inputs, direction: Direction) -> Call:
            return backends._first(super().prepare(inputs, direction))

    lazy = Lazy(lambda inputs, outputs: time.sleep(next(waits, 0)), "lazy")
    runner.bench([CASE], [lazy], "cpu", records.append, config=QUICK)
    (record,) = records
    assert record.passed
    assert record.compile_s >= seconds
    assert max(record.timing.samples) < 1000 * seconds


@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd+bwd"])
def test_every_backend_has_run_when_it_is_handed_out(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Call] = []
    monkeypatch.setattr(backends, "_first", lambda call: ran.append(call) or call)
    inputs = drawing.make(CASE, 0, "cpu", direction)
    for backend in backends.create(["flashqla", "torch-chunked", "torch-recurrent"], "cpu"):
        assert backend.prepare(inputs, direction) is ran.pop()


def test_bench_notices_changed_inputs() -> None:
    records: list[Record] = []

    def spoil(inputs: Inputs, outputs: Outputs) -> None:
        inputs.beta.mul_(0.999)

    runner.bench([CASE], [Changed(spoil)], "cpu", records.append, config=QUICK)  # type: ignore[list-item]
    assert (records[0].passed, records[0].reason) == (False, "a backend of this row changed the inputs")
    assert records[0].timing


@pytest.mark.parametrize("run", [runner.verify, runner.bench])
def test_an_interrupt_keeps_finished_rows(run: Callable[..., None]) -> None:
    def interrupt(inputs: Inputs, outputs: Outputs) -> None:
        if inputs.case.gate == "zero":
            raise KeyboardInterrupt

    records: list[Record] = []
    cases = [CASE, replace(CASE, gate="zero"), replace(CASE, gate="tiny")]
    chosen = [Changed(nothing, "first"), Changed(interrupt, "second"), Changed(nothing, "gone", reason="not here")]
    with pytest.raises(KeyboardInterrupt):
        run(cases, chosen, "cpu", records.append)
    assert [r.status for r in records] == ["ok", "ok", "missing", "interrupted", "interrupted", "missing"]
    assert [r.case_id for r in records] == [cases[0].id] * 3 + [cases[1].id] * 3


@pytest.mark.parametrize("run", [runner.verify, runner.bench])
def test_what_backends_print_goes_to_stderr(run: Callable[..., None], capfd: pytest.CaptureFixture[str]) -> None:
    def shout(inputs: Inputs, outputs: Outputs) -> None:
        os.write(1, b"compiling\n")

    run([CASE], [Changed(shout)], "cpu", lambda record: print("row", record.status))  # noqa: T201
    out, err = capfd.readouterr()
    assert out == "row ok\n"
    assert err.startswith("compiling\n")


def test_nothing_is_compiled_ahead_on_a_cpu() -> None:
    chosen = backends.create(["flashqla", "fla", "flash-qla"], "cpu")
    assert runner.warm_up(suite("qwen"), chosen, "cpu") < 1


def test_compiling_ahead_takes_a_job_per_peer_and_head_count(monkeypatch: pytest.MonkeyPatch) -> None:
    here: dict[str, list[Case]] = {}
    elsewhere: list[tuple[str, tuple[int, int], int]] = []

    class Pool:
        def __init__(self, workers: int, context: object, **options: object) -> None:
            assert 1 <= workers <= runner.MAX_COMPILERS

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def submit(
            self, function: object, name: str, cases: list[Case], device: str, seed: int, direction: Direction
        ) -> Future[None]:
            elsewhere.append((name, (cases[0].hk, cases[0].hv), len(cases)))
            assert len({(case.hk, case.hv) for case in cases}) == 1
            future: Future[None] = Future()
            future.set_exception(RuntimeError("died"))  # must not matter
            return future

    monkeypatch.setattr(runner, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(runner, "_compile", lambda name, cases, *_: here.update({name: list(cases)}))
    fakes = [
        Changed(nothing, "fla", compiles="per head count"),
        Changed(nothing, "flash-qla", compiles="per head count", reason="missing"),
        Changed(nothing, "flashinfer", compiles="once"),
        Changed(nothing, "torch-chunked"),
    ]
    cases = suite("qwen")
    told: list[str] = []
    runner.warm_up(cases, fakes, "cuda", watch=Watch(lambda text, compiling: told.append(text)))  # type: ignore[arg-type]
    assert {name for name, _, _ in elsewhere} == {"fla"}
    assert sorted(heads for _, heads, _ in elsewhere) == sorted({(case.hk, case.hv) for case in cases})
    assert all(count == 10 for *_, count in elsewhere)  # of 19: every other one, as the backend chose
    assert list(here) == ["flashinfer"]
    assert len(here["flashinfer"]) == 90
    assert [text for text in told if text.startswith("loading")] == [f"loading {fake.name}" for fake in fakes]
    assert "compiling flashinfer, 10 jobs left" in told
    assert told[-1].endswith(" 0 jobs left")
    assert sum(text.startswith("compiled fla for hk") for text in told) == 9


def test_one_thing_to_compile_waits_for_its_row_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    here: list[str] = []
    monkeypatch.setattr(runner, "_compile", lambda name, *_: here.append(name))
    fakes = [Changed(nothing, "flashinfer", compiles="once")]
    runner.warm_up([CASE], fakes, "cuda")  # type: ignore[arg-type]
    assert here == []
    runner.warm_up([CASE], fakes, "cuda", always=True)  # type: ignore[arg-type]
    assert here == ["flashinfer"]


def test_verify_proves_gradients() -> None:
    records: list[Record] = []
    cases = [CASE, replace(CASE, gate="mixed", initial_state=False)]
    chosen = backends.create(["flashqla", "torch-chunked", "torch-recurrent", "flashinfer"], "cpu", exact=True)
    runner.verify(cases, chosen, "cpu", records.append, direction="bwd")
    for case, rows in zip(cases, (records[:4], records[4:]), strict=True):
        ours, exact, recurrent, flashinfer = rows
        names = ["dq", "dk", "dv", "dg", "dbeta", *["dh0"] * case.initial_state, "dA_log", "ddt_bias"]
        for record in (ours, exact, recurrent):
            assert (record.status, record.passed, record.deterministic) == ("ok", True, True), record
            assert (record.direction, record.runs) == ("bwd", 2)
            assert list(record.errors) == names
        limit = 2e-2 if case.gate == "strong" else 1e-2
        sums = {name: ours.bounds.pop(name) for name in ("dA_log", "ddt_bias")}
        assert set(ours.bounds.values()) == {limit}
        assert all(limit <= bound <= accuracy.GRADIENT_CHECK for bound in sums.values())
        assert set(exact.bounds.values()) == {accuracy.EXACT}
        assert 1e-4 < ours.errors["dk"].rel_l2 < 5e-3
        assert ours.errors["dA_log"].rel_l2 < 1e-3
        assert exact.errors["dA_log"].rel_l2 < 1e-12
        assert flashinfer.status == "missing"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda inputs, outputs: outputs["dk"].mul_(1.1), "dk off the float64 recurrence"),
        (
            lambda inputs, outputs: outputs["dg"][0, 3, 1].fill_(torch.nan),
            "dg, dA_log, ddt_bias off the float64 recurrence",
        ),
        (
            lambda inputs, outputs: outputs["dbeta"][:, -1].fill_(torch.nan),
            "rows of dbeta past the last offset are not 0",
        ),
        (
            lambda inputs, outputs: outputs.update(dv=outputs["dv"].float()),
            "dv is torch.float32, and its input torch.bfloat16",
        ),
        (lambda inputs, outputs: inputs.do.mul_(1.5), "it changed its inputs"),
    ],
)
def test_wrong_gradients_fail_by_name(change: Change, reason: str) -> None:
    records: list[Record] = []
    ours = backends.create(["flashqla"], "cpu")[0]
    runner.verify([CASE], [Changed(change), ours], "cpu", records.append, direction="bwd")  # type: ignore[list-item]
    assert (records[0].passed, records[1].passed) == (False, True)
    assert reason in records[0].reason


def test_gradients_may_be_a_little_worse_than_those_of_the_best_peer() -> None:
    def scaled(factor: float) -> Change:
        return lambda inputs, outputs: outputs["dg"].mul_(factor)

    def passed(*peers: Changed) -> bool | None:
        records: list[Record] = []
        case = replace(CASE, gate="mixed")
        chosen = [Changed(scaled(1.05)), *peers]
        runner.verify([case], chosen, "cpu", records.append, direction="bwd")  # type: ignore[arg-type]
        assert all(record.passed is False for record in records[1:] if record.backend == "fla")
        return records[0].passed

    as_bad = Changed(scaled(1.05), "fla")
    assert passed() is False
    assert passed(as_bad) is True
    assert passed(as_bad, Changed(nothing, "flash-qla")) is False


@pytest.mark.parametrize("direction", ["bwd", "fwd+bwd"])
def test_bench_times_and_checks_gradients(direction: Direction) -> None:
    records: list[Record] = []
    wrong = Changed(lambda inputs, outputs: outputs["dq"].mul_(1.2), "wrong")
    chosen = [*backends.create(["flashqla", "torch-recurrent"], "cpu"), wrong]
    runner.bench([CASE], chosen, "cpu", records.append, direction=direction, config=QUICK)  # type: ignore[arg-type]
    assert [record.passed for record in records] == [True, True, False]
    assert records[2].reason == "wrong result"
    outputs = {"dq", "dk", "dv", "dg", "dbeta", "dh0"} | ({"o", "final_state"} if direction == "fwd+bwd" else set())
    for record in records:
        assert record.direction == direction
        assert set(record.errors) == outputs
        assert record.timing.repeats == 2
        assert record.peak_bytes is record.saved_bytes is None
    assert records[2].bound == records[2].bounds["dq"] == accuracy.GRADIENT_CHECK


@pytest.mark.parametrize(("direction", "saved"), [("bwd", 700), ("fwd+bwd", None), ("fwd", None)])
def test_what_a_forward_pass_leaves_is_counted_for_a_backward_pass_alone(
    direction: Direction, saved: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter([300, 1000])
    monkeypatch.setattr(measure, "live_bytes", lambda device: next(sizes))
    records: list[Record] = []
    runner.bench([CASE], [Changed(nothing)], "cpu", records.append, direction=direction, config=QUICK)  # type: ignore[list-item]
    assert (records[0].status, records[0].saved_bytes) == ("ok", saved)


def test_verify_leaves_the_number_of_threads_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert verified(nothing).passed is True
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
