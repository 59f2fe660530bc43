"""`flashqla show` and `flashqla schema`: a stored run as a table, and what such a file holds."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flashqla.cli import console, options
from flashqla.errors import NothingToDo

EXAMPLES = """\b
Examples:
  flashqla show run.json --memory
  flashqla show run.json --format csv > run.csv
"""
SCHEMA_EXAMPLES = """\b
Examples:
  flashqla schema
  flashqla schema > flashqla.schema.json
"""


class Format(StrEnum):
    text = "text"
    markdown = "markdown"
    csv = "csv"


def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A run kept with --json, or what is left of one.")],
    form: Annotated[Format, typer.Option("--format", help="Of the result on stdout.")] = Format.text,
    roofline: options.RooflineOption = False,
    memory: options.MemoryOption = False,
    details: options.DetailsOption = False,
    no_color: options.NoColorOption = False,
) -> None:
    """Show a stored run as a table.

    Text and Markdown are the table that verify or bench printed, where --roofline and --memory add columns to that of
    bench, and --details to that of verify; CSV has every field of every record.
    """
    from flashqla import tables
    from flashqla.records import read

    run = read(file)
    if not run.records:
        raise NothingToDo("the run has no rows", given=str(file), do="make it again")
    if form is Format.csv:
        console.result(tables.csv(run))
    else:
        render = tables.markdown if form is Format.markdown else tables.text
        console.result(render(tables.page(run, roofline=roofline, memory=memory, details=details)))


def schema(no_color: options.NoColorOption = False) -> None:
    """Print the JSON Schema of result files."""
    from flashqla.records import json_schema

    console.result(json.dumps(json_schema(), indent=2))
