"""`op_counts`: counts the ops of a function, model or train step by type and dtype."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES
from tfamp.core.kinds import Trace
from tfamp.graph.index import build_indexes
from tfamp.planning.structures import ARGUMENT, MAIN_GRAPH, RESULT, GraphIndex, op_types
from tfamp.training.scaling import build_optimizer

# Ops that only hold or pass on a value, or call functions, which are counted instead.
_NOT_COUNTED = {ARGUMENT, RESULT} | op_types("""
    Case Const Identity IdentityN If NoOp PartitionedCall Placeholder StatefulPartitionedCall
    StatelessCase StatelessIf StatelessWhile SymbolicGradient While
""")
_STEP_ARGUMENTS = (2, 3)


def op_counts(fn: Any, /, *args: Any, **kwargs: Any) -> dict[str, dict[str, int]]:
    """Counts the ops of a function, by op type and dtype.

    The function is traced, not run: no variable changes, but variables that a first call
    creates, of a layer or an optimizer, are created. Ops inside loops, branches and nested
    functions count too: the body of a loop and every branch once, and a function once for each
    call. Arguments, constants, identities and the calls themselves are left out.

    An op counts for the dtype of its first float output; without one, as in a comparison or an
    assignment, of its first float input, then of its first tensor. A Cast therefore counts for
    its result's dtype. This corresponds to Paddle's operator statistics.

    Args:
        fn: What to count: a Python function or `tf.function`, also one that holds a tape and an
            optimizer; a concrete function, which needs no arguments; what `tfamp.rewrite`
            returns; a Keras layer or model. A compiled model with `x` and `y`, and perhaps
            sample weights, as its only arguments stands for its train step, on all replicas;
            any other call of a model for its forward pass.
        *args: Arguments of a call: tensors, arrays or `tf.TensorSpec`s.
        **kwargs: The same by name.

    Returns:
        Op type -> dtype's name -> number, sorted by op type.

    Raises:
        TypeError: `fn` cannot be called.

    Example:
        >>> import tensorflow as tf, tfamp
        >>> def layer(x):
        ...     return tf.nn.relu(tf.matmul(x, x))
        >>> op_counts(layer, tf.ones((2, 2)))["MatMul"]
        {'float32': 1}
        >>> op_counts(tfamp.rewrite(layer, dtype="bfloat16"), tf.ones((2, 2)))["MatMul"]
        {'bfloat16': 1}
    """
    graph = _traced(fn, args, kwargs).graph.as_graph_def()
    indexes = {index.scope: index for index in build_indexes(graph)}
    counts = Counter(_computed(MAIN_GRAPH, indexes))
    by_op: dict[str, dict[str, int]] = {}
    for op, dtype in sorted(counts):
        by_op.setdefault(op, {})[dtype] = counts[op, dtype]
    return by_op


def _traced(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trace:
    if isinstance(fn, tf.types.experimental.ConcreteFunction):
        return fn
    if isinstance(fn, tf.types.experimental.PolymorphicFunction):
        return fn.get_concrete_function(*args, **kwargs)
    if not callable(fn):
        raise TypeError(
            "op_counts takes a Python function, a tf.function, a concrete function, a "
            f"tfamp.rewrite or a Keras model; got {type(fn).__name__}."
        )
    compiled = getattr(fn, "compiled", False) is True and hasattr(fn, "train_step")
    if compiled and len(args) in _STEP_ARGUMENTS and not kwargs:
        build_optimizer(fn)  # Outside the trace, which would leave it half built.
        run = functools.partial(fn.distribute_strategy.run, fn.train_step)
        return tf.function(lambda *data: run(args=(data,))).get_concrete_function(*args)
    # A bound method would be traced once and its trace kept; a new function is dropped at the
    # end.
    return tf.function(lambda *a, **k: fn(*a, **k)).get_concrete_function(*args, **kwargs)


def _computed(scope: str, indexes: Mapping[str, GraphIndex]) -> Iterator[tuple[str, str]]:
    """Yields type and dtype of every op; ops of a function count once for each call."""
    index = indexes[scope]
    dtypes = defaultdict[int, list[str]](list)
    # Outputs before inputs.
    for edge in sorted(index.edges, key=lambda edge: edge.port):
        dtypes[index.slots[edge.source].node].append(index.slots[edge.source].dtype)
    for edge in sorted(index.edges, key=lambda edge: edge.input):
        dtypes[index.slots[edge.target].node].append(index.slots[edge.target].dtype)
    for position, node in enumerate(index.nodes):
        called = [name for _, name in node.calls if name in indexes]
        for name in called:
            yield from _computed(name, indexes)
        slots = (index.slots[slot].dtype for slot in node.slots)
        computed_in = [*dtypes[position], *slots]
        if computed_in and node.op not in _NOT_COUNTED and node.op not in called:
            floats = (dtype for dtype in computed_in if dtype in FLOAT_DTYPES)
            yield node.op, next(floats, computed_in[0])
