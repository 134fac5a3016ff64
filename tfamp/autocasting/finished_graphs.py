"""A warning for functions that autocast cannot reach: their graphs were finished before."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfamp.core.errors import TfampWarning
from tfamp.interop import library_code

# What has been looked at, by graph: the functions themselves cannot all be referred to weakly.
_seen: weakref.WeakSet[Any] = weakref.WeakSet()


def warn_of_finished_graph(function: Any, dtype: str, targets: Mapping[str, str]) -> None:
    """Warns, once for each graph, if ops that autocast would lower stay float32.

    Args:
        function: A `ConcreteFunction` that is being called.
        dtype: The low dtype of the autocast in force.
        targets: Op type -> the dtype it casts inputs to.
    """
    if function.graph in _seen:
        return
    _seen.add(function.graph)
    float32 = _float32_ops(function.graph, dtype, targets)
    if not float32:
        return
    ops = ", ".join(f"{count} {op}" for op, count in sorted(float32.items()))
    name = function.name.decode() if isinstance(function.name, bytes) else function.name
    warnings.warn(
        f"{name} is a finished graph, a ConcreteFunction or one from a SavedModel: autocast leaves "
        f"it as it is, with {ops} in float32. Call the tf.function it comes from, which is traced "
        f"anew for autocast, or tfamp.rewrite(function, dtype={dtype!r}).",
        TfampWarning,
        stacklevel=_level_of_user(),
    )


def _float32_ops(graph: Any, dtype: str, targets: Mapping[str, str]) -> Counter[str]:
    """Counts float32 ops on the low list; none where any op has the low dtype: that was chosen."""
    graph_def = graph.as_graph_def()
    low, found = tf.as_dtype(dtype).as_datatype_enum, Counter[str]()
    bodies = [graph_def.node, *(function.node_def for function in graph_def.library.function)]
    for node in (node for body in bodies for node in body):
        if targets.get(node.op) != dtype or "T" not in node.attr:
            continue
        if node.attr["T"].type == low:
            return Counter()
        found[node.op] += node.attr["T"].type == tf.float32.as_datatype_enum
    return +found


def _level_of_user() -> int:
    """The stack level, seen from the caller, of the first frame that is no library's."""
    level, frame = 1, sys._getframe(1)
    skipped = ("tfamp.", *library_code.LIBRARIES)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(skipped):
        level, frame = level + 1, frame.f_back
    return level
