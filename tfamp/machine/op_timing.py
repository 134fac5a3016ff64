"""Times single ops, by turns in each dtype they may have.

An op is timed in a graph and a session of its own, without TensorFlow's graph optimizer: on inputs
that are there already, several times one after the other where it is short, so that starting a
session counts little. Nothing else is in that session, and no random state is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tfamp.machine.timing import NO_KERNEL_ERRORS, some_values

# An op is repeated for about this long in a run, as often as this at most.
_RUN_SECONDS = 2e-4
_MOST_COPIES = 16
# Runs of each op, by turns: for about this long, and so many at least.
_SECONDS = 0.01
_LEAST_RUNS = 2

Run: TypeAlias = Callable[[], Any]


class Given(NamedTuple):
    """An input of an op.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        value: A serialized `TensorProto` where the value counts; else there are some values.
    """

    dtype: str
    shape: tuple[int, ...]
    value: bytes = b""


class OpWork(NamedTuple):
    """An op on inputs of some shapes: whatever is equal to it takes the same time on a machine.

    Attributes:
        node: A serialized `NodeDef` without name, inputs and device.
        inputs: Its inputs.
        device: The kind of device that it runs on.
    """

    node: bytes
    inputs: tuple[Given, ...]
    device: str

    def key(self) -> str:
        """Returns a short name for it, the same in every process."""
        return hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class Turns:
    """The works that are timed by turns: an op in each dtype it may have.

    Attributes:
        works: The works.
        estimate: About how many seconds one takes.
    """

    works: tuple[OpWork, ...]
    estimate: float


# Of each work its seconds, or None where there is no kernel that does it.
Times: TypeAlias = dict[OpWork, float | None]


def time_by_turns(turns: Turns) -> Times:
    """Times some works by turns: what else the machine does then slows all of them.

    Raises:
        tf.errors.OpError: They cannot be timed, for want of memory for instance.
    """
    copies = min(max(math.ceil(_RUN_SECONDS / max(turns.estimate, 1e-9)), 1), _MOST_COPIES)
    with _session(turns.works, copies) as (nothing, runs):
        start, *best = _best_times([nothing, *runs.values()])
    seconds = {work: max(each - start, 0.0) / copies for work, each in zip(runs, best, strict=True)}
    return {work: seconds.get(work) for work in turns.works}


def _best_times(runs: Sequence[Run]) -> list[float]:
    best = [math.inf] * len(runs)
    end = time.perf_counter() + _SECONDS * len(runs)
    for number in itertools.count(1):
        best = list(map(min, best, map(_seconds_of, runs)))
        if number >= _LEAST_RUNS and time.perf_counter() > end:
            break
    return best


def _seconds_of(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@contextlib.contextmanager
def _session(works: Sequence[OpWork], copies: int) -> Iterator[tuple[Run, dict[OpWork, Run]]]:
    """Gives what runs nothing, and what does each work that can be, as often as that."""
    with tf.Graph().as_default() as graph:
        nothing, added = tf.no_op(), {}
        for number, work in enumerate(works):
            with (
                tf.name_scope(f"work{number}") as scope,
                contextlib.suppress(ValueError, *NO_KERNEL_ERRORS),
            ):
                added[work] = _add(work, copies, scope)
        with tf.compat.v1.Session(graph=graph, config=_options()) as session:
            runs = {}
            for work, (begin, last) in added.items():
                with contextlib.suppress(*NO_KERNEL_ERRORS):
                    session.run(begin)
                    runs[work] = session.make_callable(last)
                    session.run(last)  # Tells whether there is a kernel.
            yield session.make_callable(nothing), runs


def _options() -> Any:
    options = tf.compat.v1.ConfigProto(
        # The first session of a process decides for all that come, and for eager mode.
        intra_op_parallelism_threads=tf.config.threading.get_intra_op_parallelism_threads(),
        inter_op_parallelism_threads=tf.config.threading.get_inter_op_parallelism_threads(),
    )
    options.gpu_options.allow_growth = True
    # Equal ops would become one, and those whose results nobody uses none.
    options.graph_options.rewrite_options.disable_meta_optimizer = True
    options.graph_options.optimizer_options.opt_level = -1
    # An op without a kernel is no obstacle to others.
    options.graph_options.place_pruned_graph = True
    return options


def _add(work: OpWork, copies: int, scope: str) -> tuple[list[Any], Any]:
    """Adds copies of an op to the current graph, each waiting for the one before.

    Returns what gives the inputs their values, and the last copy.
    """
    with tf.device(f"{work.device.upper()}:0"):
        begin, inputs = _inputs(work, scope)
    graph_def = tf.compat.v1.GraphDef()
    for number in range(copies):
        node = graph_def.node.add()
        node.ParseFromString(work.node)
        node.name, node.device = f"copy{number}", f"/device:{work.device.upper()}:0"
        node.input.extend(f"input{place}" for place in range(len(inputs)))
        node.input.extend([f"^copy{number - 1}"] if number else [])
    for place, tensor in enumerate(inputs):
        node = graph_def.node.add(name=f"input{place}", op="Placeholder")
        node.attr["dtype"].type = tensor.dtype.as_datatype_enum
    given = {f"input{place}": tensor for place, tensor in enumerate(inputs)}
    (last,) = tf.graph_util.import_graph_def(
        graph_def, given, return_elements=[f"copy{copies - 1}"], name="timed"
    )
    return begin, last


def _inputs(work: OpWork, scope: str) -> tuple[list[Any], list[Any]]:
    """Ops that give variables of the session values; and what is read from them, or constant."""
    raw: Any = tf.raw_ops
    begin: list[Any] = []
    tensors: list[Any] = []
    for number, given in enumerate(work.inputs):
        dtype = tf.as_dtype(given.dtype)
        if given.value:
            value = tf.cast(_constant(given.value), dtype)
        else:
            value = some_values(given.shape, dtype)
        if dtype.is_floating:
            name = f"{scope}{number}"
            handle = raw.VarHandleOp(dtype=dtype, shape=given.shape, shared_name=name)
            begin.append(raw.AssignVariableOp(resource=handle, value=value))
            value = raw.ReadVariableOp(resource=handle, dtype=dtype)
        tensors.append(value)
    return begin, tensors


def _constant(value: bytes) -> Any:
    proto = tf.make_tensor_proto(0)
    proto.ParseFromString(value)
    return tf.constant(tf.make_ndarray(proto))
