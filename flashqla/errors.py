"""Errors of flashqla. Each class carries the exit code of the command line.

    FlashqlaError              70  our own bug when raised bare
      ArgumentError (ValueError)  2  an argument is wrong
      UnsupportedError            3  a right argument that this device or build cannot serve
      EnvironmentProblem          3  something is missing on this machine
      RecordError                 2  a result file cannot be read or written
      NothingToDo                 4  an empty selection

A message has up to three parts, so that a reader knows what to do next:

    head_dim 96 is not supported
      given      q [1, 4096, 16, 96] bf16
      supported  head_dim 128
      do         pad q, k and v to 128, or run this case with another backend
"""


class FlashqlaError(Exception):
    """Base of every known error. `given`, `supported` and `do` are optional single lines.

    What was given may be an empty text, which is shown as ''.
    """

    exit_code = 70

    def __init__(self, message: str, *, given: str | None = None, supported: str = "", do: str = "") -> None:
        self.message, self.supported, self.do = message, supported, do
        self.given = "" if given is None else given or "''"
        parts = [("given", self.given), ("supported", supported), ("do", do)]
        super().__init__("\n".join([message, *(f"  {name:<10} {text}" for name, text in parts if text)]))


class ArgumentError(FlashqlaError, ValueError):
    """An argument of a function or of the command line is wrong."""

    exit_code = 2


class UnsupportedError(FlashqlaError, NotImplementedError):
    """A valid request that this device, dtype or build cannot serve."""

    exit_code = 3


class EnvironmentProblem(FlashqlaError, RuntimeError):
    """A package, driver, compiler or device is missing or broken."""

    exit_code = 3


class RecordError(FlashqlaError):
    """A result file cannot be read or written."""

    exit_code = 2


class NothingToDo(FlashqlaError):
    """A selection left no case to run."""

    exit_code = 4
