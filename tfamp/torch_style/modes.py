"""The autocast in force in a context of a thread, its dtypes, and its cache of casts."""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION, float_format
from tfamp.core.kinds import Handle, Nest, Operand, Tensor, TFGraph
from tfamp.core.scopes import Scope, ScopeStack
from tfamp.graph.op_lists import OpLists
from tfamp.interop import keras_hooks, tf_private
from tfamp.interop.op_calls import may_record
from tfamp.interop.tf_private import place_in_trace

# Whether models at level O1 are called without its autocast.
_without_levels: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "tfamp_without_levels", default=False
)


@contextlib.contextmanager
def without_levels() -> Iterator[None]:
    """A context in which models at level O1 compute as their layers' policies say."""
    token = _without_levels.set(True)
    try:
        yield
    finally:
        _without_levels.reset(token)


def is_without_levels() -> bool:
    """Whether this code runs inside of `without_levels`."""
    return _without_levels.get()


# ---- Modes -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Mode:
    """One autocast in force."""

    dtype: str  # The low one.
    targets: dict[str, str]  # Op type -> dtype of float inputs. Others: the widest.
    cache_casts: bool
    key: Hashable  # Part of the key of a trace.

    @classmethod
    def of(cls, dtype: str, lists: OpLists, cache_casts: bool) -> Mode:
        """Returns the mode for a dtype and op lists."""
        targets = dict.fromkeys(lists.float32, "float32")
        targets |= dict.fromkeys(lists.low, dtype)
        return cls(dtype, targets, cache_casts, (dtype, lists))


@dataclass(eq=False)
class Block(Scope):
    """An autocast that was entered."""

    mode: Mode | None  # None casts nothing.
    casts: Casts  # Shared with the blocks around it.
    device: str  # Kind of TensorFlow's default device.
    guard: Scope | None = None  # The guard of kernels that was entered with it.


class _Modes(ScopeStack[Block]):
    """The autocasts in force."""

    def block(self, mode: Mode | None) -> Block:
        """Returns a block to enter here."""
        outer = self.innermost
        if outer is not None:
            return Block(mode, outer.casts, outer.device)
        # Read once: it costs as much as a small op, and is constant once ops have run.
        block = Block(mode, Casts(), tf_private.default_device_kind())
        # Tapes opened earlier bypass our hooks.
        block.casts.recording_changed()
        return block

    @property
    def current(self) -> Mode | None:
        """The mode in force; None if nothing is cast."""
        return getattr(self.innermost, "mode", None)

    @property
    def casts(self) -> Casts | None:
        """The cache of casts; None outside of every autocast."""
        return getattr(self.innermost, "casts", None)

    @contextlib.contextmanager
    def set_to(self, mode: Mode | None) -> Iterator[None]:
        """Puts a mode in force; None pauses the current one."""
        if mode is None and self.current is None:
            yield
            return
        block = self.block(mode)
        self.enter(block)
        try:
            yield
        finally:
            self.leave(block)


# ---- Cache of casts --------------------------------------------------------------------


_READ = "ReadVariableOp"
# Any other op that takes a variable's handle, such as a function call, may assign.
_GATHERS = {"ResourceGather", "ResourceGatherNd"}
_ONLY_READ = {_READ, "VariableShape", "VarIsInitializedOp", *_GATHERS}


_LastCast: TypeAlias = tuple[weakref.ref[Tensor], int, bool]


class Casts:
    """Cache of the casts of variables, per graph, for the blocks of one stack."""

    def __init__(self) -> None:
        # (handle of a variable, dtype) -> its last cast, weak as a tensor keeps its graph
        # alive, the place in the trace of the read that was cast, and whether tapes may
        # have recorded it.
        self._casts: weakref.WeakKeyDictionary[TFGraph, dict[tuple[str, str], _LastCast]]
        self._casts = weakref.WeakKeyDictionary()
        # Graph -> the last place in its trace at which a tape started to record or watch.
        self._recording: weakref.WeakKeyDictionary[TFGraph, int] = weakref.WeakKeyDictionary()

    def recording_changed(self) -> None:
        """Drops casts, as a tape that starts to record or watch has not recorded them."""
        if tf.executing_eagerly():
            return
        graph = tf.compat.v1.get_default_graph()
        if made := graph.get_operations():
            self._recording[graph] = place_in_trace(made[-1])
            self._casts.pop(graph, None)

    def of_traced(self, value: Operand, dtype: str, cast: Callable[[], Tensor]) -> Tensor:
        """Casts a tensor of a graph; reuses the cast of the same variable if it is valid."""
        if not _is_read_in_this_trace(value):
            return cast()
        handle, read = value.op.inputs[0], place_in_trace(value.op)
        if read <= self._recording.get(value.graph, -1):
            return cast()  # The tape has not recorded this read: its cast cannot be shared.
        casts = self._casts.setdefault(value.graph, {})
        # A tape that is open does not record in a `stop_recording`, as that of
        # `recompute_grad`.
        records = may_record()
        last, last_read, recorded = casts.get((handle.name, dtype), (None, read, records))
        result = None if last is None or records > recorded else last()
        if result is None or _may_be_assigned(handle, *sorted((last_read, read))):
            result = cast()
            casts[handle.name, dtype] = weakref.ref(result), read, records
        return result


def _may_be_assigned(handle: Handle, first: int, last: int) -> bool:
    """Whether an op between two places of a trace may assign the variable of a handle."""
    writers = (op for op in handle.consumers() if op.type not in _ONLY_READ)
    return any(first < place_in_trace(op) < last for op in writers)


def _is_read_in_this_trace(value: Operand) -> bool:
    return (
        not tf.executing_eagerly()
        and tf.is_tensor(value)
        and getattr(value, "graph", None) is tf.compat.v1.get_default_graph()
        and value.op.type == _READ
    )


current_modes = _Modes("tfamp_autocast")

# ---- Values ----------------------------------------------------------------------------

EDITABLE = frozenset({*LOW_PRECISION, "float32"})
# Attribute of the result of a cast by a user.
EXPLICIT = "_tfamp_explicit_cast"
# Attribute of a float32 tensor that is computed from variables of layers alone.
YIELDING = "_tfamp_yields"
ARRAYS = (np.ndarray, np.generic)
_NAMES = {tf.as_dtype(name): name for name in EDITABLE}  # DType.name is slow.


def is_lost(value: Operand, dtype: str) -> bool:
    """Whether a low dtype loses what numbers mean.

    Numbers such as -1e9 in a mask exceed half its range and are finite: half, as two masks may
    be added. A single number, such as an epsilon of 1e-15, becomes zero, or one, as the
    0.999999 that keeps `acos` from its end.
    """
    if dtype not in LOW_PRECISION or not isinstance(value, (*ARRAYS, int, float)):
        return False
    magnitudes = np.abs(np.asarray(value, "float64"))
    limits = float_format(dtype)
    if np.any((magnitudes > limits.max / 2) & np.isfinite(magnitudes)):
        return True
    if magnitudes.ndim or magnitudes in (0, 1):
        return False
    return bool(magnitudes.astype(tf.as_dtype(dtype).as_numpy_dtype) in (0, 1))


def held_dtype(value: Operand) -> str:
    """The name of a value's dtype; "" for numbers, lists and None."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return ""
    if isinstance(dtype, tf.DType):
        return _NAMES.get(dtype) or dtype.base_dtype.name
    return str(getattr(dtype, "name", dtype))


def read(value: Operand) -> Operand:
    """Reads a variable of a layer: in float32, and yielding to low tensors."""
    if held_dtype(value) != "float32" or not isinstance(value, (tf.Variable, tf.Tensor)):
        return value
    with current_modes.set_to(None):
        # A tensor is the value in a `keras.StatelessScope`, whose other uses do not yield.
        tensor = value.value() if isinstance(value, tf.Variable) else tf.identity(value)
    mark_yielding(tensor)
    return tensor


def mark_yielding(values: Nest) -> None:
    """Marks the float32 tensors among values, such as what an op returned, as yielding."""
    for value in values if isinstance(values, (list, tuple)) else (values,):
        if isinstance(value, (list, tuple)):
            mark_yielding(value)
        elif isinstance(value, tf.Tensor) and value.dtype == tf.float32:
            setattr(value, YIELDING, True)


def yields(value: Operand) -> bool:
    """Whether a float32 value takes the low dtype of the tensors that an op combines it with.

    It does if it is computed from variables of layers alone: biases and scales do not make an
    op on activations slower. By itself it stays float32.
    """
    if YIELDING in getattr(value, "__dict__", ()):  # getattr of a tensor is slow.
        return True
    return isinstance(value, keras.Variable) and keras_hooks.reads_low(value)


def yielded_dtype(value: Operand, mode: Mode) -> str:
    """The name of the dtype that a value has in a choice among dtypes; "" as `held_dtype`."""
    return mode.dtype if yields(value) else held_dtype(value)


def widest(dtypes: set[str]) -> str:
    """The narrowest dtype that holds the values of all these."""
    return next(iter(dtypes)) if len(dtypes) == 1 else "float32"


def recast(value: Operand, dtype: str) -> Operand:
    """Casts float16, bfloat16 and float32 values to another of these; leaves others alone."""
    held = held_dtype(value)
    if held not in EDITABLE or dtype not in EDITABLE or isinstance(value, tf.TypeSpec):
        return value
    if held == dtype:
        return value
    if isinstance(value, ARRAYS):
        return value.astype(tf.as_dtype(dtype).as_numpy_dtype)
    mode = current_modes.current
    casts = current_modes.casts if mode is not None and mode.cache_casts else None
    with current_modes.set_to(None):
        if casts is None or tf.executing_eagerly():
            return tf.cast(value, dtype)
        is_variable = isinstance(value, (tf.Variable, keras.Variable))
        tensor = tf.convert_to_tensor(value) if is_variable else value
        return casts.of_traced(tensor, dtype, lambda: tf.cast(tensor, dtype))
