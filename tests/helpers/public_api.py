"""The public names of tfamp and their signatures, as text that a change of the API changes.

    python tests/helpers/public_api.py

writes what the code says now to tests/data/public_api.txt: run it after an intended change, look at
the difference, and commit it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SNAPSHOT = Path(__file__).resolve().parents[1] / "data" / "public_api.txt"


def public_modules() -> dict[str, Any]:
    """tfamp and the modules among its public names, by full name."""
    import tfamp

    found = {"tfamp": tfamp}
    for name in tfamp.__all__:
        value = getattr(tfamp, name)
        if isinstance(value, types.ModuleType):
            found[value.__name__] = value
    return found


def public_values() -> Iterator[tuple[str, Any]]:
    """Every public class, function and module under each of its public names."""
    for module_name, module in public_modules().items():
        for name in sorted(module.__all__):
            if name != "__version__":
                yield f"{module_name}.{name}", getattr(module, name)


def own_members(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class that tfamp defines, Keras's left out."""
    for name in sorted({name for owner in _own_classes(cls) for name in vars(owner)}):
        value = inspect.getattr_static(cls, name)
        public = not name.startswith("_") or name in ("__call__", "__enter__")
        field = dataclasses.is_dataclass(cls) and name in cls.__dataclass_fields__
        if public and not field and (callable(function_of(value)) or _is_property(value)):
            yield name, value


def describe() -> str:
    """One line per public name and per public method, sorted."""
    lines, names = [], {}
    for name, value in public_values():
        # Under its other names a thing is what it is under its shortest.
        known = names.setdefault(id(value), name)
        lines += [f"{name} is {known}" if known != name else _line(name, value)]
        if inspect.isclass(value) and known == name:
            lines += [_line(f"{name}.{member}", each) for member, each in own_members(value)]
    return "\n".join(sorted(lines)) + "\n"


def _line(name: str, value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return f"{name}: module"
    if _is_property(value):
        return f"{name}: property"
    if inspect.isclass(value) and issubclass(value, BaseException):
        return f"{name}({', '.join(base.__name__ for base in value.__bases__)}): exception"
    return name + signature_text(function_of(value))


def signature_text(value: Any) -> str:
    """A signature whose defaults are free of addresses in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))


def _own_classes(cls: type) -> list[type]:
    return [owner for owner in cls.__mro__ if owner.__module__.partition(".")[0] == "tfamp"]


def _is_property(value: Any) -> bool:
    return isinstance(value, property) or type(value).__name__ == "cached_property"


def function_of(value: Any) -> Any:
    """The function behind a property, class method or static method; others as they are."""
    if _is_property(value):
        return value.fget if isinstance(value, property) else value.func
    return value.__func__ if isinstance(value, classmethod | staticmethod) else value


def main() -> int:
    """Writes the snapshot."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    importlib.import_module("tfamp")
    SNAPSHOT.parent.mkdir(exist_ok=True)
    SNAPSHOT.write_text(describe(), encoding="utf-8")
    print(f"wrote {SNAPSHOT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
