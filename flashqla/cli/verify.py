"""`flashqla verify`: outputs and gradients against the float64 recurrence."""

from enum import StrEnum
from functools import partial
from typing import Annotated

import typer

from flashqla.cli import options

EXAMPLES = """\b
Examples:
  flashqla verify --suite smoke --repeats 10
  flashqla verify bwd --suite cpu_hard -k "*/strong" --json -
"""
DEFAULT_SUITES = {"cuda": ["smoke", "hard"], "cpu": ["smoke", "cpu_hard"]}


class Direction(StrEnum):
    fwd = "fwd"
    bwd = "bwd"


def verify(
    direction: Annotated[Direction, typer.Argument(help="What to check: outputs (fwd) or gradients (bwd).")] = (
        Direction.fwd
    ),
    suite: options.SuiteOption = None,
    cases: options.CasesOption = None,
    captured: options.InputOption = None,
    heads: options.HeadsOption = None,
    lens: options.LensOption = None,
    model: options.ModelOption = None,
    pattern: options.PatternOption = None,
    backend: options.BackendOption = None,
    device: options.DeviceOption = None,
    repeats: Annotated[
        int,
        typer.Option(
            "--repeats",
            min=2,
            max=options.MOST_REPEATS,
            metavar="N",
            help="Calls per row and backend that must give the same bits.",
        ),
    ] = 2,
    seed: options.SeedOption = 0,
    json: options.JsonOption = None,
    out: options.OutOption = None,
    details: options.DetailsOption = False,
    resume: options.ResumeOption = None,
    timeout: options.TimeoutOption = options.TIMEOUT_S,
    compile_ahead: options.CompileAheadOption = True,
    in_process: options.InProcessOption = False,
    quiet: options.QuietOption = False,
    no_color: options.NoColorOption = False,
) -> None:
    """Check every output against the token recurrence in float64; with bwd every gradient.

    On a Hopper GPU: our kernels and the peers, suites smoke and hard. Elsewhere: PyTorch on the CPU, suites smoke and
    cpu_hard. --cases and --input run what is in these files instead, or besides --suite. A peer that is off is shown as
    off; it fails the run only if no backend but peers was asked for. Cases run in a process of their own: one that
    crashes or hangs costs its row, not the run.

    Gradients may be off by 1e-2, 2e-2 at strong gates, or 1.1 times what the best peer is off by. That of g is also
    shown summed up as it reaches A_log and dt_bias of a model's gates, g = -exp(A_log) softplus(a + dt_bias). Where its
    parts cancel, such a sum may be off by 1e-2 of what they are without their signs, up to 5e-2 of itself.
    """
    from flashqla.cli import session
    from flashqla.tables import verify_text

    where, note = session.choose_device(device)
    captured = captured or []
    suites = suite or ([] if cases or captured else DEFAULT_SUITES[where])
    wanted = options.chosen_cases(
        suites, file=cases, captured=captured, heads=heads, lens=lens, model=model, pattern=pattern
    )

    from flashqla import backends, runner  # and with them torch

    names = backend or backends.defaults("verify", where)
    chosen = backends.create(names, where, exact=True)
    timeout_s = None if in_process else timeout
    session.run(
        "verify-bwd" if direction is Direction.bwd else "verify-fwd",
        partial(
            runner.verify,
            wanted,
            chosen,
            where,
            direction=direction.value,
            seed=seed,
            runs=repeats,
            compile_ahead=compile_ahead,
            timeout_s=timeout_s,
        ),
        rows=[(case.id, name) for case in wanted for name in dict.fromkeys(names)],
        settings={
            **options.sources(suites, cases, captured),
            "device": where,
            "seed": seed,
            "repeats": repeats,
        },
        render=partial(verify_text, details=details),
        note=note,
        json=json,
        out=out,
        resume=resume,
        quiet=quiet,
    )
