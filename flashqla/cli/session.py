"""What `verify` and `bench` share: choosing the device, keeping records, printing the table, the exit code."""

import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from flashqla import device, records, signals
from flashqla.cli import console
from flashqla.errors import ArgumentError, EnvironmentProblem, RecordError
from flashqla.records import Kind, Record, Run, Writer, destination, judged, now, to_json, went_wrong, write

Loop = Callable[..., None]  # takes a sink for records; kept: records not to make again; tell: as in runner


def choose_device(asked: str | None = None, *, strict: bool = False) -> tuple[str, str]:
    """`cuda` or `cpu`: as asked, or else cuda on a Hopper GPU that torch can use; and a note where that is the CPU.

    The note is for once all else is known to be right: before an error it would mislead.

    Raises EnvironmentProblem without torch, when CUDA is asked for and cannot be used, or when strict and only the CPU
    is left.
    """
    if find_spec("torch") is None:
        raise EnvironmentProblem("PyTorch is not installed", do="pip install 'torch>=2.8'")
    if asked == "cpu":
        return asked, ""
    card = device.gpu()
    hopper = card is not None and card.capability == device.HOPPER
    usable = False
    if asked or hopper:
        import torch

        usable = torch.cuda.is_available()
    if usable:
        return "cuda", ""
    found = f"{card.name}, which torch cannot use" if card and hopper else card.name if card else "no GPU"
    if asked:
        raise EnvironmentProblem(
            "CUDA cannot be used here", given=f"--device cuda, {found}", do="see why with: flashqla doctor"
        )
    if strict:
        raise EnvironmentProblem("no Hopper GPU here", given=f"--strict, {found}", do="see why with: flashqla doctor")
    return "cpu", f"no Hopper GPU here ({found}): this is PyTorch on the CPU, not the kernels"


def run(
    kind: Kind,
    loop: Loop,
    *,
    rows: Sequence[tuple[str, str]],
    settings: dict[str, Any],
    render: Callable[[Run], str],
    note: str = "",
    json: str | None,
    out: Path | None = None,
    resume: Path | None = None,
    strict: bool = False,
    quiet: bool = False,
) -> None:
    """Run `loop`, keeping each record it gives, then print the table (or JSON) and exit with the code of the outcome.

    Files are proved writable before the loop starts. Ctrl-C, SIGTERM and SIGHUP end the loop; what it gave so far is
    kept and printed. Before it gave anything they leave files that are there as they are.

    note    what to tell before the loop starts
    rows    case id and backend of every record of the run, in order
    resume  a file with some of them, which this run takes over, and replaces unless `json` names another one
    """
    if resume and json is None:
        json = str(records.whole(resume))
    path = Path(json) if json not in (None, "-") else None
    if out:
        ours = (str(records.target(path)), f"{records.target(path)}.jsonl") if path else ()  # and the part file
        if str(out) == "-" or str(records.target(out)) in ours:
            raise ArgumentError("--out needs a file of its own", given=f"--out {out}", do="name another one")
        out = destination(out)
    header = Run(kind=kind, argv=sys.argv[1:], started=now(), environment=device.environment(), settings=settings)
    if resume:
        begun, found = records.gather(resume)
        for part, what in found.items():
            console.note(f"{part}: {what}")
        header = records.resume(begun, header, rows)
    kept = header.records
    total = len(rows) - len(kept)
    stopped = False
    spared: list[Path] = []  # files to leave as they are
    interrupt = signals.Interrupt()

    def show(finished: Run) -> None:
        table = render(finished)
        try:
            if out and out not in spared:
                write(out, table)
        finally:
            console.result(to_json(finished) if json == "-" else table)

    with signals.handled(interrupt):
        writer = Writer(path, header)
        try:
            try:
                interrupt.release()
                if writer.aside:
                    console.note(f"what a killed run left there is now {writer.aside}")
                if note:
                    console.note(note)
                with console.progress(total, quiet=quiet) as progress, console.results_only():

                    def sink(record: Record) -> None:
                        writer.append(record)
                        progress.step(f"{record.case_id} {record.backend}")

                    def tell(text: str, compiling: bool) -> None:
                        interrupt.release()  # a library that compiles in this process may have swallowed it
                        progress.tell(text, compiling)

                    loop(sink, kept=kept, tell=tell)
            except KeyboardInterrupt:
                stopped = True
            with signals.handled(signal.SIG_IGN):  # it takes a moment
                spared = [file for file in (path, out) if file and file.exists() and stopped and not writer.measured]
                try:
                    finished = writer.finish(interrupted=stopped, order=rows)
                except RecordError:  # hours of work may be in what cannot be kept
                    show(writer.result(interrupted=stopped, order=rows))
                    raise
        except Exception:
            if writer.part and writer.part.exists():
                console.hint(f"rows finished so far are in {writer.part}; go on with: {_command(writer.part)}")
            raise
        show(finished)
        if stopped:
            for file in spared:
                console.note(f"no row was measured, and {file} is left as it was")
            left = header if path in spared else finished
            count = sum(record.status != "interrupted" for record in left.records)
            then = "--json PATH would let a later run go on with them"
            if path in spared and not resume:  # what is there is of another run
                then = f"begin again with: {_command()}"
            elif path:
                then = f"go on with: {_command(records.whole(resume) if path in spared and resume else path)}"
            console.hint(f"interrupted: {count} of {len(rows)} rows are kept; {then}")
    raise typer.Exit(exit_code(finished, strict=strict))


def _command(resume: Path | None = None) -> str:
    """This command, to go on with the run at `resume`, or to begin anew."""
    arguments = iter(sys.argv[1:])
    words = []
    for argument in arguments:
        if argument == "--resume":
            next(arguments, None)
        elif not argument.startswith("--resume="):
            words.append(argument)
    return shlex.join(["flashqla", *words, *(["--resume", str(resume)] if resume else [])])


def exit_code(run: Run, *, strict: bool = False) -> int:
    """130 interrupted, 1 a wrong or failed row, 3 nothing could run here, 4 nothing that `verify` could judge, else 0.

    Peers do not count, unless nothing else ran. Strict: they count, and each row that could not run is a 3.
    """
    if run.interrupted:
        return 130
    backends = {record.backend for record in run.records} if strict else set(judged(run))
    counted = [record for record in run.records if record.backend in backends]
    if any(map(went_wrong, counted)):
        return 1
    idle = [record for record in counted if record.status != "ok"]
    if len(idle) == len(counted) or (strict and idle):
        return 3
    verified = [record.passed for record in counted if record.command == "verify" and record.status == "ok"]
    return 4 if verified and all(passed is None for passed in verified) else 0
