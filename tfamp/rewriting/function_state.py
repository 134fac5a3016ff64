"""What a call of a function changes: variables, iterators and random states, noted and put back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.graph.observe import held_variables, put_back
from tfamp.interop import keras_hooks, tf_private
from tfamp.rewriting.pipeline import all_nodes

_VARIABLE = "tensorflow::Var"
_ITERATOR = "tensorflow::data::IteratorResource"
_TABLE = "tensorflow::lookup::LookupInterface"
# Datasets that note in themselves how often they were iterated.
_RESHUFFLES = "reshuffle_each_iteration"
_TABLE_WRITES = ("LookupTableImportV2", "LookupTableInsertV2", "LookupTableRemoveV2")
# Of what serializes pipelines: an error where a part of the pipeline has a state that is not saved.
_FAIL = 2


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
        """Notes the states: Python's, NumPy's, those of TensorFlow's eager ops and of Keras."""
        seeds, generator = tf_private.operation_seeds(), keras_hooks.global_seed_generator()
        handles = [] if generator is None else [keras_hooks.native(generator.state).handle]
        operations = None if seeds is None else seeds.getstate()
        held = held_variables(handles)
        return cls(random.getstate(), np.random.get_state(), operations, generator, held)

    def keras_has_another(self) -> bool:
        """Whether Keras's generator of this thread is another one than it was, as the first."""
        return keras_hooks.global_seed_generator() is not self.keras_generator

    def put_back(self) -> None:
        """Gives the generators the states that were noted."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        if self.operations is not None:
            tf_private.operation_seeds().setstate(self.operations)
        keras_hooks.set_global_seed_generator(self.keras_generator)
        put_back(self.keras_state)


@contextlib.contextmanager
def kept_random_states() -> Iterator[RandomStates]:
    """Gives the states that there are, and puts them back in the end."""
    randoms = RandomStates.now()
    try:
        yield randoms
    finally:
        to_the_end(randoms.put_back)


@dataclass(frozen=True)
class FunctionState:
    """What calls of some traces change, as it was when it was noted.

    Not known is what Python does that a graph calls (`tf.py_function`), and what goes to files.
    """

    variables: Sequence[tuple[Any, Any]]
    iterators: Sequence[tuple[Any, Any]]
    randoms: RandomStates

    @classmethod
    def of(cls, traces: Sequence[Any], args: Any, randoms: RandomStates) -> FunctionState:
        """Notes the state that concrete functions, called with some arguments, may change.

        Raises:
            ValueError: There is something that could not be put back, and what to do instead.
        """
        values = _values(traces, args)
        for each in values:
            if each.dtype == tf.variant:
                _check_no_dataset_reshuffles(each)
        handles = [each for each in values if each.dtype == tf.resource]
        kinds: dict[str, list[Any]] = {_VARIABLE: [], _ITERATOR: [], _TABLE: []}
        for handle in handles:
            kind = tf_private.resource_kind(handle)
            if kind not in kinds:
                raise ValueError(_cannot_put_back(f"a resource of type {kind or 'unknown'!r}"))
            kinds[kind].append(handle)
        if kinds[_TABLE]:
            _check_tables_are_read(traces)
        iterators = [(handle, _saved_iterator(handle)) for handle in kinds[_ITERATOR]]
        return cls(held_variables(kinds[_VARIABLE]), iterators, randoms)

    def put_back(self) -> None:
        """Puts all of it back; it can be called again and again."""
        put_back(self.variables)
        for handle, saved in self.iterators:
            tf.raw_ops.DeserializeIterator(resource_handle=handle, serialized=saved)
        self.randoms.put_back()


def random_ops(trace: Any) -> list[tuple[str, int, int]]:
    """Returns type and seeds of the ops of a concrete function that hold a random state themselves.

    It is of the trace, and nothing sets it back; without a seed, (0, 0), they differ in each trace.
    """
    nodes = all_nodes(trace.graph.as_graph_def())
    return sorted(
        (node.op, node.attr["seed"].i, node.attr["seed2"].i)
        for node in nodes
        if "seed" in node.attr and "seed2" in node.attr
    )


def to_the_end(put_back: Callable[[], None]) -> None:
    """Puts something back, and begins anew where Ctrl-C interrupts it; raises that afterwards."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            put_back()
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _values(traces: Iterable[Any], args: Any) -> list[Any]:
    """The tensors and resources that traces get, from their arguments and from around them."""
    leaves = [leaf for leaf in tf.nest.flatten(args, expand_composites=True) if tf.is_tensor(leaf)]
    given = [each for leaf in leaves for each in _resources(leaf)]
    captured = [each for trace in traces for each in trace.captured_inputs]
    return list({id(each): each for each in (*given, *captured)}.values())


def _resources(leaf: Any) -> list[Any]:
    """A tensor, or what a variable is in the graph: one for each replica that has its own."""
    if isinstance(leaf, tf.distribute.DistributedValues):
        return [each.handle for each in leaf.values]
    return [leaf.handle if isinstance(leaf, tf.Variable) else leaf]


def _check_no_dataset_reshuffles(variant: Any) -> None:
    """Raises a ValueError for a dataset that another iteration changes."""
    try:
        graph = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=_FAIL)
    except tf.errors.InvalidArgumentError:  # A list of tensors, for instance: a value.
        return
    except tf.errors.OpError as error:
        cause = error.message.partition("\n")[0]
        raise ValueError(_cannot_put_back(f"a dataset ({cause})")) from error
    nodes = all_nodes(tf.compat.v1.GraphDef.FromString(graph.numpy()))
    if any(node.attr[_RESHUFFLES].b for node in nodes if _RESHUFFLES in node.attr):
        what = "the order of a dataset, whose shuffle() has reshuffle_each_iteration=True"
        raise ValueError(_cannot_put_back(what))


def _check_tables_are_read(traces: Iterable[Any]) -> None:
    ops = {node.op for trace in traces for node in all_nodes(trace.graph.as_graph_def())}
    if written := ops.intersection(_TABLE_WRITES):
        raise ValueError(_cannot_put_back(f"a lookup table ({', '.join(sorted(written))})"))


def _saved_iterator(handle: Any) -> Any:
    try:
        return tf.raw_ops.SerializeIterator(resource_handle=handle, external_state_policy=_FAIL)
    except tf.errors.OpError as error:
        cause = error.message.partition("\n")[0]
        raise ValueError(_cannot_put_back(f"a dataset's iterator ({cause})")) from error


def _cannot_put_back(what: str) -> str:
    return (
        f"The function changes {what}, whose state cannot be put back after it was run. Give a "
        "function that takes the tensors as arguments, such as next(iterator), and leaves the rest "
        "out."
    )
