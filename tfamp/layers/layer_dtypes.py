"""The compute dtypes of layers: setting them, which ones a policy manages, and float32 outputs.

This is the one place where layers get another dtype. The policy `int8_from_mixed_bfloat16` is of a
layer that Keras quantized to int8 and that computes in bfloat16; a plain policy on such a layer
would reinterpret its integers as numbers. Callers therefore give only the float part, the *float
policy*, and a quantized layer gets the *counterpart*: the same quantization from that policy.

A layer whose dtype came from a mixed policy is *managed*. The layers of a Functional (a Sequential
has one inside) have roles:

- Managed layers that make its outputs are *raised* to float32. If one cannot be raised, a linear
  Activation of dtype float32, the *cast*, is appended to the model instead.
- A layer that becomes an interior layer of another model gets its mixed policy back, and a model
  that thereby lost its float32 output gets the cast.
- A model that becomes part of another one has no outputs any more: its output layers get their
  policy back, and its casts are removed.

Every layer ends up with a plain Keras policy, so saved models do not need tfamp. `model_calls` does
the same while a model runs, for subclassed models and models called by other layers.
"""

from __future__ import annotations

import copy
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

import keras
import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES, LOW_PRECISION
from tfamp.interop import keras_hooks
from tfamp.interop.keras_hooks import copy_annotations
from tfamp.interop.patching import wrap_method
from tfamp.policy import Policy

# Attribute of a low tensor: the float32 tensor that it was cast from.
_EXACT = "_tfamp_float32"
# The attribute of a layer, model or optimizer with all that tfamp stores about it.
_RECORD = "_tfamp_record"
_Value = TypeVar("_Value")
_numbers = itertools.count()


class WeakMap(Generic[_Value]):
    """One field of the record that tfamp stores on an object, and so no longer than that lives.

    Keras neither tracks nor saves the values. By identity, as users' layers may define `__eq__`.
    """

    def __init__(self) -> None:
        self._number = next(_numbers)

    def get(self, key: Any) -> _Value | None:
        """Returns the value of an object, None if it has none."""
        value: _Value | None = _record_of(key).get(self._number)
        return value

    def set(self, key: Any, value: _Value | None) -> None:
        """Gives an object a value, instead of the one it has; None removes it."""
        restore(key, {**_record_of(key), self._number: value})


def _record_of(key: Any) -> dict[int, Any]:
    record: dict[int, Any] = getattr(key, "__dict__", {}).get(_RECORD, {})
    return record


def snapshot(key: Any) -> dict[int, Any]:
    """Returns a copy of the record of an object, for `restore`."""
    return {number: copied(value) for number, value in _record_of(key).items()}


def restore(key: Any, record: dict[int, Any]) -> None:
    """Gives an object a record, instead of the one it has."""
    vars(key)[_RECORD] = record


def copied(record: _Value) -> _Value:
    """Copies a record and its containers, but not their elements."""
    result = copy.copy(record)
    for name, value in getattr(record, "__dict__", {}).items():
        if isinstance(value, list | set | weakref.WeakKeyDictionary):
            setattr(result, name, copy.copy(value))
    return result


# An ordered set of models; they may be deleted before the layers that it belongs to.
Models: TypeAlias = weakref.WeakKeyDictionary[Any, None]


@dataclass(eq=False)
class ManagedLayer:
    """A layer whose dtype came from a mixed policy, and its roles.

    Attributes:
        policy: The policy it was created under.
        output_of: Functionals it is an output layer of.
        interior_of: Functionals it is an interior layer of.
        raised: The layer and its sublayers with the same policy, while they are raised.
        follows_input: Whether its own policy is float32, and its output is low if its input is low
            and it is not raised.
    """

    policy: Policy
    output_of: Models = field(default_factory=weakref.WeakKeyDictionary)
    interior_of: Models = field(default_factory=weakref.WeakKeyDictionary)
    raised: list[Any] = field(default_factory=list)
    follows_input: bool = False

    @property
    def policy_name(self) -> str:
        """Name of the layer's Keras policy while it is not raised."""
        return "float32" if self.follows_input else self.policy.name


managed_layers: WeakMap[ManagedLayer] = WeakMap()


def is_built_in(layer: Any) -> bool:
    """Whether Keras itself defines the layer's class."""
    return type(layer).__module__.partition(".")[0] == "keras"


def policy_of(layer: Any) -> Any:
    """The policy a layer computes under; in a map of policies, its own entry.

    Entries are by path, which a layer gets when it is built; until then it is the map itself.
    """
    policy = layer.dtype_policy
    if not _is_map(policy) or not layer.built:
        return policy
    # Layers that are never built, such as Dropout, have no path.
    return policy[layer.path] if layer.path else policy.default_policy


def quantization_of(layer: Any) -> str | None:
    """How Keras has quantized a layer: "int8", "gptq" and so on; None if it is not quantized."""
    mode = policy_of(layer).quantization_mode
    return None if mode is None else str(mode)


def is_plain(policy: Any) -> bool:
    """Whether a Keras policy is one dtype, or mixed; neither a map of policies nor quantized."""
    plain = (keras.DTypePolicy, keras.FloatDTypePolicy)
    return type(policy) in plain and policy.compute_dtype in FLOAT_DTYPES


def float_policy(layer: Any) -> str | None:
    """The name of a layer's float policy; None if its policy is neither plain nor quantized.

    Example:
        >>> float_policy(keras.layers.Dense(4, dtype="int8_from_mixed_bfloat16"))
        'mixed_bfloat16'
    """
    policy = policy_of(layer)
    if _is_map(policy) or (policy.quantization_mode is None and not is_plain(policy)):
        return None
    return _float_name(policy)


def policy_with(layer: Any, float_name: str) -> Any:
    """Returns a policy for a layer to compute in another dtype; None if it cannot.

    A quantized layer gets the counterpart that predicts the same up to rounding: in float32, and,
    if quantized to int8, in bfloat16. Other low dtypes may not hold its scales, group indexes or
    integer sums; rounding before float8 quantization may change a value by a whole float8 step.

    Example:
        >>> layer = keras.layers.Dense(4, dtype="int8_from_mixed_bfloat16")
        >>> policy_with(layer, "float32").name, policy_with(layer, "mixed_float16")
        ('int8_from_float32', None)
    """
    wanted, own = keras.DTypePolicy(float_name), policy_of(layer)
    if _is_map(own):
        return None
    if own.quantization_mode is None:
        return wanted
    if _float_name(own) == float_name:
        return copy.copy(own)
    exact = wanted.compute_dtype not in LOW_PRECISION and own.quantization_mode != "float8"
    if not exact and (own.quantization_mode, wanted.compute_dtype) != ("int8", "bfloat16"):
        return None
    return type(own).from_config({**own.get_config(), "source_name": float_name})


def give_policy(layer: Any, policy: Any) -> None:
    """Sets a layer's policy, given itself or by name; on a quantized layer its counterpart.

    A quantized layer without such a counterpart is not changed.
    """
    wanted = policy
    if policy_of(layer).quantization_mode is not None:
        wanted = policy_with(layer, _float_name(keras.dtype_policies.get(policy)))
    if wanted is not None:
        layer.dtype_policy = wanted


def in_float32(value: Any) -> Any:
    """Casts a low tensor to float32, with its mask and logits; returns anything else unchanged.

    For the result of `in_low` it returns the float32 tensor that was cast.
    """
    given = as_given(value)
    return _cast_annotated(given, "float32") if is_low(given) else given


def as_given(value: Any) -> Any:
    """Returns the float32 tensor that `in_low` cast; anything else unchanged."""
    return getattr(value, _EXACT, value)


def in_low(value: Any, dtype: str) -> Any:
    """Casts a tensor, also a symbolic one, to a low dtype, so that `in_float32` can undo it."""
    if isinstance(value, keras.KerasTensor):
        return keras.KerasTensor(value.shape, dtype=dtype, sparse=value.sparse)
    result = _cast_annotated(value, dtype)
    setattr(result, _EXACT, value)
    return result


def lowered(values: Any, dtype: str) -> Any:
    """Casts the float tensors in a structure, also symbolic ones, to a dtype; see `in_low`."""

    def lower(x: Any) -> Any:
        is_tensor = keras.ops.is_tensor(x) or isinstance(x, keras.KerasTensor)
        given = keras.backend.standardize_dtype(x.dtype) if is_tensor else dtype
        if given not in FLOAT_DTYPES or given == dtype:
            return x
        exact = in_float32(x)
        return in_low(exact, dtype) if dtype in LOW_PRECISION else _cast_annotated(exact, dtype)

    return keras.tree.map_structure(lower, values)


def _cast_annotated(value: Any, dtype: str) -> Any:
    result = keras.ops.cast(value, dtype)
    copy_annotations(value, result)
    return result


def is_low(value: Any) -> bool:
    """Whether something is a tensor of a low dtype."""
    standard = keras.backend.standardize_dtype
    return keras.ops.is_tensor(value) and standard(value.dtype) in LOW_PRECISION


def _is_map(policy: Any) -> bool:
    return isinstance(policy, keras.dtype_policies.DTypePolicyMap)


def _float_name(policy: Any) -> str:
    # Not the policy's name: a map of policies removes the names of its entries when it is saved.
    compute = str(policy.compute_dtype)
    return compute if compute == policy.variable_dtype else f"mixed_{compute}"


# ---- Roles in models -----------------------------------------------------------------------------

# Models are built by many threads, and a layer may be part of models of several.
_lock = threading.RLock()


@dataclass(eq=False)
class ModelGraph:
    """A Functional with managed layers, and its roles.

    Attributes:
        functional: The Functional.
        owner: The Sequential that it is inside of, if any.
        output_of: Functionals in which this model makes an output.
        nested: Whether it is part of another model, so that its outputs are low.
        casts: Indexes of its outputs that an appended cast makes.
        inner: `id`s of the layers and ops whose low outputs both such a cast and others consume.
    """

    functional: Any
    owner: Callable[[], Any] = lambda: None
    output_of: Models = field(default_factory=weakref.WeakKeyDictionary)
    nested: bool = False
    casts: set[int] = field(default_factory=set)
    inner: set[int] = field(default_factory=set)


graphs: WeakMap[ModelGraph] = WeakMap()
# The last Functional that a Sequential has built.
_insides: WeakMap[weakref.ref[Any]] = WeakMap()


def graph_of(layer: Any) -> ModelGraph | None:
    """The record of a Functional, or of the one inside a built Sequential."""
    is_sequential = isinstance(layer, keras.Sequential)
    return graphs.get(keras_hooks.functional_of(layer) if is_sequential else layer)


def settle(functional: Any, owner: Any = None) -> bool:
    """Gives every layer of a new Functional the dtype of its role; returns whether it did.

    `owner` is the Sequential that it is inside of, if known.
    """
    layers = [op for op in functional.operations if isinstance(op, keras.Layer)]
    with _lock:
        graph = graphs.get(functional)
        is_new = graph is None and any(managed_layers.get(op) or graph_of(op) for op in layers)
        if is_new:
            graph = ModelGraph(functional)
            graphs.set(functional, graph)
            _give_roles(graph, layers)
        if graph is not None and owner is not None:
            graph.owner = weakref.ref(owner)
            _insides.set(owner, weakref.ref(functional))
    return is_new


def _give_roles(graph: ModelGraph, layers: list[Any]) -> None:
    for layer in layers:
        models_below_become_parts(layer)
    makers = _output_makers(graph)
    for layer in layers:
        if not any(layer is maker for maker in makers):
            _becomes_interior(layer, graph.functional)
    for layer in makers:
        _becomes_output(layer, graph.functional)
    _cast_low_outputs(graph)


def forget_dropped(sequential: Any) -> None:
    """Ends the roles in a Sequential's last Functional, if it has been replaced.

    A layer that stops being an output layer gets its policy back.
    """
    last = _insides.get(sequential)
    functional = None if last is None else last()
    if functional is None or functional is keras_hooks.functional_of(sequential):
        return
    _insides.set(sequential, None)
    with _lock:
        graphs.set(functional, None)
        for layer in functional.operations:
            graph, record = graph_of(layer), managed_layers.get(layer)
            if graph is not None:
                graph.output_of.pop(functional, None)
            if record is not None:
                record.interior_of.pop(functional, None)
                record.output_of.pop(functional, None)
                if not record.output_of:
                    _unraise(layer, record)


def become_part(model: Any) -> None:
    """Makes a Functional or Sequential part of another model: its outputs become low."""
    with _lock:
        graph = graph_of(model)
        if graph is None or graph.nested:
            return
        graph.nested = True
        makers = _output_makers(graph)
        _take_casts_away(graph)
        graph.casts.clear()
        graph.inner.clear()
        for layer in makers:
            _becomes_interior(layer, graph.functional)
        _update_outer(graph)


def wants_float32(layer: Any) -> bool:
    """Whether a layer's output should be float32 if it is a model's output.

    True for managed layers, and for models with an output made by one. False if the user gave the
    dtype, also by setting `layer.dtype_policy` later.
    """
    graph = graph_of(layer)
    if graph is not None:
        return any(map(wants_float32, _output_makers(graph)))
    record = managed_layers.get(layer)
    if record is None or not record.policy.float32_outputs:
        return False
    return bool(record.raised) or float_policy(layer) == record.policy_name


def dissolve(functional: Any) -> None:
    """Removes a Functional from the registry, and the casts appended to it.

    Its layers keep their dtypes.
    """
    with _lock:
        graph = graphs.get(functional)
        if graph is not None:
            _take_casts_away(graph)
            graphs.set(functional, None)


def _take_casts_away(graph: ModelGraph) -> None:
    if graph.casts:
        keras_hooks.set_outputs(graph.functional, _uncast_outputs(graph))


def models_below_become_parts(layer: Any) -> None:
    """Makes models inside a layer, like TimeDistributed(model), its parts before its first call.

    A subclassed model may train the models that it holds, so they are not made its parts.
    """
    if graph_of(layer) is None:
        for sub in keras_hooks.sublayers(layer):
            if not isinstance(layer, keras.Model):
                become_part(sub)
            models_below_become_parts(sub)


def is_subclassed_model(layer: Any) -> bool:
    """Whether a layer is a model whose own code calls its layers."""
    graph = keras.Sequential | keras_hooks.functional_class()
    return isinstance(layer, keras.Model) and not isinstance(layer, graph)


def float32_made_of_low(model: Any) -> list[bool]:
    """Returns for each output of a Functional or Sequential if its policy made it float32."""
    graph = graph_of(model)
    if graph is None or graph.nested:
        return []
    outputs = zip(keras_hooks.outputs_of(graph.functional), _uncast_outputs(graph), strict=True)
    return [
        output.dtype == "float32" and any(map(wants_float32, output_makers([before])))
        for output, before in outputs
    ]


def _becomes_interior(layer: Any, functional: Any) -> None:
    if graph_of(layer) is not None:
        become_part(layer)
        return
    record = managed_layers.get(layer)
    if record is not None:
        record.interior_of[functional] = None
        _unraise(layer, record)


def _becomes_output(layer: Any, functional: Any) -> None:
    graph = graph_of(layer)
    if graph is not None:
        graph.output_of[functional] = None
        return
    record = managed_layers.get(layer)
    if record is None or not wants_float32(layer):
        return
    record.output_of[functional] = None
    # Raising an interior layer would slow down the other model: this one gets a cast.
    if not record.raised and not record.interior_of and can_be_raised(layer):
        _raise(layer, record)


def can_be_raised(layer: Any) -> bool:
    """Whether float32 for a layer and its sublayers changes only its own arithmetic.

    A user's layer with sublayers may hold a whole network, like a model.
    """
    if isinstance(layer, keras.Model) or policy_with(layer, "float32") is None:
        return False
    inner = keras_hooks.sublayers(layer)
    return not inner or (is_built_in(layer) and all(can_be_raised(sub) for sub in inner))


def _raise(layer: Any, record: ManagedLayer) -> None:
    """Sets float32 on a layer and its sublayers. Safe once built: variables are float32 in both."""
    record.raised = list(_carrying(layer, record.policy_name))
    for part in record.raised:
        give_policy(part, "float32")
    try:
        _retype(layer)
    except (TypeError, ValueError, tf.errors.OpError):
        # The user's code needs the low dtype.
        _restore_policies(record)


def _unraise(layer: Any, record: ManagedLayer) -> None:
    """Restores a raised layer's mixed policy; models whose outputs it makes get a cast.

    A layer quantized to int8 meanwhile stays float32 if that policy is float16.
    """
    if record.raised:
        _restore_policies(record)
        _retype(layer)
        _cast_and_update(record)


def _restore_policies(record: ManagedLayer) -> None:
    for part in record.raised:
        give_policy(part, record.policy_name)
    record.raised = []


def _carrying(layer: Any, policy_name: str) -> Iterator[Any]:
    """Yields the layer and its sublayers that have the policy."""
    if float_policy(layer) == policy_name:
        yield layer
    for sub in keras_hooks.sublayers(layer):
        yield from _carrying(sub, policy_name)


def output_makers(tensors: list[Any]) -> list[Any]:
    """Returns the layers that make symbolic float tensors, looking through ops except Casts.

    The user chose the dtype of a Cast.
    """
    found: dict[int, Any] = {}
    pending, seen = list(tensors), set()
    while pending:
        tensor = pending.pop(0)
        if id(tensor) in seen or tensor.dtype not in FLOAT_DTYPES:
            continue
        seen.add(id(tensor))
        operation, node = keras_hooks.producer(tensor)
        if isinstance(operation, keras.Layer):
            found[id(operation)] = operation
        elif operation is not None and type(operation).__name__ != "Cast":
            pending.extend(node.input_tensors)
    return list(found.values())


def _output_makers(graph: ModelGraph) -> list[Any]:
    return output_makers(_uncast_outputs(graph))


def _uncast_outputs(graph: ModelGraph) -> list[Any]:
    """Returns a model's outputs without the appended casts."""
    outputs = keras_hooks.outputs_of(graph.functional)
    for i in graph.casts:
        outputs[i] = keras_hooks.producer(outputs[i])[1].input_tensors[0]
    return outputs


def _cast_low_outputs(graph: ModelGraph) -> None:
    """Appends a cast to every low output of a model that should be float32."""
    if graph.nested:
        return
    outputs, casts = keras_hooks.outputs_of(graph.functional), dict[int, Any]()
    for i, tensor in enumerate(outputs):
        if tensor.dtype in LOW_PRECISION and any(map(wants_float32, output_makers([tensor]))):
            if id(tensor) not in casts:
                casts[id(tensor)] = _cast(tensor)
            outputs[i] = casts[id(tensor)]
            graph.casts.add(i)
    if casts:
        keras_hooks.set_outputs(graph.functional, outputs)
        graph.inner = _inner_operations(graph)
        _update_outer(graph)


def _inner_operations(graph: ModelGraph) -> set[int]:
    """The `id`s of producers of outputs that are cast and that other layers or ops consume."""
    casts = set(map(id, appended_casts(graph.functional)))
    ops = [op for op in graph.functional.operations if id(op) not in casts]
    nodes = [node for op in ops for node in keras_hooks.inbound_nodes(op)]
    taken = {id(x) for node in nodes for x in node.input_tensors}
    outputs = _uncast_outputs(graph)
    found = [outputs[i] for i in graph.casts if id(outputs[i]) in taken]
    return {id(keras_hooks.producer(tensor)[0]) for tensor in found}


def _cast(tensor: Any) -> Any:
    # Not keras.ops.cast: an op drops the mask, and the loss would include padding. Not Identity:
    # its output spec has the input's dtype.
    layer = keras.layers.Activation("linear", dtype="float32", autocast=False)
    # Layer.__call__ would cast too, but drop a softmax's logits, which the loss is computed from.
    wrap_method(layer, "call", lambda original, x: original(in_float32(x)))
    # Unique, as Keras's own name is, and in a summary it shows what it belongs to.
    layer.name = f"{keras_hooks.producer(tensor)[0].name}_{layer.name}"
    return layer(tensor)


def _retype(layer: Any) -> None:
    """Corrects the dtypes of a layer's symbolic outputs, in every model it is part of."""
    nodes = keras_hooks.inbound_nodes(layer)
    # All specs before any change: a user's code may fail in the new dtype.
    for spec, node in [(_spec_now(node), node) for node in nodes]:
        _copy_dtypes(spec, node.outputs)
    retype_followers(layer)


def retype_followers(operation: Any) -> None:
    """Corrects the symbolic outputs of the ops after a layer, up to the next layers.

    Most layers cast their inputs, so their outputs do not change.
    """
    pending = [operation]
    while pending:
        for node in keras_hooks.outbound_nodes(pending.pop(0)):
            follower = node.operation
            record = managed_layers.get(follower)
            follows = record is not None and record.follows_input
            if isinstance(follower, keras.Layer) and not follows:
                continue
            if respecify(node):
                pending.append(follower)
                if record is not None:
                    _cast_and_update(record)


def _cast_and_update(record: ManagedLayer | ModelGraph) -> None:
    """Appends casts to the models whose outputs a layer or model has made low."""
    for graph in map(graphs.get, list(record.output_of)):
        if graph is not None:
            _cast_low_outputs(graph)
            _update_outer(graph)


def _update_outer(graph: ModelGraph) -> None:
    """Propagates changed output dtypes of a model to the models it is called in."""
    owner, outputs = graph.owner(), keras_hooks.outputs_of(graph.functional)
    model = graph.functional if owner is None else owner
    # A list, as any() of a generator would stop at the first: every call has to be corrected.
    changed = [_copy_dtypes(outputs, node.outputs) for node in keras_hooks.inbound_nodes(model)]
    if any(changed):
        retype_followers(model)
        _cast_and_update(graph)


def appended_casts(model: Any) -> list[Any]:
    """Returns the casts appended to a Functional or Sequential."""
    graph = graph_of(model)
    if graph is None:
        return []
    outputs = keras_hooks.outputs_of(graph.functional)
    # A cast may make several outputs.
    return list(dict.fromkeys(keras_hooks.producer(outputs[i])[0] for i in sorted(graph.casts)))


def _spec_now(node: Any) -> list[Any]:
    """Returns the output specs of a call as they would be now, with its inputs cast."""
    args, kwargs = node.arguments.args, node.arguments.kwargs
    operation, reads = node.operation, None
    if isinstance(operation, keras.Layer) and not isinstance(operation, keras.Model):
        as_called = functools.partial(_as_called, operation)
        args, kwargs = keras.tree.map_structure(as_called, (args, kwargs))
        if operation.autocast and operation.compute_dtype in LOW_PRECISION:
            reads = operation.compute_dtype
    with keras_hooks.reading_variables_in(reads):
        return keras.tree.flatten(operation.compute_output_spec(*args, **kwargs))


def _as_called(layer: Any, value: Any) -> Any:
    castable = isinstance(value, keras.KerasTensor) and value.dtype in FLOAT_DTYPES
    if not castable or not layer.autocast or value.dtype == layer.input_dtype:
        return value
    return keras.KerasTensor(value.shape, dtype=layer.input_dtype, sparse=value.sparse)


def respecify(node: Any) -> bool:
    """Corrects the output dtypes of one symbolic call; returns whether any changed."""
    return _copy_dtypes(_spec_now(node), node.outputs)


def _copy_dtypes(sources: list[Any], targets: list[Any]) -> bool:
    different = [(s, t) for s, t in zip(sources, targets, strict=True) if s.dtype != t.dtype]
    for source, target in different:
        keras_hooks.set_symbolic_dtype(target, source.dtype)
    return bool(different)
