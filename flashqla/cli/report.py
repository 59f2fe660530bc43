"""`flashqla report`: runs as a page to look at."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flashqla.cli import console
from flashqla.errors import ArgumentError

EXAMPLES = """\b
Examples:
  flashqla report out/bench-fwd.json out/verify.json --out report.html
  flashqla report out/bench-fwd.json --format markdown --out summary.md
"""


class Format(StrEnum):
    html = "html"
    markdown = "markdown"


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN.json...", help="Runs, from --json of bench and verify.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="PATH", help="Write a file, not to stdout.")] = None,
    form: Annotated[Format, typer.Option("--format", help="A page with plots, or a summary.")] = Format.html,
    plots: Annotated[
        Path | None, typer.Option("--plots", metavar="DIR", help="Write the plots as SVG and PNG files as well.")
    ] = None,
) -> None:
    """Show runs as one page: HTML with plots, or Markdown for a pull request.

    The HTML is one file that needs no network, light or dark as the reader's system is. It takes extra report, and
    Markdown without plots takes none. Prints the names of the files it wrote.
    """
    from flashqla import plots as drawing
    from flashqla import report as pages
    from flashqla.records import destination, read, write

    if out and out.resolve() in [path.resolve() for path in runs]:
        raise ArgumentError("--out would overwrite a run", given=f"--out {out}", do="name another file")
    content = [read(path) for path in runs]
    if plots:
        drawing.need("matplotlib")
        drawing.make_folder(plots)
    target = destination(out) if out else None
    page = pages.html(content) if form is Format.html else pages.summary(content)
    written = []
    if target:
        write(target, page)
        written.append(target)
    for number, run in enumerate(content, start=1):
        if plots:
            written += drawing.write(run, plots, f"{number}-" if len(content) > 1 else "")
    console.result("\n".join(map(str, written)) if target else page)
