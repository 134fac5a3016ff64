"""Keeps the float32 state that a layer updates in its call, such as counters, in float32.

Inside the call of a layer that computes low, Keras reads float32 variables in the low dtype.
Under autocast they are read in float32, and take the dtype of low tensors they are combined with.
A sum that such a read begins stops where the next term is below half a unit of its last place:
a counter in bfloat16 stops at 256. So here

- `assign_add` and `assign_sub` add in the variable's dtype;
- variables of metrics are read in their own dtype, as outside of a layer;
- a variable whose next value is computed from its last one is read in its own dtype, wherever
  the layer still runs then and returns the same dtypes. Before the first call of a layer whose
  code calls `assign`, its `call` is traced into a graph that is thrown away, which shows this.
  For others a warning says what to do.

Variables that a layer assigns but does not compute from themselves, such as a codebook made
from sums, round once per step, as weights do, and are read low.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import TfampWarning
from tfamp.core.kinds import Layer, Method, Nest, Tensor, Variable
from tfamp.interop import keras_hooks, op_calls, tf_private
from tfamp.interop.patching import Patch, level_of_user

# Attributes of a variable: the kinds of calls that were traced for it, and the layer whose
# call could not be traced.
_TRACED_FOR = "_tfamp_traced_for"
_NOT_TRACED = "_tfamp_not_traced"
_WARNED = "_tfamp_warned_of_state"
# Variables of a layer that are looked at one by one, each by a trace.
_MOST_TRACES = 4


class _Thread(threading.local):
    is_tracing = False


_thread = _Thread()
_lock = threading.RLock()


# ---- Assignments -----------------------------------------------------------------------------


def assign_in_place(original: Method, variable: Variable, value: Any) -> Any:
    """Adds to a variable, or subtracts from it, in the dtype that it is stored in."""
    if not keras_hooks.reads_low(variable):
        return original(variable, value)
    with keras_hooks.reading_variables_in(None):
        return original(variable, value)


def assign(original: Method, variable: Variable, value: Any) -> Any:
    """Assigns a variable; warns of one that may have been computed from a low read of itself."""
    layer_name = getattr(variable, _NOT_TRACED, None)
    # Under autocast a value that is float32 was computed in float32.
    is_exact = keras_hooks.reads_float32() and not _is_low(value)
    if layer_name is not None and keras_hooks.reads_low(variable) and not is_exact:
        reason = "its call cannot run without effects, so tfamp cannot tell"
        _warn([variable], layer_name, reason)
    return original(variable, value)


def _is_low(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and keras.backend.standardize_dtype(dtype) in LOW_PRECISION


hooks = Patch(
    optional={
        "assign_in_place": "assign_add and assign_sub add in the dtype that a layer computes in.",
        "assign": "state whose updates are lost in low precision is not always warned of.",
    },
    assign_in_place=assign_in_place,
    assign=assign,
)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Returns a context in which variables are added to in the dtype that they are stored in."""
    with hooks.held():
        yield


# ---- Reads -----------------------------------------------------------------------------------


def settle(layer: Layer, call: Method, args: Any, kwargs: Any, *, same_dtypes: bool) -> None:
    """Makes a call of a layer read the state that it updates in float32.

    To be called in the scope of the call, before it.

    Args:
        layer: The layer, which is built.
        call: What computes its outputs.
        args: The arguments of the call.
        kwargs: The keyword arguments of the call.
        same_dtypes: Whether only reads that leave the dtypes of the outputs as they are.
    """
    if _thread.is_tracing:
        return
    for metric in keras_hooks.own_metrics(layer):
        for variable in metric.variables:
            keras_hooks.read_as_stored(variable)
    if keras_hooks.is_of_keras(layer) or not keras_hooks.runs_tensorflow():
        return
    owned = [v for v in keras_hooks.state_of(layer) if keras_hooks.reads_low(v)]
    if not owned:
        return
    # Another layer may update it in its own call.
    kind = id(layer), same_dtypes, _kind(args, kwargs)
    unknown = [v for v in owned if kind not in getattr(v, _TRACED_FOR, ())]
    if not unknown or not _may_assign(layer, call):
        return
    if any(isinstance(x, keras.KerasTensor) for x in keras.tree.flatten((args, kwargs))):
        return  # Keras traces the call itself, and comes here again.
    if not all(map(_can_be_used_twice, keras.tree.flatten((args, kwargs)))):
        for variable in unknown:
            setattr(variable, _NOT_TRACED, layer.name)
        return
    with _lock, _tracing():
        for variable in unknown:
            kinds: frozenset[Hashable] = getattr(variable, _TRACED_FOR, frozenset())
            setattr(variable, _TRACED_FOR, kinds | {kind})
        _settle(layer, unknown, lambda: call(*args, **kwargs), same_dtypes)


def _kind(args: Any, kwargs: Any) -> Hashable:
    """The arguments that decide which variables a call assigns, such as `training`."""
    return tuple(
        value if value is None or isinstance(value, bool | str) else ""
        for value in (*args, *(value for _, value in sorted(kwargs.items())))
    )


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    _thread.is_tracing = True
    try:
        yield
    finally:
        _thread.is_tracing = False


def _settle(
    layer: Layer, variables: Sequence[Variable], run: Callable[[], Nest], same_dtypes: bool
) -> None:
    low = _tried(layer, run, variables, read_exactly=())
    # A call that adds float32 values to its state runs with exact reads only.
    found = low or _tried(layer, run, variables, read_exactly=variables)
    if found is None:
        for variable in variables:
            setattr(variable, _NOT_TRACED, layer.name)
        return

    def works(read_exactly: Sequence[Variable]) -> bool:
        new = _tried(layer, run, variables, read_exactly)
        return new is not None and (not same_dtypes or new.dtypes == found.dtypes)

    exact: list[Variable] = []
    if found.updated and works(found.updated):
        exact = found.updated
    elif low is None:
        exact = list(variables)
    elif 1 < len(found.updated) <= _MOST_TRACES:
        for variable in found.updated:
            if works([*exact, variable]):
                exact.append(variable)
    for variable in exact:
        keras_hooks.read_as_stored(variable)
    left = [v for v in found.updated if not any(v is other for other in exact)]
    _warn(left, layer.name, "its call mixes them with low-precision tensors")


# ---- Layers whose call is traced -----------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _assigns(layer_class: type) -> bool:
    """Whether code of a user's class, or a function that it names, calls `assign`."""
    classes = [kind for kind in layer_class.__mro__ if not _is_of_library(kind.__module__)]
    return _calls_assign(value for kind in classes for value in vars(kind).values())


def _may_assign(layer: Layer, call: Method) -> bool:
    classes: set[Any] = {type(each) for each in keras_hooks.layers_of(layer)}
    is_called = any(_assigns(each) for each in classes)
    return is_called or _calls_assign([getattr(call, "__func__", call)])


def _calls_assign(values: Iterable[Any]) -> bool:
    pending, seen = list(values), set()
    while pending:
        value = pending.pop()
        value = getattr(value, "python_function", value)  # of a tf.function
        value = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
        value = inspect.unwrap(value) if callable(value) else value
        if id(value) in seen or not inspect.isfunction(value) or _is_of_library(value.__module__):
            continue
        seen.add(id(value))
        codes = [value.__code__]
        while codes:
            code = codes.pop()
            if "assign" in code.co_names:
                return True
            codes += filter(inspect.iscode, code.co_consts)
            pending += [value.__globals__.get(name) for name in code.co_names]
    return False


def _is_of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in {"keras", "tensorflow", "numpy", "builtins", "tfamp"}


def _can_be_used_twice(value: Any) -> bool:
    """Whether an argument of a call is the same after a trace; an iterator is not."""
    return not hasattr(value, "__next__")


_CONTAINERS = (list, dict, set)


@contextlib.contextmanager
def _unchanged(layer: Layer) -> Iterator[None]:
    """A context that restores the Python attributes of layers, and random states, after it."""
    owners: list[dict[str, Any]] = [each.__dict__ for each in keras_hooks.layers_of(layer)]
    attributes = [dict(owner) for owner in owners]
    # TensorFlow wraps containers that it tracks.
    values = [getattr(x, "__wrapped__", x) for owner in attributes for x in owner.values()]
    containers = [(x, _plain(x)) for x in values if issubclass(type(x), _CONTAINERS)]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for owner, before in zip(owners, attributes, strict=True):
            for name in set(owner) - set(before):
                del owner[name]
            owner.update(before)
        for value, content in containers:
            _refill(value, content)


def _plain(value: Any) -> Any:
    """The content of a container; Keras's own track what they are given."""
    kind = next(kind for kind in _CONTAINERS if isinstance(value, kind))
    return kind(value)


def _refill(value: Any, content: Any) -> None:
    # By the methods of the built-in classes: Keras's containers may be locked.
    if isinstance(value, list):
        list.__setitem__(value, slice(None), content)
    elif isinstance(value, dict):
        dict.clear(value)
        dict.update(value, content)
    else:
        set.clear(value)
        set.update(value, content)


# ---- Traces --------------------------------------------------------------------------------


class _Found(NamedTuple):
    """Facts that a trace of a call shows.

    Attributes:
        dtypes: The dtypes of its results.
        updated: The variables that are computed from themselves.
    """

    dtypes: list[str]
    updated: list[Variable]


def _tried(
    layer: Layer,
    run: Callable[[], Nest],
    variables: Sequence[Variable],
    read_exactly: Sequence[Variable],
) -> _Found | None:
    """Traces a call that reads some variables in the dtype they have; None if it cannot run."""
    with keras_hooks.read_as_stored_in(read_exactly), _unchanged(layer):
        try:
            return _traced(run, variables)
        except Exception:  # noqa: BLE001 - an op that cannot mix dtypes, or what users' code raises
            return None


def _traced(run: Callable[[], Nest], variables: Sequence[Variable]) -> _Found:
    """Traces a call into a graph of its own; assigns, adds and records nothing."""
    with op_calls.not_recording(), tf_private.scratch_graph():
        last = [tf_private.placeholder("float32", variable.shape) for variable in variables]
        mapping = list(zip(variables, last, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            # In a low scope they are casts of the placeholders.
            first = [scope.get_current_value(variable) for variable in variables]
            outputs = run()
        updated = [
            variable
            for variable, value in zip(variables, first, strict=True)
            if _is_made_of(scope.get_current_value(variable), value)
        ]
    dtypes = [
        keras.backend.standardize_dtype(x.dtype)
        for x in keras.tree.flatten(outputs)
        if keras.ops.is_tensor(x)
    ]
    return _Found(dtypes, updated)


def _is_made_of(value: Tensor, source: Tensor) -> bool:
    """Whether a value is another than a tensor, and computed from it by real numbers alone.

    Through integers, such as the index of the nearest code, a value has no rounding error.
    """
    if value is source:
        return False
    seen, pending = set(), [value]
    while pending:
        tensor = pending.pop()
        if tensor is source:
            return True
        if id(tensor) in seen or not tf.is_symbolic_tensor(tensor):
            continue
        seen.add(id(tensor))
        pending += [x for x in tensor.op.inputs if x.dtype.is_floating]
    return False


def _warn(variables: Sequence[Variable], layer_name: str, reason: str) -> None:
    new = [variable for variable in variables if not getattr(variable, _WARNED, False)]
    if not new:
        return
    for variable in new:
        setattr(variable, _WARNED, True)
    names = ", ".join(repr(variable.path) for variable in new[:3])
    names += f" and {len(new) - 3} others" if len(new) > 3 else ""
    dtype = keras_hooks.reading_dtype()
    warnings.warn(
        f"{layer_name} computes the next value of {names} from the last one, which its call uses "
        f"in {dtype}: {reason}. Small updates are lost there. Create such a variable with "
        "add_weight(..., autocast=False), which reads float32, and cast what it is computed with "
        'by keras.ops.cast(x, "float32"); or give the layer dtype="float32".',
        TfampWarning,
        stacklevel=level_of_user(),
    )
