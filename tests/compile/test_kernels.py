"""Every kernel, built for sm_90a without a GPU: does it keep to its budget, and is all of it there?

TileLang lowers each kernel and calls nvcc on it once; ptxas reports registers, spills and what it gave up on, nvdisasm
shows the instructions. Tests on a GPU see neither spills nor products that wait for each other: results stay right, and
only the time is lost.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import files
from logging.handlers import BufferingHandler
from operator import eq
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from flashqla import device

pytestmark = pytest.mark.skipif(
    device.nvcc() is None, reason="no CUDA compiler: neither nvcc on PATH nor the wheel nvidia-cuda-nvcc (extra nvcc)"
)

FORWARD = {  # v_tile, dtype, state_dtype, output_h. Variants have v_tile 128, which is short of registers.
    "128-bf16": (128, "bfloat16", "float32", False),
    "128-fp16": (128, "float16", "float32", False),
    "64-bf16": (64, "bfloat16", "float32", False),
    "64-fp16": (64, "float16", "float32", False),
    "128-bf16-state": (128, "bfloat16", "bfloat16", False),
    "128-fp16-state": (128, "float16", "float16", False),
    "128-bf16-h": (128, "bfloat16", "float32", True),
}
INVERSE: dict[str, tuple[str | bool, ...]] = {  # dtype, g_dtype, beta_dtype, l2norm, backward
    "bf16": ("bfloat16", "float32", "float32", False),
    "fp16": ("float16", "float32", "float32", False),
    "bf16-norm": ("bfloat16", "float32", "float32", True),
    "fp16-norm": ("float16", "float32", "float32", True),
    "16-bit-gates": ("bfloat16", "bfloat16", "float16", False),
    "backward": ("bfloat16", "float32", "float32", False, True),
    "backward-norm": ("float16", "float32", "float32", True, True),
}
SUMMARY: dict[str, tuple[str | bool, ...]] = {  # dtype, state_dtype, backward
    "bf16": ("bfloat16", "float32"),
    "bf16-state": ("bfloat16", "bfloat16"),
    "fp16-state": ("float16", "float16"),
    "backward": ("bfloat16", "float32", True),
}
CHAIN = {  # kind, v_tile, dtype, state_dtype
    "forward-64": ("forward", 64, "bfloat16", "float32"),
    "forward-128": ("forward", 128, "bfloat16", "float32"),
    "reverse-64": ("reverse", 64, "bfloat16", "float32"),
    "reverse-128": ("reverse", 128, "bfloat16", "float32"),
    "summary-64": ("summary", 64, "bfloat16", "float32"),
    "summary-128": ("summary", 128, "bfloat16", "float32"),
    "forward-64-fp16-state": ("forward", 64, "float16", "float16"),
    "forward-128-bf16-state": ("forward", 128, "bfloat16", "bfloat16"),
    "reverse-128-fp16-state": ("reverse", 128, "float16", "float16"),
    "reverse-64-fp16": ("reverse", 64, "float16", "float32"),
    "summary-128-fp16": ("summary", 128, "float16", "float32"),
}
GRADIENTS = {  # dtype, l2norm
    "bf16": ("bfloat16", False),
    "fp16": ("float16", False),
    "bf16-norm": ("bfloat16", True),
    "fp16-norm": ("float16", True),
}

SM_REGISTERS, SM_SMEM, RESERVED_SMEM = 65536, 233472, 1024  # Hopper; of shared memory, each CTA has a part reserved
WARP, WARP_GROUP = 32, 128


@dataclass(frozen=True)
class Built:
    source: str  # CUDA, the kernel alone, white space squeezed
    report: str  # of ptxas
    code: str  # SASS
    threads: int
    registers: int  # of a thread at the start, handed out in eights
    smem: int  # bytes of a CTA, without those reserved

    @property
    def opcodes(self) -> Counter[str]:
        """How often each instruction stands in the code, modifiers left out."""
        return Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9]*)", self.code))


def build(kernel: str, *arguments: int | str | bool) -> Built:
    import tilelang
    from tilelang.jit import JITKernel  # below the caches of tilelang.jit: what lies there comes without a report

    builder = getattr(import_module(f"flashqla.ops.kernels.{kernel}"), f"build_{kernel}")
    log = BufferingHandler(capacity=10_000)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILELANG_CACHE_DIR", folder)
        patch.setenv("TILELANG_VERBOSE", "1")  # asks ptxas for its report, and logs it
        tilelang.logger.addHandler(log)
        try:
            built = JITKernel(builder.get_tir(*arguments), target=builder.target, pass_configs=builder.pass_configs)
        finally:
            tilelang.logger.removeHandler(log)
        (cubin,) = Path(folder).rglob("*.cubin")
        code = disassemble(cubin)
    report = "\n".join(record.getMessage() for record in log.buffer)
    source = built.get_kernel_source()
    (function,) = built.artifact.device_mod.functions.values()
    (registers,) = map(int, re.findall(r"Used (\d+) registers", report))
    static_smem = sum(map(int, re.findall(r"(\d+) bytes smem", report)))  # not reported where there is none
    return Built(
        source=" ".join(source[source.index("__launch_bounds__") :].split()),
        report=report,
        code=code,
        threads=int(function.attrs["thread_extent"]["threadIdx.x"]),
        registers=-(-registers // 8) * 8,
        smem=static_smem + int(function.attrs.get("dyn_shared_memory_buf", 0)),
    )


def disassemble(cubin: Path) -> str:
    (nvdisasm,) = (file.locate() for file in files("nvidia-cuda-nvdisasm") or () if file.name == "nvdisasm")
    command = [str(nvdisasm), "--print-code", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# A test per kernel, not per kernel and property: workers of pytest-xdist would build the same kernel side by side.
@pytest.mark.parametrize("arguments", FORWARD.values(), ids=FORWARD)
def test_forward(arguments: tuple[int, str, str, bool]) -> None:
    built = build("forward", *arguments)
    v_tile, _, _, output_h = arguments
    groups = v_tile // 64
    state, score, service = import_module("flashqla.ops.kernels.forward").REGISTERS[groups]
    assert_nothing_was_given_up(built)
    assert_fits(built, 1, [state] * groups + [score, service])
    assert_forward_instructions(built, groups)
    assert_forward_stores_and_publishes(built, groups, output_h)


@pytest.mark.parametrize("arguments", INVERSE.values(), ids=INVERSE)
def test_inverse(arguments: tuple[str | bool, ...]) -> None:
    built = build("inverse", *arguments)
    l2norm = bool(arguments[3])
    kernel = import_module("flashqla.ops.kernels.inverse")
    inverting = kernel.WARPS * WARP // WARP_GROUP  # warpgroups, of the same code
    registers = [kernel.INVERT_REGISTERS] * inverting + [kernel.SERVICE_REGISTERS, kernel.PRODUCT_REGISTERS]
    assert_nothing_was_given_up(built)
    assert_fits(built, 1, registers, alike=inverting - 1)
    assert_inverse_instructions(built)
    assert_inverse_counts_arrivals(built, l2norm)
    assert_inverse_roles(built, l2norm)


@pytest.mark.parametrize("arguments", SUMMARY.values(), ids=SUMMARY)
def test_summary(arguments: tuple[str | bool, ...]) -> None:
    built = build("summary", *arguments)
    assert_nothing_was_given_up(built)
    assert_fits(built, 1, [232, 232, 40])
    assert built.opcodes["HGMMA"] == 2 * (8 + 4 + 4)  # K S, A W and K^T U
    assert built.opcodes["LDSM"] == 2 * 4  # v
    assert built.opcodes["UTMALDG"] == 2 + 2 + 1 + 1  # k, v, A, record
    ends, (*state, load) = split_roles(built)
    assert ends == [WARP_GROUP, 2 * WARP_GROUP, 2 * WARP_GROUP + WARP]
    for half in state:
        assert [half.count(f"*)({name} + ") for name in ("transitions", "states")] == [1, 1]
    assert load.count("tma_load(") == 4


@pytest.mark.parametrize(("dtype", "reverse"), [("bfloat16", False), ("float16", False), ("bfloat16", True)])
def test_scan(dtype: str, reverse: bool) -> None:
    built = build("scan", dtype, reverse)
    assert_nothing_was_given_up(built)
    assert_fits(built, 1)
    assert built.opcodes["HGMMA"] == 8  # M S
    assert built.opcodes["UTMALDG"] == 2 + 4  # M, N
    assert built.opcodes["LDS"] == 2 * 8  # N, added or taken as it is
    assert built.opcodes["STS"] == 4  # S
    assert len(re.findall(rf"flags_of\([^;]*, {1 + reverse}\)", built.source)) == 2  # by both roles, of this direction
    assert built.source.count("__syncthreads()") == 1
    ends, (state_and_load,) = split_roles(built)
    assert ends == [2 * WARP_GROUP]
    # The state is published before anybody is told of it, and both warpgroups have read a stage that is given back.
    published = in_order(
        "tl::wgmma_ss<",
        "tl::fence_proxy_async(); tl::__sync_thread_partial(8, 256);",
        "arrive()",
        "states[",
        "else",
        "tma_load(",
    )
    assert re.search(published, state_and_load)


@pytest.mark.parametrize("arguments", CHAIN.values(), ids=CHAIN)
def test_chain(arguments: tuple[str, int, str, str]) -> None:
    built = build("chain", *arguments)
    kind, v_tile, dtype, _ = arguments
    groups, reverse, writes = v_tile // 64, kind != "forward", kind != "summary"
    ahead = reverse and groups == 1  # the first chunk is entered in front of the loop, the others at its end
    state, score, service = import_module("flashqla.ops.kernels.chain").REGISTERS[reverse, groups]
    assert_nothing_was_given_up(built)
    assert_fits(built, 2 if (reverse, groups) == (False, 1) else 1, [state] * groups + [score] * reverse + [service])
    found = built.opcodes
    # Products in steps of 16: K S takes 8, A W, K^T U, P^T dO and Q^T dO 4, Q K^T 8.
    assert found["HGMMA"] == groups * (8 + 2 * 4) + reverse * (groups * 2 * 4 + 8) + ahead * (8 + 4)
    assert found["LDSM"] == (groups + ahead) * 4  # v or dO
    assert found["STSM"] == writes * (groups * (8 + 4) + ahead * 8) + reverse * 4  # the state and y; P
    # k, q, record, v, A, of whole chunks and of the last
    assert found["UTMALDG"] == 2 * (2 * (1 + reverse) + 1 + groups + 1)
    assert found["UTMASTG"] == writes * groups * (2 + 1)  # the state and y
    assert found["BAR"] == built.source.count("__syncthreads()") == 1
    assert built.source.count("cudaGridDependencySynchronize()") == 1
    # The reverse kernel waits for those before it; the others, after all roles, for the one beside them.
    before_roles = built.source.index("cudaGridDependencySynchronize()") < built.source.index("warpgroup_reg_")
    assert before_roles == (kind == "reverse")
    assert built.source.count("scale_in_place(") == reverse * (groups + ahead + groups * (dtype == "float16"))
    assert built.source.count("make_ratios(") == ahead
    # A barrier is asked for P, and for room for y, before it is waited for.
    asked, waited = (re.findall(call + r"(\w+)\[", built.source) for call in (r"peek\(", r"wait_unless\(\w+, "))
    assert asked == waited == ["p_ready", "y_free"][: ahead * (1 + writes)]
    # STORE fences what the state warpgroups have handed out, when it is there and before it is copied.
    guard = r"(?:\} if \([^;{]*\) \{ )?"  # TileLang repeats a condition around each statement under it
    handed_out = rf"store_tiles\([^;]*; {guard}s_ready[^;]*arrive\(\);"
    assert len(re.findall(handed_out, built.source)) == writes * (groups + ahead)
    assert len(re.findall(r"store_transposed\([^;]*; y_ready[^;]*arrive\(\);", built.source)) == writes * groups
    elected = r"if \([^;{]*\) \{ (?:#pragma unroll for \([^{]*\) \{ )*"
    for ready, copied in (("s_ready", "states_desc"), ("y_ready", "y_desc")):
        waited = rf"{ready}\[0\]\.wait\([^;]*; (?:if \([^;{{]*\) \{{ )?"
        fenced = rf"tl::fence_proxy_async\(\); {elected}tl::tma_store\({copied},"
        assert len(re.findall(waited + fenced, built.source)) == writes
    keys, values = ["q_smem"] * reverse + ["k_smem"], ["v_smem", "a_smem"]
    apart, together = [(keys, ["qk_ready"]), (values, ["va_ready"])], [(keys + values, ["qk_ready", "va_ready"])]
    loads = apart if groups == 1 else together
    for tiles, ready in loads:
        zeroed = r".*".join(rf"zero_rows\([^;]*{tile}" for tile in tiles)
        published = r" ".join(rf"{barrier}[^;]*arrive\(\);" for barrier in ready)
        assert re.search(zeroed + r"[^;]*; (?:\} )?tl::fence_proxy_async\(\); \} " + published, built.source)
    # What is read from shared memory for a product calls for no fence: those of the state, y, P and the last chunk.
    assert built.source.count("fence_proxy_async") == writes * 2 + reverse + len(loads)
    if writes:
        last = in_order(
            "tma_store(y_desc", "else", "*(uint4*)(y + ", "y_free[", "arrive();", "tma_store_wait<0, false>();"
        )
        assert re.search(in_order("tma_store(states_desc", "s_free[0].arrive();") + ".*" + last, built.source)


@pytest.mark.parametrize("arguments", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients(arguments: tuple[str, bool]) -> None:
    built = build("gradients", *arguments)
    kernel = import_module("flashqla.ops.kernels.gradients")
    assert_nothing_was_given_up(built)
    registers = [getattr(kernel, f"{role}_REGISTERS") for role in ("COLUMNS", "COLUMNS", "SCORE", "SERVICE")]
    assert_fits(built, 1, registers, alike=1)
    found = built.opcodes
    # Products of 64x64x64 take 4. dO S^T, dY S^T, U dS^T, dO U^T, dY U^T, Q K^T and K K^T are 2 of them; those with Z
    # and X are one, as is U^T K for the state that is not stored. Both warpgroups with columns of K run the same code.
    assert found["HGMMA"] == 4 * (7 * 2 + 3 + 1)
    # q and twice k beside those products, and the state that is not stored, in place; U^T for it; X + X^T of a block on
    # the diagonal; the inner product of states.
    assert (found["LDSM"], found["MOVM"], found["HMMA"]) == (3 * 4 + 4 + 4, 4 * 3, 2 * 8)
    assert found["STSM"] == 4 + 3 * 4  # that state; a block of Z, of X and of X^T for each column of blocks
    # Tokens, of whole chunks and of the last; states; U, k and record for that state; q and k, of whole chunks and of
    # the last.
    assert found["UTMALDG"] == 2 * (3 * 2 + 1) + 2 * 4 + (2 * 2 + 1) + 2 * 2 * 2
    # Before the roles; both warpgroups in front of a state and behind it; both with the norms.
    assert found["BAR"] == 1 + 2 + arguments[1]
    assert built.source.count("__syncthreads()") == 1
    assert "sync_thread_partial" not in built.source
    _, (columns, score, load, finish) = split_roles(built)
    fence = r"[^;]*; tl::fence_proxy_async\(\); "
    assert columns.count("store_rows<") == 2  # dq and dk
    guard = r"[ }]*(?:if \([^;{]*\) \{ )?"  # TileLang repeats a condition around each statement under it
    made = rf"flashqla::meet\(\);.*advance_state<\w+>\([^;]*;{guard}tl::fence_proxy_async\(\);{guard}__syncwarp\(\);.*"
    made += r"tokens_free\[[^;]*arrive\(\);[ }]*(?:if \([^;{]*\) \{ )?flashqla::meet\(\);"
    assert re.search(made, columns)
    # What is written to shared memory for a product, or read by others than products before it is free: no more.
    assert columns.count("fence_proxy_async") == 2
    read = r"put_inner_product\(.*tl::fence_proxy_async\(\); __syncwarp\(\); if [^;]*"
    assert re.search(read + r"[^d]s_free\[.*ds_free\[", columns)
    assert columns.count("take_out_norms<") == arguments[1]
    assert score.count("fence_proxy_async") == 1
    stored = r"query_scores<[^;]*z_smem.*key_scores<[^;]*x_smem"
    assert re.search(stored + fence + r"zx_ready[^;]*arrive\(\);", score)
    assert load.count("zero_rows(") == 3 * 2 + 2 * 2
    assert [load.count(name) for name in ("prefetch_block(", "prefetch_rows<2>(")] == [2, 2]  # S and dS; q and k
    # Whoever waits for tokens may look at what they are of.
    assert re.search(in_order("put_work(", "tokens_ready[", "arrive();"), load)
    assert [finish.count(name) for name in ("gate_gradients<", "zero_tail<")] == [1, 1]


@pytest.mark.parametrize("beta_dtype", ["float32", "bfloat16"])
def test_records(beta_dtype: str) -> None:
    built = build("records", beta_dtype)
    assert_nothing_was_given_up(built)
    assert_fits(built, 10)  # of eight heads each
    assert built.source.count("record_of_sums<") == 1
    assert built.opcodes["LDG"] == 2 * 4 + 3  # sums and betas of a lane; the search for its sequence, whose offsets
    assert built.opcodes["STG"] == 9  # the rows of a record, four floats a lane


def assert_nothing_was_given_up(built: Built) -> None:
    """Neither spills, nor a message of ptxas: products serialized or waited for (C7510 and up), setmaxnreg ignored."""
    lines = [line for line in built.report.splitlines() if line.startswith("ptxas")]
    usual = r"ptxas info +: (\d+ bytes gmem|Compiling entry|Function properties|Used \d+ registers|Compile time)"
    assert [line for line in lines if not re.match(usual, line)] == []
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in built.report
    assert built.opcodes["LDL"] == built.opcodes["STL"] == 0


def assert_fits(built: Built, ctas: int, roles: Sequence[int] = (), alike: int = 0) -> None:
    """As many CTAs fit in an SM. roles: registers that each warpgroup asks for, of a thread; `alike` of the first run
    the code of the one after them."""
    found = re.findall(r"USETMAXREG\.[\w.]+ (?:UP\d, )?0x(\w+)", built.code)
    assert sorted(int(digits, 16) for digits in found) == sorted(roles[alike:])
    if roles:
        # Roles trade what all threads together were started with. If they asked for more, one would wait for ever.
        assert built.threads == len(roles) * WARP_GROUP
        assert sum(roles) * WARP_GROUP <= built.threads * built.registers
    assert ctas * built.threads * built.registers <= SM_REGISTERS
    assert ctas * (built.smem + RESERVED_SMEM) <= SM_SMEM


def assert_forward_instructions(built: Built, groups: int) -> None:
    found = built.opcodes
    # Products in steps of 16: K S and Q S take 8, A W, K^T U and P U or Z W 4, Q K^T 8. A state warpgroup that is alone
    # does the first K S ahead of its loop; for two, P A is made, in 4.
    assert found["HGMMA"] == groups * (2 * 8 + 3 * 4) + 8 + (8 if groups == 1 else 4)
    assert found["LDSM"] == 8  # v, in two places
    assert found["STSM"] == 4 * (groups + 1)  # o and P
    tokens, made = 2 + 2 + groups, 1 + 1  # q, k, v; record, A
    assert found["UTMALDG"] == 3 * (tokens + made)  # of the first chunks, of others that are whole, and of the last
    assert found["UTMASTG"] == groups  # o
    assert found["BAR"] == built.source.count("__syncthreads()") == 1


def assert_forward_stores_and_publishes(built: Built, groups: int, output_h: bool) -> None:
    ends, (early, *states, score, load, store) = split_roles(built)
    score_end = (groups + 1) * WARP_GROUP
    load_end, store_end = score_end + WARP, score_end + 2 * WARP
    assert ends == [load_end, *range(WARP_GROUP, score_end + 1, WARP_GROUP), load_end, store_end]
    # Before the kernels in front have ended, LOAD asks for what these do not write, and nobody for anything else.
    wait = "cudaGridDependencySynchronize();"
    assert built.source.count(wait) == 1
    assert re.findall(r"tma_load\((\w+)_desc", early[: early.index(wait)]) == ["k", "q", "v"]
    assert "tma_load(" not in early[early.index(wait) :]

    # A fence stands between what threads write and a tensor copy or a product that reads it.
    fence = r"[^;]*; tl::fence_proxy_async\(\); "
    for state in states:
        assert state.count("store_transposed(") == 1
        # Two warpgroups publish an output beside the next products, and the last one after the loop; STORE fences it.
        assert len(re.findall(r"o_ready[^;]*arrive\(\);", state)) == groups
        assert "fence_proxy_async" not in state
        assert state.count(" final_state[") == 1
        assert state.count("store_state(") == (0 if not output_h else 2 if groups == 1 else 1)
    assert re.search(r"store_tile\(" + fence + r"p_ready[^;]*arrive\(\);", score)
    zeroed = r".*".join(rf"zero_rows\([^;]*{tile}" for tile in ("k_smem", "v_smem", "a_smem"))
    assert re.search(zeroed + fence + r"in_ready[^;]*arrive\(\);", load)
    whole = in_order(
        "o_ready[",
        "wait(",
        "fence_proxy_async",
        "tma_store(o_desc",
        "tma_store_arrive();",
        "tma_store_wait<0, true>();",
    )
    last = in_order("*(uint4*)(o + ", "o_free[", "arrive();", "tma_store_wait<0, false>();")
    assert re.search(whole + ".*else.*" + last, store)


def assert_inverse_instructions(built: Built) -> None:
    found = built.opcodes
    assert found["HGMMA"] == 8  # K K^T in steps of 16
    # Products of 16x16 blocks take 4: block (i, c) has i - c of them, and one with a block on the diagonal, of which a
    # quarter is 0. Such a block itself takes 2.
    below = [(i, c) for i in range(4) for c in range(i)]
    assert found["HMMA"] == sum(4 * (i - c) + 3 for i, c in below) + 4 * 2
    # Blocks of A. Those above the diagonal are zeros from the start, but for the one where diagonals stood.
    assert found["STSM"] == len(below) + 4 + 1
    assert found["UTMALDG"] == 2  # halves of k
    assert found["UTMASTG"] == 1  # A
    assert found["BAR"] == 2
    assert built.source.count("__syncthreads()") == 1  # barriers are there
    assert built.source.count("__sync_thread_partial(8, 128)") == 1  # rows are zeroed
    (tiles,) = re.findall(r"a_smem = [^;]*buf_dyn_shmem \+ (\d+)\)", built.source)
    assert int(tiles) % 1024 == 0  # or they are swizzled in another way than a copy reads them


def assert_inverse_counts_arrivals(built: Built, l2norm: bool) -> None:
    """As many arrivals as there are threads of the role, of half a warp for a job of FACTORS."""
    kernel = import_module("flashqla.ops.kernels.inverse")
    counts = Counter(re.findall(r"(\w+)\[\d+\]\.init\(([^;]*)\);", built.source))
    assert counts == {
        ("keys_ready", "32"): kernel.KEYS,
        ("keys_free", "128"): kernel.KEYS,
        ("product_ready", "128"): kernel.WARPS,
        ("product_free", f"(group * {32 + 16 * l2norm})"): kernel.PRODUCTS,
        ("job_ready", "16"): kernel.JOBS,
        ("job_free", "32"): kernel.JOBS,
    }


def assert_inverse_roles(built: Built, l2norm: bool) -> None:
    """All that each role does, in order: a stage is written when it is free and read when it is ready, and a fence
    stands between threads and a tensor copy or a product that use the same shared memory."""
    kernel = import_module("flashqla.ops.kernels.inverse")
    keys, products, jobs, warps = kernel.KEYS, kernel.PRODUCTS, kernel.JOBS, kernel.WARPS
    ends, _ = split_roles(built)
    fetch, zero_rows = [WARP, 2 * WARP, 3 * WARP], 2 * WARP
    assert ends == [kernel.LOAD_BEGIN, *fetch, zero_rows, kernel.INVERT_BEGIN, kernel.FACTORS_BEGIN]
    _, product, service, invert = re.split(r"warpgroup_reg_(?:de)?alloc<\d+>\(\);", built.source)
    load, factors = service.split("} else {", 1)
    roles = f"""\
guess
if threadIdx.x < 32:
  prefetch_rows<2>
else:
  if threadIdx.x < 64:
    prefetch_rows<1>
  else:
    if threadIdx.x < 96:
      prefetch_rows<1>
for turn:
  keys_ready[turn % {keys}].wait turn / {keys} % 2
  recall
  if item[1] < 64:
    if threadIdx.x < 64:
      zero_rows
    fence_proxy_async
    __sync_thread_partial
  fence_proxy_async
  for ki:
    wgmma_ss
    wgmma_ss
  product_free[turn % {products}].wait turn / {products} % 2 ^ 1
  inverse_norms_of_tile  # l2norm
  inverse_norms  # l2norm
  wait_wgmma<0>
  fence_proxy_async
  keys_free[turn % {keys}].arrive
  store_product
  product_ready[turn % {warps}].arrive

if threadIdx.x < {kernel.FACTORS_BEGIN}:
  for turn:
    find
    keys_free[turn % {keys}].wait turn / {keys} % 2 ^ 1
    hand_on
    if 0 < item[1]:
      if tl_shuffle_elect<32>:
        fence_proxy_async
        for half:
          keys_ready[turn % {keys}].expect_transaction 8192
          tma_load
    keys_ready[turn % {keys}].arrive
    prefetch_rows<2>  # l2norm

first_job
find
four_tokens
four_tokens
while any job[1] < turns:
  s = job[0] % {jobs}
  p = job[1] % {products}
  if job[1] < turns:
    product_ready[job[1] % {warps}].wait job[1] / {warps} % 2  # l2norm
    job_free[s].wait job[0] / {jobs} % 2 ^ 1
    hand_on
  __syncwarp
  chunk_vectors
  if job[1] < turns:
    job_ready[s].arrive
    product_free[p].arrive  # l2norm
  next_job
  find
  four_tokens
  four_tokens
  chunk_record

zero_pieces<8>
__syncwarp
first_job
while job[1] < turns:
  s = job[0] % {jobs}
  p = job[1] % {products}
  job_ready[s].wait job[0] / {jobs} % 2
  recall
  product_ready[turn % {warps}].wait turn / {warps} % 2
  if 0 < item[1]:
    tma_store_wait<0, true>
    __syncwarp
    gated_inverse
  product_free[p].arrive
  job_free[s].arrive
  if 0 < item[1]:
    fence_proxy_async
    __syncwarp
    if item[1] == 64:
      send_tile
    else:
      store_rows
      __syncwarp
  else:
    if row < tokens:
      zero_pieces<16>
      zero_pieces<8>
  next_job
tma_store_wait<0, false>"""
    expected = re.sub(r"  # l2norm" if l2norm else r"\n.*  # l2norm", "", roles)
    assert "\n\n".join(map(outline, (product, load, factors, invert))) == expected


def outline(role: str) -> str:
    """What a role calls, waits for and arrives at, in the order of the source, indented under loops and conditions."""
    text = re.sub(r"(?<=[a-z])_\d+\b|\(int\)|\(int64_t\)", "", role)  # TileLang counts variables that have one name
    text = re.sub(r">> (\d+)", lambda bits: f"/ {1 << int(bits[1])}", text)
    text = re.sub(r"& (\d+)", lambda mask: f"% {int(mask[1]) + 1}", text)
    text = re.sub(r"while \(1\) \{ if \(!([^;{]*)\) \{ break; \}", r"while \1 {", text)
    text = re.sub(r"for \(int (\w+)[^{]*\{", r"for \1 {", text)
    block = r"(?P<block>\b(?:while|for|if|else)\b[^;{}]*)?\{|(?P<end>\})"
    barrier = r"\w+\[[^;{}]*\]\.\w+\([^;]*"
    stage = r"(?<=int )[sp] = [^;]*"  # of a job
    call = r"(?:tl|flashqla)::(?!\w*(?:descriptor|warpgroup))\w+(?:<\d[^>]*>)?(?=[<(])|__\w+(?=\()"
    lines: list[str] = []
    inside: list[str] = []
    shown: list[str] = []  # blocks of the line before
    for found in re.finditer(rf"{block}|(?P<step>{barrier}|{stage}|{call})", text):
        if found["end"] and not inside:
            break
        if found["end"]:
            inside.pop()
        elif found["step"]:
            blocks = [line for line in inside if line]
            # TileLang repeats a condition around each statement under it.
            same = [*map(eq, shown, blocks), False].index(False)
            steps = [*blocks[same:], found["step"]]
            lines += ["  " * depth + plain(step) for depth, step in enumerate(steps, start=same)]
            shown = blocks
        else:
            inside.append(f"{found['block']}:" if found["block"] else "")
    return "\n".join(lines)


def plain(code: str) -> str:
    """Without namespaces and brackets around arguments."""
    code = re.sub(r"\b(?:tl|flashqla)::", "", code)
    return re.sub(r"[()]", "", re.sub(r"(?<=\w)\(", " ", code)).replace(" :", ":").strip()


def split_roles(built: Built) -> tuple[list[int], list[str]]:
    """Where the roles end, in threads, and what each does: `if (threadIdx.x < end) {...} else {`, one in the other."""
    _, *parts = re.split(r"if \(\(\(int\)threadIdx\.x\) < (\d+)\) \{", built.source)
    return [int(end) for end in parts[::2]], parts[1::2]


def in_order(*texts: str) -> str:
    """A pattern for these texts, with anything between them."""
    return ".*".join(map(re.escape, texts))
