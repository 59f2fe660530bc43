"""Every `flashqla` command that documentation, workflows and Makefile show is one that the command line has."""

import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from flashqla.cases import SUITES
from flashqla.cli import options
from flashqla.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = [ROOT / "Makefile", *sorted((ROOT / ".github" / "workflows").glob("*.yml")), *(ROOT / "scripts").glob("*.sh")]

# Run as documented: they need neither a GPU nor a file, and take a moment.
HARMLESS = {"cases", "doctor", "schema", "explain", "--help", "--version"}
LEFT_OUT = re.compile("Missing argument|Option '.*' requires an argument")
FILTERS = ("heads", "lens", "model", "pattern")

Seen = list[dict[str, Any]]


def commands_of_lines(text: str) -> list[str]:
    """Lines that call flashqla, with what follows the command: `VAR=1 .venv/bin/flashqla cases` -> `cases`."""
    joined = re.sub(r"\\\n\s*", " ", text)
    call = re.compile(r"^\s*(?:\$ |run: |attempt |- )*(?:[A-Z_]+=\S+ )*(?:\S*/)?flashqla +(\S.*)$", re.MULTILINE)
    return [line.strip() for line in call.findall(joined)]


def commands_of_page(path: Path) -> tuple[list[str], list[str]]:
    """Commands in blocks, which are whole, and those in running text, which may only name a command."""
    text = path.read_text(encoding="utf-8")
    blocks = [block for language, block in re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL) if language != "python"]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return commands_of_lines("\n".join(blocks)), re.findall(r"`(?:[A-Z_]+=\S+ )*flashqla +([^`]+)`", prose)


def words_of(command: str) -> list[str]:
    """Arguments up to a pipe, a redirection or the next command, with one value for what a shell would fill in."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=";<>|&")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if set(word) <= set(";<>|&"):
            break
        if "_args[" in word or "first[" in word:  # more options, tried where they are given
            continue
        words.append("cpu" if word == "$device" else word)
    return words[:-1] if words and words[-1] == "2" else words  # of 2>


WHOLE = sorted(
    {command for path in PAGES for command in commands_of_page(path)[0]}
    | {command for path in SCRIPTS for command in commands_of_lines(path.read_text(encoding="utf-8"))}
)
NAMED = sorted({command for path in PAGES for command in commands_of_page(path)[1]} - {"COMMAND --help"})


def parse(words: list[str]) -> tuple[str, Seen]:
    """The error that the command line has for these words, if any, and with what it would call the command."""
    seen: Seen = []
    root: Any = typer.main.get_command(app)  # made anew at every call

    def replace(command: Any) -> None:
        if children := getattr(command, "commands", {}):
            for child in children.values():
                replace(child)
        else:
            command.callback = lambda **arguments: seen.append(arguments)

    replace(root)
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as errors, pytest.raises(SystemExit):
        root.main(words, "flashqla")
    return errors.getvalue(), seen


@pytest.fixture(autouse=True)
def colours_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")  # which --no-color would set for all tests to come


def check_cases(arguments: dict[str, Any]) -> None:
    """The suites that a command names have cases that its filters keep."""
    suites = arguments.get("suite") or ()
    if suites and set(suites) <= set(SUITES):
        assert options.chosen_cases(suites, **{name: arguments[name] for name in FILTERS if arguments.get(name)})
    else:
        assert not suites, f"no such suite: {suites}"


def test_commands_are_found() -> None:
    assert "doctor || true" in WHOLE  # of a workflow
    assert any(command.startswith("bench fwd --device") for command in WHOLE)  # of the recipe
    assert any(command.startswith("verify --json $(OUT)") for command in WHOLE)  # of the Makefile
    assert {"doctor", "verify", "bench fwd", "compare"} <= set(NAMED)
    assert words_of('compare "$old" b.json "${first[@]}" --fail 5% 2>"$out/x" || y') == [
        "compare",
        "$old",
        "b.json",
        "--fail",
        "5%",
    ]


@pytest.mark.parametrize("command", WHOLE)
def test_whole_commands_parse(command: str) -> None:
    words = words_of(command)
    output, seen = parse(words)
    assert not output
    assert seen or {"--help", "--version"} & {*words}
    for arguments in seen:
        check_cases(arguments)


@pytest.mark.parametrize("command", NAMED)
def test_named_commands_parse_but_for_what_they_leave_out(command: str) -> None:
    output, seen = parse(words_of(command))
    assert LEFT_OUT.search(output) or not output
    for arguments in seen:
        check_cases(arguments)


@pytest.mark.parametrize(
    "command", ["verify --siute smoke", "bench", "bench bdw", "verify bwb", "cases --suite cpu extra", "shwo"]
)
def test_a_command_that_is_not_there_is_noticed(command: str) -> None:
    output, seen = parse(words_of(command))
    assert output or not seen
    assert not LEFT_OUT.search(output)


@pytest.mark.parametrize("command", [command for command in [*WHOLE, *NAMED] if command.split()[0] in HARMLESS])
def test_harmless_commands_run(command: str, tmp_path: Path) -> None:
    words = words_of(command)
    if LEFT_OUT.search(parse(words)[0]):
        words.append("--help")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    call = [sys.executable, "-m", "flashqla", *words]
    done = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    allowed = {0, 3} if words[0] == "doctor" else {0}  # 3: this machine could do more
    assert done.returncode in allowed, done.stderr
    assert done.stdout


@pytest.mark.parametrize("name", sorted({" ".join(words_of(command)[:1]) for command in [*WHOLE, *NAMED]}))
def test_documented_commands_have_help(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert "Usage: " in result.stdout
