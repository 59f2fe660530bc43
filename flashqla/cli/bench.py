"""`flashqla bench fwd`: times, side by side with the peers."""

from functools import partial
from typing import Annotated

import typer

from flashqla.cli import options

EXAMPLES = """\b
Examples:
  flashqla bench fwd --suite cpu --lens 1x512
  flashqla bench fwd --heads 2,8 --json run.json --out run.txt
"""
DEFAULT_SUITES = {"cuda": ["qwen"], "cpu": ["cpu"]}

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, epilog=EXAMPLES)


@app.callback()
def bench() -> None:
    """Time the op, side by side with its peers."""


@app.command(epilog=EXAMPLES)
def fwd(
    suite: options.SuiteOption = None,
    cases: options.CasesOption = None,
    captured: options.InputOption = None,
    heads: options.HeadsOption = None,
    lens: options.LensOption = None,
    model: options.ModelOption = None,
    pattern: options.PatternOption = None,
    backend: options.BackendOption = None,
    device: options.DeviceOption = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, metavar="N", help="Samples per row and backend.")] = 12,
    l2: Annotated[options.L2, typer.Option("--l2", help="Cache before a sample; GPU only.")] = options.L2.cold,
    seed: options.SeedOption = 0,
    json: options.JsonOption = None,
    out: options.OutOption = None,
    roofline: options.RooflineOption = False,
    memory: options.MemoryOption = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="No CPU path; a row of any backend that is not ok is an error.")
    ] = False,
    resume: options.ResumeOption = None,
    timeout: options.TimeoutOption = options.TIMEOUT_S,
    in_process: options.InProcessOption = False,
    quiet: options.QuietOption = False,
    no_color: options.NoColorOption = False,
) -> None:
    """Time the forward pass. Every result is checked before its time counts.

    On a Hopper GPU: our kernels and the peers on the 171 rows of suite qwen. Elsewhere: PyTorch on the CPU, suite cpu.
    --cases and --input run what is in these files instead, or besides --suite. A peer that is missing or fails keeps
    its column, with the reason. Cases run in a process of their own: one that crashes or hangs costs its row, not the
    run.
    """
    from flashqla.cli import session
    from flashqla.tables import bench_page, text

    where = session.choose_device(device, strict=strict)
    captured = captured or []
    suites = suite or ([] if cases or captured else DEFAULT_SUITES[where])
    wanted = options.chosen_cases(
        suites, file=cases, captured=captured, heads=heads, lens=lens, model=model, pattern=pattern
    )

    from flashqla import backends, measure, runner  # and with them torch

    names = backend or backends.defaults("bench", where)
    chosen = backends.create(names, where)
    timeout_s = None if in_process else timeout
    config = measure.Config(repeats=repeats, l2=l2.value)
    session.run(
        "bench-fwd",
        partial(runner.bench, wanted, chosen, where, seed=seed, config=config, timeout_s=timeout_s),
        rows=[(case.id, name) for case in wanted for name in dict.fromkeys(names)],
        settings={
            "suite": options.named(suites, cases, captured),
            "device": where,
            "seed": seed,
            "repeats": repeats,
            "l2": l2.value,
        },
        render=lambda run: text(bench_page(run, roofline=roofline, memory=memory)),
        json=json,
        out=out,
        resume=resume,
        strict=strict,
        quiet=quiet,
    )
