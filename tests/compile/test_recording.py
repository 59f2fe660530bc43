"""Calls that come again: launched from a recording, with the arguments that laying them out anew would give. Compiles
nothing, and launches nothing: kernels are replaced, and tensors are on the CPU."""

from collections.abc import Callable
from contextlib import nullcontext
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from flashqla.errors import ArgumentError
from flashqla.ops import checks, chunk_gated_delta_rule, gated_delta_rule, plan, repeats
from flashqla.ops.kernels import graphs, launch, recording

HK, HV = 2, 4
DTYPES = {codes: dtype for dtype, codes in recording.DTYPES.items()}
INPUTS = ("q", "k", "v", "g", "beta", "initial_state")


@dataclass(frozen=True)
class Seen:
    """A tensor as a kernel gets it."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    recorded: bool = False

    @property
    def end(self) -> int:
        return (
            self.address
            + (1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))) * self.dtype.itemsize
        )


def seen(x: Any) -> Any:
    if isinstance(x, Tensor):
        return Seen(x.data_ptr(), tuple(x.shape), x.stride(), x.dtype)
    if isinstance(x, c_void_p):
        tensor = recording.DLTensor.from_address(x.value)
        shape, strides = (tuple((c_int64 * tensor.ndim).from_address(at)) for at in (tensor.shape, tensor.strides))
        assert (tensor.device_type, tensor.lanes, tensor.byte_offset) == (recording.CUDA, 1, 0)
        return Seen(tensor.data, shape, strides, DTYPES[tensor.type_code, tensor.bits], recorded=True)
    return x


Launches = list[tuple[tuple[Any, ...], list[Any]]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What a Hopper GPU would be asked to run: kernels and their arguments."""
    launched: Launches = []

    def kernel(*key: Any) -> Callable[..., None]:
        return lambda *arguments: launched.append((key, [seen(x) for x in arguments]))

    def planned(problem: checks.Problem, direction: plan.Direction = "forward") -> plan.Plan:
        sizes = {"hv": problem.hv, "seqlens": problem.seqlens, "direction": direction}
        return plan.make(**sizes, dtype=checks.DTYPES[problem.q.dtype], auto_cp=problem.auto_cp)

    monkeypatch.setattr(launch, "_kernel", kernel)
    monkeypatch.setattr(gated_delta_rule, "_plan", planned)
    monkeypatch.setattr(gated_delta_rule, "_on", lambda device: nullcontext())
    monkeypatch.setattr(gated_delta_rule, "_device_facts", lambda device: ((9, 0), 132, ""))
    monkeypatch.setattr(repeats, "_launchable", lambda q: True)
    monkeypatch.setattr(repeats, "_known", {})
    monkeypatch.setattr(repeats, "_packs", {})
    monkeypatch.setattr(graphs, "kept", graphs.Graphs())
    monkeypatch.setattr(graphs, "active_count", lambda: 2)  # no graphs, where a test does not ask for them
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return launched


def drawn(tokens: int = 133, batch: int = 1, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> dict[str, Any]:
    q, k = (torch.zeros(batch, tokens, HK, 128, dtype=dtype) for _ in range(2))
    v = torch.zeros(batch, tokens, HV, 128, dtype=dtype)
    g, beta = (torch.zeros(batch, tokens, HV) for _ in range(2))
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "output_final_state": True} | changes


def split_heads() -> dict[str, Any]:
    """q, k and v as slices of one tensor, as a projection gives them."""
    qkv = torch.zeros(1, 133, (2 * HK + HV) * 128, dtype=torch.bfloat16)
    q, k, v = (x.unflatten(-1, (-1, 128)) for x in qkv.split((HK * 128, HK * 128, HV * 128), dim=-1))
    return {"q": q, "k": k, "v": v}


CALLS = [
    pytest.param(dict, id="one sequence"),
    pytest.param(lambda: {"tokens": 65, "batch": 3}, id="batch"),
    pytest.param(lambda: {"tokens": 20000}, id="split"),
    pytest.param(lambda: {"dtype": torch.float16, "g": None, "output_final_state": False}, id="nothing optional"),
    pytest.param(split_heads, id="slices"),
    pytest.param(lambda: {"cu_seqlens": torch.tensor([0, 130, 133], dtype=torch.int32)}, id="pack"),
    pytest.param(
        lambda: {
            "cu_seqlens": torch.tensor([0, 130, 133]),
            "initial_state": torch.zeros(2, HV, 128, 128, dtype=torch.bfloat16),
            "state_v_first": True,
            "use_qk_l2norm_in_kernel": True,
            "scale": 2,
        },
        id="int64 offsets, initial state",
    ),
]


def name_addresses(launched: Launches, inputs: dict[str, Any], results: tuple[Tensor, Tensor | None]) -> Launches:
    """Arguments with names in place of addresses, which differ from call to call. Scratch tensors are numbered."""
    known = {x.data_ptr(): name for name, x in inputs.items() if isinstance(x, Tensor)}
    known |= {x.data_ptr(): name for name, x in zip(("o", "final_state"), results, strict=True) if x is not None}

    def named(x: Any) -> Any:
        if not isinstance(x, Seen):
            return x
        return known.setdefault(x.address, f"scratch {len(known)}"), x.shape, x.strides, x.dtype

    return [(key, [named(x) for x in arguments]) for key, arguments in launched]


def run(launches: Launches, arguments: dict[str, Any]) -> tuple[Launches, tuple[Tensor, Tensor | None]]:
    launches.clear()
    results = chunk_gated_delta_rule(**arguments)
    return list(launches), results


def recorded(launched: Launches) -> bool:
    return any(isinstance(x, Seen) and x.recorded for _, arguments in launched for x in arguments)


def assert_recorded(launches: Launches, arguments: dict[str, Any]) -> None:
    assert [recorded(run(launches, arguments)[0]) for _ in range(3)][-1]


@pytest.mark.parametrize("changes", CALLS)
def test_the_third_call_launches_what_the_first_did(launches: Launches, changes: Callable[[], dict[str, Any]]) -> None:
    calls = [drawn(**changes()) for _ in range(4)]  # all tensors are new each time
    ran = [run(launches, arguments) for arguments in calls]
    assert [recorded(launched) for launched, _ in ran] == [False, False, True, True]
    first, *others = (name_addresses(launched, x, results) for x, (launched, results) in zip(calls, ran, strict=True))
    for other in others:
        assert other == first
    for _, (o, final_state) in ran:
        assert (o.shape, o.dtype, o.is_contiguous()) == (calls[0]["v"].shape, calls[0]["v"].dtype, True)
        assert (final_state is None) == (not calls[0]["output_final_state"])
        if final_state is not None:
            assert (final_state.dtype, final_state.is_contiguous()) == (torch.float32, True)
            assert final_state.shape == ran[0][1][1].shape


@pytest.mark.parametrize("changes", CALLS)
def test_tensors_of_a_recording_do_not_overlap(launches: Launches, changes: Callable[[], dict[str, Any]]) -> None:
    arguments = drawn(**changes())
    launched, (o, _) = [run(launches, arguments) for _ in range(3)][-1]
    given = [x.data_ptr() for x in arguments.values() if isinstance(x, Tensor)]
    tensors = {x for _, seen in launched for x in seen if isinstance(x, Seen) and x.recorded and x.address not in given}
    assert o.data_ptr() in {x.address for x in tensors}
    tensors = {x for x in tensors if any(x.strides)}  # what stands for a state that is not there lies on another
    ordered = sorted(tensors, key=lambda x: x.address)
    for x, y in pairwise(ordered):
        assert x.end <= y.address or x.address == y.address
    assert all(x.address % 16 == 0 for x in tensors)


GRADIENTS = ("q", "k", "v", "g", "beta", "initial_state")


def run_backward(
    launches: Launches, arguments: dict[str, Any], state_counts: bool = False, do: Tensor | None = None
) -> tuple[Launches, dict[str, Tensor], dict[str, Tensor]]:
    """The launches of a backward pass, what it was given, and the gradients."""
    leaves = {name: x.detach().requires_grad_() for name in GRADIENTS if (x := arguments.get(name)) is not None}
    o, final_state = chunk_gated_delta_rule(**arguments | leaves)
    outputs = [o, final_state] if state_counts else [o]
    given = [torch.zeros_like(x) for x in outputs]
    given[0] = given[0] if do is None else do
    launches.clear()
    gradients = torch.autograd.grad(outputs, list(leaves.values()), given)
    inputs = leaves | dict(zip(("do", "dht"), given, strict=False))
    if "cu_seqlens" in arguments:
        inputs["cu_seqlens"] = arguments["cu_seqlens"]
    return list(launches), inputs, dict(zip(leaves, gradients, strict=True))


def flow(launched: Launches, inputs: dict[str, Tensor], gradients: dict[str, Tensor]) -> list[Any]:
    """Arguments with what addresses mean: an input, a gradient, or which argument of a launch before.

    dq, dk, dg and dbeta may lie where something lay that nobody needs any more: only the last launch knows them.
    """
    known = {x.data_ptr(): name for name, x in inputs.items()}
    known[gradients["v"].data_ptr()] = "dv"
    told: list[Any] = []
    before: dict[int, str] = {}
    for n, (key, arguments) in enumerate(launched):
        if n == len(launched) - 1:
            known |= {x.data_ptr(): f"d{name}" for name, x in gradients.items()}
        row = []
        for at, x in enumerate(arguments):
            if isinstance(x, Seen):
                meaning = known.get(x.address) or before.setdefault(x.address, f"launch {n} argument {at}")
                row.append((meaning, x.shape, x.strides, x.dtype))
            else:
                row.append(x)
        told.append((key, row))
    return told


BACKWARD_CALLS = [
    *CALLS,
    pytest.param(
        lambda: {"initial_state": torch.zeros(1, HV, 128, 128), "state_counts": True},
        id="initial state and gradient of the final one",
    ),
]


def backward_call(changes: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    arguments = drawn(**changes())
    state_counts = arguments.pop("state_counts", False)
    return arguments, state_counts


@pytest.mark.parametrize("changes", BACKWARD_CALLS)
def test_the_third_backward_pass_launches_what_the_first_did(
    launches: Launches, changes: Callable[[], dict[str, Any]]
) -> None:
    calls = [backward_call(changes) for _ in range(4)]
    ran = [run_backward(launches, *call) for call in calls]
    assert [recorded(launched) for launched, *_ in ran] == [False, False, True, True]
    same = [key for key, _ in ran[0][0]]
    for launched, inputs, gradients in ran:
        assert [key for key, _ in launched] == same
        for name, x in gradients.items():
            assert (x.shape, x.dtype, x.is_contiguous()) == (inputs[name].shape, inputs[name].dtype, True)
    # 16-bit dg, dbeta and dinitial_state are made of what the kernels wrote, which has gone.
    if all(
        x.dtype == torch.float32 for name in ("g", "beta", "initial_state") if (x := ran[0][2].get(name)) is not None
    ):
        first, *others = (flow(*call) for call in ran)
        for other in others:
            assert other == first


@pytest.mark.parametrize("changes", BACKWARD_CALLS)
def test_tensors_of_a_recorded_backward_pass_do_not_overlap(
    launches: Launches, changes: Callable[[], dict[str, Any]]
) -> None:
    """Before the last launch, and in it: only what it does not read may have become its results."""
    launched, inputs, _ = [run_backward(launches, *backward_call(changes)) for _ in range(3)][-1]
    given = [x.data_ptr() for x in inputs.values()]
    assert launched[-1][0][0] == "gradients"
    for part in (launched[:-1], launched[-1:]):
        tensors = {x for _, seen in part for x in seen if isinstance(x, Seen) and x.recorded and x.address not in given}
        ordered = sorted((x for x in tensors if any(x.strides)), key=lambda x: x.address)
        for x, y in pairwise(ordered):
            assert x.end <= y.address or x.address == y.address
        assert all(x.address % 16 == 0 for x in ordered)


def test_memory_that_the_last_kernel_does_not_need_is_free_before_its_results_are_allocated(launches: Launches) -> None:
    arguments = drawn(tokens=1000)
    for _ in range(3):
        _, inputs, _ = run_backward(launches, arguments)
    (found,) = [x.recording for facts, x in repeats._known.items() if "backward" in facts]
    first, last = found.parts
    assert not set(first.freed) & {view.address for view in last.views}
    freed = [first.allocated[n - len(inputs)] for n in first.freed]
    assert sum(x.numel() * x.itemsize for x in freed) >= 1000 * HV * 64 * 2  # A
    in_last = sorted((tuple(x.shape), str(x.dtype)) for x in last.allocated if x.dtype != torch.uint8)
    assert in_last == sorted((tuple(inputs[name].shape), str(inputs[name].dtype)) for name in ("q", "k", "g", "beta"))


@pytest.mark.parametrize(
    "do",
    [
        pytest.param(
            torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16).expand(1, 133, HV, 128), id="expanded, as that of a sum"
        ),
        pytest.param(torch.zeros(1, 133, HV, 129, dtype=torch.bfloat16)[..., :128], id="odd strides"),
    ],
)
def test_a_gradient_that_kernels_cannot_read_in_place_is_copied_each_time(launches: Launches, do: Tensor) -> None:
    for _ in range(4):
        launched, *_ = run_backward(launches, drawn(), do=do)
        assert not recorded(launched)


def test_directions_share_no_recording(launches: Launches) -> None:
    arguments = drawn()
    for _ in range(3):
        run_backward(launches, arguments)
    directions = ["backward" in facts for facts in repeats._known]
    assert sorted(directions) == [False, True]


def transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


BASE = drawn(
    initial_state=torch.zeros(2, HV, 128, 128),
    cu_seqlens=torch.tensor([0, 130, 133], dtype=torch.int32),
    cu_seqlens_cpu=None,
    scale=0.5,
)


@pytest.mark.parametrize(
    "changes",
    [
        *(
            pytest.param({name: transposed(BASE[name])}, id=f"strides of {name}")
            for name in ("q", "k", "v", "g", "beta")
        ),
        *(
            pytest.param({name: BASE[name].bfloat16()}, id=f"dtype of {name}")
            for name in ("g", "beta", "initial_state")
        ),
        pytest.param({name: BASE[name].half() for name in ("q", "k", "v")}, id="dtype of q, k and v"),
        pytest.param({"initial_state": BASE["initial_state"].transpose(2, 3)}, id="strides of initial_state"),
        pytest.param({"initial_state": None}, id="no initial_state"),
        pytest.param({"g": None}, id="no g"),
        pytest.param({"k": BASE["k"][:, :, :1].expand_as(BASE["k"])}, id="stride 0"),
        pytest.param({name: BASE[name][:, :, :1] for name in ("q", "k")}, id="key heads"),
        pytest.param({"cu_seqlens": BASE["cu_seqlens"].long()}, id="dtype of cu_seqlens"),
        pytest.param({"cu_seqlens": None, "initial_state": None}, id="no cu_seqlens"),
        pytest.param({"cu_seqlens_cpu": BASE["cu_seqlens"].clone()}, id="cu_seqlens_cpu"),
        pytest.param({"output_final_state": False}, id="output_final_state"),
        pytest.param({"use_qk_l2norm_in_kernel": True}, id="l2norm"),
        pytest.param({"state_v_first": True}, id="state_v_first"),
        pytest.param({"auto_cp": False}, id="auto_cp"),
        pytest.param({"scale": None}, id="scale"),
    ],
)
def test_calls_that_differ_share_no_recording(launches: Launches, changes: dict[str, Any]) -> None:
    assert_recorded(launches, BASE)
    launched, _ = run(launches, BASE | changes)
    assert not recorded(launched)


def test_the_sign_of_a_zero_scale_is_kept(launches: Launches) -> None:
    assert_recorded(launches, drawn(scale=0.0))
    launched, _ = run(launches, drawn(scale=-0.0))
    assert not recorded(launched)


def test_new_offsets_in_a_tensor_are_seen(launches: Launches) -> None:
    """The values choose the plan, which is not kept for others."""
    cu_seqlens = torch.tensor([0, 64, 20000], dtype=torch.int32)
    arguments = drawn(tokens=20000, cu_seqlens=cu_seqlens)
    before = [run(launches, arguments)[0] for _ in range(3)][-1]
    assert recorded(before)
    assert len(before) == 4
    cu_seqlens[1:-1] = 10000
    after, results = run(launches, arguments)
    assert not recorded(after)
    fresh = arguments | {"cu_seqlens": cu_seqlens.clone()}
    anew, others = run(launches, fresh)
    assert name_addresses(after, arguments, results) == name_addresses(anew, fresh, others)


def test_wrong_offsets_are_refused_as_before(launches: Launches) -> None:
    cu_seqlens = torch.tensor([0, 130, 133], dtype=torch.int32)
    arguments = drawn(cu_seqlens=cu_seqlens)
    assert_recorded(launches, arguments)
    for wrong in ([0, 130, 134], [0, 130, 120], [1, 130, 133]):
        cu_seqlens.copy_(torch.tensor(wrong))
        with pytest.raises(ArgumentError) as again:
            chunk_gated_delta_rule(**arguments)
        repeats._known.clear()
        repeats._packs.clear()
        with pytest.raises(ArgumentError) as first:
            chunk_gated_delta_rule(**arguments)
        assert str(again.value) == str(first.value)
        cu_seqlens.copy_(torch.tensor([0, 130, 133]))
        assert_recorded(launches, arguments)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"q": torch.zeros(128)}, id="rank of q"),
        pytest.param({"v": torch.zeros(())}, id="rank of v"),
        pytest.param({"cu_seqlens": torch.zeros(2, 2)}, id="rank of cu_seqlens"),
        pytest.param({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, id="no offsets"),
        pytest.param({"cu_seqlens_cpu": torch.tensor([0, 133])}, id="a hint alone"),
        pytest.param({"scale": [1.0]}, id="scale"),
        pytest.param({"scale": True}, id="a flag as scale"),
        pytest.param({"auto_cp": 1.0}, id="a number as flag"),
        pytest.param({"head_first": True}, id="head_first"),
        pytest.param({"q": None}, id="no q"),
        pytest.param({"q": [1.0]}, id="a list"),
        pytest.param({"beta": torch.zeros(1, 133, HV).to_sparse()}, id="a sparse tensor"),
        pytest.param({"cu_seqlens": [0, 133]}, id="offsets in a list"),
    ],
)
def test_wrong_arguments_are_refused_beside_recordings(launches: Launches, changes: dict[str, Any]) -> None:
    assert_recorded(launches, drawn(scale=1.0))
    for _ in range(3):
        with pytest.raises(ArgumentError):
            chunk_gated_delta_rule(**drawn(scale=1.0) | changes)


@pytest.mark.parametrize(
    "changes", [{"scale": 1}, {"auto_cp": 1}, {"state_v_first": None}, {"q": torch.nn.Parameter(drawn()["q"], False)}]
)
def test_arguments_of_other_kinds_that_mean_the_same_do_the_same(launches: Launches, changes: dict[str, Any]) -> None:
    arguments = drawn(scale=1.0)
    first = name_addresses(*(before := run(launches, arguments))[:1], arguments, before[1])
    assert_recorded(launches, arguments)
    for _ in range(3):
        others = arguments | changes
        launched, results = run(launches, others)
        assert name_addresses(launched, others, results) == first


def test_a_call_that_autograd_is_to_know_of_has_gradients_beside_recordings(launches: Launches) -> None:
    arguments = drawn()
    assert_recorded(launches, arguments)
    o, _ = chunk_gated_delta_rule(**arguments | {"v": arguments["v"].clone().requires_grad_()})
    assert o.requires_grad


def test_an_input_that_kernels_cannot_read_in_place_is_copied_each_time(launches: Launches) -> None:
    """By its strides, or by its address."""
    odd = torch.zeros(1, 133, HK, 129, dtype=torch.bfloat16)[..., :128]
    shifted = torch.zeros(133 * HK * 128 + 8, dtype=torch.bfloat16)[1:][: 133 * HK * 128].view(1, 133, HK, 128)
    heads_first = torch.zeros(2, HK, 133, 128, dtype=torch.bfloat16).transpose(1, 2)
    for q in (odd, shifted, heads_first):
        arguments = drawn(batch=q.shape[0], q=q)
        for _ in range(4):
            launched, _ = run(launches, arguments)
            assert not recorded(launched)
            assert launched[0][1][0].address != q.data_ptr()


def test_aligned_calls_are_not_used_for_others(launches: Launches) -> None:
    arguments = drawn()
    assert_recorded(launches, arguments)
    storage = torch.zeros(133 * HK * 128 + 8, dtype=torch.bfloat16)
    launched, _ = run(launches, arguments | {"q": storage[1:][: 133 * HK * 128].view(1, 133, HK, 128)})
    assert not recorded(launched)


def test_a_run_inside_a_run_has_addresses_of_its_own(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another thread's would be: while kernels are launched, others run."""
    outer, inner = drawn(), drawn()
    pending: list[dict[str, Any]] = []
    inner_results = []
    kernel = launch._kernel

    def interrupted(*key: Any) -> Callable[..., None]:
        def launched(*arguments: Any) -> None:
            if pending:
                inner_results.append(chunk_gated_delta_rule(**pending.pop()))
            kernel(*key)(*arguments)

        return launched

    monkeypatch.setattr(launch, "_kernel", interrupted)
    for _ in range(3):
        run(launches, outer)
    pending.append(inner)
    launched, results = run(launches, outer)
    assert [key[0] for key, _ in launched] == ["inverse", "forward"] * 2
    assert recorded(launched[:2])
    assert recorded(launched[2:])
    assert name_addresses(launched[:2], inner, inner_results[0]) == name_addresses(launched[2:], outer, results)


def test_one_tensor_in_two_places_may_be_two_the_next_time(launches: Launches) -> None:
    q = torch.zeros(1, 133, HK, 128, dtype=torch.bfloat16)
    assert_recorded(launches, drawn(q=q, k=q))
    arguments = drawn()
    launched, _ = run(launches, arguments)
    assert recorded(launched)
    assert [x.address for x in launched[0][1][:2]] == [arguments["q"].data_ptr(), arguments["k"].data_ptr()]


def test_memory_that_is_not_what_the_tensor_says_is_not_recorded(launches: Launches) -> None:
    """A view may carry a sign beside its memory, which kernels do not see: it is written out first."""
    arguments = drawn()
    assert_recorded(launches, arguments)
    negative = torch.zeros(1, 133, HV, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    negative = negative.as_strided(arguments["g"].shape, negative.stride())
    for _ in range(3):
        launched, _ = run(launches, arguments | {"g": negative})
        assert not recorded(launched)
        assert negative.data_ptr() not in [x.address for _, given in launched for x in given if hasattr(x, "address")]


def test_packs_of_many_sequences_are_not_recorded(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MOST_SEQUENCES", 2)
    for _ in range(3):
        launched, _ = run(launches, drawn(cu_seqlens=torch.tensor([0, 130, 133], dtype=torch.int32)))
    assert not recorded(launched)


def test_few_calls_are_kept(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MOST", 3)
    for tokens in range(1, 9):
        for _ in range(3):
            launched, _ = run(launches, drawn(tokens=tokens))
        assert recorded(launched)
        assert len(repeats._known) <= 3


@dataclass(frozen=True)
class Replay:
    """A graph: launches what was captured."""

    launches: Launches
    captured: Launches

    def launch(self, stream: int) -> None:
        self.launches.extend(self.captured)


@pytest.fixture
def replays(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> list[Replay]:
    """Graphs that were made. Runs of a recording get the same memory again, as PyTorch's allocator gives it on GPUs."""
    made: list[Replay] = []
    memory: dict[int, Tensor] = {}
    empty_like = torch.empty_like

    def capture(device: int, launch: Callable[[], None]) -> Replay:
        before = len(launches)
        launch()
        made.append(Replay(launches, launches[before:]))
        del launches[before:]
        return made[-1]

    def again(like: Tensor, **options: Any) -> Tensor:
        if any(like.stride()):  # not one of a recording's
            return empty_like(like, **options)
        if id(like) not in memory:
            memory[id(like)] = empty_like(like, **options)
        return memory[id(like)]

    monkeypatch.setattr(graphs, "active_count", lambda: 1)
    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "_current_stream", lambda device: 0)
    monkeypatch.setattr(recording.torch, "empty_like", again)
    return made


@pytest.mark.parametrize("changes", CALLS)
def test_a_graph_launches_what_a_recording_does(
    launches: Launches, replays: list[Replay], changes: Callable[[], dict[str, Any]]
) -> None:
    arguments = drawn(**changes())
    ran = [run(launches, arguments) for _ in range(6)]
    assert len(replays) == 1
    assert [recorded(launched) for launched, _ in ran] == [False, False, True, True, True, True]
    for launched, results in ran[3:]:
        assert launched == ran[2][0]
        assert [None if x is None else x.data_ptr() for x in results] == [
            None if x is None else x.data_ptr() for x in ran[2][1]
        ]


@pytest.mark.parametrize("name", [*INPUTS, "cu_seqlens"])
def test_a_graph_is_not_launched_for_other_addresses(launches: Launches, replays: list[Replay], name: str) -> None:
    arguments = drawn(
        initial_state=torch.zeros(2, HV, 128, 128), cu_seqlens=torch.tensor([0, 130, 133], dtype=torch.int32)
    )
    before = [run(launches, arguments) for _ in range(4)][-1]
    assert len(replays) == 1
    others = arguments | {name: arguments[name].clone()}
    after = run(launches, others)
    assert len(replays) == 1
    assert name_addresses(after[0], others, after[1]) == name_addresses(before[0], arguments, before[1])


@pytest.mark.parametrize("changes", CALLS)
def test_graphs_launch_what_a_recorded_backward_pass_does(
    launches: Launches, replays: list[Replay], changes: Callable[[], dict[str, Any]]
) -> None:
    """One graph for what the gradients kernel needs, and one for that."""
    arguments = drawn(**changes())
    do = torch.zeros_like(arguments["v"])
    ran = [run_backward(launches, arguments, do=do) for _ in range(6)]
    assert ["gradients"] in [[key[0] for key, _ in replay.captured] for replay in replays]
    assert len(replays) == 3
    first, *others = (flow(*call) for call in ran[2:])
    for other in others:
        assert other == first
