"""Backends that go wrong, for runs in worker processes, which import them by name.

`python -c "import fake_backends; fake_backends.main()" ARGUMENT...` is the command line with these backends.
"""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from flashqla import backends, rows
from flashqla.backends import Call, Outputs
from flashqla.cases import Case, Direction
from flashqla.inputs import Inputs


@dataclass(frozen=True)
class Fake:
    """Ours, which misbehaves on cases with some gate: while it is prepared, or in a later call of it."""

    name: str
    verb: str = ""  # hang, exit, fault, raise, poison; or nothing
    gate: str = "zero"
    call: int = 0  # in which it happens; 0: while it is prepared
    slow_s: float = 0.0  # every preparation takes so much longer
    call_s: float = 0.0  # and every call
    reason: str | None = None
    hint: str = "pip install it"
    compiles: str = "never"
    exact: bool = False
    contract: bool = True

    def uncapturable(self, direction: Direction) -> str | None:
        return "it is a fake"

    def missing(self) -> str | None:
        return self.reason

    def unsupported(self, case: Case, direction: Direction) -> str | None:
        return None

    def representatives(self, cases: Sequence[Case]) -> tuple[Case, ...]:
        return tuple(cases)

    def prepare(self, inputs: Inputs, direction: Direction) -> Call:
        time.sleep(self.slow_s)
        run = backends.Flashqla("cpu").prepare(inputs, direction)
        bad = self.gate in (inputs.case.gate, "any")
        if bad and self.call == 0:
            self.misbehave()
        calls = 0

        def call() -> Outputs:
            nonlocal calls
            calls += 1
            if bad and self.call == calls:
                self.misbehave()
            time.sleep(self.call_s)
            return run()

        return call

    def misbehave(self) -> None:
        match self.verb:
            case "hang":
                time.sleep(600)
            case "exit":
                os._exit(3)
            case "fault":
                signal.raise_signal(signal.SIGSEGV)
            case "raise":
                raise ValueError("no way")
            case "poison":  # as CUDA does: every later call fails as well
                rows._lost_gpu = lambda _: "CUDA error: an illegal memory access was encountered"
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def kernels(self, inputs: Inputs, direction: Direction) -> list[str]:
        return ["a kernel"]


FAKES = {
    fake.name: fake
    for fake in (
        Fake("steady"),
        Fake("slow", slow_s=0.4),
        Fake("missing", reason="it is not here"),
        Fake("hangs", "hang", "zero", call=2),
        Fake("exits", "exit", "strong"),
    )
}


def main() -> None:
    """The command line, with these backends beside the usual ones."""
    from flashqla.cli import main as command

    usual = backends.create

    def create(names: Sequence[str], device: str, *, exact: bool = False) -> tuple[backends.Backend, ...]:
        made = (FAKES[name] if name in FAKES else usual([name], device, exact=exact)[0] for name in names)
        return tuple(made)  # type: ignore[arg-type]

    backends.create = create
    command()
