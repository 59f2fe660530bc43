"""Results as data: one Record per case and backend, one Run per command, written as versioned JSON.

Units are in field names or stated beside them. Unknown is null, never 0 and never NaN. A reader accepts the schema
version below; optional fields may be added within it.
"""

import errno
import json
import logging
import math
import os
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TextIO
from zlib import crc32

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from flashqla.cases import Case, Direction
from flashqla.device import Clocks, Environment
from flashqla.errors import ArgumentError, RecordError

SCHEMA_VERSION: Final = 1

log = logging.getLogger(__name__)

Status = Literal["ok", "missing", "unsupported", "oom", "timeout", "failed", "interrupted"]
SETTLED: Final = frozenset({"ok", "missing", "unsupported"})  # running it again would give the same status
Kind = Literal["bench-fwd", "bench-bwd", "bench-fwd+bwd", "verify-fwd", "verify-bwd"]

KernelSource = Literal["backend", "graph"]

Milliseconds = Annotated[float, Field(ge=1e-9, le=1e12)]  # what is not between is no time, but a broken clock
Count = Annotated[int, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0, lt=2**63)]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Finite = Annotated[float | None, BeforeValidator(_finite)]  # JSON has no NaN: it becomes null, and is counted elsewhere


def _as_json(fields: Any) -> Any:
    if not isinstance(fields, dict):
        return fields  # which pydantic refuses
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


Fields = Annotated[dict[str, Any], BeforeValidator(_as_json)]  # equal to what is read back from JSON


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class TensorErrors(_Model):
    """One output tensor against the float64 truth. An error that is not finite is null, with the entries counted."""

    rel_l2: Finite
    max_abs: Finite
    cosine: Finite
    nan: Count = 0  # entries
    inf: Count = 0  # entries


class Timing(_Model):
    """Times in milliseconds."""

    gpu_ms: Milliseconds | None = None  # median of samples: the op alone, on the device (on the CPU: its wall time)
    gpu_ms_min: Milliseconds | None = None
    gpu_ms_iqr: Annotated[float, Field(ge=0, le=1e12)] | None = None  # null under 5 samples
    samples: list[Milliseconds] = []  # ms, in the order they were taken
    call_ms: Milliseconds | None = None  # median of an eager call, host work included
    l2: Literal["cold", "warm"]
    clock: Literal["graph", "events", "wall"]
    repeats: Count


class Record(_Model):
    """What one backend did on one case, and what made the number."""

    case_id: str
    case: Case
    model: str
    hk: int
    hv: int
    layout: str
    tokens: int
    backend: str
    direction: Direction
    command: Literal["bench", "verify"]
    status: Status
    reason: str | None = None  # why the status is not ok
    hint: str | None = None  # what to do about it
    timing: Timing | None = None
    errors: dict[str, TensorErrors] = {}  # per output: "o", "final_state", "dq" and so on
    bound: Finite = None  # allowed relative L2 error, of the output that comes nearest to its own
    bounds: dict[str, float] = {}  # of every output
    passed: bool | None = None  # errors within the bound
    runs: Count | None = None  # calls of the backend that were compared bit by bit
    deterministic: bool | None = None  # these were equal
    kernels: list[str] = []  # names of the kernels that ran, or of the implementation
    # What named them: the backend before the call, the captured CUDA graph of it. Older files have no such field, and
    # are written as they were.
    kernels_from: list[KernelSource] | None = Field(default=None, exclude_if=lambda value: value is None)
    compile_s: float | None = None
    clocks: Clocks | None = None  # read right behind the samples, while the device ran this backend's call
    # Device memory that a call allocates at its peak, above its inputs, as PyTorch's allocator counts it.
    peak_bytes: Bytes | None = None
    saved_bytes: Bytes | None = None  # that a forward pass left for a backward pass, outputs too
    seed: int
    session: AwareDatetime | None = None  # start of the run that measured it, where that was resumed by this one

    @classmethod
    def of(
        cls,
        case: Case,
        *,
        backend: str,
        direction: Direction,
        command: Literal["bench", "verify"],
        status: Status,
        seed: int,
        **readings: Any,
    ) -> Self:
        """A record of `case`, with the fields that a case determines filled in."""
        return cls(
            **_of(case),
            case=case,
            backend=backend,
            direction=direction,
            command=command,
            status=status,
            seed=seed,
            **readings,
        )

    @model_validator(mode="after")
    def _of_its_case(self) -> Self:
        for name, right in _of(self.case).items():
            if getattr(self, name) != right:
                raise ValueError(f"{name} {getattr(self, name)!r} where the case has {right!r}")
        return self


def _of(case: Case) -> dict[str, Any]:
    """What a record repeats of its case, for those who read records and know nothing of cases."""
    return {
        "case_id": case.id,
        "model": case.model,
        "hk": case.hk,
        "hv": case.hv,
        "layout": case.layout,
        "tokens": case.tokens,
    }


class Run(_Model):
    """One command, from its first record to its last."""

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Kind
    argv: list[str]
    started: AwareDatetime
    finished: AwareDatetime | None = None
    interrupted: bool = False
    sessions: list[AwareDatetime] = []  # starts of the runs that this one resumed, the first of them first
    environment: Environment
    settings: Fields
    records: list[Record] = []


def judged(run: Run) -> tuple[str, ...]:
    """Backends that decide whether the run went well: not the peers, unless nothing but peers ran."""
    names = tuple(dict.fromkeys(record.backend for record in run.records))
    return tuple(name for name in names if name not in run.environment.peers) or names


def went_wrong(record: Record) -> bool:
    """Whether the backend gave a wrong answer, or none where it should have given one."""
    broken = record.status in ("oom", "timeout", "failed")
    return broken or record.passed is False or record.deterministic is False


def shortfall(run: Run) -> list[str]:
    """Why a run is not all that was asked for, a line; none where it came to its end and has rows."""
    if run.interrupted:
        return [f"interrupted: {sum(record.status != 'interrupted' for record in run.records)} rows are kept"]
    return [] if run.records else ["the run has no rows"]


def resume(old: Run, new: Run, rows: Sequence[tuple[str, str]]) -> Run:
    """`new` with the records of `old` that need not be made again: those that are ok, and what cannot run here.

    rows: case id and backend of all that `new` shall hold. Raises RecordError where records of the two do not belong
    together: made by other code, on another device, with other settings, or of other rows.
    """
    there, here = _identity(old), _identity(new)
    unlike = [name for name in there | here if there.get(name) != here.get(name)]
    strange = [f"{r.case_id} {r.backend}" for r in old.records if (r.case_id, r.backend) not in rows]
    given = [f"{name}: {there.get(name)} there, {here.get(name)} here" for name in unlike]
    given += [f"rows not asked for here: {strange[0]}, in all {len(strange)}"] if strange else []
    if given:
        command = shlex.join(["flashqla", *old.argv])
        raise RecordError("these runs do not go together", given="; ".join(given), do=f"it was started by: {command}")
    kept = [
        record.model_copy(update={"session": record.session or old.started})
        for record in old.records
        if record.status in SETTLED
    ]
    return new.model_copy(update={"records": kept, "sessions": [*old.sessions, old.started]})


def gather(path: Path) -> tuple[Run, dict[Path, str]]:
    """The run at `path`, with rows that killed sessions of the same run left in part files beside it.

    Of two records of a row the later counts, unless only the earlier is settled. Also returns what was found in these
    part files, in words. Raises RecordError where `path` cannot be read.
    """
    parts = _parts(whole(path))
    if parts and not path.exists():  # every session of it was killed
        path = next(filter(_readable, parts), parts[0])
    run = read(path)
    sessions, found = [run], {}
    for part in parts:
        if part == path:
            continue
        try:
            other = read(part)
        except RecordError as error:
            found[part] = f"{error.message}, and is left alone"
            continue
        related = _related(run, other)
        if related:
            sessions.append(other)
        found[part] = f"{len(other.records)} rows of {'this run, taken over' if related else 'another run, left alone'}"
    if len(sessions) == 1:
        return run, found
    rows: dict[tuple[str, str], Record] = {}
    *earlier, last = sorted(sessions, key=lambda session: session.started)
    for session in (*earlier, last):
        for record in session.records:
            key = record.case_id, record.backend
            if key not in rows or record.status in SETTLED or rows[key].status not in SETTLED:
                rows[key] = record.model_copy(update={"session": record.session or session.started})
    starts = {start for session in sessions for start in (*session.sessions, session.started)} - {last.started}
    return last.model_copy(update={"records": [*rows.values()], "sessions": sorted(starts)}), found


def whole(path: Path) -> Path:
    """The file of a run, by that or by one of its part files. Raises RecordError for what is no name of a file."""
    path = target(path) if os.path.islink(path) else path
    name = re.sub(rf"{_PART}$", "", path.name)
    if not name:
        problem = "a part file has the name of its run before .jsonl" if path.name else "a folder is no result file"
        raise RecordError(problem, given=str(path), do="name a file")
    return path.with_name(name)


_PART = r"\.jsonl(\.old(\.\d+)?)?"  # of a session at work or killed; .old: moved away by the one after it


def _parts(path: Path) -> list[Path]:
    """Part files beside the file of a run, that of the latest session first."""
    name = re.compile(re.escape(path.name) + _PART)
    if not path.parent.is_dir():
        return []
    return sorted(part for part in path.parent.iterdir() if name.fullmatch(part.name) and part.is_file())


def _readable(part: Path) -> bool:
    """Not so where a session was killed before it wrote what run it is."""
    try:
        read(part)
    except RecordError:
        return False
    return True


def _related(run: Run, other: Run) -> bool:
    """Whether they are sessions of one run: one resumed the other, or both resumed a third."""
    return not {run.started, *run.sessions}.isdisjoint({other.started, *other.sessions})


def _identity(run: Run) -> dict[str, Any]:
    """All that must be the same in two sessions of one run."""
    facts = {**asdict(run.environment), **run.settings, "kind": run.kind}
    facts["git_revision"] = (run.environment.git_revision or "").removesuffix("+")  # results may lie in the tree
    return facts


def target(path: Path) -> Path:
    """Where a path leads, through all links. Raises RecordError for links that lead in a circle."""
    try:
        path.stat()
    except OSError as error:  # any other, such as that there is no file yet, is no problem here
        if error.errno == errno.ELOOP:
            raise RecordError("links lead in a circle", given=str(path), do="name another file") from error
    return path.resolve()


def destination(path: Path) -> Path:
    """Where to write what shall be at `path`: there, or where it links to. Raises RecordError where no file can be."""
    with _writing(path):
        path = target(path) if path.is_symlink() else path
        if path.is_dir():
            problem = "it is a folder"
        elif path.exists() and not path.is_file():
            problem = "it is a device or a pipe"
        elif not path.parent.is_dir():
            problem = "there is no such folder"
        elif not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
            problem = "permission denied"
        else:
            return path
    raise _unwritable(path, problem)


def write(path: Path, text: str) -> None:
    """Write a file in one step, so that nobody ever sees a part of it. Raises RecordError."""
    with replacing(path) as unfinished:
        # Half a surrogate pair, as in "\\ud800", is no text that UTF-8 has.
        unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which becomes `path` in one step at the end. Raises RecordError."""
    # A short name: what has room for the name of the file has room for this one.
    unfinished = path.with_name(f".{crc32(os.fsencode(path.name)):08x}.{os.getpid()}.tmp")
    with _writing(path):
        try:
            yield unfinished
            with unfinished.open("rb") as content:  # or a machine that goes down may keep the name and lose the bytes
                os.fsync(content.fileno())
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unwritable(path, error.strerror or "") from error


def _unwritable(path: Path, problem: str) -> RecordError:
    return RecordError("a file cannot be written", given=f"{path}: {problem}", do="name another one")


def now() -> datetime:
    """The present second, in UTC."""
    return datetime.now(UTC).replace(microsecond=0)


class Writer:
    """Takes the records of a run as they come and leaves one JSON file, whatever happens in between.

    It begins with the records that the run has already.

    With a path, records go to the part file `<path>.jsonl` at once, a line each, so that a crash loses none; `read`
    accepts that file too. Opening it here proves the folder writable before anything is measured, and keeps other runs
    away from the path. One that a killed run left is moved to `aside`, a name not taken yet, until a run that resumed
    it is complete. Without a path, records are kept in memory only. Raises RecordError.
    """

    def __init__(self, path: Path | None, run: Run) -> None:
        self._path, self._run = path, run
        self._records = list(run.records)
        self.part: Path | None = None
        self.aside: Path | None = None
        self._file: TextIO | None = None
        if path is None:
            return
        self._path = path = destination(path)
        self.part = path.with_name(path.name + ".jsonl")
        with _writing(self.part):
            self._file, self.aside = _open_alone(self.part)
        try:
            self._line(_header(run))
            for record in run.records:
                self._line(record.model_dump(mode="json"))
        except RecordError:  # the disk is full: half of a part file would stand before that of the killed run
            if self.aside:
                os.replace(self.aside, self.part)
            else:
                self.part.unlink()
            raise

    def append(self, record: Record) -> None:
        """Keep a record, on disk before this returns."""
        self._records.append(record)
        self._line(record.model_dump(mode="json"))

    @property
    def measured(self) -> int:
        """Records that came, of rows that were run: neither cut off nor such that cannot run here."""
        not_run = ("interrupted", "missing", "unsupported")
        return sum(record.status not in not_run for record in self._records[len(self._run.records) :])

    def result(self, *, interrupted: bool = False, order: Sequence[tuple[str, str]] = ()) -> Run:
        """The run as it ends now.

        order: case id and backend of the records, where they did not come in that order.
        """
        place = {row: index for index, row in enumerate(order)}
        records = sorted(self._records, key=lambda record: place.get((record.case_id, record.backend), len(place)))
        return self._run.model_copy(update={"finished": now(), "interrupted": interrupted, "records": records})

    def finish(self, *, interrupted: bool = False, order: Sequence[tuple[str, str]] = ()) -> Run:
        """Write the final JSON in one atomic step, remove the part file, and return the run; order: as for `result`.

        A run that was interrupted before it measured anything leaves a file that is there as it is.
        """
        run = self.result(interrupted=interrupted, order=order)
        if self._file is not None and self._path is not None and self.part is not None:
            if self.measured or not (interrupted and self._path.exists()):
                write(self._path, to_json(run))
            self.part.unlink(missing_ok=True)
            self._file.close()
            if not interrupted:
                _tidy(self._path, run)
        return run

    def _line(self, content: dict[str, Any]) -> None:
        if self._file is not None and self.part is not None:
            with _writing(self.part):
                self._file.write(_dump(content) + "\n")
                self._file.flush()
                os.fsync(self._file.fileno())


def _open_alone(part: Path) -> tuple[TextIO, Path | None]:
    """An empty part file that no other run can open before this one ends, and where the one before it lies now."""
    import fcntl  # Windows has none, and can read results without it

    file = part.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise _unwritable(part, "another run is writing it") from None
    if not file.tell():
        return file, None
    names = (part.with_name(part.name + ".old" + ending) for ending in ("", *(f".{n}" for n in range(2, 10**4))))
    aside = next(name for name in names if not name.exists())
    os.replace(part, aside)
    file.close()
    return _open_alone(part)[0], aside


def _tidy(path: Path, run: Run) -> None:
    """Remove part files that were moved away, of sessions whose rows are all in the run."""
    rows = {(record.case_id, record.backend) for record in run.records}
    for part in _parts(path):
        with suppress(RecordError, OSError):
            old = read(part)
            if _related(run, old) and rows >= {(record.case_id, record.backend) for record in old.records}:
                part.unlink()


def to_json(run: Run) -> str:
    """A run as JSON text, one record per line so that files compare well."""
    header = json.dumps(_header(run), indent=2, allow_nan=False).removesuffix("\n}")
    records = ",\n".join("    " + _dump(record.model_dump(mode="json")) for record in run.records)
    return f'{header},\n  "records": [\n{records}\n  ]\n}}\n'


def read(path: Path) -> Run:
    """A run from its JSON, or from the part file that a killed run left. Raises RecordError with what is wrong."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise RecordError("the result file cannot be read", given=f"{path}: {error}") from error
    try:
        content = _content(path, text)
        version = content["schema_version"]
    except RecursionError as error:
        raise RecordError("not a result file of flashqla", given=f"{path}: nested too deep") from error
    except (KeyError, TypeError, IndexError) as error:
        raise RecordError("not a result file of flashqla", given=f"{path}: it has no schema_version") from error
    except ValueError as error:  # JSONDecodeError is one
        raise RecordError("not a result file of flashqla", given=f"{path}: {error}") from error
    if version != SCHEMA_VERSION or type(version) is not int:
        raise RecordError(
            f"schema version {_short(repr(version))} is not supported",
            given=str(path),
            supported=f"version {SCHEMA_VERSION}",
            do="read it with the flashqla that wrote it, or with a newer one",
        )
    try:
        run = Run.model_validate(content)
        # Once more for strict types, which know dates and tuples only in JSON text, and no half surrogate pairs in it.
        Run.model_validate_json(json.dumps(content, ensure_ascii=False).encode(errors="replace"), strict=True)
    except ValidationError as error:
        given, supported = _misfit(content, error)
        do = "read it with the flashqla that wrote it; flashqla schema says what such a file holds"
        raise RecordError(
            "not a result file of flashqla", given=f"{path}: {given}", supported=supported, do=do
        ) from error
    rows = Counter((record.case_id, record.backend) for record in run.records)
    for (case_id, backend), count in rows.items():
        if count > 1:
            raise RecordError("a result file holds a row more than once", given=f"{path}: {backend} on {case_id}")
    for number, record in enumerate(run.records, start=1):
        if problem := _contradiction(run, record):
            raise RecordError(
                "a record contradicts itself or its file",
                given=f"{path}: record {number} ({record.case_id} {record.backend}), {problem}",
                do="leave records as flashqla wrote them, or measure again",
            )
    return run


def _contradiction(run: Run, record: Record) -> str:
    """What cannot be, given the rest of the record; nothing in one that flashqla wrote."""
    kind = f"{record.command}-{record.direction}"
    if kind != run.kind:
        return f"{kind} in a {run.kind} run"
    timing = record.timing
    if timing and timing.samples and timing.gpu_ms is not None:
        median = statistics.median(timing.samples)
        if not math.isclose(timing.gpu_ms, median, rel_tol=1e-6):
            return f"timing.gpu_ms {timing.gpu_ms:g} where the median of its samples is {median:g}"
    for name, error in record.errors.items() if record.passed else ():
        if error.nan or error.inf:
            return f"passed with {error.nan} nan and {error.inf} inf in {name}"
        if error.rel_l2 is not None and error.rel_l2 > record.bounds.get(name, math.inf) * (1 + 1e-9):
            return f"passed with rel_l2 {error.rel_l2:g} of {name}, whose bound is {record.bounds[name]:g}"
    return ""


def _misfit(content: dict[str, Any], error: ValidationError) -> tuple[str, str]:
    """The first thing in a file that is not as it should be, with its record and field, and what it should be."""
    first = error.errors()[0]
    place, where = first["loc"], ""
    if place[:1] == ("records",) and len(place) > 1:
        record = content["records"][place[1]]
        names = [record.get(name) for name in ("case_id", "backend")] if isinstance(record, dict) else []
        name = " ".join(_short(name) for name in names if isinstance(name, str))
        where = f"record {int(place[1]) + 1}" + f" ({name})" * bool(name)
        place = place[2:]
    where = ", ".join(filter(None, [where, ".".join(_short(str(part)) for part in place)]))
    problem = first.get("ctx", {}).get("error")
    if isinstance(problem, ArgumentError):  # of a case that means nothing
        return f"{where}: {problem.message}, {problem.given}", problem.supported
    if problem or first["type"] == "missing":
        return f"{where}: {problem or 'is missing'}", ""
    return f"{where}: {_short(repr(first['input']))}", first["msg"].removeprefix("Input should be ")


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."


def json_schema() -> dict[str, Any]:
    """JSON Schema of a result file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Run.model_json_schema(mode="serialization")}


def _content(path: Path, text: bytes) -> dict[str, Any]:
    """Of a result file; or of a part file: the run without its records, then these, a line each."""
    try:
        content: dict[str, Any] = _load(text)
        if "records" in content:
            return content
    except (json.JSONDecodeError, UnicodeDecodeError):
        pass
    if not text.strip():
        raise ValueError("the file is empty")
    first, *rest = text.splitlines()
    try:
        header = _load(first)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError("it is cut off, or no JSON") from None
    records = []
    for number, line in enumerate(rest, start=2):
        try:
            records.append(_load(line))
        except (json.JSONDecodeError, UnicodeDecodeError):
            if number <= len(rest):  # the last is cut off by a crash
                log.warning("%s: line %d is damaged, and its row is left out", path, number)
    return {**header, "interrupted": True, "records": records}


def _load(text: bytes) -> Any:
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a key that stands twice, of which Python would take the last."""
    content = dict(pairs)
    if len(content) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{_short(name)} stands more than once in one object")
    return content


def _header(run: Run) -> dict[str, Any]:
    return run.model_dump(mode="json", exclude={"records"})


def _dump(content: dict[str, Any]) -> str:
    return json.dumps(content, allow_nan=False)
