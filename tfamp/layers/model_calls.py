"""Dtypes that depend on how models are built and called, set by wrapped methods of each model.

Five facts are known only then: a subclassed model is the outermost one called, and so returns
float32; a Functional or Sequential is called by a user's own layer, and so is a part of it, or
by a subclassed model, which gets its outputs in a low dtype; a Sequential has built a new
Functional; a layer holds one that needs exact inputs; a layer adds losses. Methods are wrapped
on single objects, not on classes: they keep working after the policy has changed and affect no
other model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import keras

from tfamp import kernel_guard, state_guard
from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.kinds import Functional, Layer, Method, Model, Nest, Operation, Tensor
from tfamp.interop import keras_hooks
from tfamp.interop.patching import is_wrapped_by, unwrap_methods, wrap_method, wrapped_methods
from tfamp.layers import fused_norms, layer_dtypes, model_roles
from tfamp.layers.assignment import Assignment, Before, Decider, assigned, managed_by
from tfamp.layers.layer_dtypes import is_built_in
from tfamp.layers.model_roles import graph_of
from tfamp.layers.records import WeakMap
from tfamp.layers.symbolic_dtypes import computing_specs_of, models_in_computation
from tfamp.policy import Policy, prepares_data


class _Call(NamedTuple):
    """A call of a layer.

    Attributes:
        layer: The layer.
        inputs: Its first argument.
        masked: Whether it has a mask, or the layer is extended by a subclass.
    """

    layer: Layer
    inputs: Nest
    masked: bool


# Whether a rule applies to a call.
_Applies: TypeAlias = Callable[[_Call], bool]

# Layers with `autocast` switched off, as they or layers inside need the exact inputs.
_uncast_inputs: WeakMap[bool] = WeakMap()
# Keras's layers with inaccurate low results, or without gradients, unless computed in float32.
# Subclasses too: they may call the method of their base class.
_FLOAT32_INSIDE: dict[type, _Applies] = {
    keras.layers.Add: lambda call: keras_hooks.adds_many(call.layer, call.inputs),
    keras.layers.Average: lambda _: True,  # adds one tensor after the other
    keras.layers.Dot: lambda call: call.layer.normalize,  # squares
    keras.layers.GlobalAveragePooling1D: lambda call: call.masked,  # sums
    keras.layers.Masking: lambda _: True,  # compares with a value
    keras.layers.SpectralNormalization: lambda _: True,  # assigns the weights it computes
    keras.layers.UnitNormalization: lambda _: True,  # squares
    # Low bicubic resizing has no gradient, and XLA rejects the gradient of bilinear resizing.
    keras.layers.UpSampling2D: lambda call: call.layer.interpolation != "nearest",
}
# Keras's layers that add nothing up, nor do their gradients. BatchNormalization has other
# rules: float32 statistics, by one kernel, and rewrites replace the method of its class.
_WITHOUT_SUMS = (
    keras.layers.BatchNormalization,
    keras.layers.Concatenate,
    keras.layers.Dropout,
    keras.layers.Flatten,
    keras.layers.Identity,
    keras.layers.InputLayer,
    keras.layers.Permute,
    keras.layers.ReLU,
    keras.layers.Reshape,
)
_EXACT_INPUTS = (keras.layers.Embedding, keras.layers.Masking)


class _Running(threading.local):
    def __init__(self) -> None:
        # Models that are being called with symbolic tensors in this thread.
        self.symbolic: list[Layer] = []
        # Layers that a policy keeps in float32, being called or built.
        self.float32: list[Layer] = []


_running = _Running()


@contextlib.contextmanager
def _running_in(running: list[Layer], layer: Layer) -> Iterator[None]:
    """A context in which a layer is the innermost one that runs."""
    running.append(layer)
    try:
        yield
    finally:
        running.pop()


def protect_values(layer: Layer) -> None:
    """Keeps losses, raw features and long sums in float32, as low dtypes cannot hold them.

    The layer may have any dtype, and its constructor may still be running.
    """
    guard_kernels(layer)
    add_losses_in_float32(layer)
    if isinstance(layer, keras.layers.Embedding):
        wrap_method(layer, "call", _look_up_exactly)
    for layer_class, applies in _FLOAT32_INSIDE.items():
        if isinstance(layer, layer_class):
            _compute_in_float32(layer, layer_class, applies)
    if keras_hooks.turns_positions(layer):
        _compute_angles_in_float32(layer)
    if isinstance(layer, keras_hooks.functional_class()):
        return  # casts no inputs
    if is_built_in(layer) and not isinstance(layer, keras.Sequential | keras.layers.Wrapper):
        return  # holds no layers of a user

    def begin(original: Callable[[], None]) -> None:
        if not layer.built:
            _take_inputs_as_they_are(layer)
        original()

    _take_inputs_as_they_are(layer)
    name = keras_hooks.first_method_of_call(layer)
    if name not in wrapped_methods(layer):
        # A layer gets its sublayers after its base constructor: the first call knows them.
        wrap_method(layer, name, begin)
        if isinstance(layer, keras.Sequential):
            wrap_method(layer, "build", functools.partial(_build_sequential, layer))


def _look_up_exactly(original: Method, *args: Any, **kwargs: Any) -> Nest:
    """Calls an Embedding with exact ids, its first argument, unless it reverses features."""
    call = inspect.signature(original).bind(*args, **kwargs)
    if not call.arguments.get("reverse"):
        name = next(iter(call.arguments))
        ids = call.arguments[name]
        call.arguments[name] = keras.tree.map_structure(layer_dtypes.before_cast, ids)
    return original(*call.args, **call.kwargs)


def _compute_in_float32(layer: Layer, layer_class: type[Layer], applies: _Applies) -> None:
    """Makes a layer of `_FLOAT32_INSIDE` compute in float32 between low inputs and outputs.

    A subclass that overrides `call` computes all of it in float32, its sublayers included: it
    may mix their outputs with its inputs, and call the method of its base class on either.
    """
    if isinstance(layer, _EXACT_INPUTS):
        _uncast(layer)
    is_extended = type(layer).call is not layer_class.call
    signature = inspect.signature(layer.call)

    def call(original: Method, *args: Any, **kwargs: Any) -> Nest:
        arguments = signature.bind(*args, **kwargs).arguments
        masked = is_extended or arguments.get("mask") is not None
        if not applies(_Call(layer, next(iter(arguments.values()), None), masked)):
            return original(*args, **kwargs)
        if is_extended:
            _set_sublayers_float32(layer, layer_dtypes.float_policy(layer))
        args, kwargs = keras.tree.map_structure(layer_dtypes.in_float32, (args, kwargs))
        with keras_hooks.reading_variables_in(None):
            return layer_dtypes.lowered(original(*args, **kwargs), layer.compute_dtype)

    wrap_method(layer, "call", call)


def _compute_angles_in_float32(layer: Layer) -> None:
    """Makes a layer compute angles of exact positions in float32, with low outputs.

    A `call` that was replaced in this layer alone is left alone. It holds the layer, and no
    other can be passed to it.
    """
    if "call" in vars(layer):
        return
    _uncast(layer)

    def call(original: Method, *args: Any, **kwargs: Any) -> Nest:
        dtype = layer.compute_dtype
        if dtype not in LOW_PRECISION:
            return original(*args, **kwargs)
        args, kwargs = keras.tree.map_structure(layer_dtypes.in_float32, (args, kwargs))
        with keras_hooks.reading_variables_in(None):
            outputs = keras_hooks.call_in_float32(layer, original, *args, **kwargs)
        return layer_dtypes.lowered(outputs, dtype)

    wrap_method(layer, "call", call)


def add_losses_in_float32(layer: Layer) -> None:
    """Makes the losses that a layer adds float32, and its activity regularizer compute in it.

    Keras adds these to the model's float32 loss and cannot mix dtypes, and a sum of many
    squared activations exceeds float16's range. After `call` Keras computes the regularizer of
    each output in the output's dtype and passes the result to `add_loss`, which replaces it.
    """
    regularizer = layer.activity_regularizer
    if "add_loss" in wrapped_methods(layer) or (is_built_in(layer) and regularizer is None):
        return
    thread = threading.local()  # each replica traces in its own thread

    def call(original: Method, *args: Any, **kwargs: Any) -> Nest:
        thread.outputs = []
        outputs = original(*args, **kwargs)
        thread.outputs = [x for x in keras.tree.flatten(outputs) if keras.ops.is_tensor(x)]
        return outputs

    def compute_output_spec(original: Method, *args: Any, **kwargs: Any) -> Nest:
        try:
            return original(*args, **kwargs)
        finally:
            thread.outputs = []  # nothing regularizes symbolic tensors

    def add_loss(original: Method, loss: Nest) -> None:
        outputs = getattr(thread, "outputs", None)
        if outputs:
            output = outputs.pop(0)
            if layer_dtypes.is_low(output):
                loss = _activity_loss(layer.activity_regularizer, output)
        original(keras.tree.map_structure(layer_dtypes.in_float32, loss))

    wrap_method(layer, "add_loss", add_loss)
    if regularizer is not None:
        wrap_method(layer, "call", call)
        wrap_method(layer, "compute_output_spec", compute_output_spec)


def _activity_loss(regularizer: Callable[[Tensor], Tensor], output: Tensor) -> Tensor:
    """Returns Keras's loss for one output of a layer, a batch mean from Keras 3.14 on."""
    loss = regularizer(layer_dtypes.in_float32(output))
    if keras.ops.ndim(output) == 0 or not keras_hooks.averages_activity_losses():
        return loss
    batch_size = keras.ops.cast(keras.ops.shape(output)[0], loss.dtype)
    return keras.ops.divide_no_nan(loss, batch_size)


def _build_sequential(model: Model, original: Method, *args: Any, **kwargs: Any) -> Nest:
    """Builds a Sequential; an InputLayer that Keras makes for it takes float32 features.

    Keras gives it the compute dtype of the first layer; one that the user added has float32.
    """
    first_before = keras_hooks.sublayers(model)[:1]
    result = original(*args, **kwargs)
    for first in keras_hooks.sublayers(model)[:1]:
        made_by_keras = isinstance(first, keras.layers.InputLayer) and first_before != (first,)
        if made_by_keras and first.dtype in LOW_PRECISION:
            keras_hooks.set_fed_dtype(first, "float32")
    return result


def _take_inputs_as_they_are(layer: Layer) -> None:
    if casts_unprepared(layer):
        _uncast(layer)
    elif _casts_low(layer) and _holds(layer, _takes_exact_inputs):
        _uncast(layer)
        if not (is_built_in(layer) or isinstance(layer, keras.Sequential)):
            wrap_method(layer, "call", functools.partial(_cast_and_remember, layer))


def _takes_exact_inputs(layer: Layer) -> bool:
    return isinstance(layer, _EXACT_INPUTS)


def _uncast(layer: Layer) -> None:
    layer.autocast = False
    _uncast_inputs.set(layer, True)


def _cast_and_remember(layer: Layer, original: Method, *args: Any, **kwargs: Any) -> Nest:
    """Calls user code as Keras does, with low inputs; `before_cast` undoes the cast."""
    dtype = layer.compute_dtype
    args, kwargs = layer_dtypes.lowered((args, kwargs), dtype)
    with keras_hooks.reading_variables_in(dtype):
        return original(*args, **kwargs)


def casts_unprepared(layer: Layer) -> bool:
    """Whether a layer casts its inputs to a low dtype for a preprocessing layer inside it."""
    return _casts_low(layer) and _holds(layer, _prepares)


def _casts_low(layer: Layer) -> bool:
    low = layer.autocast and layer.compute_dtype in LOW_PRECISION
    return low and not isinstance(layer, keras_hooks.functional_class())


def _prepares(layer: Layer) -> bool:
    return prepares_data(type(layer)) and layer.compute_dtype not in LOW_PRECISION


def _holds(layer: Layer, applies: Callable[[Layer], bool]) -> bool:
    inside = keras_hooks.sublayers(layer)
    return any(applies(sublayer) or _holds(sublayer, applies) for sublayer in inside)


def assignment_under(
    layer: Layer, policy: Policy, by: Decider, before: Before | None = None
) -> Assignment:
    """Returns the assignment of a mixed policy to a layer; changes nothing."""
    assignment = assigned(type(layer), policy, by, fused=fused_norms.can_fuse(type(layer)))
    manager = None if model_roles.is_graph(layer) else assignment.policy
    return dataclasses.replace(assignment, before=before, policy=manager)


def manage(layer: Layer, policy: Policy, assignment: Assignment) -> None:
    """Stores the assignment of a layer under a policy, and wraps the methods that this needs.

    The layer is new or already has the dtype that is assigned. A model itself keeps the mixed
    policy: `compile` scales the loss of models that have it.
    """
    if isinstance(layer, keras.layers.InputLayer):
        return  # its dtype is the dtype of the fed data
    if assignment.before is not None or assignment.policy is not None:
        model_roles.assign(layer, assignment)
    if fused_norms.can_fuse(type(layer)):
        fused_norms.fuse(layer, policy.compute_dtype)
    elif assignment.policy_name == "float32":
        _keep_sublayers_float32(layer, policy)
    elif isinstance(layer, keras.Sequential):
        if policy.float32_outputs:
            _watch_sequential(layer)
    elif model_roles.is_subclassed_model(layer) and policy.float32_outputs:
        cast_outermost(layer)


def release(layer: Layer, before: Before | None) -> None:
    """Undoes `manage` and `protect_values`: methods and casts are Keras's again.

    With `before`, the layer also gets the policy back that it had before a level.
    """
    unwrap_methods(layer)
    is_norm = isinstance(layer, keras.layers.BatchNormalization)  # `fused_norms` takes its cast
    if before is not None:
        layer.autocast = before.autocast
        layer_dtypes.give_policy(layer, before.policy)
    elif is_norm or _uncast_inputs.get(layer):
        layer.autocast = True


def guard_kernels(layer: Layer) -> None:
    """Makes a layer that may run inexact kernels run them in float32 while it computes low."""
    is_plain = is_built_in(layer) or isinstance(layer, keras.layers.BatchNormalization)
    if is_plain and isinstance(layer, _WITHOUT_SUMS):
        return
    if keras_hooks.turns_positions(layer):
        return  # `_compute_angles_in_float32` needs the method of the layer itself.
    # A Functional runs ops between its layers; a Sequential installs the hooks once for all.
    for name in keras_hooks.methods_of_call(layer):
        if not is_wrapped_by(layer, name, _call_guarded):
            wrap_method(layer, name, functools.partial(_call_guarded, layer))


def _call_guarded(layer: Layer, original: Method, *args: Any, **kwargs: Any) -> Nest:
    if layer.compute_dtype not in LOW_PRECISION:
        return original(*args, **kwargs)
    with kernel_guard.guarded(), state_guard.guarded():
        state_guard.settle(layer, original, args, kwargs, same_dtypes=True)
        return original(*args, **kwargs)


def manage_functional(functional: Functional, owner: Model | None = None) -> None:
    """Gives the layers of a Functional the dtypes of their roles, and wraps its calls.

    The owner is the Sequential that runs it, if known.
    """
    if model_roles.settle(functional, owner):
        _watch_functional(functional)


def _watch_functional(functional: Functional) -> None:
    def call(original: Method, *args: Any, **kwargs: Any) -> Nest:
        graph = graph_of(functional)
        args, kwargs = keras.tree.map_structure(layer_dtypes.before_cast, (args, kwargs))
        # A Sequential, which calls its Functional's call(), handles its own callers.
        if graph is not None and graph.owner() is None:
            return _as_part(functional, original, *args, **kwargs)
        return original(*args, **kwargs)

    def around(operation: Operation, function: Method) -> Method:
        graph = graph_of(functional)
        if graph is None or id(operation) not in graph.inner:
            return function
        return functools.partial(_through_float32, function)

    wrap_method(functional, "call", call)
    wrap_method(functional, "compute_output_spec", functools.partial(_spec_of, functional))
    keras_hooks.wrap_operations(functional, around)


def _through_float32(function: Method, *args: Any, **kwargs: Any) -> Nest:
    """Casts the low output of a layer, which a Functional returns too, to float32 and back.

    The appended cast returns the float32 tensor, so other outputs have gradients with respect
    to it.
    """

    def cast(x: Any) -> Any:
        if not layer_dtypes.is_low(x):
            return x
        return layer_dtypes.in_low(layer_dtypes.in_float32(x), x.dtype)

    outputs = function(*args, **kwargs)
    return keras.tree.map_structure(cast, outputs)


def _spec_of(model: Model, original: Method, *args: Any, **kwargs: Any) -> Nest:
    caller = _caller_of(model)
    with computing_specs_of(model):
        return _for_caller(caller, model, original(*args, **kwargs))


def _caller_of(model: Model) -> Layer | None:
    """Returns the innermost layer or model that calls a model; None if it is called alone."""
    for layer in reversed((*models_in_computation(), *keras_hooks.calling_layers())):
        is_sequential = isinstance(layer, keras.Sequential)
        if is_sequential and keras_hooks.functional_of(layer) is model:
            continue  # A Sequential is not a caller of the Functional inside it.
        if layer is not model:
            return layer
    return None


def _as_part(model: Model, original: Method, *args: Any, **kwargs: Any) -> Nest:
    """Calls a Functional or Sequential as a part of the layer that calls it, if any."""
    caller, graph = _caller_of(model), graph_of(model)
    # A model that makes outputs of a Functional stays float32.
    makes_outputs = graph is not None and bool(graph.output_of)
    is_part = caller is not None and not model_roles.is_subclassed_model(caller)
    if is_part and not makes_outputs:
        model_roles.become_part(model)
    return _for_caller(caller, model, original(*args, **kwargs))


def _for_caller(caller: Layer | None, model: Model, outputs: Nest) -> Nest:
    """Casts outputs of a Functional or Sequential to the compute dtype of a subclassed caller.

    The caller's code may add them to other low tensors. If it returns one of them as an output,
    that is the float32 tensor again.
    """
    if caller is None or not model_roles.is_subclassed_model(caller):
        return outputs
    dtype = caller.compute_dtype
    made_of_low = model_roles.float32_made_of_low(model)
    if dtype not in LOW_PRECISION or not any(made_of_low):
        return outputs
    flat = zip(keras.tree.flatten(outputs), made_of_low, strict=True)
    cast_outputs = [layer_dtypes.in_low(x, dtype) if was_low else x for x, was_low in flat]
    return keras.tree.pack_sequence_as(outputs, cast_outputs)


def _watch_sequential(model: Model) -> None:
    """Tracks the Functionals that a Sequential builds and drops.

    It builds a new one whenever a layer is added or removed, and the former may live on.
    """

    def build(original: Method, *args: Any, **kwargs: Any) -> Nest:
        model_roles.forget_dropped(model)
        result = original(*args, **kwargs)
        model_roles.forget_dropped(model)
        functional = keras_hooks.functional_of(model)
        if functional is not None:
            # Without roles if the policy has changed since: its constructor was not wrapped.
            model_roles.settle(functional, model)
        return result

    def pop(original: Method, *args: Any, **kwargs: Any) -> Nest:
        layer = original(*args, **kwargs)
        model_roles.forget_dropped(model)
        return layer

    def get_config(original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        # Keras lists the layers of the Sequential; appended casts are in the Functional only.
        config = original()
        appended = model_roles.appended_casts(model)
        config["layers"] += [keras.saving.serialize_keras_object(layer) for layer in appended]
        return config

    def returns_low() -> bool:
        """Whether the output is low: nested inputs, say, build no Functional with a cast."""
        built = keras_hooks.functional_of(model) is not None
        return not built and any(map(model_roles.wants_float32, model.layers[-1:]))

    for around in (build, pop, get_config):
        wrap_method(model, around.__name__, around)
    wrap_method(model, "call", functools.partial(_as_part, model))
    cast_outermost(model, returns_low)


def cast_outermost(model: Model, applies: Callable[[], bool] = lambda: True) -> None:
    """Makes the outermost call of a model return float32, in its spec and its export too.

    Inside another layer's call it returns its low dtype, which the next layer takes. So it does
    for symbolic tensors: the Functional made of them casts its outputs where needed.
    """
    cast = functools.partial(_as_float32, model)

    def outermost() -> bool:
        symbolic = any(running is model for running in _running.symbolic)
        return not symbolic and applies() and _caller_of(model) is None

    def symbolic_call(original: Method, *args: Any, **kwargs: Any) -> Nest:
        with _running_in(_running.symbolic, model):
            return original(*args, **kwargs)

    def call(original: Method, *args: Any, **kwargs: Any) -> Nest:
        outputs = original(*args, **kwargs)
        # After the call, which may build a Sequential.
        return keras.tree.map_structure(cast, outputs) if outermost() else outputs

    def compute_output_spec(original: Method, *args: Any, **kwargs: Any) -> Nest:
        spec = _spec_of(model, original, *args, **kwargs)
        return keras.tree.map_structure(cast, spec) if outermost() else spec

    for around in (symbolic_call, call, compute_output_spec):
        wrap_method(model, around.__name__, around)
    wrap_method(model, "export", functools.partial(_export, model))


def _export(model: Model, original: Method, *args: Any, **kwargs: Any) -> Nest:
    """Exports a model with float32 inputs; Keras would give them the compute dtype."""
    call = inspect.signature(original).bind(*args, **kwargs)
    if model.built and call.arguments.get("input_signature") is None:
        cast = functools.partial(_as_float32, model)
        inputs = keras_hooks.exported_inputs(model)
        call.arguments["input_signature"] = keras.tree.map_structure(cast, inputs)
    return original(*call.args, **call.kwargs)


def _as_float32(model: Model, value: Any) -> Any:
    """Returns a tensor, symbolic tensor or spec in float32 if it has a model's low dtype."""
    is_symbolic = isinstance(value, keras.KerasTensor)
    is_spec = isinstance(value, keras.InputSpec)
    if not (is_symbolic or is_spec or keras.ops.is_tensor(value)):
        return value
    dtype = keras.backend.standardize_dtype(value.dtype)
    if dtype not in LOW_PRECISION or dtype != model.compute_dtype:
        return value
    if is_symbolic:
        return keras.KerasTensor(value.shape, dtype="float32", sparse=value.sparse)
    if is_spec:
        return keras.InputSpec("float32", value.shape, name=value.name)
    return layer_dtypes.in_float32(value)


def _keep_sublayers_float32(layer: Layer, policy: Policy) -> None:
    """Keeps the sublayers of a float32 layer in float32, before it is built or called.

    It gets them after its base constructor has run; Keras's wrappers take theirs as arguments.
    """

    def settle(original: Method, *args: Any, **kwargs: Any) -> Nest:
        _set_sublayers_float32(layer, policy.name)
        with _running_in(_running.float32, layer):
            return original(*args, **kwargs)

    wrap_method(layer, "build", settle)
    wrap_method(layer, "call", settle)


def runs_float32_layer() -> bool:
    """Whether a layer that a policy keeps in float32 is being called or built."""
    return bool(_running.float32)


def _set_sublayers_float32(layer: Layer, policy_name: str | None) -> None:
    # Keras's layers hand their policy down explicitly; a dtype that the user chose wins.
    hands_down = is_built_in(layer)
    for sublayer in keras_hooks.sublayers(layer):
        has_ours = hands_down or managed_by(sublayer) is not None
        if has_ours and layer_dtypes.float_policy(sublayer) == policy_name:
            layer_dtypes.give_policy(sublayer, "float32")
            model_roles.leave_to_holder(sublayer)
        _set_sublayers_float32(sublayer, policy_name)
