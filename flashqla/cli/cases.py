"""`flashqla cases`: what a suite holds."""

import json as json_text
from dataclasses import asdict
from typing import Annotated

import typer

from flashqla.cli import console, options

EXAMPLES = """\b
Examples:
  flashqla cases --suite hard
  flashqla cases --suite qwen --heads 2,8 --json
"""


def cases(
    suite: options.SuiteOption = None,
    file: options.CasesOption = None,
    heads: options.HeadsOption = None,
    lens: options.LensOption = None,
    model: options.ModelOption = None,
    pattern: options.PatternOption = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON, with every field of a case.")] = False,
    no_color: options.NoColorOption = False,
) -> None:
    """List the cases of a suite, or of a file.

    By id, with what each is there for. The default is suite hard, and with --cases what is in the file.
    """
    suites = suite or ([] if file else ["hard"])
    chosen = options.chosen_cases(suites, file=file, heads=heads, lens=lens, model=model, pattern=pattern)
    if json:
        console.result(json_text.dumps([{"id": case.id, **asdict(case)} for case in chosen], indent=2))
        return
    width = max(len(case.id) for case in chosen)
    console.result("\n".join(f"{case.id:<{width}}  {case.note or case.model}".rstrip() for case in chosen))
    if not suite and not file:
        console.note(f"these are the cases of suite hard; --suite takes {options.SUITE_NAMES}")
