"""`flashqla bench`: times, side by side with the peers; a command per direction."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from flashqla.cases import Direction
from flashqla.cli import options

if TYPE_CHECKING:
    from flashqla.records import Kind  # whose import takes longer than most commands

EPILOG = """\b
Examples:
"""
EXAMPLES = f"""{EPILOG}\
  flashqla bench fwd --suite cpu --lens 1x512
  flashqla bench bwd --suite cpu_bwd --lens 1x256
"""
HELP = """Time {what}. Every result is checked before its time counts.

On a Hopper GPU: our kernels and the peers on the {rows} rows of suite {gpu}. Elsewhere: PyTorch on the CPU, suite
{cpu}. --cases and --input run what is in these files instead, or besides --suite. A peer that is missing or fails keeps
its column, with the reason. Cases run in a process of their own: one that crashes or hangs costs its row, not the run.

A row of slow calls gets fewer samples than --repeats asks for, as many as fit in --budget and at least 3. Below 5 the
table marks it with a ?, and compare cannot judge it.
"""

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, epilog=EXAMPLES)


@app.callback()
def bench() -> None:
    """Time the op, side by side with its peers."""


def _command(direction: Direction, kind: "Kind", gpu: str, cpu: str) -> Callable[..., None]:
    """The command for a direction, with the suites that it takes unless told otherwise."""
    suites_here = {"cuda": [gpu], "cpu": [cpu]}

    def command(
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
                min=1,
                max=options.MOST_REPEATS,
                metavar="N",
                help="Samples per row and backend, at most.",
            ),
        ] = 12,
        budget: options.BudgetOption = options.BUDGET_S,
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
        compile_ahead: options.CompileAheadOption = True,
        in_process: options.InProcessOption = False,
        quiet: options.QuietOption = False,
        no_color: options.NoColorOption = False,
    ) -> None:
        from flashqla.cli import session
        from flashqla.tables import bench_page, check_columns, text

        check_columns(kind, roofline=roofline, memory=memory)
        where, note = session.choose_device(device, strict=strict)
        captured = captured or []
        suites = suite or ([] if cases or captured else suites_here[where])
        wanted = options.chosen_cases(
            suites, file=cases, captured=captured, heads=heads, lens=lens, model=model, pattern=pattern
        )

        import torch

        from flashqla import backends, measure, runner

        names = backend or backends.defaults("bench", where)
        chosen = backends.create(names, where)
        timeout_s = None if in_process else timeout
        config = measure.Config(repeats=repeats, l2=l2.value, budget_s=budget)
        session.run(
            kind,
            partial(
                runner.bench,
                wanted,
                chosen,
                where,
                direction=direction,
                seed=seed,
                config=config,
                compile_ahead=compile_ahead,
                timeout_s=timeout_s,
            ),
            rows=[(case.id, name) for case in wanted for name in dict.fromkeys(names)],
            settings={
                **options.sources(suites, cases, captured),
                "device": where,
                "seed": seed,
                "repeats": repeats,
                "budget_s": budget,
                # A CPU's caches are as the calls before left them, and its times depend on how many threads there are.
                **({"l2": "warm", "threads": torch.get_num_threads()} if where == "cpu" else {"l2": l2.value}),
            },
            render=lambda run: text(bench_page(run, roofline=roofline, memory=memory)),
            note=note,
            json=json,
            out=out,
            resume=resume,
            strict=strict,
            quiet=quiet,
        )

    return command


def _add(direction: Direction, kind: "Kind", what: str, rows: str, gpu: str, cpu: str, lens: str, heads: str) -> None:
    """Add the command for a direction; lens, heads: of suites cpu and gpu, for its examples."""
    examples = (f"--suite {cpu} --lens {lens}", f"--heads {heads} --json run.json --out run.txt")
    lines = "".join(f"  flashqla bench {direction} {example}\n" for example in examples)
    add = app.command(direction, help=HELP.format(what=what, rows=rows, gpu=gpu, cpu=cpu), epilog=EPILOG + lines)
    add(_command(direction, kind, gpu, cpu))


_add("fwd", "bench-fwd", "the forward pass", "171", "qwen", "cpu", "1x512", "2,8")
_add("bwd", "bench-bwd", "the backward pass, on what one forward pass saved", "48", "bwd", "cpu_bwd", "1x256", "16,32")
_add("fwd+bwd", "bench-fwd+bwd", "both passes through autograd", "48", "bwd", "cpu_bwd", "1x256", "16,32")
