"""Outcomes as JUnit XML, which CI systems show as tests."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree


@dataclass(frozen=True)
class Outcome:
    """One test. Whatever its outcome, it has something to say."""

    group: str
    name: str
    result: Literal["passed", "failure", "skipped"]
    word: str  # what kind of failure
    message: str


def suite(name: str, timestamp: str, outcomes: Sequence[Outcome]) -> ElementTree.Element:
    """A test suite with a test per outcome."""
    count = {result: sum(outcome.result == result for outcome in outcomes) for result in ("failure", "skipped")}
    element = ElementTree.Element(
        "testsuite",
        name=_legal(name),
        tests=str(len(outcomes)),
        failures=str(count["failure"]),
        errors="0",
        skipped=str(count["skipped"]),
        timestamp=timestamp,
    )
    for outcome in outcomes:
        test = ElementTree.SubElement(element, "testcase", classname=_legal(outcome.group), name=_legal(outcome.name))
        message = _legal(outcome.message)
        if outcome.result == "failure":
            ElementTree.SubElement(test, "failure", type=outcome.word, message=message).text = message
        elif outcome.result == "skipped":
            ElementTree.SubElement(test, "skipped", message=message)
        else:
            ElementTree.SubElement(test, "system-out").text = message
    return element


def text(element: ElementTree.Element) -> str:
    """XML of a suite, or of a `testsuites` that holds some."""
    ElementTree.indent(element)
    return ElementTree.tostring(element, encoding="unicode", xml_declaration=True) + "\n"


def _legal(words: str) -> str:
    """Without the control characters that XML has no way to write; messages of compilers have some."""
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", "", words)
