"""Cases: names that never change, filters, and the content of the suites."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from flashqla.cases import SUITES, Case, read_cases, select, suite
from flashqla.errors import ArgumentError


@pytest.mark.parametrize(
    ("case", "layout", "case_id"),
    [
        (Case(2, 8, (32768,), batch=True, model="397B/122B TP8"), "1x32768", "hk2-hv8/1x32768/mixed"),
        (Case(2, 8, (28672, 4096)), "28672+4096", "hk2-hv8/28672+4096/mixed"),
        (Case(16, 64, (8192,) * 4, note="any"), "8192x4", "hk16-hv64/8192x4/mixed"),
        (Case(2, 8, (8192,) * 4, batch=True), "4x8192", "hk2-hv8/4x8192/mixed/batch"),
        (Case(1, 3, (0, 64, 0), gate="reset_inf", tail=47), "0+64+0", "hk1-hv3/0+64+0/reset_inf/tail47"),
        (
            Case(2, 4, (73,), keys="norm5", beta="one", dtype="float16", gate_dtype="bfloat16", state_dtype="float16",
                 strided=True, l2norm=True, state_v_first=True, initial_state=False, final_state=False),
            "1x73",
            "hk2-hv4/1x73/mixed/norm5/beta-one/float16/gate-bfloat16/state-float16/strided/l2norm/v-first"
            "/no-initial-state/no-final-state",
        ),
    ],
)  # fmt: skip
def test_layout_and_id(case: Case, layout: str, case_id: str) -> None:
    assert case.layout == layout
    assert case.id == case_id


def test_tokens_leave_out_the_tail() -> None:
    assert Case(2, 4, (73, 42, 0), tail=47).tokens == 115


@pytest.mark.parametrize(
    ("case", "packed"),
    [
        (Case(1, 1, (64,)), False),
        (Case(1, 1, (64,), tail=3), True),
        (Case(1, 1, (64, 64)), True),
        (Case(1, 1, (64, 64), batch=True), False),
    ],
)
def test_packed_says_whether_offsets_are_passed(case: Case, packed: bool) -> None:
    assert case.packed is packed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hk": 3, "hv": 4}, "heads"),
        ({"hk": 8, "hv": 4}, "heads"),
        ({"hk": 0, "hv": 0}, "heads"),
        ({"lengths": ()}, "lengths"),
        ({"lengths": (3, -1)}, "lengths"),
        ({"lengths": (3, 4), "batch": True}, "dense batch"),
        ({"lengths": (10**23,)}, "no tensor is that large"),
        ({"tail": 2**48}, "no tensor is that large"),
        ({"hk": 2**63, "hv": 2**63, "lengths": (0,)}, "no tensor is that large"),
        ({"tail": 4, "batch": True}, "tail"),
        ({"tail": -1}, "tail"),
        ({"gate": "weak"}, "unknown gate"),
        ({"state_dtype": "float64"}, "unknown state_dtype"),
    ],
)
def test_meaningless_cases_are_refused(fields: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"hk": 2, "hv": 4, "lengths": (64,)}
    with pytest.raises(ArgumentError, match=message):
        Case(**{**good, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SUITES)
def test_ids_of_a_suite_are_unique(name: str) -> None:
    ids = [case.id for case in suite(name)]
    assert ids
    assert len(ids) == len(set(ids))


def test_unknown_suite_names_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match="smoke, hard, sweep, qwen"):
        suite("everything")


def test_qwen_suite_is_the_published_sweep() -> None:
    cases = suite("qwen")
    assert len(cases) == 171
    assert cases == suite("sweep")
    heads = {case.model: (case.hk, case.hv) for case in cases}
    assert heads == {
        "397B/122B TP8": (2, 8),
        "397B/122B TP4": (4, 16),
        "397B/122B TP2": (8, 32),
        "397B/122B TP1": (16, 64),
        "35B/9B/4B TP1": (16, 32),
        "27B TP2": (8, 24),
        "27B TP1": (16, 48),
        "2B/0.8B TP1": (16, 16),
        "Sym h32": (32, 32),
    }
    layouts = (
        "1x32768 1x16384 1x8192 1x4096 1x2048 28672+4096 24576+8192 16384+16384 8192+24576 4096+28672 "
        "12288+4096 6144+2048 4096+4096 2048+6144 1024+7168 8192x4 4096x8 2048x4 1024x8"
    )
    for model in heads:
        assert " ".join(case.layout for case in cases if case.model == model) == layouts
    assert {(case.gate, case.dtype, case.initial_state, case.final_state) for case in cases} == {
        ("mixed", "bfloat16", True, True)
    }
    assert all(case.batch == case.layout.startswith("1x") for case in cases)


def test_backward_suite_is_the_published_table_and_two_more_head_counts() -> None:
    rows = suite("bwd")
    heads = dict.fromkeys((case.hk, case.hv) for case in rows)
    assert list(heads) == [(16, 32), (8, 16), (4, 8), (2, 4), (16, 64), (16, 48)]
    assert len(rows) == 6 * 8
    assert {(len(case.lengths), case.tokens) for case in rows} == {(n, t) for n in (1, 2, 4, 8) for t in (8192, 32768)}
    assert all((case.gate, case.initial_state, case.final_state) == ("mixed", True, True) for case in rows)
    assert all(case.model for case in rows)
    assert all(case.tokens <= 256 for case in suite("cpu_bwd"))


def test_hard_suite_covers_the_inputs_that_break_kernels() -> None:
    cases = suite("hard")
    assert {case.gate for case in cases} == {
        "typical", "strong", "zero", "half_zero", "mixed", "reset", "reset_inf", "tiny"
    }  # fmt: skip
    assert {case.keys for case in cases} == {"normal", "correlated", "norm5"}
    assert {case.dtype for case in cases} == {"bfloat16", "float16"}
    assert {case.gate_dtype for case in cases} == {"float32", "bfloat16", "float16"}
    assert {case.state_dtype for case in cases} == {"float32", "bfloat16", "float16"}
    assert {length for case in cases for length in case.lengths} >= {0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 1000}
    heads = {(1, 3), (2, 6), (4, 12), (8, 24), (16, 48), (2, 4), (2, 8), (16, 64), (1, 1)}
    assert {(case.hk, case.hv) for case in cases if case.layout == "1x200"} == heads
    for field in ("batch", "tail", "strided", "l2norm", "state_v_first"):
        assert any(getattr(case, field) for case in cases), field
    for field in ("initial_state", "final_state"):
        assert not all(getattr(case, field) for case in cases), field
    assert any(case.tokens == 0 for case in cases)
    assert all(case.note for case in cases)


def test_cpu_hard_is_the_hard_suite_cut_down() -> None:
    hard, cut = suite("hard"), suite("cpu_hard")
    settings = {replace(case, hk=1, hv=1, lengths=(1,), batch=True, tail=0, note="").id for case in hard}
    assert {replace(case, hk=1, hv=1, lengths=(1,), batch=True, tail=0, note="").id for case in cut} == settings
    assert {length % 64 for case in cut for length in case.lengths} == {n % 64 for case in hard for n in case.lengths}
    assert max(case.tokens for case in cut) < 2000


CASES = suite("qwen")


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        ({}, 171),
        ({"heads": [(2, 8)]}, 19),
        ({"heads": [(2, 8), (16, 64)], "lens": ["1x32768", "4096x8"]}, 4),
        ({"model": "27b"}, 38),
        ({"pattern": ["hk2-hv8/*28672"]}, 2),
        ({"pattern": ["HV16/1x2048", "hv24/1x2048/"]}, 3),
        ({"lens": ["7x7"]}, 0),
    ],
)
def test_filters(filters: dict[str, list[str]], count: int) -> None:
    chosen = select(CASES, **filters)  # type: ignore[arg-type]
    assert len(chosen) == count
    assert [case for case in CASES if case in chosen] == list(chosen)


def test_pattern_finds_notes() -> None:
    assert [case.id for case in select(suite("hard"), pattern=["deadlock"])] == [
        "hk16-hv48/1238+1199+1240+1216+1187+1203+519/mixed"
    ]


# A user's own cases

OWN = """
[defaults]
hk = 2
hv = 8
lengths = [4096]

[prefill]
batch = true

["two sequences"]
lengths = [1000, 24]
gate = "strong"
note = "packed"
"""


def test_own_cases_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    assert read_cases(path) == (
        Case(2, 8, (4096,), batch=True, note="prefill"),
        Case(2, 8, (1000, 24), gate="strong", note="packed"),
    )


def test_the_file_of_the_readme_is_one(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    path = tmp_path / "own.toml"
    path.write_text(readme.partition("```toml\n")[2].partition("```")[0])
    assert [case.note for case in read_cases(path)] == ["one prompt", "a pack with padding"]


def test_a_file_can_set_every_field(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    case = Case(2, 4, (73, 9), "a model", "strong", "norm5", "one", "float16", "bfloat16", "float16", False, 5, True,
                True, True, False, False, "a note")  # fmt: skip
    drawn = {name: value for name, value in asdict(case).items() if name not in ("file", "content")}
    path.write_text("[case]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in drawn.items()))
    assert read_cases(path) == (case,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no case in the file"),
        ("[defaults]\nhk = 2", "there is no case in the file"),
        ("[a", "the cases file cannot be read"),
        ("hk = 2\n[a]\nhv = 2\nlengths = [1]", "a cases file holds tables alone"),
        ("[[a]]\nhk = 2", "a cases file holds tables alone"),
        ("[a]\nhk = 2\nhv = 4", "a case needs lengths"),
        ("[a]\nlengths = [1]", "a case needs hk and hv"),
        ("[a]\nhk = 2\nhv = 4\nlens = [1]", "unknown key lens"),
        ("[a]\nhk = 2\nhv = 4\nlengths = [1]\nfile = 'x'", "unknown key file"),
        ("[a.b]\nhk = 2", "unknown key b"),
        ("[a]\nhk = 2.0", "hk is an integer"),
        ("[a]\nhk = true", "hk is an integer"),
        ("[a]\nlengths = 64", "lengths is a list of integers"),
        ("[a]\nlengths = [64, '1']", "lengths is a list of integers"),
        ("[a]\nbatch = 1", "batch is true or false"),
        ("[a]\ngate = 1", "gate is a string"),
        ("[a]\nhk = 2\nhv = 3\nlengths = [1]", "head counts do not fit"),
        ("[a]\nhk = 2\nhv = 4\nlengths = []", "no valid lengths"),
        ("[a]\nhk = 2\nhv = 4\nlengths = [99999999999999999999999]", "no tensor is that large"),
        ("[a]\nhk = 2\nhv = 4\nlengths = [1]\ngate = 'weak'", "unknown gate"),
        ("[a]\nhk = 2\nhv = 4\nlengths = [1]\ngate = 'captured'", "captured inputs have a file"),
        ("[defaults]\nhk = 1\nhv = 1\nlengths = [9]\n[a]\n[b]\nnote = 'again'", "two tables describe one case"),
    ],
)
def test_mistakes_in_a_file_name_it_and_the_table(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(ArgumentError) as caught:
        read_cases(path)
    assert caught.value.message.startswith(message)
    assert caught.value.given.startswith(str(path))
    if text.startswith("[a]"):
        assert "[a]" in caught.value.given


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["missing", "no text"])
def test_a_file_that_cannot_be_read(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    if content:
        path.write_bytes(content)
    with pytest.raises(ArgumentError, match="cannot be read") as caught:
        read_cases(path)
    assert str(path) in caught.value.given


def test_captured_cases_are_known_by_content_and_not_by_file() -> None:
    case = Case(2, 8, (100,), batch=True, gate="captured", file="a.pt", content="0123456789ab", l2norm=True)
    assert case.id == "hk2-hv8/1x100/captured/0123456789ab/l2norm"
    assert replace(case, file="b.safetensors").id == case.id
    with pytest.raises(ArgumentError, match="captured inputs have a file"):
        replace(case, gate="mixed")
