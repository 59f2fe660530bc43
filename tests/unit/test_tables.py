"""Tables: the exact text, so that a change of a published table is seen."""

from collections.abc import Callable
from csv import reader as csv_reader
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flashqla import tables
from flashqla.cases import Case
from flashqla.errors import ArgumentError
from flashqla.records import Record, Run, TensorErrors, read, to_json
from flashqla.tables import bench_page, bench_text, csv, markdown, page, text, verify_text

A = Case(2, 8, (32768,), batch=True, model="397B/122B TP8")
B = Case(2, 8, (28672, 4096), model="397B/122B TP8")
C = Case(16, 16, (2048,), batch=True, model="2B/0.8B TP1")

BENCH = """\
flashqla bench fwd
  started   2026-01-02T03:04:05+00:00
  device    NVIDIA H200, 132 SMs, driver 580.1, SM clock 1755 MHz, 60 C, 500 W
  cpu       a CPU
  software  flashqla 0.1.0 (git abc123), python 3.11.7, torch 2.13.0, CUDA 13.0, triton 3.7.0, tilelang 0.1.15, \
tvm-ffi 0.1.12
  peers     fla 0.6.0
  kernels   sources sha256 0123456789abcdef
  settings  L2 cold, CUDA graph replay, 12 samples per time, suite qwen, seed 0, device cuda

397B/122B TP8  h_k=2 h_v=8
                        ms      ms          ms   call ms  call ms  faster than  faster than
  layout          flashqla     fla  flashinfer  flashqla      fla          fla   flashinfer
  1x32768           0.5000  1.0000      n/a[1]    1.0000   2.0000        2.00x            -
  28672+4096       0.2500*  2.0000      n/a[1]    0.5000   4.0000        8.00x            -
  geometric mean                                                         4.00x            -

2B/0.8B TP1  h_k=16 h_v=16
                        ms          ms          ms   call ms  call ms  faster than  faster than
  layout          flashqla         fla  flashinfer  flashqla      fla          fla   flashinfer
  1x2048            12.50~  1.0000![2]      n/a[3]     25.00   2.0000            -            -
  geometric mean                                                                 -            -

All rows: flashqla faster than
                    fla  flashinfer
  geometric mean  4.00x           -
  least           2.00x           -
  most            8.00x           -
  rows                2           0

ms: median time of the op alone.
call ms: median time of the op called from Python and waited for.
faster than: time of the other / time of flashqla; above 1.00x flashqla is the faster one.
n/a: no time, see the note. !: wrong result, so no ratio. *: clocks were throttled (power cap).
~: noisy, the middle half of the samples spans more than 5% of the time.
Means leave out rows without a ratio.
[1] flashinfer: missing, it is not installed, hint: pip install flashinfer
[2] fla: wrong result
[3] flashinfer: oom, 20 GB asked, hint: pip install flashinfer
"""

VERIFY = """\
  case                                flashqla    bound                 fla         verdict
  hk2-hv8/1x32768/mixed      1.0e-03 / 2.0e-03  5.0e-03   1.0e-03 / 3.0e-03              ok
  hk16-hv16/1x2048/mixed     4.0e-03 / 1.0e-03  5.0e-03              n/a[1]              ok
  hk2-hv8/28672+4096/mixed  6.0e-03 / 2.0e-03!  5.0e-03  5.0e-01 / 1.0e+00!  WRONG, fla off

Relative L2 error against the float64 recurrence: o / final_state. !: above the bound.
n/a: not run, see the note. A peer that is off says nothing about the others: the yardstick is float64.
flashqla ran: inverse, forward
[1] fla: missing, it is not installed, hint: pip install fla

flashqla: 2 passed, 1 failed
fla: 1 passed, 1 failed, 1 missing
"""

Make = Callable[..., Record]


@pytest.fixture
def bench_run(make_run: Callable[..., Run], timed: Make, absent: Make) -> Run:
    return make_run(
        timed(A, "fla", 1.0),  # a peer that ran first is still no match for the first column
        timed(A, "flashqla", 0.5),
        absent(A, "flashinfer"),
        timed(B, "flashqla", 0.25, throttle=("power cap",)),
        timed(B, "fla", 2.0),
        absent(B, "flashinfer"),
        timed(C, "flashqla", 12.5, iqr=0.7),
        timed(C, "fla", 1.0, passed=False, reason="wrong result"),
        absent(C, "flashinfer", "oom", reason="20 GB asked"),
    )


def test_bench_table(bench_run: Run) -> None:
    assert bench_text(bench_run) == BENCH


def test_a_table_rendered_from_the_file_is_the_same(bench_run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(to_json(bench_run))
    assert bench_text(read(path)) == BENCH


def test_verify_table_has_the_worst_case_last(make_run: Callable[..., Run], verified: Make, absent: Make) -> None:
    run = make_run(
        verified(B, "flashqla", 6e-3, 2e-3, passed=False),
        verified(B, "fla", 0.5, 1.0, passed=False),
        verified(C, "flashqla", 4e-3, 1e-3),
        absent(C, "fla"),
        verified(A, "flashqla", 1e-3, 2e-3),
        verified(A, "fla", 1e-3, 3e-3),
        kind="verify-fwd",
    )
    header, _, table = verify_text(run).partition("\n\n")
    assert table == VERIFY
    assert header.startswith("flashqla verify fwd\n")


def test_errors_that_are_not_finite_are_counted(make_run: Callable[..., Run], verified: Make) -> None:
    errors = {"o": TensorErrors(rel_l2=None, max_abs=None, cosine=None, nan=7, inf=2)}
    record = verified(A, "flashqla", 0, 0, passed=False).model_copy(update={"errors": errors})
    assert "7 nan, 2 inf!" in verify_text(make_run(record, kind="verify-fwd"))


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({"status": "oom"}, "oom"),
        ({"status": "failed"}, "failed"),
        ({"deterministic": False}, "not deterministic"),
        ({"passed": False, "deterministic": False}, "WRONG"),
        ({"passed": None}, "not judged"),
    ],
)
def test_verdicts(make_run: Callable[..., Run], verified: Make, fields: dict[str, object], verdict: str) -> None:
    record = verified(A, "flashqla", 1e-3, 1e-3).model_copy(update=fields)
    line = next(line for line in verify_text(make_run(record, kind="verify-fwd")).splitlines() if A.id in line)
    assert line.endswith(f"  {verdict}")


@pytest.mark.parametrize(("iqr", "mark"), [(None, ""), (0.0, ""), (0.05, ""), (0.051, "~")])
def test_noise_is_marked(make_run: Callable[..., Run], timed: Make, iqr: float | None, mark: str) -> None:
    run = make_run(timed(A, "flashqla", 1.0, iqr=iqr))
    assert f"  1.0000{mark}  " in bench_text(run)
    assert "\n~: noisy, the middle half of the samples spans more than 5% of the time.\n" in bench_text(run)


@pytest.mark.parametrize(("samples", "mark"), [(1, "?"), (4, "?"), (5, "")])
def test_too_few_samples_are_marked(make_run: Callable[..., Run], timed: Make, samples: int, mark: str) -> None:
    record = timed(A, "flashqla", 1.0)
    assert record.timing
    timing = record.timing.model_copy(update={"samples": [1.0] * samples})
    shown = bench_text(make_run(record.model_copy(update={"timing": timing})))
    assert f"  1.0000{mark}  " in shown
    assert ("\n?: fewer than 5 samples, too few to tell how noisy they are; --budget" in shown) == bool(mark)


def test_rows_of_earlier_sessions_are_counted(make_run: Callable[..., Run], timed: Make) -> None:
    first, second = (datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2))
    rows = [timed(A, "flashqla", 1.0, session=first), timed(B, "flashqla", 1.0)]
    once, twice = (bench_text(make_run(*rows, sessions=sessions)) for sessions in ([first], [first, second]))
    start = "\n  started   2026-01-02T03:04:05+00:00"
    assert f"{start}, after an earlier session since 2026-01-01T00:00:00+00:00, from which 1 of 2 rows are\n" in once
    assert f"{start}, after 2 earlier sessions since" in twice
    assert "session" not in bench_text(make_run(*rows))


def test_rows_without_a_model_are_told_apart_by_id(make_run: Callable[..., Run], timed: Make) -> None:
    a, b = replace(A, model=""), replace(A, model="", gate="strong")
    text = bench_text(make_run(timed(a, "flashqla", 1.0), timed(b, "flashqla", 2.0)))
    assert "h_k=2 h_v=8\n" in text
    assert "  1x32768/mixed     1.0000" in text
    assert "  1x32768/strong    2.0000" in text
    assert "faster than" not in text


def test_on_the_cpu_there_is_one_time_per_call(make_run: Callable[..., Run], timed: Make) -> None:
    record = timed(A, "flashqla", 1.0)
    assert record.timing
    wall = record.model_copy(update={"timing": record.timing.model_copy(update={"clock": "wall", "call_ms": 1.0})})
    text = bench_text(make_run(wall))
    assert "wall clock" in text
    assert "call ms" not in text


def test_peak_memory_has_columns_of_its_own(make_run: Callable[..., Run], timed: Make, absent: Make) -> None:
    run = make_run(
        timed(A, "flashqla", 0.5, peak_bytes=3 * 2**30),
        timed(A, "fla", 1.0, peak_bytes=0),
        timed(B, "flashqla", 0.5, peak_bytes=2**19),
        absent(B, "fla"),
    )
    shown = text(bench_page(run, memory=True))
    lines = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert lines["layout"][-2:] == ["flashqla", "fla"]
    assert lines["1x32768"][-2:] == ["3072.0", "0.0"]
    assert lines["28672+4096"][-2:] == ["0.5", "-"]
    assert "\npeak MiB: device memory that a call allocates at its peak" in shown
    both = text(bench_page(run, memory=True, roofline=True))
    assert next(line for line in both.splitlines() if "1x32768" in line).split()[-3:] == ["9%", "3072.0", "0.0"]
    assert "MiB" not in bench_text(run)
    head, *rows = csv_reader(csv(run).splitlines())
    assert [dict(zip(head, row, strict=True))["peak_bytes"] for row in rows] == [str(3 * 2**30), "0", str(2**19), ""]


def test_memory_that_is_not_known_has_a_note_and_no_columns(make_run: Callable[..., Run], timed: Make) -> None:
    shown = text(bench_page(make_run(timed(A, "flashqla", 0.5)), memory=True))
    assert "\npeak MiB: not known, because it is counted on a GPU alone.\n" in shown
    assert shown.count("MiB") == 1


def test_backward_runs_show_memory_where_it_is_known(make_run: Callable[..., Run], timed: Make) -> None:
    known = timed(A, "flashqla", 0.5, direction="bwd", peak_bytes=2**20, saved_bytes=3 * 2**20)
    run = make_run(known, timed(A, "fla", 1.0, direction="bwd", peak_bytes=2**21), kind="bench-bwd")
    shown = bench_text(run)
    lines = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert lines["1x32768"][1:] == ["0.5000", "1.0000", "1.0000", "2.0000", "2.00x", "1.0", "2.0", "3.0", "-"]
    assert lines["layout"][-4:] == ["flashqla", "fla"] * 2
    assert shown.startswith("flashqla bench bwd\n")
    assert "\nms: median time of the backward pass alone, on what one forward pass saved.\n" in shown
    assert "\nsaved MiB: device memory that a forward pass leaves" in shown
    bare = bench_text(make_run(timed(A, "flashqla", 0.5, direction="fwd+bwd"), kind="bench-fwd+bwd"))
    assert "MiB" not in bare
    assert "\nms: median time of forward and backward pass, through autograd.\n" in bare
    with pytest.raises(ArgumentError, match="the least time of a backward pass is not known"):
        page(run, roofline=True)


GRADIENTS = """\
  case                      of      flashqla    bound       fla  flashinfer         verdict
  hk2-hv8/1x32768/mixed     dq       1.0e-03  1.0e-02   2.0e-03      n/a[1]              ok
                            dg       2.0e-03  2.0e-02   3.0e-03
                            dh0      1.0e-03  1.0e-02         -
  hk16-hv16/1x2048/mixed              n/a[2]        -         -           -             oom
  hk2-hv8/28672+4096/mixed  dq   1.1e-02![3]  1.0e-02   1.0e-03           -  WRONG, fla off
                            dg       2.0e-03  2.0e-02  9.0e-01!
"""


def test_gradients_have_a_line_each(make_run: Callable[..., Run], verified: Make, absent: Make) -> None:
    def gradients(case: Case, backend: str, passed: bool = True, **errors: float) -> Record:
        found = {name: TensorErrors(rel_l2=error, max_abs=error, cosine=1.0) for name, error in errors.items()}
        bounds = {"dq": 1e-2, "dg": 2e-2, "dh0": 1e-2}
        record = verified(case, backend, 0, 0, passed=passed, bounds={name: bounds[name] for name in errors})
        return record.model_copy(update={"errors": found, "direction": "bwd", "kernels": []})

    run = make_run(
        gradients(B, "flashqla", False, dq=1.1e-2, dg=2e-3).model_copy(update={"reason": "dq off"}),
        gradients(B, "fla", False, dq=1e-3, dg=0.9),
        gradients(A, "flashqla", dq=1e-3, dg=2e-3, dh0=1e-3),
        gradients(A, "fla", dq=2e-3, dg=3e-3),
        absent(A, "flashinfer", "unsupported", reason="no", hint=None),
        absent(C, "flashqla", "oom", reason="too much", hint=None),
        kind="verify-bwd",
    )
    assert verify_text(run).split("\n\n")[1] == GRADIENTS.rstrip("\n")


DETAILS = """\
  case                   of           flashqla    bound  max abs     cosine     fla  max abs  cosine  verdict
  hk2-hv8/1x32768/mixed  o             1.0e-03  5.0e-03  2.5e-02  0.9999995  n/a[1]        -       -       ok
                         final_state   2.0e-03  6.0e-03        -          -                -       -
"""


def test_details_add_the_largest_error_and_the_cosine(
    make_run: Callable[..., Run], verified: Make, absent: Make
) -> None:
    errors = {
        "o": TensorErrors(rel_l2=1e-3, max_abs=0.025, cosine=0.9999995),
        "final_state": TensorErrors(rel_l2=2e-3, max_abs=None, cosine=None),
    }
    record = verified(A, "flashqla", 0, 0, bounds={"o": 5e-3, "final_state": 6e-3})
    run = make_run(record.model_copy(update={"errors": errors}), absent(A, "fla"), kind="verify-fwd")
    shown = verify_text(run, details=True)
    assert shown.split("\n\n")[1] == DETAILS.rstrip("\n")
    assert "\nmax abs: the largest absolute error of an entry. cosine: " in shown
    assert "cosine" not in verify_text(run)
    assert text(page(run, details=True)) == shown


@pytest.mark.parametrize(
    ("sources", "words"),
    [(None, "ran: a"), (["backend"], "ran, as planned: a"), (["backend", "graph"], "ran: a")],
)
def test_kernels_that_no_graph_has_named_are_planned_ones(
    make_run: Callable[..., Run], timed: Make, sources: list[str] | None, words: str
) -> None:
    record = timed(A, "flashqla", 1.0).model_copy(update={"kernels": ["a"], "kernels_from": sources})
    absent = record.model_copy(update={"backend": "fla", "kernels": [], "kernels_from": []})
    shown = bench_text(make_run(record, absent))
    assert f"\nflashqla {words}\n" in shown
    assert "fla ran" not in shown


def test_details_are_refused_for_bench(make_run: Callable[..., Run], timed: Make) -> None:
    with pytest.raises(ArgumentError, match="a bench run has no such columns"):
        page(make_run(timed(A, "flashqla", 1.0)), details=True)


def test_who_is_judged_is_asked_once(
    make_run: Callable[..., Run], timed: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(tables, "judged", lambda run: asked.append(run) or ("flashqla",))
    run = make_run(*(timed(A, name, 1.0) for name in ("fla", "flashqla", "flashinfer")))
    assert tables.columns(run) == ["flashqla", "fla", "flashinfer"]
    assert len(asked) == 1


def test_columns_of_bench_are_refused_for_verify(make_run: Callable[..., Run], verified: Make) -> None:
    run = make_run(verified(A, "flashqla", 1e-3, 1e-3), kind="verify-fwd")
    with pytest.raises(ArgumentError, match="a verify run has no such columns"):
        page(run, memory=True)


def test_the_number_of_runs_that_agreed_is_told(make_run: Callable[..., Run], verified: Make) -> None:
    rows = [verified(A, "flashqla", 1e-3, 1e-3, runs=100, deterministic=True),
            verified(B, "flashqla", 1e-3, 1e-3, runs=7, deterministic=False)]  # fmt: skip
    shown = verify_text(make_run(*rows, kind="verify-fwd"))
    assert "\nEach result was made 100 times, with the same bits unless its verdict says otherwise.\n" in shown
    assert "not deterministic" in next(line for line in shown.splitlines() if B.id in line)
    assert "Each result" not in verify_text(make_run(verified(A, "flashqla", 1e-3, 1e-3), kind="verify-fwd"))


def test_markdown_has_the_same_cells(bench_run: Run) -> None:
    text = markdown(page(bench_run))
    assert "\n### 397B/122B TP8 h\\_k=2 h\\_v=8\n\n| layout | ms flashqla | ms fla | ms flashinfer |" in text
    assert "\n| 28672+4096 | 0.2500\\* | 2.0000 | n/a\\[1\\] | 0.5000 | 4.0000 | 8.00x | - |\n" in text
    assert "\n- \\[3\\] flashinfer: oom, 20 GB asked, hint: pip install flashinfer\n" in text
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 3
    for head, rule, *rows in tables:
        assert set(rule) <= set("|:- ")
        assert len({line.count("|") for line in (head, rule, *rows)}) == 1


def test_names_in_markdown_are_no_markup(make_run: Callable[..., Run], timed: Callable[..., Record]) -> None:
    case = replace(A, model="<b>|\n[a](b)")
    shown = markdown(page(make_run(timed(case, "flashqla", 0.5), timed(case, "a|`b", 0.5))))
    assert "\n### \\<b>\\| \\[a\\](b) h\\_k=2 h\\_v=8\n" in shown
    assert " ms a\\|\\`b |" in shown


def test_csv_has_every_record_and_names_every_column_once(bench_run: Run) -> None:
    head, *rows = csv_reader(csv(bench_run).splitlines())
    assert len(rows) == len(bench_run.records)
    assert len(set(head)) == len(head)
    first = dict(zip(head, rows[0], strict=True))
    assert (first["backend"], first["timing.gpu_ms"], first["case.lengths"]) == ("fla", "1.0", "32768")
    assert first["clocks.sm_mhz"] == "1755"


@pytest.mark.parametrize("render", [bench_text, verify_text])
def test_a_run_without_rows_still_renders(make_run: Callable[..., Run], render: Callable[[Run], str]) -> None:
    assert "interrupted" in render(make_run(interrupted=True))


def test_kernels_are_named_once_and_long_names_cut(make_run: Callable[..., Run], timed: Make) -> None:
    names = ["inverse", "k" * 300]
    text = bench_text(make_run(*(timed(case, "flashqla", 1.0, kernels=names) for case in (A, B))))
    assert f"\nflashqla ran: inverse, {'k' * 117}...\n" in text
