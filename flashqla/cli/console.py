"""The only printer. Results go to stdout; everything that is about them goes to stderr."""

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

from flashqla.errors import FlashqlaError, RecordError

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress  # whose import takes longer than most commands

SOON_S = 5.0  # what is over before is not worth a line of a log
EACH_S = 30.0  # at most one line of a log in as many seconds
GLANCE_S = 1.0  # how often to look whether one is due


def result(text: str) -> None:
    """Print a result. A reader that has had enough, as `head` has, is no error."""
    try:
        print(_shown(text.removesuffix("\n")), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is left in the buffer
    except OSError as error:
        raise RecordError("stdout cannot be written", given=error.strerror) from error


def note(text: str) -> None:
    """Tell something that the reader should know about the results."""
    print(f"{_paint('note:', '33')} {_shown(text)}", file=sys.stderr)


def hint(text: str) -> None:
    """Tell what to do next."""
    print(f"{_paint('hint:', '36')} {_shown(text)}", file=sys.stderr)


def error(problem: FlashqlaError) -> None:
    """Print a known error, without a traceback."""
    print(f"{_paint('error:', '31')} {_shown(str(problem))}", file=sys.stderr)


class Pace:
    """How long a run of `total` rows will take. Time spent compiling says nothing about the rows to come."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._left, self._done, self._ran = clock, total, 0, 0.0
        self._since: float | None = None  # None while compiling

    def turn(self, compiling: bool) -> None:
        """Rows are measured from now on, or what they need is compiled."""
        if self._since is not None:
            self._ran += self._clock() - self._since
        self._since = None if compiling else self._clock()

    def step(self) -> None:
        """A row is done."""
        self.turn(self._since is None)
        self._done, self._left = self._done + 1, self._left - 1

    def left(self) -> str:
        """Time left, as 1:02:03; empty while there is nothing to judge by."""
        if not (self._done and self._ran):
            return ""
        seconds = round(self._ran / self._done * self._left)
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"


class Progress:
    """What a run does and how far it is. This one keeps silent."""

    def step(self, text: str) -> None:
        """A row is done."""

    def tell(self, text: str, compiling: bool) -> None:
        """What is being done, and whether that is compiling."""


class Bar(Progress):
    """On a terminal."""

    def __init__(self, bar: "RichProgress", total: int) -> None:
        self._bar, self._pace = bar, Pace(total)
        self._task = bar.add_task("", total=total, left="")

    def step(self, text: str) -> None:
        self._pace.step()
        self._bar.update(self._task, advance=1, description=_shown(text), left=self._pace.left())

    def tell(self, text: str, compiling: bool) -> None:
        self._pace.turn(compiling)
        if text:
            self._bar.update(self._task, description=_shown(text))


class Lines(Progress):
    """A line on stderr for everything that is told, with the seconds that compiling has taken so far."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None  # None while nothing is compiled

    def tell(self, text: str, compiling: bool) -> None:
        if not compiling:
            self._since = None
        elif self._since is None:
            self._since = self._clock()
        if text:
            _say(text if self._since is None else _with_seconds(text, self._clock() - self._since))


class Log(Progress):
    """For a file or a pipe, as in CI: a line now and then of what takes long, and none of a run that is over soon."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._pace = clock, Pace(total, clock)
        self._total, self._done = total, 0
        self._text, self._compiling, self._since = "", False, clock()  # since then it compiles, or does not
        self._told = False  # of the compiling at work
        self._due = clock() + SOON_S
        self._lock = threading.Lock()  # a thread of its own looks whether a line is due

    def step(self, text: str) -> None:
        with self._lock:
            self._pace.step()
            self._done += 1

    def tell(self, text: str, compiling: bool) -> None:
        with self._lock:
            self._pace.turn(compiling)
            if compiling != self._compiling:
                now = self._clock()
                if self._told:
                    self._say(f"ready after {now - self._since:.0f} s")
                self._text, self._compiling, self._since, self._told = "compiling", compiling, now, False
            self._text = text or self._text

    def look(self) -> None:
        """Print a line if one is due."""
        with self._lock:
            now = self._clock()
            if now < self._due:
                return
            self._told = self._compiling and now - self._since >= SOON_S
            if self._told:
                self._say(_with_seconds(self._text, now - self._since))
            else:
                self._say(", ".join(filter(None, [f"{self._done} of {self._total} rows", self._pace.left()])))

    def _say(self, line: str) -> None:
        _say(line)
        self._due = self._clock() + EACH_S


@contextmanager
def progress(total: int, *, quiet: bool) -> Iterator[Progress]:
    """A bar on stderr, or lines where that is no terminal; nothing when quiet."""
    if quiet:
        yield Progress()
        return
    if not _rich_terminal():
        with _looked_after(Log(total)) as log:
            yield log
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column

    left = TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True))
    cut_off = Column(no_wrap=True, ratio=1)
    text = TextColumn("{task.description}", markup=False, table_column=cut_off)  # names may have brackets
    columns = (MofNCompleteColumn(), BarColumn(10), TimeElapsedColumn(), left, text)
    screen = Console(stderr=True, markup=False, emoji=False, highlight=False)  # what others print stays as it is
    with RichProgress(*columns, console=screen, transient=True, redirect_stdout=False, expand=True) as bar:
        yield Bar(bar, total)


@contextmanager
def _looked_after(log: Log) -> Iterator[Log]:
    """Lines of a log also come while nothing is told: a compiler may be silent for minutes."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(GLANCE_S):
            log.look()

    thread = threading.Thread(target=look, name="flashqla progress", daemon=True)
    try:
        thread.start()
        yield log
    finally:
        over.set()
        if thread.is_alive():  # Ctrl-C may come before
            thread.join()


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


def _with_seconds(text: str, taken_s: float) -> str:
    return f"{text} ({taken_s:.0f} s)" if taken_s >= 1 else text


def _say(line: str) -> None:
    print(_shown(line), file=sys.stderr)


def _shown(text: str) -> str:
    """Without what controls a terminal, for texts come from files. Newline and tab stay."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", text)


def _paint(word: str, colour: str) -> str:
    return f"\033[{colour}m{word}\033[0m" if _rich_terminal() and not os.environ.get("NO_COLOR") else word
