"""What `verify` and `bench` share: choosing the device, keeping records, printing the table, the exit code."""

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from flashqla import device
from flashqla.cli import console
from flashqla.errors import EnvironmentProblem, RecordError
from flashqla.records import Kind, Record, Run, Writer, judged, now, to_json, went_wrong

Sink = Callable[[Record], None]


def choose_device(asked: str | None = None, *, strict: bool = False) -> str:
    """`cuda` or `cpu`: as asked, or else cuda on a Hopper GPU that torch can use. Says so when it is the CPU.

    Raises EnvironmentProblem without torch, when CUDA is asked for and cannot be used, or when strict and only the CPU
    is left.
    """
    if find_spec("torch") is None:
        raise EnvironmentProblem("PyTorch is not installed", do="pip install 'torch>=2.8'")
    if asked == "cpu":
        return asked
    card = device.gpu()
    hopper = card is not None and card.capability == device.HOPPER
    usable = False
    if asked or hopper:
        import torch

        usable = torch.cuda.is_available()
    if usable:
        return "cuda"
    found = f"{card.name}, which torch cannot use" if card and hopper else card.name if card else "no GPU"
    if asked:
        raise EnvironmentProblem(
            "CUDA cannot be used here", given=f"--device cuda, {found}", do="see why with: flashqla doctor"
        )
    if strict:
        raise EnvironmentProblem("no Hopper GPU here", given=f"--strict, {found}", do="see why with: flashqla doctor")
    console.note(f"no Hopper GPU here ({found}): what follows is PyTorch on the CPU, not the kernels")
    return "cpu"


def run(
    kind: Kind,
    loop: Callable[[Sink], None],
    *,
    total: int,
    settings: dict[str, Any],
    render: Callable[[Run], str],
    json: str | None,
    out: Path | None = None,
    strict: bool = False,
    quiet: bool = False,
) -> None:
    """Run `loop`, keeping each record it gives, then print the table (or JSON) and exit with the code of the outcome.

    Files are proved writable before the loop starts. Ctrl-C ends the loop; what it gave so far is kept and printed.
    """
    if out and (out.is_dir() or not os.access(out.parent, os.W_OK)):
        raise RecordError("the table cannot be written", given=f"--out {out}", do="name a file in a folder of yours")
    header = Run(kind=kind, argv=sys.argv[1:], started=now(), environment=device.environment(), settings=settings)
    writer = Writer(Path(json) if json and json != "-" else None, header)
    stopped = False
    with console.progress(total, quiet=quiet) as step, console.results_only():

        def sink(record: Record) -> None:
            writer.append(record)
            step(f"{record.case_id} {record.backend}")

        try:
            loop(sink)
        except KeyboardInterrupt:
            stopped = True
        except Exception:
            if writer.part:
                console.hint(f"rows finished so far are in {writer.part}")
            raise
    finished = writer.finish(interrupted=stopped)
    table = render(finished)
    if out:
        out.write_text(table, encoding="utf-8")
    console.result(to_json(finished) if json == "-" else table)
    if stopped:
        console.hint(f"interrupted: {len(finished.records)} of {total} rows are kept")
    raise typer.Exit(exit_code(finished, strict=strict))


def exit_code(run: Run, *, strict: bool = False) -> int:
    """130 interrupted, 1 a wrong or failed row, 3 nothing could run here, else 0.

    Peers do not count, unless nothing else ran. Strict: they count, and each row that could not run is a 3.
    """
    if run.interrupted:
        return 130
    backends = {record.backend for record in run.records} if strict else set(judged(run))
    records = [record for record in run.records if record.backend in backends]
    if any(map(went_wrong, records)):
        return 1
    idle = [record for record in records if record.status != "ok"]
    return 3 if len(idle) == len(records) or (strict and idle) else 0
