"""Captured calls: what a file holds, files that hold something else, and the hook that writes them."""

import json
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import flashqla
from flashqla import accuracy, captures, inputs, runner
from flashqla.backends import create
from flashqla.cases import Case
from flashqla.errors import ArgumentError, EnvironmentProblem, RecordError
from flashqla.measure import Config
from flashqla.ops import gated_delta_rule
from flashqla.records import Record

FORMATS = [".safetensors", ".pt"]
PACK = Case(2, 4, (70, 0, 9), tail=5, state_v_first=True, l2norm=True, keys="norm5", state_dtype="bfloat16")
DENSE = Case(1, 3, (65, 65), batch=True, dtype="float16", gate_dtype="float16", initial_state=False, final_state=False)
CALLS = {
    "packed": PACK,
    "dense": DENSE,
    "no tokens": Case(2, 2, (0,), batch=True),
    "strided": Case(1, 2, (9,), strided=True),
}
Arguments = dict[str, Any]


def arguments_of(case: Case) -> Arguments:
    drawn = inputs.make(case, 0, "cpu")
    return {
        **drawn.tensors(),
        "scale": 0.125,
        "use_qk_l2norm_in_kernel": case.l2norm,
        "state_v_first": case.state_v_first,
        "output_final_state": case.final_state,
    }


@pytest.fixture
def arguments() -> Arguments:
    return arguments_of(PACK)


def save(path: Path, **content: Any) -> Path:
    """A file as another program would write it."""
    if path.suffix == ".pt":
        torch.save(content, path)
    else:
        from safetensors.torch import save_file

        tensors = {name: x.contiguous().clone() for name, x in content.items() if isinstance(x, Tensor)}
        save_file(tensors, path, {name: json.dumps(x) for name, x in content.items() if name not in tensors})
    return path


def same(x: Any, y: Any) -> bool:
    return accuracy.same({"x": x}, {"x": y}) if isinstance(x, Tensor) else x is y


# Files


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("name", CALLS)
def test_what_is_written_is_read(name: str, suffix: str, tmp_path: Path) -> None:
    case, path = CALLS[name], tmp_path / f"call{suffix}"
    given = arguments_of(case)
    captures.write(path, given)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]

    read = captures.read(path).case
    assert (read.gate, read.file, read.note) == ("captured", str(path), f"captured in {path.name}")
    for field in ("hk", "hv", "lengths", "dtype", "gate_dtype", "tail", "l2norm", "state_v_first", "final_state"):
        assert getattr(read, field) == getattr(case, field), field
    assert read.initial_state == case.initial_state
    assert read.batch == ("cu_seqlens" not in given)

    made = inputs.make(read, 7, "cpu")
    assert made.scale == 0.125
    assert accuracy.same(made.tensors(), {key: x for key, x in given.items() if isinstance(x, Tensor)})
    assert (made.cu_seqlens_cpu is None) == (made.cu_seqlens is None)


def test_an_id_is_that_of_the_content_in_either_format(arguments: Arguments, tmp_path: Path) -> None:
    ids = set()
    for path in (tmp_path / "a.pt", tmp_path / "b.safetensors"):
        captures.write(path, arguments)
        ids.add(captures.read(path).case.id)
    assert len(ids) == 1
    arguments["k"][0, 3, 1, 5] += 1
    captures.write(tmp_path / "a.pt", arguments)
    ids.add(captures.read(tmp_path / "a.pt").case.id)
    captures.write(tmp_path / "a.pt", arguments | {"scale": 1.0})
    ids.add(captures.read(tmp_path / "a.pt").case.id)
    assert len(ids) == 3


@pytest.mark.parametrize("suffix", FORMATS)
def test_settings_and_gates_may_be_missing(suffix: str, tmp_path: Path) -> None:
    q, v, beta = torch.ones(2, 5, 1, 128), torch.ones(2, 5, 2, 128), torch.ones(2, 5, 2)
    read = captures.read(save(tmp_path / f"call{suffix}", q=q, k=q.clone(), v=v, beta=beta))
    assert read.scale == 128**-0.5
    assert torch.equal(read.tensors["g"], torch.zeros(2, 5, 2))
    assert (read.case.l2norm, read.case.state_v_first, read.case.final_state) == (False, False, True)


def test_offsets_of_either_width_and_metadata_of_other_writers_are_fine(arguments: Arguments, tmp_path: Path) -> None:
    arguments["cu_seqlens"] = arguments["cu_seqlens"].long()
    path = save(tmp_path / "call.safetensors", **arguments, format="pt")
    assert captures.read(path).tensors["cu_seqlens"].dtype == torch.int32


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("attacked",)


@pytest.mark.parametrize("old", [False, True], ids=["torch.save", "pickle"])
def test_a_hostile_file_is_refused(old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("call.pt")
    if old:
        path.write_bytes(pickle.dumps({"q": Hostile()}, protocol=2))
    else:
        torch.save({"q": Hostile()}, path)
    with pytest.raises(ArgumentError, match="holds more than tensors, numbers and text"):
        captures.read(path)
    assert not Path("attacked").exists()


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("content", [None, b"", b"{}", b"garbage" * 9], ids=["none", "empty", "json", "garbage"])
def test_a_broken_file_is_refused(content: bytes | None, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"call{suffix}"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArgumentError, match="cannot be read") as caught:
        captures.read(path)
    assert str(path) in caught.value.given


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_cut_file_is_refused(suffix: str, arguments: Arguments, tmp_path: Path) -> None:
    path = tmp_path / f"call{suffix}"
    captures.write(path, arguments)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ArgumentError, match="cannot be read"):
        captures.read(path)


Change = Callable[[Arguments], object]


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("beta"), "no beta"),
        (lambda a: a.update(h0=torch.ones(1)), "unknown h0"),
        (lambda a: a.update(use_l2norm=True), "unknown use_l2norm"),
        (lambda a: a.update(state_v_first=1), "state_v_first = 1"),
        (lambda a: a.update(scale="big"), "scale = 'big'"),
        (lambda a: a.update(scale=float("inf")), "scale "),
        (lambda a: a.update(scale=10**400), "scale is not a finite number"),
        (lambda a: a.update(q=a["q"][..., :64]), "q, k and v do not fit together"),
        (lambda a: a.update(v=a["v"].float()), "q, k and v need one floating dtype"),
        (lambda a: a.update(beta=a["beta"].double()), "a dtype does not go with bfloat16 q"),
        (lambda a: a.update(initial_state=a["initial_state"][:2]), "initial_state needs a state per sequence"),
        (lambda a: a.update(cu_seqlens=a["cu_seqlens"] + 9), "cu_seqlens must start at 0"),
        (lambda a: a.update(cu_seqlens=a["cu_seqlens"].float()), "cu_seqlens must hold"),
        (lambda a: a.update({name: a[name].double() for name in "qkv"}), "captured calls in float64"),
    ],
)
def test_other_content_is_refused(
    change: Change, message: str, suffix: str, arguments: Arguments, tmp_path: Path
) -> None:
    change(arguments)
    path = save(tmp_path / f"call{suffix}", **arguments)
    with pytest.raises(ArgumentError, match="not a captured call") as caught:
        captures.read(path)
    assert message in str(caught.value)
    assert str(path) in caught.value.given


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (lambda q: q.to("meta"), "q has no data, only the device meta"),
        (lambda q: q[:, :1, :1].expand(1, 2**28, 4, 128), "q repeats 256 bytes to 256 GiB"),
    ],
    ids=["meta", "expanded"],
)
def test_tensors_without_data_of_their_own_are_refused(
    odd: Callable[[Tensor], Tensor], message: str, arguments: Arguments, tmp_path: Path
) -> None:
    q = odd(arguments["q"].clone()) if message.endswith("meta") else odd(arguments["q"][:, :1, :1].clone())
    path = save(tmp_path / "call.pt", **arguments | {"q": q})
    with pytest.raises(ArgumentError, match=message) as caught:
        captures.read(path)
    assert caught.value.do == "capture the call again with flashqla.capture"


def test_views_are_read_as_what_they_show(arguments: Arguments, tmp_path: Path) -> None:
    negative, repeated = torch._neg_view(arguments["q"]), arguments["v"][:, :1].expand_as(arguments["v"])
    plain = save(tmp_path / "plain.pt", **arguments | {"q": -arguments["q"], "v": repeated.contiguous()})
    views = save(tmp_path / "views.pt", **arguments | {"q": negative, "v": repeated})
    captures.write(tmp_path / "written.safetensors", arguments | {"q": negative, "v": repeated})
    found = [captures.read(path) for path in (plain, views, tmp_path / "written.safetensors")]
    assert not any(call.tensors["q"].is_neg() for call in found)
    assert len({call.case.id for call in found}) == 1
    assert all(same(call.tensors["q"], -arguments["q"]) for call in found)


@pytest.mark.parametrize("text", [b"q, k, v\n1, 2, 3\n", b"ecture notes", b"hello"])
def test_a_text_is_no_call(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_bytes(text)
    with pytest.raises(ArgumentError, match=r"text\.pt: it is damaged, or holds more than tensors, numbers and text"):
        captures.read(tmp_path / "text.pt")


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_inputs_that_are_not_finite_are_not_judged(direction: Any, arguments: Arguments, tmp_path: Path) -> None:
    arguments["q"][0, 3, 0, :2] = torch.nan
    arguments["g"][0, :3, 1] = torch.tensor([-torch.inf, torch.inf, torch.nan])
    captures.write(tmp_path / "call.pt", arguments)
    case = captures.read(tmp_path / "call.pt").case
    records: list[Record] = []
    runner.verify([case], create(["flashqla", "torch-chunked"], "cpu"), "cpu", records.append, direction=direction)
    runner.bench([case], create(["flashqla"], "cpu"), "cpu", records.append, config=Config(repeats=2))
    for record in records:
        assert (record.status, record.passed) == ("ok", None)
        assert record.reason.startswith("inputs that are not finite: 2 in q, 2 in g")


def test_a_dict_of_tensors_is_asked_for(tmp_path: Path) -> None:
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    torch.save({"q": torch.eye(3).to_sparse(), "k": 1, "v": None, "beta": torch.ones(1)}, tmp_path / "odd.pt")
    with pytest.raises(ArgumentError, match=r"list\.pt: a list"):
        captures.read(tmp_path / "list.pt")
    with pytest.raises(ArgumentError, match="no v, q is no dense tensor, k is no dense tensor"):
        captures.read(tmp_path / "odd.pt")


def test_formats_are_known_by_name(arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="unknown format") as caught:
        captures.read(tmp_path / "call.npz")
    assert caught.value.supported == ".safetensors, .pt"
    monkeypatch.setattr(captures, "find_spec", lambda name: None)
    for use in (
        captures.read,
        lambda path: captures.write(path, arguments),
        lambda path: flashqla.capture(path).__enter__(),
    ):
        with pytest.raises(EnvironmentProblem, match=r"flashqla\[capture\]"):
            use(tmp_path / "call.safetensors")
    captures.write(tmp_path / "call.pt", arguments)
    assert captures.read(tmp_path / "call.pt").case.lengths == (70, 0, 9)


# Verifying and timing them


@pytest.mark.parametrize("timeout_s", [None, 120.0], ids=["here", "worker"])
def test_captured_calls_are_verified_and_timed(timeout_s: float | None, arguments: Arguments, tmp_path: Path) -> None:
    captures.write(tmp_path / "call.pt", arguments)
    case = captures.read(tmp_path / "call.pt").case
    records: list[Record] = []
    both = create(["flashqla", "torch-chunked"], "cpu", exact=True)
    runner.verify([case], both, "cpu", records.append, timeout_s=timeout_s)
    runner.bench([case], both[:1], "cpu", records.append, config=Config(repeats=2), timeout_s=timeout_s)
    assert [(r.case_id, r.status, r.passed) for r in records] == [(case.id, "ok", True)] * 3
    assert 0 < records[0].errors["o"].rel_l2 < 5e-3
    assert records[1].errors["final_state"].rel_l2 < 1e-12


def test_a_file_that_changes_meanwhile_costs_its_rows(arguments: Arguments, tmp_path: Path) -> None:
    path, records = tmp_path / "call.pt", list[Record]()
    captures.write(path, arguments)
    case = captures.read(path).case
    captures.write(path, arguments | {"scale": 1.0})
    runner.verify([case], create(["flashqla"], "cpu"), "cpu", records.append)
    assert records[0].status == "failed"
    assert "the file has changed" in records[0].reason


def test_the_truth_of_many_heads_is_that_of_groups(arguments: Arguments, tmp_path: Path, monkeypatch: Any) -> None:
    captures.write(tmp_path / "call.pt", arguments)
    read = inputs.make(captures.read(tmp_path / "call.pt").case, 0, "cpu")
    whole = accuracy.truth(read)
    own = accuracy.reference_errors(read, whole)
    monkeypatch.setattr(
        accuracy, "TRUTH_BYTES", 2 * accuracy.BLOCK_BYTES
    )  # of which one head fits, and most of another
    grouped = accuracy.truth(read)
    for name, x in whole.outputs.items():
        torch.testing.assert_close(grouped.outputs[name], x, rtol=1e-12, atol=1e-12)
    for name, error in accuracy.reference_errors(read, grouped).items():
        assert error.rel_l2 == pytest.approx(own[name].rel_l2, rel=1e-2)


# The hook


@pytest.fixture(autouse=True)
def nothing_stays_patched() -> Any:
    op = gated_delta_rule.chunk_gated_delta_rule
    yield
    assert gated_delta_rule.chunk_gated_delta_rule is op
    assert flashqla.chunk_gated_delta_rule is op
    assert not captures._recorders
    assert not captures._installed


class Layer(torch.nn.Module):
    """As models do it: the op is bound when the layer is made."""

    def __init__(self, op: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.op = op or flashqla.chunk_gated_delta_rule

    def forward(self, **arguments: Any) -> tuple[Tensor, Tensor | None]:
        return self.op(**arguments)


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("name", ["packed", "dense", "strided"])
def test_capture_keeps_arguments_and_changes_nothing(name: str, suffix: str, tmp_path: Path) -> None:
    arguments, layer, path = arguments_of(CALLS[name]), Layer(), tmp_path / f"call{suffix}"
    before = accuracy.snapshot({key: x for key, x in arguments.items() if isinstance(x, Tensor)})
    expected = layer(**arguments)
    with flashqla.capture(path) as files:
        found = [layer(**arguments), flashqla.chunk_gated_delta_rule(**arguments)]
    assert files == [path]
    for pair in found:
        assert all(map(same, pair, expected))
    assert accuracy.same(before, {key: arguments[key] for key in before})

    read = inputs.make(captures.read(path).case, 0, "cpu")
    assert accuracy.same(read.tensors(), before)
    again = flashqla.chunk_gated_delta_rule(**read.tensors(), **{k: x for k, x in arguments.items() if k not in before})
    assert all(map(same, again, expected))


def test_capture_leaves_gradients_alone(tmp_path: Path) -> None:
    def gradients() -> list[Tensor]:
        leaves = {key: x.requires_grad_() for key, x in arguments_of(DENSE).items() if isinstance(x, Tensor)}
        o, _ = flashqla.chunk_gated_delta_rule(**leaves)
        o.square().sum().backward()
        return [x.grad for x in leaves.values()]

    expected = gradients()
    with flashqla.capture(tmp_path / "call.pt") as files:
        assert all(map(same, gradients(), expected))
    assert len(files) == 1


def test_calls_are_numbered_and_counted(arguments: Arguments, tmp_path: Path) -> None:
    with flashqla.capture(tmp_path / "call.pt", calls=2) as files:
        for scale in (1.0, 2.0, 3.0):
            flashqla.chunk_gated_delta_rule(**arguments | {"scale": scale})
    assert files == [tmp_path / "call-1.pt", tmp_path / "call-2.pt"] == sorted(tmp_path.iterdir())
    assert [captures.read(path).scale for path in files] == [1.0, 2.0]


def test_positional_arguments_and_defaults_are_kept(tmp_path: Path) -> None:
    a = arguments_of(DENSE)
    with flashqla.capture(str(tmp_path / "call.pt")):
        flashqla.chunk_gated_delta_rule(a["q"], a["k"], a["v"], None, a["beta"])
    read = captures.read(tmp_path / "call.pt")
    assert (read.scale, read.case.final_state, read.tensors["g"].any().item()) == (128**-0.5, False, False)


def test_nested_capture_keeps_in_both(arguments: Arguments, tmp_path: Path) -> None:
    with flashqla.capture(tmp_path / "outer.pt", calls=2) as outer:
        flashqla.chunk_gated_delta_rule(**arguments)
        with flashqla.capture(tmp_path / "inner.pt") as inner:
            flashqla.chunk_gated_delta_rule(**arguments | {"scale": 2.0})
    assert (len(outer), len(inner)) == (2, 1)
    assert captures.read(outer[1]).case.content == captures.read(inner[0]).case.content


def test_an_exception_leaves_nothing_patched_and_keeps_what_was_called(arguments: Arguments, tmp_path: Path) -> None:
    path, layer = tmp_path / "call.pt", Layer()
    op = layer.op

    def fail() -> None:
        with flashqla.capture(path):
            layer(**arguments)
            assert layer.op is not op
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert captures.read(path).case.tokens == PACK.tokens
    assert layer.op is op


def test_what_was_bound_inside_is_put_back_too(arguments: Arguments, tmp_path: Path) -> None:
    with flashqla.capture(tmp_path / "call.pt"):
        layer = Layer()
        layer(**arguments)
        held = flashqla.chunk_gated_delta_rule
    assert layer.op is flashqla.chunk_gated_delta_rule
    assert all(map(same, held(**arguments), layer(**arguments)))  # out of reach, and passes


def test_captures_end_in_any_order_and_count_for_all_threads(arguments: Arguments, tmp_path: Path) -> None:
    first, second = flashqla.capture(tmp_path / "first.pt"), flashqla.capture(tmp_path / "second.pt")
    files = [*[first.__enter__()], second.__enter__()]
    thread = threading.Thread(target=lambda: flashqla.chunk_gated_delta_rule(**arguments))
    thread.start()
    thread.join()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert [len(kept) for kept in files] == [1, 1]


def test_calls_in_float64_pass_and_are_named(tmp_path: Path) -> None:
    arguments = {name: x.double() if isinstance(x, Tensor) else x for name, x in arguments_of(DENSE).items()}
    warned = pytest.warns(UserWarning, match="kept 0 of 1 calls; passed through: captured calls in float64")
    with warned, flashqla.capture(tmp_path / "call.pt") as files:
        flashqla.chunk_gated_delta_rule(**arguments)
    assert files == []


def test_compiled_calls_pass_and_are_named(tmp_path: Path) -> None:
    arguments, layer = arguments_of(DENSE), Layer()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    expected = layer(**arguments)

    def watched() -> tuple[Tensor, Tensor | None]:
        with flashqla.capture(tmp_path / "call.pt", calls=2):
            layer(**arguments)
            return compiled(**arguments)

    for _ in range(2):  # traced, then not traced again
        with pytest.warns(UserWarning, match=r"kept 1 of 2 calls; passed through: under torch\.compile"):
            assert all(map(same, watched(), expected))
    assert all(map(same, compiled(**arguments), expected))


def mapped(arguments: Arguments, change: Callable[[Tensor], Tensor]) -> Arguments:
    return {name: change(x) if isinstance(x, Tensor) else x for name, x in arguments.items()}


def call_on_fakes(arguments: Arguments) -> None:
    with FakeTensorMode() as mode:
        flashqla.chunk_gated_delta_rule(**mapped(arguments, mode.from_tensor))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda a: None, "there were no more"),
        (
            lambda a: flashqla.chunk_gated_delta_rule(**mapped(a, lambda x: x.to("meta"))),
            "tensors that are not plain ones",
        ),
        (call_on_fakes, "tensors that are not plain ones"),
        (lambda a: flashqla.chunk_gated_delta_rule(**a | {"head_first": True}), "cannot hold: head_first"),
        (lambda a: flashqla.chunk_gated_delta_rule(**a | {"q": a["q"][:, 1:]}), "do not fit together"),
        (lambda a: flashqla.chunk_gated_delta_rule(**a | {"nonsense": 1}), "nonsense"),
    ],
    ids=["none", "meta", "fake", "head_first", "shape", "unknown"],
)
def test_calls_that_cannot_be_kept_pass_and_are_named(
    call: Callable[[Arguments], object], reason: str, tmp_path: Path
) -> None:
    def watched() -> None:
        # The errors are those of the op, as without the hook.
        with flashqla.capture(tmp_path / "call.pt"), suppress(ArgumentError, TypeError):
            call(arguments_of(DENSE))

    with pytest.warns(UserWarning, match=f"kept 0 of 1 calls; .*{reason}"):
        watched()
    assert not list(tmp_path.iterdir())


def test_calls_in_a_graph_capture_pass_and_are_named(arguments: Arguments, tmp_path: Path, monkeypatch: Any) -> None:
    expected = flashqla.chunk_gated_delta_rule(**arguments)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.warns(UserWarning, match="while a CUDA graph was captured"), flashqla.capture(tmp_path / "call.pt"):
        assert all(map(same, flashqla.chunk_gated_delta_rule(**arguments), expected))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_does_not_stop_the_run(arguments: Arguments, tmp_path: Path, monkeypatch: Any) -> None:
    def fail(content: object, path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    expected = flashqla.chunk_gated_delta_rule(**arguments)
    monkeypatch.setattr(torch, "save", fail)
    with pytest.warns(UserWarning, match="No space left on device"), flashqla.capture(tmp_path / "call.pt"):
        assert all(map(same, flashqla.chunk_gated_delta_rule(**arguments), expected))
    assert not list(tmp_path.iterdir())


def test_wrong_use_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    for path, calls, error in (
        (tmp_path / "call.npz", 1, ArgumentError),
        (tmp_path / "call.pt", 0, ArgumentError),
        (tmp_path / "no" / "call.pt", 1, RecordError),
    ):
        with pytest.raises(error), flashqla.capture(path, calls):
            pytest.fail("it ran")


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """flash-linear-attention, as far as the hook looks at it."""

    def chunk_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
        initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None, **kwargs: Any,
    ) -> str:  # fmt: skip
        return "a result"

    module = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_the_op_of_flash_linear_attention_is_captured_too(fla: ModuleType, tmp_path: Path) -> None:
    op, layer, arguments = fla.chunk_gated_delta_rule, Layer(fla.chunk_gated_delta_rule), arguments_of(PACK)
    with warnings.catch_warnings(action="error"), flashqla.capture(tmp_path / "call.pt") as files:
        assert layer(**arguments, transpose_state_layout=False, cp_context=None) == "a result"
    assert fla.chunk_gated_delta_rule is layer.op is op
    assert captures.read(files[0]).case.lengths == PACK.lengths
    with pytest.warns(UserWarning, match="cannot hold: cp_context"), flashqla.capture(tmp_path / "other.pt"):
        layer(**arguments, cp_context=object())


def test_a_peer_that_cannot_be_imported_is_left_out(
    arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fla", "fla.ops"):
        (tmp_path / name.replace(".", "/")).mkdir()
        (tmp_path / name.replace(".", "/") / "__init__.py").touch()
    (tmp_path / "fla/ops/gated_delta_rule.py").write_text("raise RuntimeError('no driver')")
    monkeypatch.syspath_prepend(tmp_path)
    with warnings.catch_warnings(action="error"), pytest.raises(UserWarning, match="no driver"):
        flashqla.capture(tmp_path / "call.pt").__enter__()
    assert not captures._installed
    with pytest.warns(UserWarning, match="leaves out fla.*no driver"), flashqla.capture(tmp_path / "call.pt") as files:
        flashqla.chunk_gated_delta_rule(**arguments)
    assert len(files) == 1
    for name in ("fla", "fla.ops"):
        sys.modules.pop(name, None)
