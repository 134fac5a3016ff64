"""Carries out the plans of layers: one wrapper of `call`, and one of `compute_output_spec`.

`layer_plan` says what happens in the calls of a layer, from what is known of it. Five facts are
known only when models are built and called: a subclassed model is the outermost one called, and so
returns float32; a Functional or Sequential is called by a user's own layer, and so is a part of
it, or by a subclassed model, which gets its outputs in a low dtype; a Sequential has built a new
Functional; a layer holds one that needs exact inputs; a layer adds losses. Methods are wrapped
on single objects, not on classes: they keep working after the policy has changed and affect no
other model.

The wrapper of a method reads the plan at each call and runs the steps that it names, in the order
of `_STEPS`. Besides `call` and `compute_output_spec` these are wrapped, as Keras leaves no other
way: `quantized_call`, which Keras calls instead of `call`; `add_loss`, which gets the losses; the
first method of a call, where a layer's sublayers are known; `build` and `pop` of what makes
layers; `get_config`, `get_build_config` and `build_from_config`, for files; `symbolic_call` and
`export` of models; `_run_through_graph` of Functionals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras

from tfamp import kernel_guard, state_guard
from tfamp.core.dtypes import LOW_PRECISION, float_format
from tfamp.core.errors import TfampWarning
from tfamp.core.kinds import Functional, Layer, Method, Model, Nest, Operation, Tensor
from tfamp.interop import keras_hooks
from tfamp.interop.patching import is_wrapped_by, level_of_user, unwrap_methods, wrap_method
from tfamp.layers import fused_norms, layer_dtypes, loop_weights, low_products, model_roles
from tfamp.layers.layer_dtypes import is_built_in
from tfamp.layers.layer_plan import (
    Assignment,
    Before,
    Decider,
    Kind,
    LayerFacts,
    LayerPlan,
    assigned,
    plan_layer,
)
from tfamp.layers.layer_record import assignment_of, graph_of, managed_by, note, record_of
from tfamp.layers.symbolic_dtypes import computing_specs_of, models_in_computation
from tfamp.policy import FLOAT32_SUMS, Policy, prepares_data


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


# Called with a layer, what it is around, and the arguments of the method.
_Step: TypeAlias = Callable[..., Any]
# Plans whose outputs are cast where no layer is around.
_OUTERMOST = ("outermost", "part or outermost")


class _Float32Inside(NamedTuple):
    """Why a layer computes in float32, after "as it", and in which of its calls."""

    reason: str
    applies: Callable[[_Call], bool] = lambda _: True


# Keras's layers with inaccurate low results, or without gradients, unless computed in float32.
# Subclasses too: they may call the method of their base class.
_FLOAT32_INSIDE: Mapping[type, _Float32Inside] = {
    keras.layers.Add: _Float32Inside(
        "adds many inputs", lambda call: keras_hooks.adds_many(call.layer, call.inputs)
    ),
    keras.layers.Average: _Float32Inside("adds one input after the other"),
    keras.layers.Dot: _Float32Inside("may normalize", lambda call: call.layer.normalize),  # squares
    keras.layers.GlobalAveragePooling1D: _Float32Inside(
        "sums under a mask", lambda call: call.masked
    ),
    keras.layers.Masking: _Float32Inside("compares with a value"),
    keras.layers.SpectralNormalization: _Float32Inside("assigns the weights it computes"),
    keras.layers.UnitNormalization: _Float32Inside("squares"),
    # Low bicubic resizing has no gradient, and XLA rejects the gradient of bilinear resizing.
    keras.layers.UpSampling2D: _Float32Inside(
        "may interpolate", lambda call: call.layer.interpolation != "nearest"
    ),
}
# Keras's layers that add nothing up, nor do their gradients. BatchNormalization has other
# ways: float32 statistics, by one kernel, and rewrites replace the method of its class.
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
        # The outputs of a layer, by its `id`, whose losses Keras adds next.
        self.outputs: dict[int, list[Tensor]] = {}


_running = _Running()


@contextlib.contextmanager
def _running_in(running: list[Layer], layer: Layer) -> Iterator[None]:
    """A context in which a layer is the innermost one that runs."""
    running.append(layer)
    try:
        yield
    finally:
        running.pop()


# ---- Plans -----------------------------------------------------------------------------------


def plan_of(layer: Layer) -> LayerPlan | None:
    """Returns the plan of a layer now; None for one that tfamp leaves to Keras."""
    record = record_of(layer)
    if record.facts is None:
        return None
    assignment = record.assignment
    if assignment is None:
        return plan_layer(record.facts, "")
    return plan_layer(record.facts, assignment.role, assignment.refusal)


def described_plan(layer: Layer) -> str:
    """Returns the plan of a layer now in words; "" for one that tfamp leaves to Keras."""
    plan, places = plan_of(layer), record_of(layer).places
    names = set()
    for functional in () if places is None else places.output_of:
        graph = record_of(functional).graph
        # A user knows a Sequential, not the Functional inside of it.
        names.add(((graph and graph.owner()) or functional).name)
    return "" if plan is None else plan.to_text(sorted(names))


def _facts_of(layer: Layer) -> LayerFacts:
    """The facts of a layer that its class and its attributes show; its constructor may run."""
    is_plain = is_built_in(layer) or isinstance(layer, keras.layers.BatchNormalization)
    inside = _float32_inside(layer)
    regularizer = layer.activity_regularizer is not None
    return LayerFacts(
        kind=_kind_of(layer),
        float32_inside="" if inside is None else inside[1].reason,
        takes_ids=isinstance(layer, keras.layers.Embedding),
        takes_exact=isinstance(layer, _EXACT_INPUTS),
        # A `call` that was replaced in this layer alone cannot be given another layer.
        turns_positions=keras_hooks.turns_positions(layer) and "call" not in vars(layer),
        adds_up=not (is_plain and isinstance(layer, _WITHOUT_SUMS)),
        drops=is_plain and isinstance(layer, keras.layers.Dropout),
        loops=loop_weights.loops(layer),
        adds_losses=not is_built_in(layer),
        is_regularized=regularizer,
        holds_layers=not _holds_no_layers(layer),
        runs_user_code=not (is_built_in(layer) or isinstance(layer, keras.Sequential)),
        can_fuse=fused_norms.can_fuse(type(layer)),
        # A `call` that was replaced in this layer alone may compute anything.
        has_product=low_products.has_product(type(layer)) and "call" not in vars(layer),
    )


def _holds_no_layers(layer: Layer) -> bool:
    """Whether a layer holds no layers of a user; a Functional casts no inputs."""
    may_hold = isinstance(layer, keras.Sequential | keras.layers.Wrapper)
    is_functional = isinstance(layer, keras_hooks.functional_class())
    return is_functional or (is_built_in(layer) and not may_hold)


def _kind_of(layer: Layer) -> Kind:
    if isinstance(layer, keras_hooks.functional_class()):
        return "functional"
    if isinstance(layer, keras.Sequential):
        return "sequential"
    return "model" if isinstance(layer, keras.Model) else "layer"


def _float32_inside(layer: Layer) -> tuple[type[Layer], _Float32Inside] | None:
    rows = _FLOAT32_INSIDE.items()
    return next(((kind, row) for kind, row in rows if isinstance(layer, kind)), None)


def _ask(layer: Layer, **changes: Any) -> None:
    """Changes the facts of a layer, and wraps the methods that its plan then needs."""
    facts = dataclasses.replace(record_of(layer).facts or _facts_of(layer), **changes)
    note(layer, facts=facts)
    plan = plan_of(layer)
    if plan is None:
        return
    # A later place in a model makes it an output layer, which asks for nothing then.
    plans = (plan, plan_layer(facts, "output")) if plan.role else (plan,)
    for name in _STEPS:
        method = keras_hooks.first_method_of_call(layer) if name == _FIRST else name
        is_needed = any(_steps(each, name) for each in plans)
        if is_needed and not is_wrapped_by(layer, method, _interpreted):
            wrap_method(layer, method, functools.partial(_interpreted, layer, name))
    if not plan.autocast and record_of(layer).autocast is None:
        note(layer, autocast=layer.autocast)
        layer.autocast = False


def _interpreted(layer: Layer, name: str, original: Method, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of a layer with the steps that its plan names around it."""
    plan = plan_of(layer)
    for step in () if plan is None else _steps(plan, name):
        original = functools.partial(step, layer, original)
    return original(*args, **kwargs)


@functools.lru_cache(maxsize=4096)
def _steps(plan: LayerPlan, name: str) -> tuple[_Step, ...]:
    """The steps around a method, the innermost first."""
    return tuple(step for step, applies in _STEPS[name] if applies(plan))


def protect_values(layer: Layer) -> None:
    """Keeps losses, raw features and long sums in float32, as low dtypes cannot hold them.

    The layer may have any dtype, and its constructor may still be running.
    """
    _ask(layer, protected=True)
    _look_inside(layer)


def guard_kernels(layer: Layer) -> None:
    """Makes a layer that may run inexact kernels run them in float32 while it computes low."""
    _ask(layer, guarded=True)


def add_losses_in_float32(layer: Layer) -> None:
    """Makes the losses that a layer adds float32, and its activity regularizer compute in it."""
    _ask(layer, losses=True)


def cast_outermost(model: Model) -> None:
    """Makes the outermost call of a model return float32, in its spec and its export too."""
    _ask(model, casts=True)


# ---- Steps of any layer ----------------------------------------------------------------------


def _guard(layer: Layer, original: Method, *args: Any, **kwargs: Any) -> Nest:
    # A Functional runs ops between its layers; a Sequential installs the hooks once for all.
    if layer.compute_dtype not in LOW_PRECISION:
        return original(*args, **kwargs)
    with kernel_guard.guarded(), state_guard.guarded():
        state_guard.settle(layer, original, args, kwargs, same_dtypes=True)
        return original(*args, **kwargs)


def _look_up_exactly(layer: Layer, original: Method, *args: Any, **kwargs: Any) -> Nest:
    """Calls an Embedding with exact ids, its first argument, unless it reverses features."""
    call = inspect.signature(layer.call).bind(*args, **kwargs)
    if not call.arguments.get("reverse"):
        name = next(iter(call.arguments))
        ids = call.arguments[name]
        exact = keras.tree.map_structure(layer_dtypes.before_cast, ids)
        call.arguments[name] = exact
        for each in keras.tree.flatten(exact):
            _warn_of_rounded_ids(layer, keras.backend.standardize_dtype(each.dtype))
    return original(*call.args, **call.kwargs)


def _warn_of_rounded_ids(layer: Layer, dtype: str) -> None:
    """Warns of ids that another layer computed in a dtype that cannot hold all of them.

    In a symbolic call inputs have a low dtype that a real call casts from exact ones.
    """
    if (
        keras_hooks.calls_symbolically()
        or dtype not in LOW_PRECISION
        or record_of(layer).warned_of_ids
    ):
        return
    # Above 2 / eps, float numbers are further apart than integers.
    most = int(2 / float_format(dtype).eps)
    if layer.input_dim <= most + 1:
        return
    note(layer, warned_of_ids=True)
    warnings.warn(
        f"{layer.name} ({type(layer).__name__}) looks up {layer.input_dim} rows and is given ids "
        f"in {dtype}, which rounds integers above {most}: it takes other rows. The layer that "
        "makes the ids, such as a Lambda or Reshape, computes in that dtype; give it "
        "dtype='float32' or integer inputs, or use level O1.",
        TfampWarning,
        stacklevel=level_of_user(),
    )


def _compute_in_float32(layer: Layer, original: Method, *args: Any, **kwargs: Any) -> Nest:
    """Computes in float32 between low inputs and outputs.

    A subclass that overrides `call` computes all of it in float32, its sublayers included: it
    may mix their outputs with its inputs, and call the method of its base class on either.
    """
    found = _float32_inside(layer)
    if found is None:
        return original(*args, **kwargs)
    layer_class, inside = found
    is_extended = type(layer).call is not layer_class.call
    arguments = inspect.signature(layer.call).bind(*args, **kwargs).arguments
    masked = is_extended or arguments.get("mask") is not None
    if not inside.applies(_Call(layer, next(iter(arguments.values()), None), masked)):
        return original(*args, **kwargs)
    if is_extended:
        _set_sublayers_float32(layer, layer_dtypes.float_policy(layer))
    args, kwargs = keras.tree.map_structure(layer_dtypes.in_float32, (args, kwargs))
    with keras_hooks.reading_variables_in(None):
        return layer_dtypes.lowered(original(*args, **kwargs), layer.compute_dtype)


def _turn_in_float32(layer: Layer, original: Method, *args: Any, **kwargs: Any) -> Nest:
    """Computes angles of exact positions in float32, with low outputs."""
    dtype = layer.compute_dtype
    if dtype not in LOW_PRECISION:
        return original(*args, **kwargs)
    args, kwargs = keras.tree.map_structure(layer_dtypes.in_float32, (args, kwargs))
    with keras_hooks.reading_variables_in(None):
        outputs = keras_hooks.call_in_float32(layer, original, *args, **kwargs)
    return layer_dtypes.lowered(outputs, dtype)


def _cast_and_remember(layer: Layer, original: Method, *args: Any, **kwargs: Any) -> Nest:
    """Calls user code as Keras does, with low inputs; `before_cast` undoes the cast."""
    dtype = layer.compute_dtype
    args, kwargs = layer_dtypes.lowered((args, kwargs), dtype)
    with keras_hooks.reading_variables_in(dtype):
        return original(*args, **kwargs)


# Keras adds losses to the model's float32 loss and cannot mix dtypes, and a sum of many squared
# activations exceeds float16's range. After `call` Keras computes the regularizer of each output
# in the output's dtype and passes the result to `add_loss`, which replaces it.


def _note_outputs(layer: Layer, original: Method, *args: Any, **kwargs: Any) -> Nest:
    _running.outputs.pop(id(layer), None)
    outputs = original(*args, **kwargs)
    tensors = [x for x in keras.tree.flatten(outputs) if keras.ops.is_tensor(x)]
    _running.outputs[id(layer)] = tensors
    return outputs


def _forget_outputs(layer: Layer, original: Method, *args: Any, **kwargs: Any) -> Nest:
    try:
        return original(*args, **kwargs)
    finally:
        _running.outputs.pop(id(layer), None)  # nothing regularizes symbolic tensors


def _add_in_float32(layer: Layer, original: Method, loss: Nest) -> None:
    outputs = _running.outputs.get(id(layer))
    if outputs:
        output = outputs.pop(0)
        if layer_dtypes.is_low(output):
            loss = _activity_loss(layer.activity_regularizer, output)
    if not outputs:
        _running.outputs.pop(id(layer), None)
    original(keras.tree.map_structure(layer_dtypes.in_float32, loss))


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


def _begin(layer: Layer, original: Callable[[], None]) -> None:
    """Begins a call. A layer gets its sublayers after its base constructor: now they are known."""
    if not layer.built:
        _look_inside(layer)
    original()


def _look_inside(layer: Layer) -> None:
    facts = record_of(layer).facts
    if facts is None or not facts.holds_layers or facts.holds:
        return
    if casts_unprepared(layer):
        _ask(layer, holds="data")
    elif _casts_low(layer) and _holds(layer, _takes_exact_inputs):
        _ask(layer, holds="exact")


def _takes_exact_inputs(layer: Layer) -> bool:
    return isinstance(layer, _EXACT_INPUTS)


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
    can_fuse = fused_norms.can_fuse(type(layer))
    _ask(
        layer,
        uncast=can_fuse and layer.compute_dtype == "float32",
        # Its own graph, once it is known, manages a Functional.
        managed=not isinstance(layer, keras_hooks.functional_class()),
        stays=assignment.policy_name == "float32" and not can_fuse,
        float32_outputs=bool(policy.float32_outputs),
        low_products=policy.float32_outputs == FLOAT32_SUMS,
        low=policy.compute_dtype,
        policy_name=policy.name,
    )


def manage_once_loaded(layer: Layer, policy: Policy) -> None:
    """Manages a layer of a dtype of its own if a file says that the policy managed it."""
    fused = fused_norms.can_fuse(type(layer)) and policy.keeps_float32(type(layer))
    has_sums = policy.float32_outputs == FLOAT32_SUMS
    if fused or (has_sums and low_products.has_product(type(layer))):
        _ask(layer, loads_under=policy)


def release(layer: Layer, before: Before | None) -> None:
    """Undoes `manage` and `protect_values`: methods and casts are Keras's again.

    With `before`, the layer also gets the policy back that it had before a level.
    """
    unwrap_methods(layer)
    autocast = record_of(layer).autocast if before is None else before.autocast
    note(layer, facts=None, autocast=None)
    if autocast is not None:
        layer.autocast = autocast
    if before is not None:
        layer_dtypes.give_policy(layer, before.policy)


# ---- Steps of models -------------------------------------------------------------------------


def manage_functional(functional: Functional, owner: Model | None = None) -> None:
    """Gives the layers of a Functional the dtypes of their roles, and wraps its calls.

    The owner is the Sequential that runs it, if known.
    """
    for layer in model_roles.output_makers(keras_hooks.outputs_of(functional)):
        policy = record_of(layer).handed_down
        if policy is not None and assignment_of(layer) is None:
            manage(layer, policy, assignment_under(layer, policy, "policy"))
    if not model_roles.settle(functional, owner):
        return

    def around(operation: Operation, function: Method) -> Method:
        graph = graph_of(functional)
        if graph is None or id(operation) not in graph.inner:
            return function
        return functools.partial(_through_float32, function)

    _ask(functional, managed=True)
    keras_hooks.wrap_operations(functional, around)


def _call_functional(functional: Functional, original: Method, *args: Any, **kwargs: Any) -> Nest:
    graph = graph_of(functional)
    args, kwargs = keras.tree.map_structure(layer_dtypes.before_cast, (args, kwargs))
    # A Sequential, which calls its Functional's call(), handles its own callers.
    if graph is not None and graph.owner() is None:
        return _as_part(functional, original, *args, **kwargs)
    return original(*args, **kwargs)


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


# A Sequential builds a new Functional whenever a layer is added or removed, and the former may
# live on.


def _build_graph(model: Model, original: Method, *args: Any, **kwargs: Any) -> Nest:
    model_roles.forget_dropped(model)
    result = original(*args, **kwargs)
    model_roles.forget_dropped(model)
    functional = keras_hooks.functional_of(model)
    if functional is not None:
        # Without roles if the policy has changed since: its constructor was not wrapped.
        model_roles.settle(functional, model)
    return result


def _pop(model: Model, original: Method, *args: Any, **kwargs: Any) -> Nest:
    layer = original(*args, **kwargs)
    model_roles.forget_dropped(model)
    return layer


def _get_config(model: Model, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Keras lists the layers of a Sequential; appended casts are in the Functional only."""
    config = original()
    appended = model_roles.appended_casts(model)
    if appended and "layers" in config:  # A subclass may have another, and make them again.
        casts = [keras.saving.serialize_keras_object(layer) for layer in appended]
        config = {**config, "layers": [*config["layers"], *casts]}
    return config


def _returns_low(model: Model) -> bool:
    """Whether the output of a Sequential is low: nested inputs, say, build no Functional.

    One that is built has a cast of its outputs.
    """
    built = keras_hooks.functional_of(model) is not None
    return not built and any(map(model_roles.wants_float32, model.layers[-1:]))


# Inside another layer's call a model returns its low dtype, which the next layer takes. So it
# does for symbolic tensors: the Functional made of them casts its outputs where needed.


def _is_outermost(model: Model) -> bool:
    symbolic = any(running is model for running in _running.symbolic)
    plan = plan_of(model)
    casts_itself = plan is not None and plan.outputs == "part or outermost"
    if symbolic or (casts_itself and not _returns_low(model)):
        return False
    return _caller_of(model) is None


def _call_symbolically(model: Model, original: Method, *args: Any, **kwargs: Any) -> Nest:
    with _running_in(_running.symbolic, model):
        return original(*args, **kwargs)


def _cast_outermost(model: Model, original: Method, *args: Any, **kwargs: Any) -> Nest:
    outputs = original(*args, **kwargs)
    # After the call, which may build a Sequential.
    if not _is_outermost(model):
        return outputs
    return keras.tree.map_structure(functools.partial(_as_float32, model), outputs)


def _spec_of_outermost(model: Model, original: Method, *args: Any, **kwargs: Any) -> Nest:
    return _cast_outermost(model, functools.partial(_spec_of, model, original), *args, **kwargs)


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


def _run_in_float32(layer: Layer, original: Method, *args: Any, **kwargs: Any) -> Nest:
    """Keeps the sublayers of a float32 layer in float32, before it is built or called.

    It gets them after its base constructor has run; Keras's wrappers take theirs as arguments.
    """
    facts = record_of(layer).facts
    _set_sublayers_float32(layer, None if facts is None else facts.policy_name)
    with _running_in(_running.float32, layer):
        return original(*args, **kwargs)


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


def _with_low(step: Callable[..., Any]) -> _Step:
    """A step that takes the low dtype of the policy that manages the layer, too."""

    def run(layer: Layer, original: Method, *args: Any, **kwargs: Any) -> Any:
        facts = record_of(layer).facts
        return step(layer, "" if facts is None else facts.low, original, *args, **kwargs)

    return run


def _load(layer: Layer, original: Method, config: dict[str, Any]) -> None:
    """Builds a layer as a file says; one that a policy managed when it was saved is again."""
    plan = plan_of(layer)
    policy = None if plan is None else plan.loads_under
    if policy is not None:
        _ask(layer, loads_under=None)  # it has the plan of a layer that was not loaded
        was_low = low_products.was_low(config, policy.compute_dtype)
        if was_low:
            # The file says float32, as it made an output; its model makes it so again.
            layer_dtypes.give_policy(layer, policy.name)
        if was_low or fused_norms.was_fused(config, policy.compute_dtype):
            manage(layer, policy, assignment_under(layer, policy, "policy"))
    original(config)


# ---- The order of steps ----------------------------------------------------------------------

# Stands for the first method of a call, whose name Keras decides.
_FIRST = "first"
# By method, the innermost step first, and whether a plan has it.
_STEPS: Mapping[str, Sequence[tuple[_Step, Callable[[LayerPlan], bool]]]] = {
    "call": (
        (_turn_in_float32, lambda plan: plan.turns_positions),
        (_with_low(low_products.call), lambda plan: bool(plan.low_product)),
        (_guard, lambda plan: plan.guarded or plan.exact_rate),
        (_note_outputs, lambda plan: plan.regularized_in_float32),
        (_look_up_exactly, lambda plan: plan.inputs == "ids"),
        (_compute_in_float32, lambda plan: bool(plan.float32_inside)),
        (_cast_and_remember, lambda plan: plan.inputs == "lowered"),
        (_with_low(fused_norms.call), lambda plan: bool(plan.fused)),
        (_run_in_float32, lambda plan: bool(plan.float32_sublayers)),
        (_call_functional, lambda plan: plan.outputs == "part"),
        (_as_part, lambda plan: plan.outputs == "part or outermost"),
        (_cast_outermost, lambda plan: plan.outputs in _OUTERMOST),
    ),
    "inner_loop": ((loop_weights.inner_loop, lambda plan: plan.casts_once),),
    "quantized_call": ((_guard, lambda plan: plan.guarded),),
    "compute_output_spec": (
        (_forget_outputs, lambda plan: plan.regularized_in_float32),
        (_with_low(fused_norms.compute_output_spec), lambda plan: bool(plan.fused)),
        (_spec_of, lambda plan: plan.outputs == "part"),
        (_spec_of_outermost, lambda plan: plan.outputs in _OUTERMOST),
    ),
    _FIRST: ((_begin, lambda plan: plan.looks_inside),),
    "add_loss": ((_add_in_float32, lambda plan: plan.float32_losses),),
    "build": (
        (_build_sequential, lambda plan: plan.float32_features),
        (_run_in_float32, lambda plan: bool(plan.float32_sublayers)),
        (_build_graph, lambda plan: plan.outputs == "part or outermost"),
    ),
    "build_from_config": ((_load, lambda plan: plan.loads_under is not None),),
    "pop": ((_pop, lambda plan: plan.outputs == "part or outermost"),),
    "get_config": ((_get_config, lambda plan: plan.outputs == "part or outermost"),),
    "get_build_config": (
        (_with_low(fused_norms.get_build_config), lambda plan: bool(plan.fused)),
        (_with_low(low_products.get_build_config), lambda plan: bool(plan.low_product)),
    ),
    "symbolic_call": ((_call_symbolically, lambda plan: plan.outputs in _OUTERMOST),),
    "export": ((_export, lambda plan: plan.outputs in _OUTERMOST),),
}
