"""The public op on Hopper: kernels against float64, at the inputs that have broken such kernels elsewhere."""

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus

from flashqla.errors import ArgumentError, UnsupportedError
from flashqla.ops import FallbackWarning, chunk_gated_delta_rule, chunk_gated_delta_rule_fwd, explain, strict
from flashqla.ops.kernels import launch
from flashqla.reference import (
    chunk_forward,
    chunk_gated_delta_rule_backward,
    chunk_gated_delta_rule_reference,
    recurrent_gated_delta_rule,
)

TOLERANCE = 5e-3  # relative L2 error of bfloat16 arithmetic with float32 sums
TOKEN_TENSORS = ("q", "k", "v", "g", "beta")
TENSORS = (*TOKEN_TENSORS, "initial_state")
Arguments = dict[str, Any]


def gates(kind: str, shape: tuple[int, ...]) -> Tensor:
    x = torch.randn(shape, device="cuda")
    typical = logsigmoid(x) / 16
    if kind == "mixed":
        typical[..., 3::4] = 0
    elif kind == "strong":
        return -16 * softplus(0.5 * x + 1)
    elif kind == "zero":
        return torch.zeros_like(x)
    elif kind == "half_zero":
        typical[torch.rand(shape, device="cuda") < 0.5] = 0
    elif kind == "tiny":
        return torch.full_like(x, 1e-12).log()
    elif kind in ("-inf", "-90"):
        typical[:, 37] = float(kind)
    return typical


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def make(
    lengths: list[int],
    hk: int = 2,
    hv: int = 8,
    gate: str = "mixed",
    dtype: torch.dtype = torch.bfloat16,
    tail: int = 0,
    dense: bool = False,
    seed: int = 0,
) -> Arguments:
    """Arguments on the GPU. A tail of NaN rows follows the last offset."""
    torch.manual_seed(seed)
    rows = (len(lengths), lengths[0]) if dense else (1, sum(lengths) + tail)
    arguments = {
        "q": normalize(torch.randn(*rows, hk, 128, device="cuda"), dim=-1).to(dtype),
        "k": normalize(torch.randn(*rows, hk, 128, device="cuda"), dim=-1).to(dtype),
        "v": torch.randn(*rows, hv, 128, device="cuda").to(dtype),
        "g": gates(gate, (*rows, hv)) if gate != "none" else None,
        "beta": torch.rand(*rows, hv, device="cuda"),
        "initial_state": torch.randn(len(lengths), hv, 128, 128, device="cuda"),
        "cu_seqlens": None if dense else cumulative(lengths).cuda(),
    }
    if tail:
        for name in TOKEN_TENSORS:
            arguments[name][:, -tail:] = torch.nan
    return arguments


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory holds NaN inside."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def call(arguments: Arguments, **options: Any) -> tuple[Tensor, Tensor]:
    """The op without a fallback; its arguments must come out as they went in."""
    before = {name: x.clone() for name, x in arguments.items() if x is not None}
    with strict(), poisoned_memory():
        o, final_state = chunk_gated_delta_rule(**arguments, output_final_state=True, **options)
    for name, x in before.items():
        torch.testing.assert_close(arguments[name], x, rtol=0, atol=0, equal_nan=True)
    assert final_state is not None
    return o, final_state


def truth(arguments: Arguments, **options: Any) -> tuple[Tensor, Tensor]:
    o, final_state = chunk_gated_delta_rule_reference(
        **arguments, output_final_state=True, dtype=torch.float64, **options
    )
    assert final_state is not None
    return o, final_state


def assert_near(found: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape, what
    assert torch.isfinite(found).all(), f"{what} has NaN or inf"
    error, size = (torch.linalg.vector_norm(x.double()).item() for x in (found.double() - expected, expected))
    assert error <= tolerance * size, f"{what}: relative error {error / max(size, 1e-300):.2e}"


def check(arguments: Arguments, **options: Any) -> tuple[Tensor, Tensor]:
    """The op against float64."""
    results = call(arguments, **options)
    options.pop("cu_seqlens_cpu", None)
    options.pop("auto_cp", None)
    for found, expected, what in zip(results, truth(arguments, **options), ("o", "final state"), strict=True):
        assert_near(found, expected, what)
    assert results[0].dtype == arguments["v"].dtype
    assert results[1].dtype == torch.float32
    return results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", ["typical", "strong", "zero", "half_zero", "-inf", "-90", "tiny", "none"])
def test_gates(gate, dtype):
    check(make([130], hk=2, hv=4, gate=gate, dtype=dtype, dense=True))


def test_against_the_token_recurrence():
    """The other tests take the chunk form in float64 for the truth; here it is the definition itself."""
    arguments = make([65, 0, 130], hk=2, hv=4)
    expected = recurrent_gated_delta_rule(**arguments, output_final_state=True)
    for found, exact, what in zip(call(arguments), expected, ("o", "final state"), strict=True):
        assert_near(found, exact, what)


@pytest.mark.parametrize("tail", [47, 1, 64])
def test_rows_past_the_last_offset(tail):
    o, _ = check(make([73, 42, 94], tail=tail))
    assert (o[:, -tail:] == 0).all()


def test_empty_sequences():
    lengths = [0, 64, 0, 0, 130, 1, 0]
    arguments = make(lengths)
    _, final_state = check(arguments)
    empty = [n for n, length in enumerate(lengths) if length == 0]
    assert torch.equal(final_state[empty], arguments["initial_state"][empty])


@pytest.mark.parametrize("tail", [0, 5])
def test_nothing_but_empty_sequences(tail):
    arguments = make([0, 0, 0], tail=tail)
    o, final_state = call(arguments)
    assert o.shape[1] == tail
    assert (o == 0).all()
    assert torch.equal(final_state, arguments["initial_state"])
    _, final_state = call(arguments | {"initial_state": None})
    assert (final_state == 0).all()


def test_offsets_change_between_calls():
    """Same sizes, other offsets, in new tensors and in the same one."""
    arguments = make([128] * 8, hk=1, hv=2, gate="typical")
    cu_seqlens = arguments["cu_seqlens"]
    picks = random.Random(0)
    for n in range(200):
        offsets = torch.tensor([0, *sorted(picks.randrange(1025) for _ in range(7)), 1024], dtype=torch.int32)
        if n % 2:
            cu_seqlens.copy_(offsets)
        check(arguments | {"cu_seqlens": cu_seqlens if n % 2 else offsets.cuda()})


@pytest.mark.parametrize(
    "how", ["data is another tensor", "a write through data", "a graph is replayed", "another stream"]
)
def test_offsets_that_change_unseen_give_right_results(how):
    """PyTorch counts no write, or the host read before it: lengths that are old choose tiles, and nothing else."""
    arguments = make([1000, 8, 8, 8], hk=1, hv=2, gate="typical")
    cu_seqlens = arguments["cu_seqlens"]
    for _ in range(4):  # the third is launched from a recording
        check(arguments)
    source = torch.empty_like(cu_seqlens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cu_seqlens.copy_(source)
    check(arguments)  # the capture has counted a write that was none
    for lengths in ([8, 1000, 8, 8], [0, 0, 0, 1024], [256] * 4, [1000, 8, 8, 0]):
        offsets = cumulative(lengths).cuda()
        if how == "data is another tensor":
            cu_seqlens.data = offsets
        elif how == "a write through data":
            cu_seqlens.data.copy_(offsets)
        elif how == "a graph is replayed":
            source.copy_(offsets)
            graph.replay()
        else:
            writer = torch.cuda.Stream()
            writer.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(writer):
                torch.cuda._sleep(10_000_000)
                cu_seqlens.copy_(offsets)
            torch.cuda.current_stream().wait_stream(writer)
        for _ in range(3):
            check(arguments)


@pytest.mark.parametrize("hint", [True, False])
def test_graph_replays_with_other_data_and_offsets(hint):
    """A captured call takes values and offsets from memory at each replay; a hint at capture does not bind it."""
    arguments = make([300, 400, 324], hk=2, hv=4)
    options = {"cu_seqlens_cpu": arguments["cu_seqlens"].cpu()} if hint else {}
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other), strict():
        chunk_gated_delta_rule(**arguments, **options, output_final_state=True)
    torch.cuda.current_stream().wait_stream(other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), strict():
        o, final_state = chunk_gated_delta_rule(**arguments, **options, output_final_state=True)

    for seed, lengths in enumerate(([300, 400, 324], [0, 1024, 0], [1, 63, 900], [1000, 0, 24])):
        fresh = make(lengths, hk=2, hv=4, tail=1024 - sum(lengths), seed=seed)
        for name, x in fresh.items():
            arguments[name].copy_(x)
        o.fill_(torch.nan)
        final_state.fill_(torch.nan)
        graph.replay()
        expected_o, expected_state = truth(fresh)
        assert_near(o, expected_o, f"o of {lengths}")
        assert_near(final_state, expected_state, f"final state of {lengths}")
        assert (o[:, sum(lengths) :] == 0).all()


def test_offsets_that_were_never_read_can_be_captured():
    """Nothing may wait for the GPU during capture, so the lengths stay unknown."""
    arguments = make([300, 400, 324], hk=2, hv=4)
    chunk_gated_delta_rule_fwd(**arguments, output_h=True)  # compiles
    arguments["cu_seqlens"] = arguments["cu_seqlens"].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), strict():
        results = chunk_gated_delta_rule_fwd(**arguments, output_h=True)
    graph.replay()
    assert_near(results[2], truth(arguments)[0], "o")
    exact = chunk_gated_delta_rule_fwd(**arguments, output_h=True)[3]
    assert results[3] is not None
    assert exact is not None
    assert (exact.shape[1], results[3].shape[1]) == (5 + 7 + 6, 1024 // 64 + 3)
    assert torch.equal(results[3][:, : exact.shape[1]], exact)


def test_a_captured_batch_keeps_its_offsets():
    """Those of the eager call before, which other batches since have pushed out of what is kept."""
    arguments = make([200, 200], hk=2, hv=4, dense=True)
    expected = chunk_gated_delta_rule(**arguments, output_final_state=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), strict():
        results = chunk_gated_delta_rule(**arguments, output_final_state=True)
    for tokens in range(1, 400):
        launch._even_offsets(2, tokens, arguments["q"].device)
    torch.empty(2**20, device="cuda").fill_(torch.nan)
    graph.replay()
    for x, y in zip(results, expected, strict=True):
        assert torch.equal(x, y)


def test_capture_refuses_what_it_cannot_replay():
    arguments = make([64, 64])
    dense = make([64], dense=True, dtype=torch.float32)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side), torch.cuda.graph(graph, stream=side):
        with pytest.raises(ArgumentError, match="on the CPU while a graph is captured"):
            chunk_gated_delta_rule(**arguments | {"cu_seqlens": cumulative([64, 64])})
        with pytest.raises(UnsupportedError, match="cannot be captured"):
            chunk_gated_delta_rule(**dense)


@pytest.mark.parametrize("auto_cp", [True, False])
def test_long_and_tiny_sequences_together(auto_cp):
    check(make([32768, 1, 63, 4096]), auto_cp=auto_cp)


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 1000])
def test_lengths(tokens):
    """All tokens at once, and the last one on its own after the others."""
    arguments = make([tokens], hk=1, hv=2, gate="typical", dense=True)
    o, final_state = check(arguments)
    if tokens == 1:
        return
    first = {name: arguments[name][:, :-1] for name in TOKEN_TENSORS}
    last = {name: arguments[name][:, -1:] for name in TOKEN_TENSORS}
    _, between = call(first | {"initial_state": arguments["initial_state"]})
    o_last, final_state_last = call(last | {"initial_state": between})
    assert_near(o_last, o[:, -1:].double(), "o", 2 * TOLERANCE)
    assert_near(final_state_last, final_state.double(), "final state", 2 * TOLERANCE)


@pytest.mark.parametrize(
    ("hk", "hv"), [(1, 3), (2, 6), (4, 12), (8, 24), (16, 48), (2, 4), (2, 8), (16, 64), (1, 1), (16, 16)]
)
def test_heads(hk, hv):
    check(make([100, 29], hk=hk, hv=hv))
    check(make([130] * 3, hk=hk, hv=hv, dense=True))


def test_pack_equals_separate_calls():
    lengths = [410, 431, 294, 991, 386, 1584]
    arguments = make(lengths, hk=16, hv=32)
    o, final_state = check(arguments)
    begin = 0
    for n, length in enumerate(lengths):
        rows = {name: arguments[name][:, begin : begin + length] for name in TOKEN_TENSORS}
        o_alone, state_alone = call(rows | {"initial_state": arguments["initial_state"][n : n + 1]})
        assert_near(o_alone, o[:, begin : begin + length].double(), f"o of sequence {n}", TOLERANCE)
        assert_near(state_alone, final_state[n : n + 1].double(), f"state of sequence {n}", TOLERANCE)
        begin += length


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_state_v_first(state_dtype):
    arguments = make([130, 65])
    arguments["initial_state"] = arguments["initial_state"].to(state_dtype)
    o, final_state = check(arguments)
    turned = arguments | {"initial_state": arguments["initial_state"].mT.contiguous()}
    o_v_first, state_v_first = check(turned, state_v_first=True)
    assert torch.equal(o, o_v_first)
    assert torch.equal(final_state, state_v_first.mT)
    o_view, state_view = call(arguments | {"initial_state": arguments["initial_state"].mT}, state_v_first=True)
    assert torch.equal(o_view, o)
    assert torch.equal(state_view.mT, final_state)


def test_l2norm():
    arguments = make([130, 65])
    for name in ("q", "k"):
        arguments[name] = 5 * arguments[name]
    o, _ = check(arguments, use_qk_l2norm_in_kernel=True)
    unit = {name: normalize(arguments[name].float(), dim=-1).bfloat16() for name in ("q", "k")}
    assert_near(o, truth(arguments | unit)[0], "o", 2 * TOLERANCE)


@pytest.mark.parametrize("g_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beta_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gate_dtypes(g_dtype, beta_dtype):
    arguments = make([130, 65])
    arguments |= {"g": arguments["g"].to(g_dtype), "beta": arguments["beta"].to(beta_dtype)}
    check(arguments)


def test_float32_gates_are_not_rounded():
    """With beta = 0 a token scales the state by exp(g): in bfloat16 -1.003 would be -1."""
    arguments = make([1], dense=True)
    arguments |= {"beta": 0 * arguments["beta"], "g": torch.full_like(arguments["g"], -1.003)}
    _, final_state = call(arguments)
    assert_near(final_state, arguments["initial_state"].double() * torch.tensor(-1.003).double().exp(), "state", 1e-5)


def test_strides():
    """q, k and v as slices of one projection, g and beta of one buffer, a state with gaps: bitwise as contiguous."""
    hk, hv, tokens = 2, 4, 130
    contiguous = make([tokens], hk=hk, hv=hv, dense=True)
    q, k, v = (contiguous[name] for name in ("q", "k", "v"))
    qkv = torch.cat((q.flatten(2), k.flatten(2), v.flatten(2)), dim=-1).split([hk * 128, hk * 128, hv * 128], dim=-1)
    gates_ = torch.stack((contiguous["g"], contiguous["beta"]), dim=-1)
    strided = contiguous | {name: x.unflatten(-1, (-1, 128)) for name, x in zip("qkv", qkv, strict=True)}
    strided |= {"g": gates_[..., 0], "beta": gates_[..., 1]}
    strided["initial_state"] = contiguous["initial_state"].repeat_interleave(2, dim=1)[:, ::2]
    assert not any(strided[name].is_contiguous() for name in TENSORS)
    expected = check(contiguous)
    for found, exact in zip(call(strided), expected, strict=True):
        assert torch.equal(found, exact)

    heads_first = {name: contiguous[name].transpose(1, 2).contiguous().transpose(1, 2) for name in TOKEN_TENSORS}
    last_strided = {"q": q.mT.contiguous().mT, "v": v.mT.contiguous().mT}
    batched = {name: x.expand(2, *x.shape[1:]) for name, x in contiguous.items() if x is not None}
    for changed in (heads_first, last_strided):
        for found, exact in zip(call(contiguous | changed), expected, strict=True):
            assert torch.equal(found, exact)
    check(batched | {"cu_seqlens": None})


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets(where, dtype):
    arguments = make([1, 1, 1], tail=14)
    o, _ = check(arguments | {"cu_seqlens": torch.tensor([0, 1, 2, 3], dtype=dtype, device=where)})
    assert (o[:, 3:] == 0).all()
    for offsets, says in (
        ([1, 10, 12, 17], "start at 0"),
        ([0, 16, 12, 17], r"cu_seqlens\[1\] = 16, cu_seqlens\[2\] = 12"),
        ([0, 1, 2, 18], "ends at 18, past the 17 tokens"),
    ):
        with pytest.raises(ValueError, match=says):
            chunk_gated_delta_rule(**arguments | {"cu_seqlens": torch.tensor(offsets, dtype=dtype, device=where)})
    torch.cuda.synchronize()


def test_inference_tensors_are_never_taken_for_old_ones():
    with torch.inference_mode():
        arguments = make([300, 400, 324], hk=2, hv=4)
        check(arguments)
        arguments["cu_seqlens"].copy_(cumulative([0, 1000, 24]))
        check(arguments)


def test_repeated_calls_are_equal():
    """Bitwise from run to run. No state and a zero state, a batch and a pack, may differ in rounding."""
    arguments = make([515] * 4, dense=True)
    o, final_state = check(arguments)
    for _ in range(3):
        again = call(arguments)
        assert torch.equal(again[0], o)
        assert torch.equal(again[1], final_state)

    packed = {name: arguments[name].flatten(0, 1)[None] for name in TOKEN_TENSORS}
    packed |= {"initial_state": arguments["initial_state"], "cu_seqlens": cumulative([515] * 4).cuda()}
    o_packed, state_packed = call(packed)
    assert_near(o_packed.view_as(o), o.double(), "o of a pack")
    assert_near(state_packed, final_state.double(), "final state of a pack")

    nothing, zeros = (call(arguments | {"initial_state": x}) for x in (None, 0 * arguments["initial_state"]))
    assert_near(nothing[0], zeros[0].double(), "o from no state")
    assert_near(nothing[1], zeros[1].double(), "final state from no state")


@pytest.mark.parametrize("state_v_first", [False, True])
def test_forward_results(state_v_first):
    arguments = make([0, 65, 130, 64], hk=2, hv=8, tail=3)
    if state_v_first:
        arguments["initial_state"] = arguments["initial_state"].mT.contiguous()
    with strict(), poisoned_memory():
        results = chunk_gated_delta_rule_fwd(**arguments, output_h=True, state_v_first=state_v_first)
    expected = chunk_forward(**arguments, state_v_first=state_v_first, dtype=torch.float64)
    rows = 0 if arguments["cu_seqlens"] is None else int(arguments["cu_seqlens"][-1])
    for name, found, exact in zip(("g", "A", "o", "h", "final state"), results, expected, strict=True):
        assert found is not None
        assert exact is not None
        inside = slice(None, rows) if name in ("g", "A", "o") else slice(None)
        assert_near(found[:, inside], exact[:, inside], name, 1e-5 if name == "g" else TOLERANCE)
    no_state = chunk_gated_delta_rule_fwd(**arguments, output_final_state=False)
    assert no_state[3] is None
    assert no_state[4] is None


@pytest.mark.parametrize("gate", ["typical", "strong", "zero"])
def test_gradients(gate):
    arguments = make([64, 0, 131], hk=2, hv=4, gate=gate)
    leaves = {name: arguments[name].requires_grad_() for name in TENSORS}
    o, final_state = chunk_gated_delta_rule(**arguments, output_final_state=True)
    assert final_state is not None
    do, dfinal_state = torch.randn_like(o), torch.randn_like(final_state)
    found = torch.autograd.grad([o, final_state], list(leaves.values()), [do, dfinal_state], retain_graph=True)
    exact = chunk_gated_delta_rule_backward(**arguments, do=do, dht=dfinal_state, dtype=torch.float64)
    for (name, leaf), dx, expected in zip(leaves.items(), found, exact, strict=True):
        assert dx.dtype == leaf.dtype
        assert expected is not None
        assert_near(dx, expected, f"gradient of {name}", 2e-2)

    (alone,) = torch.autograd.grad(o, leaves["initial_state"], do)
    expected = chunk_gated_delta_rule_backward(**arguments, do=do, dtype=torch.float64).dinitial_state
    assert expected is not None
    assert_near(alone, expected, "gradient of the initial state from o alone", 2e-2)


@pytest.mark.parametrize("dense", [True, False])
def test_compile(dense):
    """Whole graph with Inductor, forward and backward, then other offsets."""
    arguments = make([300] * 3, hk=2, hv=4, gate="typical", dense=dense)
    leaves = {name: arguments[name].requires_grad_() for name in TENSORS}

    def layer(q: Tensor, **options: Any) -> Tensor:
        o, final_state = chunk_gated_delta_rule(q + q, **options, output_final_state=True)
        assert final_state is not None
        return o.float().square().mean() + final_state.square().mean()

    compiled = torch.compile(layer, fullgraph=True)
    for lengths in ([300, 300, 300], [0, 899, 1]):
        if not dense:
            arguments["cu_seqlens"] = cumulative(lengths).cuda()
        losses = [f(**arguments) for f in (compiled, layer)]
        assert_near(losses[0], losses[1].double(), "loss", 1e-4)
        gradients = [torch.autograd.grad(loss, list(leaves.values())) for loss in losses]
        for name, found, expected in zip(leaves, *gradients, strict=True):
            assert_near(found, expected.double(), f"gradient of {name}", 1e-2)


def test_warm_calls_never_wait_for_the_gpu():
    packed, dense = make([300, 400, 324]), make([512], dense=True)
    hint = packed["cu_seqlens"].cpu()
    unread = packed["cu_seqlens"].clone()
    calls = [
        (packed | {"cu_seqlens": unread}, {"cu_seqlens_cpu": hint}),
        (packed | {"cu_seqlens": hint}, {}),
        (packed, {}),  # read once, above
        (dense, {}),
    ]
    for arguments, options in calls:
        with strict():
            chunk_gated_delta_rule(**arguments, **options, output_final_state=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for arguments, options in calls:
            with strict():
                chunk_gated_delta_rule(**arguments, **options, output_final_state=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_fallback_is_announced_once_and_can_be_forbidden():
    arguments = make([65], dense=True, dtype=torch.float32)
    assert explain(**arguments).implementation == "torch"
    with strict(), pytest.raises(UnsupportedError, match="q, k and v are float32"):
        chunk_gated_delta_rule(**arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [chunk_gated_delta_rule(**arguments, output_final_state=True) for _ in range(2)]
    assert sum(x.category is FallbackWarning for x in caught) <= 1  # another test may have been first
    assert_near(results[1][0], truth(arguments)[0], "o", 1e-4)

    chosen = explain(**make([65], dense=True))
    assert chosen.implementation == "tilelang"
    assert chosen.kernels


def test_offsets_past_32_bits():
    """262144 tokens x 64 heads: v, o and A have more elements or bytes than 32 bits count.

    The gates forget within 2048 tokens, so the end of the row is checked against a short run that starts late.
    """
    arguments = make([262144], hk=16, hv=64, gate="typical", dense=True)
    with strict():
        o, final_state = chunk_gated_delta_rule(**arguments, output_final_state=True)
    late = {name: arguments[name][:, -4096:].clone() for name in TOKEN_TENSORS}
    expected_o, expected_state = truth(late)
    assert_near(o[:, -2048:], expected_o[:, -2048:], "o at the end")
    assert final_state is not None
    assert_near(final_state, expected_state, "final state")
    early = {name: arguments[name][:, :1024].clone() for name in TOKEN_TENSORS}
    assert_near(o[:, :1024], truth(early | {"initial_state": arguments["initial_state"]})[0], "o at the beginning")
    for begin in range(0, 262144, 16384):  # in parts, because isfinite needs memory of its own
        assert torch.isfinite(o[:, begin : begin + 16384]).all()
