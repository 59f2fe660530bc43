"""The `flashqla` command: its options, and how an error becomes an exit code."""

import os
import signal
import sys
import traceback
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flashqla import signals
from flashqla.cli import bench, cases, compare, console, doctor, explain, report, show, verify, warmup
from flashqla.errors import EnvironmentProblem, FlashqlaError, RecordError

EXIT_CODES = """\b
Exit codes:
  0    ok
  1    a wrong result, a row that failed, or a regression
  2    wrong usage
  3    something is missing or unsupported on this machine
  4    nothing to run, to compare, to judge or to show
  70   a bug in flashqla
  130  interrupted by Ctrl-C, SIGTERM or SIGHUP; finished rows are kept
"""
EXAMPLES = """\b
Examples:
  flashqla doctor
  flashqla verify --suite smoke
"""


class Commands(TyperGroup):
    """Turns known errors into a message and their exit code, unknown ones into a traceback and 70."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # here, because one level up it would become exit code 1
            raise typer.Exit(130) from None

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except FlashqlaError as problem:
            if problem.exit_code == FlashqlaError.exit_code:  # raised bare: our bug
                traceback.print_exc()
            else:
                console.error(problem)
            sys.exit(problem.exit_code)
        except ImportError as broken:
            if (broken.name or "").partition(".")[0] == __package__.partition(".")[0]:
                traceback.print_exc()
                sys.exit(70)
            cause = EnvironmentProblem(
                "a package cannot be imported", given=str(broken), do="see what is here with: flashqla doctor"
            )
            console.error(cause)
            sys.exit(cause.exit_code)
        except Exception:
            traceback.print_exc()
            sys.exit(70)


app = typer.Typer(
    name="flashqla",
    cls=Commands,
    help="Verify and time the gated delta rule (GDN) kernels of Qwen models.",
    epilog=f"{EXIT_CODES}\n{EXAMPLES}",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: rich takes longer to import than to print it
    pretty_exceptions_enable=False,
)
app.command(epilog=verify.EXAMPLES)(verify.verify)
app.add_typer(bench.app, name="bench")
app.command(epilog=compare.EXAMPLES)(compare.compare)
app.command(epilog=compare.CALIBRATE_EXAMPLES)(compare.calibrate)
app.command(epilog=show.EXAMPLES)(show.show)
app.command(epilog=report.EXAMPLES)(report.report)
app.command(epilog=doctor.EXAMPLES)(doctor.doctor)
app.command(epilog=explain.EXAMPLES)(explain.explain)
app.command(epilog=warmup.EXAMPLES)(warmup.warmup)
app.command(epilog=cases.EXAMPLES)(cases.cases)
app.command(epilog=show.SCHEMA_EXAMPLES)(show.schema)


def _version(asked: bool) -> None:
    if asked:
        from flashqla import __version__

        console.result(f"flashqla {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


class _Results(FileIO):
    """What stdout writes to. A disk that is full is a known error, once; a reader that has gone stays what it is."""

    failed = False

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.terminal = self.isatty()  # one that is lost says no

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) if not self.failed else len(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            if self.terminal:
                raise BrokenPipeError from error
            self.failed = True  # what is buffered is written once more at the end of the process
            raise RecordError("stdout cannot be written", given=error.strerror) from error


class _Notes(FileIO):
    """What stderr writes to. Notes that cannot be written are lost, and change nothing else."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _open_streams() -> None:
    """Give the process its three descriptors, and streams that can write any character, or say that they cannot.

    A descriptor that the caller closed would go to the next file that is opened, and what libraries print with it.
    """
    for descriptor, mode in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, mode), True)  # takes the lowest free one, which is this
    for name, descriptor, kind in (("stdout", 1, _Results), ("stderr", 2, _Notes)):
        raw = kind(descriptor, "w", closefd=False)
        lines = name == "stderr" or raw.isatty()
        encoding = getattr(getattr(sys, name), "encoding", None)  # there is no stream where it was closed
        setattr(sys, name, TextIOWrapper(BufferedWriter(raw), encoding, "backslashreplace", line_buffering=lines))


def main() -> None:
    """The command, from its streams to its exit code."""
    _open_streams()
    try:
        app()
    finally:  # what is left is for Python to take down, and a signal would only spoil the exit code
        signals.handle(signal.SIG_IGN)
        # CPython remembers that KeyboardInterrupt left code run from a string, as where a dataclass is made, until the
        # next such code runs, and would end by SIGINT though it was caught.
        exec("")
