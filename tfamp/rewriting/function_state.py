"""The state that calls of a function change: its variables, and the random generators."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.graph.observe import held_variables, put_back
from tfamp.interop import keras_hooks, tf_private
from tfamp.rewriting.pipeline import all_nodes

_VARIABLE = "tensorflow::Var"
_TABLE = "tensorflow::lookup::LookupInterface"
_TABLE_WRITES = ("LookupTableImportV2", "LookupTableInsertV2", "LookupTableRemoveV2")


@dataclass(frozen=True)
class RandomStates:
    """The states of the random generators that Python code draws from, also while it is traced."""

    python: Any
    numpy: Any
    operations: Any
    keras_generator: Any
    keras_state: Sequence[tuple[Any, Any]]

    @classmethod
    def now(cls) -> RandomStates:
        """Returns the states of Python, NumPy, TensorFlow's eager ops and Keras."""
        seeds, generator = tf_private.operation_seeds(), keras_hooks.global_seed_generator()
        handles = [] if generator is None else [keras_hooks.native(generator.state).handle]
        operations = None if seeds is None else seeds.getstate()
        held = held_variables(handles)
        return cls(random.getstate(), np.random.get_state(), operations, generator, held)

    def put_back(self) -> None:
        """Gives the generators these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        if self.operations is not None:
            tf_private.operation_seeds().setstate(self.operations)
        keras_hooks.set_global_seed_generator(self.keras_generator)
        put_back(self.keras_state)


@contextlib.contextmanager
def kept_random_states() -> Iterator[RandomStates]:
    """A context that restores the random states at its end."""
    randoms = RandomStates.now()
    try:
        yield randoms
    finally:
        randoms.put_back()


def variables_of(traces: Sequence[Any], args: Any) -> list[Any]:
    """Returns the handles of all variables that concrete functions get, arguments included.

    State of Python that a graph calls (`tf.py_function`), and of files, is unknown.

    Raises:
        ValueError: The functions may change the state of something else; it says what to do.
    """
    leaves = [leaf for leaf in tf.nest.flatten(args, expand_composites=True) if tf.is_tensor(leaf)]
    given = [each for leaf in leaves for each in _tensors(leaf)]
    captured = [each for trace in traces for each in trace.captured_inputs]
    found = []
    for each in {id(each): each for each in (*given, *captured)}.values():
        kind = tf_private.resource_kind(each) if each.dtype == tf.resource else None
        if kind == _VARIABLE:
            found.append(each)
        elif kind == _TABLE:
            _check_tables_are_read(traces)
        elif kind is not None or each.dtype == tf.variant:
            what = f"a resource of type {kind or 'unknown'!r}"
            raise _cannot_restore("a dataset" if each.dtype == tf.variant else what)
    return found


def _tensors(leaf: Any) -> list[Any]:
    """A tensor, or the handles of a variable: one for each replica that has its own."""
    if isinstance(leaf, tf.distribute.DistributedValues):
        return [each.handle for each in leaf.values]
    return [leaf.handle if isinstance(leaf, tf.Variable) else leaf]


def _check_tables_are_read(traces: Iterable[Any]) -> None:
    ops = {node.op for trace in traces for node in all_nodes(trace.graph.as_graph_def())}
    if written := ops.intersection(_TABLE_WRITES):
        raise _cannot_restore(f"a lookup table ({', '.join(sorted(written))})")


def _cannot_restore(what: str) -> ValueError:
    return ValueError(
        f"The function uses {what}, whose state cannot be restored after a run. Give a function "
        "that takes the tensors as arguments, such as next(iterator), and leaves the rest out."
    )


def random_ops(trace: Any) -> list[tuple[str, int, int]]:
    """Returns type and seeds of the ops of a concrete function that hold a random state themselves.

    The state belongs to the trace and cannot be reset; seeds (0, 0) differ in each trace.
    """
    nodes = all_nodes(trace.graph.as_graph_def())
    return sorted(
        (node.op, node.attr["seed"].i, node.attr["seed2"].i)
        for node in nodes
        if "seed" in node.attr and "seed2" in node.attr
    )
