"""Times single ops, by turns in each dtype they may have.

An op is timed in a graph and a session of its own, without TensorFlow's graph optimizer: on inputs
that are there already, several times one after the other where it is short, so that starting a
session counts little. Nothing else is in that session, and no random state is used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tfamp.machine.timing import NO_KERNEL_ERRORS, some_values

# An op is repeated for about this long in a run, as often as this at most.
_RUN_SECONDS = 3e-4
_MOST_COPIES = 64
# Runs of an op: so many at least, and more until the two best times are this near to each other.
_LEAST_RUNS = 5
_MOST_RUNS = 40
_AGREEMENT = 1.02
# Of a long op fewer, once they have taken this long.
_LONG_SECONDS = 0.15
_LEAST_LONG_RUNS = 3
_EMPTY_RUNS = 20


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
    with contextlib.ExitStack() as stack:
        runs: dict[OpWork, Callable[[], Any] | None] = {}
        for work in turns.works:
            try:
                runs[work] = stack.enter_context(_prepared(work, copies))
            except (ValueError, *NO_KERNEL_ERRORS):
                runs[work] = None
        able = {work: run for work, run in runs.items() if run is not None}
        seconds = dict(zip(able, _best_times(list(able.values())), strict=True))
    start = _session_seconds()
    return {
        work: max(seconds[work] - start, 0.0) / copies if work in seconds else None for work in runs
    }


@functools.cache
def _session_seconds() -> float:
    """What a session takes to run nothing."""
    with _prepared(None, 0) as run:
        return min(_seconds_of(run) for _ in range(_EMPTY_RUNS))


def _best_times(runs: Sequence[Callable[[], Any]]) -> list[float]:
    times: list[list[float]] = [[] for _ in runs]
    begin = time.perf_counter()
    while runs and not _is_enough(times, time.perf_counter() - begin):
        for run, own in zip(runs, times, strict=True):
            own.append(_seconds_of(run))
    return [min(own) for own in times]


def _is_enough(times: Sequence[list[float]], taken: float) -> bool:
    count = len(times[0])
    if count < (_LEAST_LONG_RUNS if taken > _LONG_SECONDS else _LEAST_RUNS):
        return False
    return count >= _MOST_RUNS or taken > _LONG_SECONDS or all(map(_agree, times))


def _agree(times: list[float]) -> bool:
    best, second = sorted(times)[:2]
    return second <= _AGREEMENT * best


def _seconds_of(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@contextlib.contextmanager
def _prepared(work: OpWork | None, copies: int) -> Iterator[Callable[[], Any]]:
    """Gives what does a work, as often as that, one after the other; None is no work at all."""
    with tf.Graph().as_default() as graph:
        begin, last = [], tf.no_op().name
        if work is not None:
            with tf.device(f"{work.device.upper()}:0"):
                begin, inputs = _variables(work)
            last = _chain(work, inputs, copies)
        with tf.compat.v1.Session(graph=graph, config=_options()) as session:
            session.run(begin)
            run = session.make_callable(graph.get_operation_by_name(last))
            run()  # The first one makes kernels.
            yield run


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
    return options


def _variables(work: OpWork) -> tuple[list[Any], list[str]]:
    """Ops that give variables of the session values, and the names of what reads these."""
    raw: Any = tf.raw_ops
    begin, names = [], []
    for number, given in enumerate(work.inputs):
        dtype = tf.as_dtype(given.dtype)
        if not dtype.is_floating:
            value = tf.make_ndarray(_tensor(given.value)) if given.value else None
            tensor = tf.zeros(given.shape, dtype) if value is None else tf.constant(value, dtype)
            names.append(tensor.op.name)
            continue
        if given.value:
            value = tf.cast(tf.make_ndarray(_tensor(given.value)), dtype)
        else:
            value = some_values(given.shape, given.dtype)
        handle = raw.VarHandleOp(dtype=dtype, shape=given.shape, shared_name=f"input{number}")
        begin.append(raw.AssignVariableOp(resource=handle, value=value))
        names.append(raw.ReadVariableOp(resource=handle, dtype=dtype).op.name)
    return begin, names


def _tensor(value: bytes) -> Any:
    proto = tf.make_tensor_proto(0)
    proto.ParseFromString(value)
    return proto


def _chain(work: OpWork, inputs: Sequence[str], copies: int) -> str:
    """Adds copies of an op to the current graph, each waiting for the one before."""
    graph_def = tf.compat.v1.GraphDef()
    for number in range(copies):
        node = graph_def.node.add()
        node.ParseFromString(work.node)
        node.name, node.device = f"work{number}", f"/device:{work.device.upper()}:0"
        node.input.extend(f"given{place}" for place in range(len(inputs)))
        node.input.extend([f"^work{number - 1}"] if number else [])
    graph = tf.compat.v1.get_default_graph()
    given = {
        f"given{place}": graph.get_tensor_by_name(f"{name}:0") for place, name in enumerate(inputs)
    }
    for name, tensor in given.items():
        node = graph_def.node.add(name=name, op="Placeholder")
        node.attr["dtype"].type = tensor.dtype.as_datatype_enum
    tf.graph_util.import_graph_def(graph_def, given, name="timed")
    return f"timed/work{copies - 1}"
