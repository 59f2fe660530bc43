"""`flashqla report`: runs as a page to look at."""

import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flashqla import signals
from flashqla.cli import console, options
from flashqla.errors import ArgumentError, NothingToDo

EXAMPLES = """\b
Examples:
  flashqla report out/bench-fwd.json out/verify.json --out report.html
  flashqla report out/bench-fwd.json --format markdown --out summary.md
"""


class Format(StrEnum):
    html = "html"
    markdown = "markdown"
    text = "text"
    junit = "junit"


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN.json...", help="Runs, from --json of bench and verify.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="PATH", help="Write a file, not to stdout.")] = None,
    form: Annotated[
        Format, typer.Option("--format", help="A page with plots, a summary, all tables, or tests.")
    ] = Format.html,
    plots: Annotated[
        str | None, typer.Option("--plots", metavar="DIR", help="Write the plots as SVG and PNG files as well.")
    ] = None,
    details: options.DetailsOption = False,
    no_color: options.NoColorOption = False,
) -> None:
    """Show runs as one page: HTML with plots, Markdown for a pull request, plain text, or JUnit XML for a CI system.

    The HTML is one file that needs no network, light or dark as the reader's system is. It takes extra report, and
    the other formats without plots take none. Prints the names of the files it wrote.
    """
    from flashqla import plots as drawing
    from flashqla import report as pages
    from flashqla.records import destination, read, target, write
    from flashqla.tables import check_columns

    options.check_runs(runs)
    if plots == "":  # which would be the folder at hand
        raise ArgumentError("--plots takes a folder", given="--plots ''", do="name one")
    folder = Path(plots) if plots else None
    if str(out) == "-":
        do = "leave it out, and the page goes to stdout"
        raise ArgumentError("--out takes a file", given="--out -", do=do)
    if out and target(out) in map(target, runs):
        raise ArgumentError("--out would overwrite a run", given=f"--out {out}", do="name another file")
    if form is Format.html and out is None and _terminal():
        do = "name a file with --out report.html, or take --format text"
        raise ArgumentError("a terminal cannot show the page", given="--format html, without --out", do=do)
    content = [read(path) for path in runs]
    if not any(run.kind.startswith("verify") for run in content):
        check_columns(content[0].kind, details=details)
    if folder:
        drawing.need("matplotlib")
        drawing.make_folder(folder)
    place = destination(out) if out else None
    render = {"html": pages.html, "markdown": pages.summary, "text": pages.text}
    page = pages.junit(content) if form is Format.junit else render[form.value](content, details=details)
    written = []
    with signals.handled(signal.default_int_handler):  # which lets what is half written be removed
        if place:
            write(place, page)
            written.append(place)
        for number, run in enumerate(content, start=1):
            if folder:
                written += drawing.write(run, folder, f"{number}-" if len(content) > 1 else "")
    console.result("\n".join(map(str, written)) if place else page)
    if empty := [str(path) for path, run in zip(runs, content, strict=True) if not run.records]:
        raise NothingToDo("a run has no rows", given=", ".join(empty), do="make it again")


def _terminal() -> bool:
    return sys.stdout.isatty()
