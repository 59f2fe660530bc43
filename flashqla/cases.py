"""A case: one problem of the gated delta rule, described without tensors.

`inputs.make` turns a case and a seed into tensors; records and tables name it by `Case.id`. `read_cases` reads a user's
own from a file, and built-in suites stand at the end of this one. Nothing here imports torch, so that listing and
filtering cases is instant anywhere.
"""

import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

from flashqla.errors import ArgumentError

Direction = Literal["fwd", "bwd", "fwd+bwd"]  # bwd: on what one forward pass saved
Gate = Literal["typical", "strong", "zero", "half_zero", "mixed", "reset", "reset_inf", "tiny", "captured"]
Keys = Literal["normal", "correlated", "norm5"]
Beta = Literal["sigmoid", "one"]
DType = Literal["bfloat16", "float16", "float32"]

CHUNK = 64  # tokens; the length around which every edge case turns
HEAD_DIM = 128
MAX_ROWS = 2**48  # of heads and tokens, or of heads and states; PyTorch counts the bytes of a tensor in 63 bits


@dataclass(frozen=True)
class Case:
    """One problem: head counts, sequence lengths, and how its inputs are drawn and laid out.

    Key and value heads have 128 dimensions. Raises ArgumentError for a description that means nothing.
    """

    hk: int
    hv: int
    lengths: tuple[int, ...]  # tokens per sequence; zeros allowed
    model: str = ""  # block label of the table: "397B/122B TP8"
    gate: Gate = "mixed"
    keys: Keys = "normal"  # correlated: all entries positive; norm5: rows of norm 5, for l2norm
    beta: Beta = "sigmoid"
    dtype: DType = "bfloat16"  # q, k, v
    gate_dtype: DType = "float32"  # g, beta
    state_dtype: DType = "float32"  # initial state
    batch: bool = False  # True: dense [B, T]; False: sequences packed into one row
    tail: int = 0  # rows past the last offset, filled with NaN
    strided: bool = False  # q, k, v are slices of one projection, g and beta of one buffer
    l2norm: bool = False  # use_qk_l2norm_in_kernel
    state_v_first: bool = False
    initial_state: bool = True
    final_state: bool = True
    note: str = ""  # what the case is there for
    file: str = ""  # gate captured: where its tensors are read from, instead of being drawn
    content: str = ""  # and a hash of them, by which they are known wherever the file lies

    def __post_init__(self) -> None:
        for sound, message, given, supported in (
            (
                0 < self.hk <= self.hv and self.hv % self.hk == 0,
                "head counts do not fit",
                "heads",
                "hv = n * hk, n >= 1",
            ),
            (self.lengths and min(self.lengths) >= 0, "no valid lengths", "lengths", "one or more, none negative"),
            (not self.batch or len(set(self.lengths)) <= 1, "a dense batch has one length", "lengths", "equal lengths"),
            (self.tail >= 0 and not (self.tail and self.batch), "no such tail", "tail", "tail >= 0, packed rows only"),
            (
                len({self.gate == "captured", bool(self.file), bool(self.content)}) == 1,
                "captured inputs have a file and a hash, and others none",
                "gate",
                "--input FILE makes a case of captured inputs",
            ),
            *((getattr(self, f) in words, f"unknown {f}", f, ", ".join(words)) for f, words in _WORDS.items()),
        ):
            if not sound:
                value = (self.hk, self.hv) if given == "heads" else getattr(self, given)
                raise ArgumentError(message, given=f"{given} {value}", supported=supported)
        if self.hv * max(self.tokens + self.tail, HEAD_DIM * len(self.lengths)) > MAX_ROWS:
            given = f"{self.hv} value heads, {self.tokens + self.tail} tokens, {len(self.lengths)} sequences"
            supported = f"value heads * tokens <= 2**48, value heads * sequences <= 2**48 / {HEAD_DIM}"
            raise ArgumentError("no tensor is that large", given=given, supported=supported)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences together, without the tail."""
        return sum(self.lengths)

    @property
    def packed(self) -> bool:
        """Whether the case is passed with `cu_seqlens`."""
        return not self.batch and (len(self.lengths) > 1 or self.tail > 0)

    @property
    def layout(self) -> str:
        """Lengths in short: "1x32768", "28672+4096", "8192x4" (four packed), "4x8192" (a dense batch of four)."""
        first, count = self.lengths[0], len(self.lengths)
        if count == 1 or self.batch:
            return f"{count}x{first}"
        # Two equal lengths are written out, as in the published tables.
        return f"{first}x{count}" if count > 2 and len(set(self.lengths)) == 1 else "+".join(map(str, self.lengths))

    @property
    def id(self) -> str:
        """Stable name, "hk2-hv8/1x32768/mixed": heads, layout, gate, then every setting that is not the default."""
        extras = {
            self.content: bool(self.content),
            self.keys: self.keys != "normal",
            f"beta-{self.beta}": self.beta != "sigmoid",
            self.dtype: self.dtype != "bfloat16",
            f"gate-{self.gate_dtype}": self.gate_dtype != "float32",
            f"state-{self.state_dtype}": self.state_dtype != "float32",
            "batch": self.batch and len(self.lengths) > 1,
            f"tail{self.tail}": self.tail > 0,
            "strided": self.strided,
            "l2norm": self.l2norm,
            "v-first": self.state_v_first,
            "no-initial-state": not self.initial_state,
            "no-final-state": not self.final_state,
        }
        parts = [f"hk{self.hk}-hv{self.hv}", self.layout, self.gate]
        return "/".join(parts + [text for text, on in extras.items() if on])


_WORDS: dict[str, tuple[str, ...]] = {
    "gate": get_args(Gate),
    "keys": get_args(Keys),
    "beta": get_args(Beta),
    "dtype": get_args(DType),
    "gate_dtype": get_args(DType),
    "state_dtype": get_args(DType),
}


def select(
    cases: Iterable[Case],
    *,
    heads: Sequence[tuple[int, int]] = (),
    lens: Sequence[str] = (),
    model: str | None = None,
    pattern: Sequence[str] = (),
) -> tuple[Case, ...]:
    """Cases that pass every filter given; the values of one filter are alternatives.

    heads    (hk, hv) pairs
    lens     layouts as in `Case.layout`
    model    part of the model label, upper or lower case
    pattern  parts of the id or note, upper or lower case, `*` and `?` as in file names
    """

    def matches(case: Case) -> bool:
        text = f"{case.id} {case.note}".lower()
        return (
            (not heads or (case.hk, case.hv) in heads)
            and (not lens or case.layout in lens)
            and (model is None or model.lower() in case.model.lower())
            and (not pattern or any(fnmatchcase(text, f"*{part.lower()}*") for part in pattern))
        )

    return tuple(case for case in cases if matches(case))


def read_cases(path: Path) -> tuple[Case, ...]:
    """Cases of a TOML file: a table for each, with fields of Case as keys; table `defaults` holds what they share.

    The name of a table is the note of its case, unless that has one. Raises ArgumentError.
    """
    tables = read_toml(path, "cases")
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ArgumentError("a cases file holds tables alone", given=f"{path}: {name}", supported=_EXAMPLE)
        _judge_fields(table, f"{path}: [{name}]")
    defaults = tables.pop("defaults", {})
    if not tables:
        raise ArgumentError("there is no case in the file", given=str(path), supported=_EXAMPLE)
    names: dict[str, str] = {}
    cases = []
    for name, table in tables.items():
        settings = {"note": name, **defaults, **table}
        if lacking := [key for key in ("hk", "hv", "lengths") if key not in settings]:
            raise ArgumentError(
                f"a case needs {' and '.join(lacking)}", given=f"{path}: [{name}]", do="add it there or to [defaults]"
            )
        try:
            case = Case(**{**settings, "lengths": tuple(settings["lengths"])})
        except ArgumentError as error:
            given = f"{path}: [{name}]: {error.given}"
            raise ArgumentError(error.message, given=given, supported=error.supported) from None
        if case.id in names:
            given = f"{path}: [{names[case.id]}] and [{name}] are both {case.id}"
            raise ArgumentError("two tables describe one case", given=given, do="leave one of them out")
        names[case.id] = name
        cases.append(case)
    return tuple(cases)


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Content of a TOML file of cases or thresholds, none of which is so deep or so long that it cannot be shown.

    Raises ArgumentError.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        repr(content)
    except RecursionError as error:
        raise ArgumentError(f"the {what} file cannot be read", given=f"{path}: nested too deep") from error
    except (OSError, ValueError) as error:  # no UTF-8, no TOML, or a number of more digits than Python converts
        raise ArgumentError(f"the {what} file cannot be read", given=f"{path}: {error}") from error
    return content


_KINDS: dict[Any, str] = {int: "an integer", bool: "true or false", str: "a string"}
_EXAMPLE = "[name] with hk = 2, hv = 8, lengths = [1000, 24], or [defaults] for all cases"


def _judge_fields(table: dict[str, Any], where: str) -> None:
    """Raise ArgumentError for keys that are no fields of a case, and for values of another type than theirs."""
    kinds = {f.name: f.type for f in fields(Case) if f.name not in ("file", "content")}
    for key, value in table.items():
        if key not in kinds:
            raise ArgumentError(f"unknown key {key}", given=where, supported=", ".join(kinds))
        if kinds[key] == tuple[int, ...]:
            right, wanted = isinstance(value, list) and all(type(n) is int for n in value), "a list of integers"
        else:
            kind = kinds[key] if kinds[key] in _KINDS else str  # a Literal, whose words Case judges
            right, wanted = type(value) is kind, _KINDS[kind]
        if not right:
            raise ArgumentError(f"{key} is {wanted}", given=f"{where}: {key} = {value!r}")


def suite(name: str) -> tuple[Case, ...]:
    """The cases of a built-in suite (see `SUITES`). Raises ArgumentError for an unknown name."""
    if name not in SUITES:
        raise ArgumentError("unknown suite", given=name, supported=", ".join(SUITES))
    return SUITES[name]()


# Value heads of a Qwen model are split over TP ranks: one row per (h_k, h_v) that a GPU sees.
QWEN_HEADS = {
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
QWEN_LENGTHS: tuple[tuple[int, ...], ...] = (
    *((length,) for length in (32768, 16384, 8192, 4096, 2048)),
    *((28672, 4096), (24576, 8192), (16384, 16384), (8192, 24576), (4096, 28672)),
    *((12288, 4096), (6144, 2048), (4096, 4096), (2048, 6144), (1024, 7168)),
    *((8192,) * 4, (4096,) * 8, (2048,) * 4, (1024,) * 8),
)


def _rows(heads: dict[str, tuple[int, int]], lengths: Iterable[tuple[int, ...]]) -> tuple[Case, ...]:
    return tuple(
        Case(*pair, lens, model=model, batch=len(lens) == 1) for model, pair in heads.items() for lens in tuple(lengths)
    )


def _sweep() -> tuple[Case, ...]:
    return _rows(QWEN_HEADS, QWEN_LENGTHS)


def _cpu() -> tuple[Case, ...]:
    heads = {model: QWEN_HEADS[model] for model in ("397B/122B TP8", "397B/122B TP4", "27B TP2", "2B/0.8B TP1")}
    return _rows(heads, ((1024,), (512,), (768, 256), (256,) * 4))


# The head counts and lengths of the backward table that flash-qla publishes, and two more head counts. Each total is
# cut at random places: those that its seed 42 gives.
BACKWARD_HEADS = {
    "35B/9B/4B TP1": (16, 32),
    "35B/9B/4B TP2": (8, 16),
    "35B/9B/4B TP4": (4, 8),
    "35B/9B/4B TP8": (2, 4),
    "397B/122B TP1": (16, 64),
    "27B TP1": (16, 48),
}
BACKWARD_LENGTHS: tuple[tuple[int, ...], ...] = (
    (8192,),
    (7053, 1139),
    (5809, 1244, 406, 733),
    (161, 1928, 3157, 563, 1244, 229, 177, 733),
    (32768,),
    (7212, 25556),
    (7212, 7072, 13725, 4759),
    (3274, 1029, 2909, 5061, 2011, 3793, 9932, 4759),
)


def _bwd() -> tuple[Case, ...]:
    return _rows(BACKWARD_HEADS, BACKWARD_LENGTHS)


def _cpu_bwd() -> tuple[Case, ...]:
    heads = {model: BACKWARD_HEADS[model] for model in ("35B/9B/4B TP4", "35B/9B/4B TP8")}
    return _rows(heads, ((256,), (128,), (161, 95), (64,) * 4))


def _smoke() -> tuple[Case, ...]:
    return (
        Case(2, 4, (128,), batch=True, note="two full chunks"),
        Case(1, 3, (65,), batch=True, gate="strong", initial_state=False, note="one token in the last chunk, no state"),
        Case(2, 8, (73, 42, 0, 94), tail=47, note="packed, an empty sequence, a padded tail"),
        Case(2, 2, (100,) * 2, batch=True, gate="zero", dtype="float16", note="dense batch, no decay"),
        Case(2, 4, (130,), batch=True, gate="reset_inf", note="a gate of -inf"),
        Case(2, 4, (63, 64), strided=True, l2norm=True, keys="norm5", state_v_first=True, note="every switch on"),
    )


def _hard() -> tuple[Case, ...]:
    def dense(hk: int, hv: int, length: int, note: str, gate: Gate = "mixed") -> Case:
        return Case(hk, hv, (length,), batch=True, gate=gate, note=note)

    empties = (0, 64, 0, 0, 130, 1, 0)
    ragged = (410, 431, 294, 991, 386, 1584)
    base = dense(2, 8, 300, "")
    pack = Case(2, 4, (73, 42, 94))
    return (
        dense(4, 4, 4096, "strong gates: real models decay to nothing within tokens", "strong"),
        replace(pack, tail=47, note="NaN rows past the last offset must not be read, and their output is 0"),
        replace(pack, tail=47, initial_state=False, gate="strong", note="a NaN tail, without a state"),
        Case(2, 4, empties, note="empty sequences hand their initial state through"),
        Case(2, 4, empties, initial_state=False, note="empty sequences without a state end at 0"),
        Case(2, 4, (0,) * 3, note="a pack of empty sequences: nothing to launch"),
        Case(2, 4, (0,) * 2, tail=47, note="empty sequences, then a NaN tail"),
        dense(2, 4, 0, "no tokens at all"),
        Case(2, 8, (32768, 1, 63, 4096), note="heads that never decay cannot be warmed up from a short prefix"),
        Case(16, 48, (1238, 1199, 1240, 1216, 1187, 1203, 519), note="a ragged pack that has deadlocked a kernel"),
        dense(2, 8, 2000, "no decay: the plain delta rule, errors never fade", "zero"),
        dense(2, 8, 2000, "half of the tokens do not decay", "half_zero"),
        dense(2, 8, 2000, "the gates of a trained model", "typical"),
        dense(2, 4, 130, "one gate of -90: its decay underflows", "reset"),
        dense(2, 4, 130, "one gate of -inf: a hard reset", "reset_inf"),
        dense(2, 4, 130, "all gates log(1e-12): cumulative gates beyond exp's range", "tiny"),
        Case(2, 4, (130, 65, 64), gate="reset_inf", note="-inf gates in packed sequences"),
        *(dense(2, 4, n, "lengths around a chunk") for n in (1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 1000)),
        *(
            dense(hk, hv, 200, "head counts and groups")
            for hk, hv in ((1, 1), (1, 3), (2, 4), (2, 6), (2, 8), (4, 12), (8, 24), (16, 48), (16, 64))
        ),
        Case(16, 32, ragged, note="a pack equals its sequences on their own"),
        replace(base, state_v_first=True, note="V-first states are the transposes of K-first ones"),
        replace(pack, state_v_first=True, note="V-first states, packed"),
        replace(base, keys="norm5", l2norm=True, note="normalising q and k inside the op"),
        replace(base, keys="norm5", l2norm=True, dtype="float16", note="normalising fp16 q and k inside the op"),
        replace(base, gate_dtype="bfloat16", note="bf16 g and beta"),
        replace(base, gate_dtype="float16", note="fp16 g and beta"),
        replace(base, gate="strong", gate_dtype="bfloat16", note="bf16 g and beta, strong gates"),
        replace(base, strided=True, note="slices of one projection"),
        replace(pack, strided=True, tail=47, note="slices of one projection, packed, a NaN tail"),
        *(
            replace(dense(2, 4, n, "correlated keys: the inverse is far from the identity"), keys="correlated")
            for n in (64, 128, 256, 512, 1024)
        ),
        replace(dense(2, 4, 512, "correlated keys, beta 1, no decay", "zero"), keys="correlated", beta="one"),
        replace(base, beta="one", note="beta 1: every write replaces what was stored"),
        replace(base, dtype="float16", note="fp16"),
        replace(base, dtype="float16", gate="strong", note="fp16, strong gates"),
        replace(base, dtype="float16", gate="zero", lengths=(1000,), note="fp16, no decay"),
        replace(base, state_dtype="bfloat16", note="bf16 initial state"),
        replace(base, state_dtype="float16", dtype="float16", note="fp16 initial state"),
        replace(pack, state_dtype="bfloat16", state_v_first=True, note="bf16 initial states, V-first, packed"),
        replace(base, initial_state=False, note="no initial state equals one of zeros"),
        replace(base, final_state=False, note="no final state asked for"),
        replace(base, initial_state=False, final_state=False, note="no state in or out"),
        replace(base, lengths=(300,) * 4, note="a dense batch equals the same sequences packed"),
        replace(base, lengths=(300,) * 4, batch=False, note="the same sequences packed"),
        replace(base, lengths=(65,) * 3, strided=True, initial_state=False, note="a dense batch of strided rows"),
        replace(pack, dtype="float16", gate_dtype="float16", strided=True, tail=47, keys="norm5", l2norm=True,
                state_v_first=True, state_dtype="float16", note="every switch at once"),
    )  # fmt: skip


def _cpu_hard() -> tuple[Case, ...]:
    """The hard cases cut down: long sequences keep only their last, partial chunk's length, big packs fewer heads."""

    def cut(case: Case) -> Case:
        lengths = tuple(n if n <= 5 * CHUNK else 3 * CHUNK + n % CHUNK for n in case.lengths)
        hk = min(case.hk, 2) if sum(lengths) > 8 * CHUNK else case.hk
        return replace(case, hk=hk, hv=hk * (case.hv // case.hk), lengths=lengths)

    return tuple({case.id: case for case in map(cut, _hard())}.values())


SUITES: dict[str, Callable[[], tuple[Case, ...]]] = {
    "smoke": _smoke,  # seconds, anywhere
    "hard": _hard,  # inputs that have broken kernels
    "sweep": _sweep,  # every Qwen head count and length, to verify
    "qwen": _sweep,  # the same rows, to time
    "bwd": _bwd,  # rows of the backward table, to time
    "cpu": _cpu,  # a small Qwen suite for timing without a GPU
    "cpu_bwd": _cpu_bwd,  # the same for the backward pass
    "cpu_hard": _cpu_hard,  # the hard cases at sizes for a CPU
}
