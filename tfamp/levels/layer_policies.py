"""Changes the dtypes of an existing model's layers: all by a policy, or single layers by hand.

Variables keep their dtypes. A level is applied in two steps: all changes of tfamp's are removed,
and then the policy is applied, so that levels can follow each other in any order.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES, LOW_PRECISION
from tfamp.core.foreign import advice, described
from tfamp.core.options import nearest
from tfamp.interop import keras_hooks
from tfamp.interop.keras_hooks import layers_of
from tfamp.interop.patching import rewrap_methods, unwrap_methods, wrap_method, wrapped_methods
from tfamp.layers import layer_dtypes, model_calls, model_roles, records
from tfamp.layers.assignment import (
    Assignment,
    Before,
    before_level,
    decider_of,
    managed_by,
    set_by_hand,
)
from tfamp.layers.policy_state import policy_scope
from tfamp.levels.precision_config import read_dtype
from tfamp.policy import Policy, prepares_data

# ---- The structure of a model --------------------------------------------------------------------


# Symbolic dtypes are corrected in passes until a fixed point. A layer called several times may need
# as many passes; more than this means that it never settles.
_MOST_PASSES = 20


def computing_layers_of(*roots: Any) -> list[Any]:
    """Returns the layers of models and layers, without input layers."""
    return [each for each in layers_of(*roots) if not isinstance(each, keras.layers.InputLayer)]


def functionals_of(model: Any) -> list[tuple[Any, Any]]:
    """Returns the Functionals in a model, innermost first, each with the Sequential that runs it.

    The Sequential is None for a standalone Functional.
    """
    found: dict[int, tuple[Any, Any]] = {}
    for layer in reversed(layers_of(model)):
        owner = layer if isinstance(layer, keras.Sequential) else None
        functional = keras_hooks.functional_of(layer) if owner is not None else layer
        if isinstance(functional, keras_hooks.functional_class()):
            found.setdefault(id(functional), (functional, owner))
    return list(found.values())


def output_layers_of(layer: Any) -> list[Any]:
    """Returns the layers that make the outputs of a Functional or Sequential.

    A layer makes its own; which ones do in a subclassed model only its code says.
    """
    if isinstance(layer, keras.Sequential):
        makers = layer.layers[-1:]
    elif is_graph(layer):
        makers = model_roles.output_makers(keras_hooks.outputs_of(layer))
    else:
        return [] if isinstance(layer, keras.Model) else [layer]
    return [each for maker in makers for each in output_layers_of(maker)]


def is_graph(layer: Any) -> bool:
    """Whether a layer is a Functional or Sequential model."""
    return isinstance(layer, keras.Sequential | keras_hooks.functional_class())


def models_held_by_models(model: Any) -> list[Any]:
    """Returns the Functional and Sequential models held by a model, or one in it, if subclassed."""
    holders = filter(model_roles.is_subclassed_model, layers_of(model))
    return [sub for holder in holders for sub in keras_hooks.sublayers(holder) if is_graph(sub)]


def correct_symbolic_dtypes(model: Any) -> None:
    """Gives the symbolic tensors of a model, nested ones included, the dtypes its layers return.

    A ValueError names a layer that fails.
    """
    for functional, _ in functionals_of(model):
        correct_symbolic_dtypes_of(functional)


def correct_symbolic_dtypes_of(functional: Any) -> None:
    """Gives the symbolic tensors of one Functional the dtypes its layers return."""
    nodes = [
        node
        for operation in functional.operations
        if not isinstance(operation, keras.layers.InputLayer)
        for node in keras_hooks.inbound_nodes(operation)
        if any(tensor.dtype in FLOAT_DTYPES for tensor in node.outputs)
    ]
    with model_calls.computing_specs_of(functional):
        for _ in range(_MOST_PASSES):
            # A list: any() of a generator would stop at the first change.
            changed = [_corrected(node) for node in nodes]
            if not any(changed):
                return


def _corrected(node: Any) -> bool:
    try:
        return model_roles.respecify(node)
    except (TypeError, ValueError, RuntimeError, NotImplementedError, tf.errors.OpError) as error:
        operation = node.operation
        dtype = getattr(operation, "compute_dtype", "low precision")
        raise ValueError(
            f"{operation.name} ({type(operation).__name__}) cannot be computed in {dtype}: {error} "
            f"Keep it in float32 with keep_float32=[{operation.name!r}]."
        ) from error


def drop_traced_functions(model: Any) -> None:
    """Drops the traced steps of a model and of models inside it: the next call traces again."""
    for layer in layers_of(model):
        if isinstance(layer, keras.Model):
            for name in ("train_function", "test_function", "predict_function"):
                setattr(layer, name, None)


def path_of(layer: Any) -> str:
    """Returns the path of a layer in its model, or its name before it is built."""
    return str(getattr(layer, "path", None) or layer.name)


def quantized_names(layers: Iterable[Any]) -> str:
    """Returns the paths of quantized layers, each with its mode, as text; "" for none."""
    modes = [(layer, layer_dtypes.quantization_of(layer)) for layer in layers]
    return ", ".join(f"{path_of(layer)} ({mode})" for layer, mode in modes if mode is not None)


def select(layers: list[Any], wanted: Iterable[Any], argument: str) -> list[Any]:
    """Returns the layers that a user selects, in their order, without their sublayers.

    `wanted` holds names or paths; regular expressions, searched for in the paths where no name
    matches exactly; layer classes; layers. An error names the argument.
    """
    chosen: set[int] = set()
    for each in wanted:
        found = _meant(layers, each, argument)
        if not found:
            is_text = isinstance(each, str)
            names = [x.name if is_text else type(x).__name__ for x in layers]
            raise ValueError(
                f"{argument} holds {each!r}, which means no layer of the model. The nearest is "
                f"{nearest(getattr(each, '__name__', each), names)!r}.{advice(each)}"
            )
        chosen |= {id(layer) for layer in found}
    return [layer for layer in layers if id(layer) in chosen]


def _meant(layers: list[Any], wanted: Any, argument: str) -> list[Any]:
    if isinstance(wanted, str):
        exact = [layer for layer in layers if wanted in (layer.name, path_of(layer))]
        if exact:
            return exact
        try:
            pattern = re.compile(wanted)
        except re.error as error:
            raise ValueError(
                f"{argument} holds {wanted!r}, which is not a regular expression: {error}."
            ) from error
        return [x for x in layers if pattern.search(x.name) or pattern.search(path_of(x))]
    if isinstance(wanted, type):
        return [layer for layer in layers if isinstance(layer, wanted)]
    if isinstance(wanted, keras.Layer):
        return [layer for layer in layers if layer is wanted]
    raise TypeError(
        f"{argument} takes names of layers, regular expressions, layer classes and layers; got "
        f"{described(wanted)}"
    )


# ---- A policy for the whole model ----------------------------------------------------------------


def note_state(root: Any) -> Callable[[], None]:
    """Returns a function that restores the dtypes, replaced methods and appended casts of a model.

    With it a failed `prepare` leaves the model as it was.
    """
    layers, functionals = layers_of(root), [found for found, _ in functionals_of(root)]
    noted = [(x, wrapped_methods(x), layer_dtypes.policy_of(x), x.autocast) for x in layers]
    # A Sequential is a layer, and the Functional that it runs is not.
    noted_records = [(x, records.snapshot(x)) for x in (*layers, *functionals)]
    outputs = [keras_hooks.outputs_of(x) for x in functionals]
    # Outputs of the ops behind a layer too, such as a sum of two outputs.
    symbolic = [
        (tensor, tensor.dtype)
        for layer in layers
        for node in (*keras_hooks.inbound_nodes(layer), *keras_hooks.outbound_nodes(layer))
        for tensor in node.outputs
    ]

    def restore() -> None:
        for layer, methods, policy, autocast in noted:
            rewrap_methods(layer, methods)
            layer_dtypes.give_policy(layer, policy)
            layer.autocast = autocast
        for functional, before in zip(functionals, outputs, strict=True):
            now = keras_hooks.outputs_of(functional)
            if any(x is not y for x, y in zip(before, now, strict=True)):
                keras_hooks.set_outputs(functional, before)
        for key, record in noted_records:
            records.restore(key, record)
        for tensor, dtype in symbolic:
            keras_hooks.set_symbolic_dtype(tensor, dtype)

    return restore


def default_policy(model: Any) -> str:
    """Returns the name of the policy that a model's layers have by default.

    A model read from a file does not record the policy it was made under, so it is the one of most
    layers, "float32" in a tie.
    """
    layers = [x for x in computing_layers_of(model) if not isinstance(x, keras.Model)]
    if any(map(before_level, layers)):
        return "float32"
    own = layer_dtypes.float_policy(model) or "float32"
    if own.startswith("mixed_"):
        return own
    counts = Counter(name for name in map(layer_dtypes.float_policy, layers) if name is not None)
    most = max(counts, key=lambda x: (counts[x], x == "float32", x), default="float32")
    return most if most != "float64" else "float32"


def take_off(model: Any, *, keep_by_hand: bool) -> set[int]:
    """Removes what a policy of tfamp's, or a former level, changed about a model.

    Its layers then have their own dtypes, or float32 if made under a mixed policy; its symbolic
    tensors are not corrected yet. Returns the `id`s of the layers whose dtype a user chose.
    `keep_by_hand` keeps those set by hand since.
    """
    default = default_policy(model)
    chosen: set[int] = set()
    for functional, _ in functionals_of(model):
        model_roles.dissolve(functional)
    for layer in computing_layers_of(model):
        now, before = layer_dtypes.policy_of(layer), before_level(layer)
        is_chosen = _is_chosen(layer, default)
        _restore(layer, before)
        if is_chosen and (keep_by_hand or before is None):
            layer_dtypes.give_policy(layer, now)
            model_calls.guard_kernels(layer)
            chosen.add(id(layer))
            # Level O0 restores the policy before the levels later.
            is_noted = before is not None or set_by_hand(layer)
            model_roles.assign(layer, _by_hand(layer, before) if is_noted else None)
            continue
        if before is None and default.startswith("mixed_"):
            layer_dtypes.give_policy(layer, "float32")
        model_roles.assign(layer, None)
    return chosen


def _is_chosen(layer: Any, default: str) -> bool:
    """Whether a user chose a layer's dtype; a Functional or Sequential computes nothing itself."""
    if set_by_hand(layer):
        return True
    return not is_graph(layer) and decider_of(layer, default) == "user"


def _restore(layer: Any, before: Before | None) -> None:
    """Removes what a policy or a level changed about a layer, but its policy without a level."""
    unwrap_methods(layer)
    if before is not None:
        layer.autocast = before.autocast
        layer_dtypes.give_policy(layer, before.policy)
    elif model_calls.uncast_inputs.get(layer) or isinstance(layer, keras.layers.BatchNormalization):
        layer.autocast = True  # layers.fused_norms or layers.model_calls switched it off


def _by_hand(layer: Any, before: Before | None) -> Assignment:
    """The assignment of a layer whose dtype a user chose."""
    given = layer_dtypes.float_policy(layer) or layer_dtypes.policy_of(layer).name
    return Assignment(given, "user", before=before)


def put_on(model: Any, policy: Policy, *, kept: Iterable[Any], chosen: Iterable[int]) -> None:
    """Applies a mixed policy to every layer of a model, except kept and chosen ones.

    `take_off` has run. Kept layers stay float32, sublayers included; `chosen` has the `id`s of the
    layers whose dtype a user chose. A ValueError names a layer that fails in the low dtype.
    """
    skipped = {id(layer) for layer in layers_of(*kept)} | set(chosen)
    for layer in computing_layers_of(model):
        if id(layer) in skipped:
            continue
        stays = prepares_data(type(layer)) or _holds_its_dtype(layer, policy)
        keeps = policy.keeps_float32(type(layer))
        if stays or keeps:
            skipped |= {id(each) for each in layers_of(layer)}
        if not stays:
            _put_on(layer, policy, keeps)
    for functional, owner in functionals_of(model):
        correct_symbolic_dtypes_of(functional)
        model_calls.manage_functional(functional, owner)
    model_roles.models_below_become_parts(model)


def _put_on(layer: Any, policy: Policy, keeps: bool) -> None:
    before = Before(layer_dtypes.policy_of(layer), layer.autocast)
    if not keeps:
        layer_dtypes.give_policy(layer, policy.name)
    model_calls.manage(layer, policy, "level", before)
    if layer.built:
        return

    def build(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Sublayers made in its own `build` get the policy there.
        with policy_scope(policy):
            return original(*args, **kwargs)

    wrap_method(layer, "build", build)


def _holds_its_dtype(layer: Any, policy: Policy) -> bool:
    """Whether a layer, or one whose results its code may mix, is quantized and cannot change."""
    if is_graph(layer):
        return False  # the layers in it cast their inputs
    return any(layer_dtypes.policy_with(each, policy.name) is None for each in layers_of(layer))


# ---- Single layers by hand -----------------------------------------------------------------------


def set_layer_dtype(
    model_or_layer: Any, dtype: Any, *, pattern: str | None = None
) -> tuple[str, ...]:
    """Sets the compute dtype of a layer, or of every layer that a pattern matches.

    The counterpart of MindSpore's `to_float`. Sublayers are set too. Keras layers cast their own
    inputs, and variables keep their dtypes, so the model may be built and trained. Dtypes set by
    hand stay when `prepare` applies another level, also of outputs and BatchNormalization; only
    level O0 resets them. Quantized layers stay quantized.

    Pass the model and a pattern rather than a layer of it: then all of its symbolic outputs get
    the new dtype, and its compiled functions are traced again.

    Args:
        model_or_layer: A model or layer.
        dtype: "float16", "bfloat16" or "float32".
        pattern: Name or path of layers inside, or a regular expression searched for in the paths
            of layers where none has that very name. None for the given layer itself.

    Returns:
        The paths of the layers that were set.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `dtype` is none of these, no layer matches, or a layer stores its weights in
            another low dtype, does not run in this one, or is quantized so that it cannot. Nothing
            has changed.

    Example:
        >>> import keras, tfamp
        >>> model = keras.Sequential(
        ...     [keras.Input((8,)), keras.layers.Dense(4, name="wide"), keras.layers.Dense(2)]
        ... )
        >>> tfamp.set_layer_dtype(model, "bfloat16", pattern="wide")
        ('sequential/wide',)
        >>> [layer.compute_dtype for layer in model.layers]
        ['bfloat16', 'float32']
    """
    if not isinstance(model_or_layer, keras.Layer):
        raise TypeError(
            f"set_layer_dtype takes a keras.Model or keras.Layer; got {described(model_or_layer)}"
        )
    name = read_dtype(dtype)
    if name is None:
        raise ValueError("dtype must be 'float16', 'bfloat16' or 'float32'; got None or 'auto'.")
    chosen = [model_or_layer]
    if pattern is not None:
        chosen = select(layers_of(model_or_layer)[1:], [pattern], "pattern")
    targets = [x for x in computing_layers_of(*chosen) if layer_dtypes.float_policy(x) is not None]
    _check_can_compute(targets, name)
    with contextlib.ExitStack() as undo:
        undo.callback(note_state(model_or_layer))
        for layer in targets:
            _set(layer, name)
            model_calls.protect_values(layer)
        correct_symbolic_dtypes(model_or_layer)
        for layer in targets:
            model_roles.retype_followers(layer)
        undo.pop_all()
    drop_traced_functions(model_or_layer)
    return tuple(path_of(layer) for layer in chosen)


def _check_can_compute(layers: list[Any], dtype: str) -> None:
    for layer in layers:
        for stored in (weight.dtype for weight in layer.weights):
            if stored in LOW_PRECISION and stored != dtype:
                raise ValueError(
                    f"{path_of(layer)} stores its weights in {stored}, so it cannot compute in "
                    f"{dtype}. Set the dtype first, then prepare the model for O3 or master "
                    "weights."
                )
    names = quantized_names(
        x for x in layers if layer_dtypes.policy_with(x, _policy_name(x, dtype)) is None
    )
    if names:
        raise ValueError(
            f"Keras has quantized {names}, and a layer quantized so cannot be set to {dtype}: its "
            "predictions would change by more than rounding. Leave it out with pattern=, or set "
            "the dtype first and quantize then."
        )


def _policy_name(layer: Any, dtype: str) -> str:
    stores_low = any(weight.dtype in LOW_PRECISION for weight in layer.weights)
    return dtype if dtype == "float32" or stores_low else f"mixed_{dtype}"


def _set(layer: Any, dtype: str) -> None:
    before = before_level(layer)
    if managed_by(layer) is not None and isinstance(layer, keras.layers.BatchNormalization):
        # Back to Keras's own arithmetic, in the requested dtype.
        unwrap_methods(layer)
        layer.autocast = True if before is None else before.autocast
    layer_dtypes.give_policy(layer, _policy_name(layer, dtype))
    model_calls.guard_kernels(layer)
    model_roles.assign(layer, _by_hand(layer, before))
    for node in keras_hooks.inbound_nodes(layer):
        for tensor in node.outputs:
            if tensor.dtype in (*LOW_PRECISION, "float32"):
                keras_hooks.set_symbolic_dtype(tensor, layer.compute_dtype)
