"""Records of what tfamp knows about a layer, model or optimizer, stored on the object itself.

So a record lives as long as its object, and Keras neither tracks nor saves it.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import weakref
from typing import Any, Generic, TypeVar

# The attribute of a layer, model or optimizer with all that tfamp stores about it.
_RECORD = "_tfamp_record"
_Value = TypeVar("_Value")
_numbers = itertools.count()


class WeakMap(Generic[_Value]):
    """One field of the record that tfamp stores on an object, and so no longer than that lives.

    Keras neither tracks nor saves the values. By identity, as users' layers may define
    `__eq__`.
    """

    def __init__(self) -> None:
        self._number = next(_numbers)

    def get(self, key: Any) -> _Value | None:
        """Returns the value of an object, None if it has none."""
        value: _Value | None = _record_of(key).get(self._number)
        return value

    def set(self, key: Any, value: _Value | None) -> None:
        """Gives an object a value, instead of the one it has; None removes it."""
        restore(key, {**_record_of(key), self._number: value})


def _record_of(key: Any) -> dict[int, Any]:
    record: dict[int, Any] = getattr(key, "__dict__", {}).get(_RECORD, {})
    return record


def snapshot(key: Any) -> dict[int, Any]:
    """Returns a copy of the record of an object, for `restore`."""
    return {number: copied(value) for number, value in _record_of(key).items()}


def restore(key: Any, record: dict[int, Any]) -> None:
    """Gives an object a record, instead of the one it has."""
    vars(key)[_RECORD] = record


def copied(record: _Value) -> _Value:
    """Copies a record, the records in it and their containers, but not the elements of these."""
    result = copy.copy(record)
    for name, value in getattr(record, "__dict__", {}).items():
        if isinstance(value, list | set | weakref.WeakKeyDictionary):
            object.__setattr__(result, name, copy.copy(value))
        elif dataclasses.is_dataclass(value):
            object.__setattr__(result, name, copied(value))
    return result
