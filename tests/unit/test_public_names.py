"""What `import flashqla` offers, and that it costs nothing until it is used."""

import subprocess
import sys

import pytest

import flashqla
from flashqla import captures, ops


def test_the_package_offers_the_op_and_its_version() -> None:
    assert set(flashqla.__all__) == {*ops.__all__, "__version__", "capture"}
    assert set(flashqla.__all__) <= set(dir(flashqla))


def test_names_load_on_first_use_and_are_those_of_ops() -> None:
    code = """
import sys, flashqla
assert flashqla.__version__
assert "torch" not in sys.modules
from flashqla import chunk_gated_delta_rule
from flashqla.ops import chunk_gated_delta_rule as op
assert chunk_gated_delta_rule is op
assert "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_capture_is_a_function_of_the_package() -> None:
    assert flashqla.capture is captures.capture


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = flashqla.nonsense
