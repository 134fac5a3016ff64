"""State that calls of a function change: variables and random generators."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfamp.core.kinds import Handle, Nest, Op, Trace
from tfamp.graph.graph import Graph
from tfamp.graph.observe import held_variables, put_back
from tfamp.interop import keras_hooks, tf_private

# In the names of TensorFlow's ops for convolutions over two axes, gradients included. Those of
# sequences have an axis of length 1.
_CONVOLVES = "Conv2D"
_VARIABLE = "tensorflow::Var"
_TABLE = "tensorflow::lookup::LookupInterface"
_TABLE_WRITES = ("LookupTableImportV2", "LookupTableInsertV2", "LookupTableRemoveV2")


@contextlib.contextmanager
def kept_random_states() -> Iterator[Callable[[], None]]:
    """A context that restores the random generators that Python code may use in a trace.

    These are Python's, NumPy's, TensorFlow's for eager ops, and Keras's. Yields a function that
    restores them earlier.
    """
    seeds, generator = tf_private.operation_seeds(), keras_hooks.global_seed_generator()
    handles = [] if generator is None else [keras_hooks.native(generator.state).handle]
    python, numpy, keras = random.getstate(), np.random.get_state(), held_variables(handles)
    operations = None if seeds is None else seeds.getstate()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        if operations is not None:
            tf_private.operation_seeds().setstate(operations)
        keras_hooks.set_global_seed_generator(generator)
        put_back(keras)

    try:
        yield restore
    finally:
        restore()


def variables_of(traces: Sequence[Trace], args: Nest) -> list[Handle]:
    """Returns the handles of all variables that concrete functions capture or are given.

    State behind `tf.py_function` and in files is not covered.

    Raises:
        ValueError: The functions may change other state; the message says what to do.
    """
    leaves = filter(tf.is_tensor, tf.nest.flatten(args, expand_composites=True))
    passed = [leaf.handle if isinstance(leaf, tf.Variable) else leaf for leaf in leaves]
    captured = [tensor for trace in traces for tensor in trace.captured_inputs]
    variables = []
    for tensor in {id(tensor): tensor for tensor in (*passed, *captured)}.values():
        kind = tf_private.resource_kind(tensor) if tensor.dtype == tf.resource else None
        if kind == _VARIABLE:
            variables.append(tensor)
        elif kind == _TABLE:
            _check_tables_are_read(traces)
        elif kind is not None or tensor.dtype == tf.variant:
            what = f"a resource of type {kind or 'unknown'!r}"
            raise _cannot_restore("a dataset" if tensor.dtype == tf.variant else what)
    return variables


def _check_tables_are_read(traces: Iterable[Trace]) -> None:
    if written := set[str]().union(*map(ops_of, traces)).intersection(_TABLE_WRITES):
        raise _cannot_restore(f"a lookup table ({', '.join(sorted(written))})")


def _cannot_restore(what: str) -> ValueError:
    return ValueError(
        f"The function uses {what}, whose state cannot be restored after a run. Give a "
        "function that takes the tensors as arguments, such as next(iterator), and leaves the "
        "rest out."
    )


def ops_of(trace: Trace) -> set[str]:
    """Returns the op types in the graph of a concrete function and in called functions."""
    return set(op_counts(trace))


def op_counts(trace: Trace) -> Counter[str]:
    """Counts the ops of each type in the graph of a concrete function and called functions."""
    return Counter(node.op for node in Graph(trace.graph.as_graph_def()).nodes)


def convolutions_along_one_axis(trace: Trace) -> int:
    """Counts the convolutions in the graph of a concrete function whose filters have one axis."""
    return sum(_has_one_axis(op) for op in trace.graph.get_operations() if _CONVOLVES in op.type)


def _has_one_axis(convolution: Op) -> bool:
    makes_filter = convolution.type.endswith("Filter")
    shape = (convolution.outputs[0] if makes_filter else convolution.inputs[1]).shape
    return shape.rank is not None and list(shape[:2]).count(1) == 1


def drawing_ops(traces: Iterable[Trace]) -> tuple[str, ...]:
    """Returns the types of ops that draw random numbers, which XLA draws by other algorithms."""
    found = {op for trace in traces for op in ops_of(trace) if "Random" in op}
    return tuple(sorted(op for op in found if "RandomGet" not in op))


def random_ops(trace: Trace) -> list[tuple[str, int, int]]:
    """Returns the ops of a concrete function that keep a random state, which is never restored.

    Each is its type and its two seeds, sorted; with seeds of 0 it draws other numbers in each
    run.
    """
    nodes = Graph(trace.graph.as_graph_def()).nodes
    return sorted(
        (node.op, node.attr["seed"].i, node.attr["seed2"].i)
        for node in nodes
        # Without a dropout, recurrent layers of cuDNN draw nothing.
        if "seed2" in node.attr and ("dropout" not in node.attr or node.attr["dropout"].f)
    )


def unseeded_ops(traces: Sequence[Trace]) -> tuple[str, ...]:
    """Returns the types of random ops that draw other numbers in each run or trace, sorted."""
    first, *others = map(random_ops, traces)
    unseeded = {op for op, *seeds in first if not any(seeds)}
    for other in others:
        unseeded |= {op for op, *_ in set(other) - set(first)}
    return tuple(sorted(unseeded))
