"""Notes that are kept in a dict of bounded size."""

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def note(notes: dict[Key, Value], key: Key, value: Value, most: int) -> Value:
    """Note a value under a new key, in place of the oldest where there are `most` already. Returns the value."""
    if len(notes) >= most:
        del notes[next(iter(notes))]
    notes[key] = value
    return value
