"""Results as data: one Record per case and backend, one Run per command, written as versioned JSON.

Units are in field names or stated beside them. Unknown is null, never 0 and never NaN. A reader accepts the schema
version below; optional fields may be added within it.
"""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TextIO

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from flashqla.cases import Case, Direction
from flashqla.device import Clocks, Environment
from flashqla.errors import RecordError

SCHEMA_VERSION: Final = 1

Status = Literal["ok", "missing", "unsupported", "oom", "timeout", "failed", "interrupted"]
Kind = Literal["bench-fwd", "verify-fwd"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]  # a time of 0 or less is a broken clock


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Finite = Annotated[float | None, BeforeValidator(_finite)]  # JSON has no NaN: it becomes null, and is counted elsewhere


def _as_json(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


Fields = Annotated[dict[str, Any], BeforeValidator(_as_json)]  # equal to what is read back from JSON


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


class TensorErrors(_Model):
    """One output tensor against the float64 truth. An error that is not finite is null, with the entries counted."""

    rel_l2: Finite
    max_abs: Finite
    cosine: Finite
    nan: int = 0  # entries
    inf: int = 0  # entries


class Timing(_Model):
    """Times in milliseconds."""

    gpu_ms: Positive | None = None  # median of samples: the op alone, on the device (on the CPU: its wall time)
    gpu_ms_min: Positive | None = None
    gpu_ms_iqr: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None  # null under 5 samples
    samples: list[Positive] = []  # ms, in the order they were taken
    call_ms: Positive | None = None  # median of an eager call, host work included
    l2: Literal["cold", "warm"]
    clock: Literal["graph", "events", "wall"]
    repeats: int


class Record(_Model):
    """What one backend did on one case, and what made the number."""

    case_id: str
    case: Fields  # of Case
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
    errors: dict[str, TensorErrors] = {}  # per output: "o", "final_state"
    bound: Finite = None  # allowed relative L2 error
    passed: bool | None = None  # errors within the bound
    deterministic: bool | None = None  # bitwise equal from run to run
    kernels: list[str] = []  # names of the kernels that ran, or of the implementation
    compile_s: float | None = None
    clocks: Clocks | None = None
    seed: int

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
            case_id=case.id,
            case=asdict(case),
            model=case.model,
            hk=case.hk,
            hv=case.hv,
            layout=case.layout,
            tokens=case.tokens,
            backend=backend,
            direction=direction,
            command=command,
            status=status,
            seed=seed,
            **readings,
        )


class Run(_Model):
    """One command, from its first record to its last."""

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Kind
    argv: list[str]
    started: AwareDatetime
    finished: AwareDatetime | None = None
    interrupted: bool = False
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


def now() -> datetime:
    """The present second, in UTC."""
    return datetime.now(UTC).replace(microsecond=0)


class Writer:
    """Takes the records of a run as they come and leaves one JSON file, whatever happens in between.

    With a path, records go to the part file `<path>.jsonl` at once, a line each, so that a crash loses none; `read`
    accepts that file too. Opening it here proves the folder writable before anything is measured. Without a path,
    records are kept in memory only. Raises RecordError.
    """

    def __init__(self, path: Path | None, run: Run) -> None:
        self._path, self._run = path, run
        self._records: list[Record] = []
        self.part: Path | None = None
        self._file: TextIO | None = None
        if path is None:
            return
        if path.is_dir():
            raise RecordError("the result file is a folder", given=str(path), do="name a file in it")
        self.part = path.with_name(path.name + ".jsonl")
        try:
            if self.part.exists():  # rows of a run that was killed
                os.replace(self.part, self.part.with_name(self.part.name + ".old"))
            self._file = self.part.open("w", encoding="utf-8")
            self._line(_header(run))
        except OSError as error:
            raise RecordError(
                "the result file cannot be written", given=f"{path}: {error.strerror}", do="choose another --json path"
            ) from error

    def append(self, record: Record) -> None:
        """Keep a record, on disk before this returns."""
        self._records.append(record)
        self._line(record.model_dump(mode="json"))

    def finish(self, *, interrupted: bool = False) -> Run:
        """Write the final JSON in one atomic step, remove the part file, and return the run."""
        run = self._run.model_copy(
            update={"finished": now(), "interrupted": interrupted, "records": list(self._records)}
        )
        if self._file is not None and self._path is not None and self.part is not None:
            self._file.close()
            complete = self.part.with_name(self.part.name + ".tmp")
            try:
                complete.write_text(to_json(run), encoding="utf-8")
                os.replace(complete, self._path)
            except OSError as error:
                raise RecordError(
                    "the result file cannot be written",
                    given=f"{self._path}: {error.strerror}",
                    do=f"the rows are safe in {self.part}",
                ) from error
            self.part.unlink()
        return run

    def _line(self, content: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(_dump(content) + "\n")
            self._file.flush()


def to_json(run: Run) -> str:
    """A run as JSON text, one record per line so that files compare well."""
    header = json.dumps(_header(run), indent=2, allow_nan=False).removesuffix("\n}")
    records = ",\n".join("    " + _dump(record.model_dump(mode="json")) for record in run.records)
    return f'{header},\n  "records": [\n{records}\n  ]\n}}\n'


def read(path: Path) -> Run:
    """A run from its JSON, or from the part file that a killed run left. Raises RecordError with what is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError("the result file cannot be read", given=f"{path}: {error}") from error
    try:
        content = _part(text.splitlines()) if path.suffix == ".jsonl" else json.loads(text)
        version = content["schema_version"]
    except (json.JSONDecodeError, KeyError, TypeError, IndexError) as error:
        raise RecordError("not a result file of flashqla", given=f"{path}: {error!r}") from error
    if version != SCHEMA_VERSION:
        raise RecordError(
            f"schema version {version} is not supported",
            given=str(path),
            supported=f"version {SCHEMA_VERSION}",
            do="read it with the flashqla that wrote it, or with a newer one",
        )
    try:
        return Run.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RecordError("not a result file of flashqla", given=f"{path}: {where}: {first['msg']}") from error


def json_schema() -> dict[str, Any]:
    """JSON Schema of a result file."""
    return Run.model_json_schema(mode="serialization")


def _part(lines: Iterable[str]) -> dict[str, Any]:
    """Content of a part file: the header of the run, then its records; a line cut off by a crash ends them."""
    header, *rest = lines
    content: dict[str, Any] = json.loads(header)
    records = []
    for line in rest:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return {**content, "interrupted": True, "records": records}


def _header(run: Run) -> dict[str, Any]:
    return run.model_dump(mode="json", exclude={"records"})


def _dump(content: dict[str, Any]) -> str:
    return json.dumps(content, allow_nan=False)
