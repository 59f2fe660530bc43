"""Verdicts on two runs: real changes are found, noise is not, and rows without a number stay out of it."""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashqla.cases import Case, suite
from flashqla.compare import (
    ALL_CALLS,
    CALL_MS,
    Thresholds,
    Verdict,
    calibrate,
    changes,
    compare,
    only,
    read_thresholds,
    tally,
    threshold,
    to_toml,
)
from flashqla.errors import ArgumentError, NothingToDo, UnsupportedError
from flashqla.records import Record, Run, TensorErrors, Timing

Make = Callable[..., Record]
CASES = suite("qwen")[:40]
A, B = CASES[:2]


def noisy(seed: str, ms: float, *, noise: float = 0.01, samples: int = 12) -> list[float]:
    """Times as GPUs give them: a few percent to either side, a slow one now and then, and runs that differ a little."""
    rng = random.Random(seed)
    level = ms * rng.gauss(1, 0.005)
    return [level * rng.lognormvariate(0, noise) * (1.1 if rng.random() < 0.05 else 1) for _ in range(samples)]


@pytest.fixture
def row(timed: Make) -> Make:
    """A bench record with the given samples."""

    def make(case: Case, samples: Sequence[float], backend: str = "flashqla", **changed: Any) -> Record:
        timing: dict[str, Any] = {"l2": "cold", "clock": "graph", "repeats": len(samples)}
        timing |= {name: changed.pop(name) for name in ("l2", "clock", "call_ms", "gpu_ms_iqr") if name in changed}
        record = timed(case, backend, statistics.median(samples), **changed)
        return record.model_copy(
            update={"timing": Timing(gpu_ms=statistics.median(samples), samples=list(samples), **timing)}
        )

    return make


@pytest.fixture
def sweep(make_run: Callable[..., Run], row: Make) -> Callable[..., Run]:
    """A run of 40 cases, 0.1 to 4 ms each, with its own noise; `slower` maps a case id to a factor."""

    def make(name: str, slower: dict[str, float] | None = None) -> Run:
        factors = slower or {}
        times = {case: 0.1 * (1 + at) * factors.get(case.id, 1) for at, case in enumerate(CASES)}
        return make_run(*(row(case, noisy(f"{name} {case.id}", ms)) for case, ms in times.items()))

    return make


def words(verdicts: Sequence[Verdict]) -> dict[str, str]:
    return {verdict.case_id: verdict.word for verdict in verdicts}


def one(old: Run, new: Run, **options: Any) -> Verdict:
    (verdict,) = compare(old, new, **options)
    return verdict


# Times


def test_ten_percent_is_found_and_nothing_else(sweep: Callable[..., Run]) -> None:
    slow = {case.id for case in CASES[::7]}
    verdicts = compare(sweep("old"), sweep("new", dict.fromkeys(slow, 1.1)))
    found = words(verdicts)
    assert {case_id for case_id, word in found.items() if word == "slower"} == slow
    assert set(found.values()) <= {"slower", "same", "unclear"}
    worst = verdicts[: len(slow)]  # worst first
    assert [verdict.word for verdict in worst] == ["slower"] * len(slow)
    assert sorted((verdict.ratio for verdict in worst), reverse=True) == [verdict.ratio for verdict in worst]
    for verdict in worst:
        assert verdict.ratio == pytest.approx(1.1, abs=0.03)
        assert verdict.interval
        assert 1.05 < verdict.interval[0] <= verdict.ratio <= verdict.interval[1]


def test_ten_percent_faster_is_found(sweep: Callable[..., Run]) -> None:
    found = words(compare(sweep("old"), sweep("new", {A.id: 0.9})))
    assert found.pop(A.id) == "faster"
    assert not {"slower", "faster"} & set(found.values())


def test_a_against_a_gives_no_regression(sweep: Callable[..., Run]) -> None:
    for turn in range(20):
        found = [verdict.word for verdict in compare(sweep(f"{turn} old"), sweep(f"{turn} new"))]
        assert not {"slower", "faster"} & set(found)
        assert found.count("same") > 0.7 * len(found)


def test_the_same_samples_give_the_same_interval(sweep: Callable[..., Run]) -> None:
    assert compare(sweep("old"), sweep("new")) == compare(sweep("old"), sweep("new"))


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ([1.0] * 6, [1.1] * 6, "slower"),
        ([1.0] * 6, [1.04] * 6, "same"),  # surely slower, by less than the threshold
        ([1.0] * 6, [0.9] * 6, "faster"),
        ([1.0, 1.4] * 6, [1.1, 1.5] * 6, "unclear"),  # beyond the threshold, within the noise
        ([1.0] * 12, [0.5] * 5 + [1.1] * 7, "unclear"),
    ],
)
def test_threshold_and_interval_must_agree(
    make_run: Callable[..., Run], row: Make, old: list[float], new: list[float], word: str
) -> None:
    assert one(make_run(row(A, old)), make_run(row(A, new))).word == word


def test_four_samples_say_nothing_about_noise(make_run: Callable[..., Run], row: Make) -> None:
    verdict = one(make_run(row(A, [1.0] * 4)), make_run(row(A, [9.0] * 12)))
    assert (verdict.word, verdict.ratio, verdict.interval) == ("unclear", 9.0, None)
    assert verdict.why == "fewer than 5 samples"


def test_throttled_rows_are_flagged_and_kept(make_run: Callable[..., Run], row: Make) -> None:
    verdict = one(make_run(row(A, [1.0] * 6)), make_run(row(A, [2.0] * 6, throttle=("power cap",))))
    assert (verdict.word, verdict.why) == ("slower", "clocks were throttled")


# Rows without a number


def test_rows_without_a_number_enter_no_statistic(make_run: Callable[..., Run], row: Make, absent: Make) -> None:
    good = row(A, [1.0] * 6)
    wrong = row(A, [0.1] * 6, passed=False, reason="wrong result")
    shaky = row(A, [0.1] * 6, deterministic=False)
    table: list[tuple[Record | None, Record | None, str, str]] = [
        (good, None, "missing", "no such row"),
        (None, good, "new", ""),
        (good, absent(A, "flashqla"), "missing", "missing: it is not installed"),
        (good, absent(A, "flashqla", "unsupported"), "missing", "unsupported: it is not installed"),
        (good, absent(A, "flashqla", "interrupted", reason=None), "missing", "interrupted"),
        (good, absent(A, "flashqla", "oom", reason="20 GB asked"), "failed", "oom: 20 GB asked"),
        (good, absent(A, "flashqla", "timeout", reason="60 s"), "failed", "timeout: 60 s"),
        (good, absent(A, "flashqla", "failed", reason="ValueError: x"), "failed", "failed: ValueError: x"),
        (good, wrong, "failed", "wrong result"),
        (good, shaky, "failed", "not deterministic"),
        (wrong, wrong, "failed", "wrong result, as before"),
        (wrong, good, "new", "before: wrong result"),
        (absent(A, "flashqla", "oom", reason="20 GB asked"), good, "new", "before: oom: 20 GB asked"),
        (good, good.model_copy(update={"timing": None}), "missing", "no time"),
    ]
    for old, new, word, why in table:
        verdict = one(make_run(*filter(None, [old])), make_run(*filter(None, [new])))
        assert (verdict.word, verdict.why) == (word, why)
        assert (verdict.old, verdict.new, verdict.ratio, verdict.interval) == (None,) * 4


def test_an_interrupted_run_is_compared_as_far_as_it_got(sweep: Callable[..., Run], absent: Make) -> None:
    old, whole = sweep("old"), sweep("new", {A.id: 1.1})
    cut = [*whole.records[:10], absent(CASES[10], "flashqla", "interrupted", reason=None)]
    new = whole.model_copy(update={"interrupted": True, "records": cut})
    verdicts = compare(old, new)
    assert len(verdicts) == len(CASES)
    found = words(verdicts)
    assert found[A.id] == "slower"
    assert {case.id for case in CASES[10:]} == {case_id for case_id, word in found.items() if word == "missing"}
    assert "interrupted False -> True" in changes(old, new)


def test_a_subset_leaves_the_other_rows_missing(sweep: Callable[..., Run]) -> None:
    old, new = sweep("old"), sweep("new")
    part = new.model_copy(update={"records": new.records[:5]})
    assert list(words(compare(old, part)).values()).count("missing") == len(CASES) - 5
    assert list(words(compare(part, old)).values()).count("new") == len(CASES) - 5


def test_peers_are_shown_and_do_not_count(make_run: Callable[..., Run], row: Make) -> None:
    old = make_run(row(A, [1.0] * 6), row(A, [1.0] * 6, "fla"))
    new = make_run(row(A, [1.0] * 6), row(A, [2.0] * 6, "fla"))
    found = [(verdict.backend, verdict.word, verdict.counts) for verdict in compare(old, new)]
    assert found == [("flashqla", "same", True), ("fla", "slower", False)]  # what counts comes first
    (alone,) = compare(only(old, ["fla"]), only(new, ["fla"]))
    assert (alone.backend, alone.word, alone.counts) == ("fla", "slower", True)


# Calls


@pytest.fixture
def called(make_run: Callable[..., Run], row: Make) -> Callable[..., Run]:
    """A run of 40 cases whose calls take 0.2 ms more than the device, `times` that, scattered by 12%."""

    def make(name: str, times: float = 1.0, **changed: Any) -> Run:
        rng = random.Random(f"{name} calls")
        drift = rng.gauss(1, 0.03)  # hosts have better and worse days
        rows = []
        for at, case in enumerate(CASES):
            ms = 0.1 * (1 + at % 7)
            call_ms = (ms + 0.2) * times * drift * rng.lognormvariate(0, 0.12)
            steady: dict[str, Any] = {"call_ms": call_ms, "gpu_ms_iqr": 0.01 * ms}
            rows.append(row(case, [ms] * 6, **{**steady, **changed}))
        return make_run(*rows)

    return make


def calls(old: Run, new: Run, **options: Any) -> dict[str, Verdict]:
    return {verdict.case_id: verdict for verdict in compare(old, new, **options) if verdict.quantity == CALL_MS}


def test_calls_that_scatter_as_hosts_do_are_no_regression(called: Callable[..., Run]) -> None:
    for turn in range(20):
        found = calls(called(f"{turn} old"), called(f"{turn} new"))
        assert len(found) == len(CASES) + 1
        assert {verdict.word for verdict in found.values()} == {"same"}


def test_a_host_that_got_slower_is_found_in_all_calls_together(called: Callable[..., Run]) -> None:
    found = calls(called("old"), called("new", 1.45))
    together = found[ALL_CALLS]
    assert (together.word, together.threshold, together.counts) == ("slower", 0.25, True)
    assert together.interval
    assert 1.25 < together.interval[0] <= together.ratio == pytest.approx(1.45, abs=0.15)
    assert calls(called("old"), called("new", 0.65))[ALL_CALLS].word == "faster"
    assert calls(called("old"), called("new", 1.45), thresholds=Thresholds(calls=0.6))[ALL_CALLS].word == "same"
    assert {verdict.word for verdict in compare(called("old"), called("new", 1.45)) if verdict.quantity == "ms"} == {
        "same"
    }


def test_a_single_call_must_take_twice_as_long(make_run: Callable[..., Run], row: Make) -> None:
    def run(call_ms: float) -> Run:
        return make_run(row(A, [1.0] * 6, call_ms=call_ms, gpu_ms_iqr=0.0))

    words = [calls(run(2.0), run(2.0 * ratio))[A.id].word for ratio in (1.99, 2.01, 1 / 1.99, 1 / 2.01)]
    assert words == ["same", "slower", "same", "faster"]
    assert ALL_CALLS not in calls(run(2.0), run(9.0))  # four rows and fewer do not show how they scatter


def test_calls_come_behind_rows(called: Callable[..., Run]) -> None:
    verdicts = compare(called("old"), called("new", 3.0))
    assert [verdict.quantity for verdict in verdicts] == ["ms"] * len(CASES) + [CALL_MS] * (len(CASES) + 1)
    assert verdicts[len(CASES)].case_id == ALL_CALLS


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"call_ms": None}, id="none was timed"),
        pytest.param({"clock": "wall"}, id="on a CPU it is the time of the op"),
        pytest.param({"gpu_ms_iqr": 0.2}, id="a noisy device"),
        pytest.param({"gpu_ms_iqr": None}, id="too few samples to tell"),
        pytest.param({"throttle": ("power cap",)}, id="throttled"),
        pytest.param({"passed": False}, id="a wrong result"),
        pytest.param({"l2": "warm"}, id="another L2 mode"),
    ],
)
def test_calls_that_are_not_judged(make_run: Callable[..., Run], row: Make, changed: dict[str, Any]) -> None:
    steady: dict[str, Any] = {"call_ms": 2.0, "gpu_ms_iqr": 0.0}
    old = make_run(row(A, [1.0] * 6, **steady))
    new = make_run(row(A, [1.0] * 6, **{**steady, "call_ms": 9.0, **changed}))
    new = new.model_copy(update={"environment": replace(new.environment, gpu="a CPU")}) if "clock" in changed else new
    for pair in ((old, new), (new, old)):
        assert not calls(*pair, allow=["l2", "clock", "hardware"])


def test_calls_from_another_cpu_are_not_judged(called: Callable[..., Run]) -> None:
    old, new = called("old"), called("new", 3.0)
    other = new.model_copy(update={"environment": replace(new.environment, cpu="another")})
    assert calls(old, new)
    assert not calls(old, other)
    assert {verdict.word for verdict in compare(old, other)} == {"same"}


# How many rows were judged


@pytest.mark.parametrize(
    ("good", "vague", "enough", "line"),
    [
        (4, 0, True, ""),
        (2, 2, True, "2 of 4 rows could be judged: 2 unclear, 2 of them with too few samples; measure longer"),
        (1, 2, False, "1 of 3 rows could be judged: 2 unclear"),
        (0, 1, False, "0 of 1 rows could be judged: 1 unclear"),
        (0, 0, True, ""),
    ],
)
def test_half_of_the_rows_must_be_judged(
    make_run: Callable[..., Run], row: Make, good: int, vague: int, enough: bool, line: str
) -> None:
    old = make_run(*(row(case, [1.0] * 6) for case in CASES[: good + vague]))
    new = make_run(*(row(case, [1.0] * (6 if at < good else 4)) for at, case in enumerate(CASES[: good + vague])))
    found = tally(compare(old, new))
    assert (found.told, found.asked, found.enough) == (good, good + vague, enough)
    assert found.line.startswith(line)
    assert bool(found.line) == bool(line)


def test_rows_that_should_be_there_are_not_judged_and_a_choice_of_fewer_is_none(
    sweep: Callable[..., Run], absent: Make
) -> None:
    old, new = sweep("old"), sweep("new")
    part = new.model_copy(update={"records": new.records[:3]})
    assert tally(compare(old, part)).enough  # bench fwd --heads 2,8 against a baseline of all
    cut = part.model_copy(update={"interrupted": True})
    lost = sum(verdict.why == "not reached: the run was interrupted" for verdict in compare(old, cut))
    assert lost == len(CASES) - 3
    found = tally(compare(old, cut))
    assert (found.enough, f"{lost} missing" in found.line) == (False, True)
    gone = part.model_copy(update={"records": [*part.records, *(absent(case, "flashqla") for case in CASES[3:])]})
    assert not tally(compare(old, gone)).enough
    assert tally(compare(cut, old)) == (3, 3, "")  # new rows are no loss


# Verify runs


@pytest.mark.parametrize(
    ("old", "new", "word", "quantity", "ratio"),
    [
        ((1e-3, 2e-3), (1e-3, 3e-3), "worse", "final_state", 1.5),
        ((1e-3, 2e-3), (1e-3, 2.04e-3), "same", "final_state", 1.02),
        ((1e-3, 2e-3), (5e-4, 1e-3), "better", "o", 0.5),
        ((0.0, 0.0), (0.0, 1e-9), "same", "o", 1.0),  # far below the bound of 5e-3 all errors are the same
        ((0.0, 0.0), (1e-3, 0.0), "worse", "o", 200.0),
    ],
)
def test_errors_are_compared_by_the_output_that_grew_most(
    make_run: Callable[..., Run],
    verified: Make,
    old: tuple[float, float],
    new: tuple[float, float],
    word: str,
    quantity: str,
    ratio: float,
) -> None:
    runs = [make_run(verified(A, "flashqla", *errors), kind="verify-fwd") for errors in (old, new)]
    verdict = one(*runs)
    assert verdict.word == word
    assert verdict.ratio == pytest.approx(ratio)
    assert verdict.quantity == quantity or ratio == 1.0


def test_verify_rows_that_fail_or_are_not_judged(make_run: Callable[..., Run], verified: Make) -> None:
    good = verified(A, "flashqla", 1e-3, 1e-3)
    wrong, open_ = verified(A, "flashqla", 1, 1, passed=False), verified(A, "flashqla", 1, 1, passed=None)
    fewer = good.model_copy(update={"errors": {"o": TensorErrors(rel_l2=1e-3, max_abs=1e-3, cosine=1.0)}})
    table = [
        (good, wrong, "failed", "wrong result"),
        (wrong, good, "new", "before: wrong result"),
        (good, open_, "unclear", "not judged"),
        (open_, open_, "unclear", "not judged"),
        (good, fewer, "unclear", "not compared: final_state"),
    ]
    for old, new, word, why in table:
        verdict = one(make_run(old, kind="verify-fwd"), make_run(new, kind="verify-fwd"))
        assert (verdict.word, verdict.why) == (word, why)


# Conditions


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("bench-fwd", "verify-fwd", "bench fwd against verify fwd"),
        ("bench-bwd", "bench-fwd+bwd", r"bench bwd against bench fwd\+bwd"),
        ("verify-bwd", "verify-fwd", "verify bwd against verify fwd"),
    ],
)
def test_runs_of_different_commands_are_not_compared(
    make_run: Callable[..., Run], old: str, new: str, text: str
) -> None:
    with pytest.raises(ArgumentError, match=text):
        compare(make_run(kind=old), make_run(kind=new))


@pytest.mark.parametrize(
    ("changed", "allow", "text"),
    [
        ({"l2": "warm"}, "l2", "cold L2 against warm L2"),
        ({"clock": "events"}, "clock", "graph clock against events clock"),
        ({"gpu": "NVIDIA H100"}, "hardware", "NVIDIA H200 against NVIDIA H100"),
    ],
)
def test_other_conditions_are_refused_unless_allowed(
    make_run: Callable[..., Run], row: Make, changed: dict[str, Any], allow: Any, text: str
) -> None:
    old = make_run(row(A, [1.0] * 6), row(B, [1.0] * 6))
    gpu = changed.pop("gpu", "NVIDIA H200")
    new = make_run(row(A, [1.0] * 6, **changed), environment=replace(old.environment, gpu=gpu))
    with pytest.raises(UnsupportedError, match=text) as refused:
        compare(old, new)
    assert (f"rows: 1, one is {A.id} flashqla fwd" in refused.value.given) == (allow != "hardware")
    assert refused.value.do.endswith(f"--allow {allow}")
    verdicts = {verdict.case_id: verdict for verdict in compare(old, new, allow=[allow])}
    assert (verdicts[A.id].word, verdicts[A.id].why) == ("same", text)
    assert verdicts[B.id].word == "missing"


def test_rows_that_are_not_compared_mix_nothing(make_run: Callable[..., Run], row: Make) -> None:
    old, new = make_run(row(A, [1.0] * 6)), make_run(row(A, [1.0] * 6, l2="warm", passed=False))
    assert one(old, new).word == "failed"


def test_times_on_the_cpu_are_of_that_cpu(make_run: Callable[..., Run], row: Make) -> None:
    old = make_run(row(A, [1.0] * 6, clock="wall"))
    new = old.model_copy(update={"environment": replace(old.environment, cpu="another", gpu="NVIDIA H100")})
    with pytest.raises(UnsupportedError, match="a CPU against another"):
        compare(old, new)


def test_what_else_changed_is_named(make_run: Callable[..., Run]) -> None:
    old = make_run()
    environment = replace(old.environment, torch="2.14.0", peers={"fla": "0.7.0", "flashinfer": None})
    new = make_run(environment=environment, settings={**old.settings, "seed": 1})
    assert changes(old, new) == ["torch 2.13.0 -> 2.14.0", "fla 0.6.0 -> 0.7.0", "seed 0 -> 1"]
    assert changes(old, old) == []


# Thresholds


@pytest.mark.parametrize(
    ("given", "share"), [("5%", 0.05), ("0.05", 0.05), (0.2, 0.2), (" 150% ", 1.5), ("0.5%", 0.005)]
)
def test_a_threshold_is_a_share(given: object, share: float) -> None:
    assert threshold(given) == pytest.approx(share)


@pytest.mark.parametrize("given", ["5", "0", "0%", "-1%", "five", "", "nan", "inf%", True, [1]])
def test_what_is_no_threshold(given: object) -> None:
    with pytest.raises(ArgumentError, match="not a threshold") as caught:
        threshold(given)
    assert caught.value.given == (str(given) or "''")


def test_the_thresholds_file_decides_per_case(sweep: Callable[..., Run], tmp_path: Path) -> None:
    path = tmp_path / "thresholds.toml"
    path.write_text(f'default = "4%"\n[cases]\n"*" = "6%"\n"{A.id}" = 0.2\n')
    limits = read_thresholds(path)
    assert limits == Thresholds(0.04, {"*": 0.06, A.id: 0.2}, calls=0.25)
    path.write_text(f'calls = "40%"\n{path.read_text()}')
    assert read_thresholds(path) == replace(limits, calls=0.4)
    assert (limits.of(A.id), limits.of(B.id), Thresholds(0.04).of(B.id)) == (0.2, 0.06, 0.04)
    found = compare(sweep("old"), sweep("new", {A.id: 1.1, B.id: 1.1}), limits)
    assert (words(found)[A.id], words(found)[B.id]) == ("same", "slower")
    assert {verdict.case_id: verdict.threshold for verdict in found}[A.id] == 0.2


@pytest.mark.parametrize(
    "content", ["defualt = 1", "cases = 3", "calls = 5", 'default = "5"', "[", '[cases]\n"*" = "x"', None]
)
def test_a_broken_thresholds_file_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "thresholds.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ArgumentError):
        read_thresholds(path)


def test_calibration_suggests_what_its_own_runs_stay_below(sweep: Callable[..., Run], tmp_path: Path) -> None:
    runs = [sweep(f"run {turn}") for turn in range(4)]
    limits = calibrate(runs)
    path = tmp_path / "thresholds.toml"
    path.write_text(to_toml(limits))
    assert read_thresholds(path) == limits
    assert 0.01 <= limits.default < 0.05
    for old in runs:
        for new in runs:
            ratios = [(verdict.ratio, verdict.threshold) for verdict in compare(old, new, limits)]
            assert all(ratio and ratio < 1 + share for ratio, share in ratios)


def test_calibration_in_numbers(make_run: Callable[..., Run], row: Make) -> None:
    def run(*times: float) -> Run:
        return make_run(*(row(case, [ms] * 5) for case, ms in zip(CASES, times, strict=False)))

    steady = [1.0] * 9
    limits = calibrate([run(*steady, 1.0), run(*steady, 1.1), run(*steady, 1.3)])
    assert limits == Thresholds(0.01, {CASES[9].id: 0.45})  # 1.5 times 30 percent; at least 1 percent
    assert to_toml(limits) == f'default = "1%"\n\n[cases]\n"{CASES[9].id}" = "45%"\n'


def test_calibration_sees_how_calls_scatter(called: Callable[..., Run], tmp_path: Path) -> None:
    runs = [called(f"run {turn}") for turn in range(4)]
    limits = calibrate(runs)
    assert 0.1 < limits.calls < 0.5
    path = tmp_path / "thresholds.toml"
    path.write_text(to_toml(limits))
    assert read_thresholds(path) == limits
    for old in runs:
        for new in runs:
            assert {verdict.word for verdict in calls(old, new, thresholds=limits).values()} == {"same"}


def test_calibration_takes_bench_runs_of_one_build(make_run: Callable[..., Run], row: Make) -> None:
    run = make_run(row(A, [1.0] * 6))
    other = run.model_copy(update={"environment": replace(run.environment, kernel_fingerprint="f" * 16)})
    verify = make_run(kind="verify-fwd")
    for runs in ([run], [run, other], [verify, verify]):
        with pytest.raises(ArgumentError, match="two or more bench runs of one build"):
            calibrate(runs)
    with pytest.raises(UnsupportedError):
        calibrate([run, make_run(row(A, [1.0] * 6, l2="warm"))])
    with pytest.raises(NothingToDo):
        calibrate([run, make_run(row(B, [1.0] * 6))])
