"""Calls of the op kept in files: written by `capture` in a training or serving run, read by `--input`.

A file holds the arguments of one call under their public names (`flashqla.ops`): tensors q, k, v, g, beta,
initial_state and cu_seqlens, of which g, initial_state and cu_seqlens may be missing, and settings scale,
use_qk_l2norm_in_kernel, state_v_first and output_final_state, any of which may be missing. In .safetensors the
settings are metadata, written as in JSON; in .pt all of it is one dict, which is read without running any code in it.
Tensors are stored contiguous, whatever their strides were.
"""

import functools
import gc
import hashlib
import importlib
import inspect
import json
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashqla.cases import Case
from flashqla.errors import ArgumentError, EnvironmentProblem, FlashqlaError
from flashqla.ops import checks
from flashqla.records import destination, replacing

REQUIRED = ("q", "k", "v", "beta")
TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")
SETTINGS = {"scale": None, "use_qk_l2norm_in_kernel": False, "state_v_first": False, "output_final_state": True}
FORMATS = (".safetensors", ".pt")
HASH_DIGITS = 12
MOST_REPEATED = 4 * 2**30  # bytes of a tensor that repeats what its file holds, as an expanded one does
OP = "chunk_gated_delta_rule"
# Arguments that say how to run and change nothing about what is computed, in our op and flash-linear-attention's.
IMMATERIAL = ("auto_cp", "cu_seqlens_cpu", "chunk_indices", "chunk_size")


@dataclass(frozen=True)
class Captured:
    """A call read from a file, judged by the checks of the op. Tensors are on the CPU; there is always a g."""

    case: Case
    tensors: dict[str, Tensor]
    scale: float


def read(path: Path) -> Captured:
    """A captured call. Raises ArgumentError for a file that is none, EnvironmentProblem without safetensors."""
    content = {**SETTINGS, **_content(path)}
    try:
        problem = _judge(content)
        tensors = {name: content[name] for name in TENSORS if content.get(name) is not None}
        if "cu_seqlens" in tensors:
            tensors["cu_seqlens"] = tensors["cu_seqlens"].int()
        case = _case(path, problem, _hash(tensors, content))
    except ArgumentError as error:
        raise ArgumentError(
            f"not a captured call: {error.message}",
            given=": ".join(filter(None, (str(path), error.given))),
            supported=error.supported,
        ) from error
    tensors.setdefault("g", torch.zeros(problem.v.shape[:3]))
    return Captured(case, tensors, problem.scale)


def write(path: Path, arguments: Mapping[str, Any]) -> None:
    """Write the arguments of a call, in one step. Raises ArgumentError for an unknown format, RecordError."""
    format_of(path)
    tensors = {
        name: _resolved(x).to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name in TENSORS
        if (x := arguments.get(name)) is not None
    }
    settings: dict[str, Any] = {name: bool(arguments[name]) for name in SETTINGS if name in arguments}
    settings["scale"] = None if arguments.get("scale") is None else float(arguments["scale"])
    with replacing(path) as unfinished:
        if path.suffix == ".pt":
            torch.save({**tensors, **settings}, unfinished)
        else:
            from safetensors.torch import save_file

            save_file(tensors, unfinished, {name: json.dumps(value) for name, value in settings.items()})


def format_of(path: Path) -> str:
    """The format of a file by its name. Raises ArgumentError for others, EnvironmentProblem without safetensors."""
    if path.suffix not in FORMATS:
        raise ArgumentError("unknown format of a captured call", given=str(path), supported=", ".join(FORMATS))
    if path.suffix == ".safetensors" and find_spec("safetensors") is None:
        raise EnvironmentProblem(
            "safetensors is not installed", given=str(path), do="pip install 'flashqla[capture]', or use .pt"
        )
    return path.suffix


def _content(path: Path) -> dict[str, Any]:
    """Tensors and settings of a file, by name."""
    suffix = format_of(path)
    try:
        content = _unpickled(path) if suffix == ".pt" else _safe(path)
    except Exception as error:  # whatever a reader says about a file that is broken, hostile or not there
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise ArgumentError("a captured call cannot be read", given=f"{path}: {reason}") from error
    if not isinstance(content, dict):
        raise ArgumentError("not a captured call", given=f"{path}: a {type(content).__name__}", supported="a dict")
    wrong = [f"no {name}" for name in REQUIRED if content.get(name) is None]
    wrong += [f"unknown {name}" for name in content if name not in TENSORS and name not in SETTINGS]
    wrong += [f"{name} {why}" for name in TENSORS if (why := _strange(content.get(name)))]
    wrong += [
        f"{name} = {content[name]!r:.80}"
        for name, default in SETTINGS.items()
        if name in content and not isinstance(content[name], bool if default is not None else float | int | None)
    ]
    if isinstance(scale := content.get("scale"), float | int) and not _finite(scale):
        wrong.append("scale is not a finite number")
    if wrong:
        supported = f"dense tensors {', '.join(TENSORS)}; settings {', '.join(SETTINGS)}"
        do = "capture the call again with flashqla.capture"
        raise ArgumentError("not a captured call", given=f"{path}: {', '.join(wrong)}", supported=supported, do=do)
    return {name: _resolved(x) if isinstance(x, Tensor) else x for name, x in content.items()}


def _resolved(x: Tensor) -> Tensor:
    """Without the bits for sign and conjugation that torch may keep beside the data, which others do not look for."""
    return x.detach().resolve_conj().resolve_neg()


def _strange(x: Any) -> str:
    """Why a tensor cannot be read, nothing if it can or is not there."""
    if x is None:
        return ""
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        return "is no dense tensor"
    if x.device.type != "cpu":
        return f"has no data, only the device {x.device}"
    held = x.untyped_storage().nbytes()
    if x.nbytes > max(held, MOST_REPEATED):
        return f"repeats {held} bytes to {x.nbytes / 2**30:.0f} GiB"
    return ""


def _finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an int beyond all floats
        return False


def _unpickled(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError):  # of the file system, and of a zip archive
        raise
    except Exception as error:  # a pickle: some of its texts tell how to run what is in the file, others nothing
        raise ValueError("it is damaged, or holds more than tensors, numbers and text") from error


def _safe(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    metadata.pop("format", None)  # which other writers of such files put there
    return tensors | {name: _setting(text) for name, text in metadata.items()}


def _setting(text: str) -> Any:
    """A value from its JSON, or as Python writes it; what is neither, as Infinity, stays a text."""
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def _judge(arguments: Mapping[str, Any]) -> checks.Problem:
    """The call as the op sees it. Raises ArgumentError, also for one that the op serves and a case cannot be."""
    tensors: dict[str, Any] = {name: arguments.get(name) for name in TENSORS}
    checks.kinds(arguments["scale"], False, **tensors)
    problem = checks.problem(
        **tensors,
        scale=arguments["scale"],
        output_final_state=arguments["output_final_state"],
        l2norm=arguments["use_qk_l2norm_in_kernel"],
        state_v_first=arguments["state_v_first"],
        auto_cp=True,
        cu_seqlens_cpu=None,
        read="fresh",
    )
    if problem.q.dtype == torch.float64:
        raise ArgumentError("captured calls in float64 are not supported", supported="bfloat16, float16, float32")
    return problem


def _case(path: Path, problem: checks.Problem, content: str) -> Case:
    p, lengths = problem, problem.seqlens or ()
    packed = p.cu_seqlens is not None
    gate = p.beta if p.g is None else p.g
    return Case(
        p.hk,
        p.hv,
        lengths,
        gate="captured",
        dtype=_name(p.q),
        gate_dtype=_name(gate),
        state_dtype="float32" if p.initial_state is None else _name(p.initial_state),
        batch=not packed,
        tail=p.tokens - sum(lengths) if packed else 0,
        l2norm=p.l2norm,
        state_v_first=p.state_v_first,
        initial_state=p.initial_state is not None,
        final_state=p.output_final_state,
        note=f"captured in {path.name}",
        file=str(path),
        content=content,
    )


def _name(x: Tensor) -> Any:
    return checks.DTYPES[x.dtype]


def _hash(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> str:
    """Of what a call computes from, which is the same in either format."""
    digest = hashlib.sha256(json.dumps([settings[name] for name in SETTINGS]).encode())
    for name, x in tensors.items():
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        digest.update(x.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:HASH_DIGITS]


@contextmanager
def capture(path: str | Path, calls: int = 1) -> Iterator[list[Path]]:
    """Inside, keep the arguments of the next `calls` calls of chunk_gated_delta_rule, ours and that of
    flash-linear-attention where it can be imported, wherever a Python module or a torch.nn.Module holds it.

        with flashqla.capture("layer.safetensors"):
            model(batch)

    Args:
        path: a file ending in .safetensors (needs the package of that name) or .pt. With calls > 1 files are numbered:
            layer-1.safetensors, and so on. Each appears whole, before its call runs, and replaces an older one.
            Processes of one job need names of their own.
        calls: how many calls to keep; later ones only pass.

    Gives the list of files, which grows as they are written. Calls give what they would give without it. They are
    passed through and not kept under torch.compile, while a CUDA graph is captured, in a transform or with tensors that
    are not plain ones (fake, meta, subclasses), in float64, and with arguments that a file cannot hold; a warning at
    the end says so. It counts for all threads, and may be nested.

    Raises ArgumentError, EnvironmentProblem or RecordError before anything runs when files cannot be written there.
    """
    if type(calls) is not int or calls < 1:
        raise ArgumentError("calls must be a number of 1 or more", given=f"calls = {calls!r}")
    path = destination(Path(path))
    format_of(path)
    recorder = _Recorder(path, calls)
    with _lock:
        if not _recorders:
            _traced.seen = False
            _install()
        _recorders.append(recorder)
    try:
        yield recorder.files
    finally:
        with _lock:
            _recorders.remove(recorder)
            if not _recorders:
                _uninstall()
        recorder.report()


class _Recorder:
    """Keeps the next calls, and why others were not kept."""

    def __init__(self, path: Path, calls: int) -> None:
        self.path, self.calls = path, calls
        self.files: list[Path] = []
        self.passed: dict[str, None] = {}  # reasons, in order

    def see(self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep a call. Whatever goes wrong is a reason: the run that is watched goes on."""
        if len(self.files) == self.calls:
            return
        try:
            arguments = _arguments(signature, args, kwargs)
            _judge(arguments)
            number = len(self.files) + 1
            path = self.path if self.calls == 1 else self.path.with_stem(f"{self.path.stem}-{number}")
            write(path, arguments)
            self.files.append(path)
        except FlashqlaError as error:
            self.passed[": ".join(filter(None, (error.message, error.given)))] = None
        except Exception as error:  # a full disk, or a call that fails by itself
            self.passed[f"{type(error).__name__}: {error}"] = None

    def report(self) -> None:
        reasons = [*self.passed, *(["under torch.compile"] if _traced.seen else [])]
        if reasons or len(self.files) < self.calls:
            why = f"passed through: {'; '.join(reasons)}" if reasons else "there were no more"
            text = f"flashqla.capture kept {len(self.files)} of {self.calls} calls; {why}"
            warnings.warn(text, stacklevel=4)


class _Traced:
    """Whether torch.compile has run a call; it allows traced code little more than to set an attribute."""

    seen = False


_lock = threading.RLock()
_recorders: list[_Recorder] = []
_installed: list[tuple[Callable[..., Any], Callable[..., Any]]] = []  # the op, and what stands for it
_traced = _Traced()


def _arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call that can be kept. Raises ArgumentError for one that cannot."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name)
    arguments = {**SETTINGS, **{name: given.pop(name) for name in (*TENSORS, *SETTINGS) if name in given}}
    strange = [name for name, x in given.items() if name not in IMMATERIAL and x is not None and x is not False]
    if strange:
        raise ArgumentError("an argument that a file cannot hold", given=", ".join(strange))
    tensors = [x for name in TENSORS if isinstance(x := arguments.get(name), Tensor)]
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise ArgumentError("while a CUDA graph was captured")
    if (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or any(type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta for x in tensors)
    ):
        raise ArgumentError("in a transform, or with tensors that are not plain ones")
    return arguments


def _standing_in(op: Callable[..., Any]) -> Callable[..., Any]:
    """A function that shows its calls to the recorders, then makes them."""
    signature = inspect.signature(op)

    @functools.wraps(op)
    def passing(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _traced.seen = True
        else:
            with _lock:
                for recorder in _recorders:
                    recorder.see(signature, args, kwargs)
        return op(*args, **kwargs)

    return passing


def _install() -> None:
    found = []
    for name in ("flashqla.ops.gated_delta_rule", "fla.ops.gated_delta_rule"):
        try:
            op = getattr(importlib.import_module(name), OP)
        except ImportError:
            continue
        except Exception as error:  # peers run device and toolchain checks while they are imported
            warnings.warn(f"flashqla.capture leaves out {name}: {type(error).__name__}: {error}", stacklevel=4)
            continue
        found.append((op, _standing_in(op)))
    _installed.extend(found)
    _swap({id(op): stand_in for op, stand_in in _installed})


def _uninstall() -> None:
    _swap({id(stand_in): op for op, stand_in in _installed})
    _installed.clear()


def _swap(others: Mapping[int, Callable[..., Any]]) -> None:
    """Put functions in place of others, known by id, in all modules: also where `from m import f` has put them, and
    where a layer keeps one as an attribute."""
    modules = [x for x in gc.get_objects() if issubclass(type(x), torch.nn.Module)]
    for holder in (*sys.modules.values(), *modules):
        names = getattr(holder, "__dict__", None)
        if type(names) is not dict:
            continue
        for name, value in [*names.items()]:
            if id(value) in others:
                names[name] = others[id(value)]
