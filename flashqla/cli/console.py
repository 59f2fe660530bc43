"""The only printer. Results go to stdout; everything that is about them goes to stderr."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout

from flashqla.errors import FlashqlaError


def result(text: str) -> None:
    """Print a result."""
    print(text.removesuffix("\n"))


def note(text: str) -> None:
    """Tell something that the reader should know about the results."""
    print(f"{_paint('note:', '33')} {text}", file=sys.stderr)


def hint(text: str) -> None:
    """Tell what to do next."""
    print(f"{_paint('hint:', '36')} {text}", file=sys.stderr)


def error(problem: FlashqlaError) -> None:
    """Print a known error, without a traceback."""
    print(f"{_paint('error:', '31')} {problem}", file=sys.stderr)


@contextmanager
def progress(total: int, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A bar on stderr, advanced by one with each call of what is yielded; none when quiet or not on a terminal."""
    if quiet or not _rich_terminal():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (MofNCompleteColumn(), BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("compiling what is not cached", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


@contextmanager
def results_only() -> Iterator[None]:
    """Keep stdout for results: whatever prints inside, compilers and other libraries included, reaches stderr."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)  # compiled code and child processes write to the descriptor, not to sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def plain(on: bool) -> bool:
    """`--no-color`: says so to every library that may print."""
    if on:
        os.environ["NO_COLOR"] = "1"
    return on


def _rich_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _paint(word: str, colour: str) -> str:
    return f"\033[{colour}m{word}\033[0m" if _rich_terminal() and not os.environ.get("NO_COLOR") else word
