"""The layers of a model that exists, and how they get other dtypes: all of them, or single ones.

Variables stay what they are. A level is put on a model in two steps: everything that tfamp did to
it is taken off, and then the policy put on, so that levels can follow each other in any order.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES, LOW_PRECISION
from tfamp.core.options import nearest
from tfamp.interop import keras_hooks
from tfamp.interop.keras_hooks import described, layers_of
from tfamp.interop.patching import rewrap_methods, unwrap_methods, wrap_method, wrapped_methods
from tfamp.layers import layer_dtypes
from tfamp.layers.model_calls import (
    computing_specs_of,
    manage,
    manage_functional,
    protect_values,
    uncast_inputs,
)
from tfamp.layers.policy_state import policy_scope
from tfamp.levels.precision_config import read_dtype
from tfamp.policy import Policy, prepares_data

# ---- The structure of a model --------------------------------------------------------------------


# Symbolic dtypes are corrected in passes until none changes. A layer called several times may need
# as many passes; more than this is a layer that changes its mind.
_MOST_PASSES = 20


def computing_layers_of(*roots: Any) -> list[Any]:
    """The same without the layers that only take the inputs."""
    return [each for each in layers_of(*roots) if not isinstance(each, keras.layers.InputLayer)]


def functionals_of(model: Any) -> list[tuple[Any, Any]]:
    """The Functionals in a model, the innermost first, each with the Sequential that runs it.

    That is None for a standalone Functional.
    """
    found: dict[int, tuple[Any, Any]] = {}
    for layer in reversed(layers_of(model)):
        owner = layer if isinstance(layer, keras.Sequential) else None
        functional = keras_hooks.functional_of(layer) if owner is not None else layer
        if isinstance(functional, keras_hooks.functional_class()):
            found.setdefault(id(functional), (functional, owner))
    return list(found.values())


def is_graph(layer: Any) -> bool:
    """Whether a layer is a Functional or Sequential model."""
    return isinstance(layer, keras.Sequential | keras_hooks.functional_class())


def models_held_by_models(model: Any) -> list[Any]:
    """The Functional and Sequential models that a model, or a model in it, holds if subclassed."""
    holders = filter(layer_dtypes.is_subclassed_model, layers_of(model))
    return [sub for holder in holders for sub in keras_hooks.sublayers(holder) if is_graph(sub)]


def correct_symbolic_dtypes(model: Any) -> None:
    """Makes the symbolic tensors of a model and those inside it say what its layers return now.

    A ValueError names the layer that fails.
    """
    for functional, _ in functionals_of(model):
        correct_symbolic_dtypes_of(functional)


def correct_symbolic_dtypes_of(functional: Any) -> None:
    """Does the same for one Functional."""
    nodes = [
        node
        for operation in functional.operations
        if not isinstance(operation, keras.layers.InputLayer)
        for node in keras_hooks.inbound_nodes(operation)
        if any(tensor.dtype in FLOAT_DTYPES for tensor in node.outputs)
    ]
    with computing_specs_of(functional):
        for _ in range(_MOST_PASSES):
            # A list, not any(...) of a generator: every node is to be corrected.
            changed = [_corrected(node) for node in nodes]
            if not any(changed):
                return


def _corrected(node: Any) -> bool:
    try:
        return layer_dtypes.respecify(node)
    except (TypeError, ValueError, RuntimeError, NotImplementedError, tf.errors.OpError) as error:
        operation = node.operation
        dtype = getattr(operation, "compute_dtype", "low precision")
        raise ValueError(
            f"{operation.name} ({type(operation).__name__}) cannot be computed in {dtype}: {error} "
            f"Keep it in float32 with keep_float32=[{operation.name!r}]."
        ) from error


def drop_traced_functions(model: Any) -> None:
    """Makes a model, and those inside it, trace their steps again, in the dtypes they have now."""
    for layer in layers_of(model):
        if isinstance(layer, keras.Model):
            for name in ("train_function", "test_function", "predict_function"):
                setattr(layer, name, None)


def path_of(layer: Any) -> str:
    """The path of a layer in its model; its name before it is built."""
    return str(getattr(layer, "path", None) or layer.name)


def quantized_names(layers: Iterable[Any]) -> str:
    """The paths of layers that Keras has quantized, each with how; "" where there are none."""
    modes = [(layer, layer_dtypes.quantization_of(layer)) for layer in layers]
    return ", ".join(f"{path_of(layer)} ({mode})" for layer, mode in modes if mode is not None)


def select(layers: list[Any], wanted: Iterable[Any], argument: str) -> list[Any]:
    """Returns the layers that a user means, in their order, without those below them.

    Wanted are names or paths of layers; regular expressions, searched for in the paths where no
    layer has that very name; layer classes; layers. An error names the argument.
    """
    chosen: set[int] = set()
    for each in wanted:
        found = _meant(layers, each, argument)
        if not found:
            is_text = isinstance(each, str)
            names = [x.name if is_text else type(x).__name__ for x in layers]
            raise ValueError(
                f"{argument} holds {each!r}, which means no layer of the model. The nearest is "
                f"{nearest(getattr(each, '__name__', each), names)!r}.{keras_hooks.advice(each)}"
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


@dataclass(frozen=True, slots=True)
class Before:
    """A layer's own policy and `autocast` before a policy was put on it, and that one's name."""

    policy: Any
    autocast: bool
    given: str


layers_before: layer_dtypes.WeakMap[Before] = layer_dtypes.WeakMap()
set_by_hand: layer_dtypes.WeakMap[bool] = layer_dtypes.WeakMap()


def note_state(root: Any) -> Callable[[], None]:
    """Returns a function that restores the dtypes, replaced methods and appended casts of a model.

    With it a failure leaves no trace of what `prepare` changes about a model.
    """
    registries: tuple[layer_dtypes.WeakMap[Any], ...] = (
        layer_dtypes.managed_layers,
        layers_before,
        set_by_hand,
    )
    layers, functionals = layers_of(root), [found for found, _ in functionals_of(root)]
    noted = [(x, wrapped_methods(x), layer_dtypes.policy_of(x), x.autocast) for x in layers]
    keys = [(registry, x) for x in layers for registry in registries]
    keys += [(layer_dtypes.graphs, x) for x in functionals]
    records = [(registry, x, layer_dtypes.copied(registry.get(x))) for registry, x in keys]
    outputs = [keras_hooks.outputs_of(x) for x in functionals]
    # Outputs of the ops that follow a layer too, such as a sum of two outputs.
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
        for registry, key, value in records:
            registry.set(key, value)
        for tensor, dtype in symbolic:
            keras_hooks.set_symbolic_dtype(tensor, dtype)

    return restore


def default_policy(model: Any) -> str:
    """The name of the policy that a model's layers have unless someone chose another.

    A model read from a file does not know any more which it was made under, so it is the one that
    most layers have, "float32" where it is a draw.
    """
    layers = [x for x in computing_layers_of(model) if not isinstance(x, keras.Model)]
    if any(layers_before.get(layer) for layer in layers):
        return "float32"
    own = layer_dtypes.float_policy(model) or "float32"
    if own.startswith("mixed_"):
        return own
    counts = Counter(name for name in map(layer_dtypes.float_policy, layers) if name is not None)
    most = max(counts, key=lambda x: (counts[x], x == "float32", x), default="float32")
    return most if most != "float64" else "float32"


def take_off(model: Any, *, keep_by_hand: bool) -> set[int]:
    """Takes off a model what a policy of tfamp's, or a level before, put on it.

    Its layers then have the dtypes they had, or float32 where they were made under a mixed policy;
    its symbolic tensors do not say so yet. Returns the `id`s of the layers whose dtype a user
    chose: those set by hand since may be kept.
    """
    default = default_policy(model)
    chosen: set[int] = set()
    for functional, _ in functionals_of(model):
        layer_dtypes.dissolve(functional)
    for layer in computing_layers_of(model):
        now, before = layer_dtypes.policy_of(layer), layers_before.get(layer)
        is_chosen = _is_chosen(layer, default)
        unwrap_methods(layer)
        layer_dtypes.managed_layers.set(layer, None)
        if before is not None:
            layer.autocast = before.autocast
            layer_dtypes.give_policy(layer, before.policy)
        elif isinstance(layer, keras.layers.BatchNormalization) or uncast_inputs.get(layer):
            layer.autocast = True  # layers.fused_norms or layers.model_calls switched it off
        if is_chosen and (keep_by_hand or before is None):
            layer_dtypes.give_policy(layer, now)
            chosen.add(id(layer))
            if before is not None:  # It stays, for the way back: what the layer was at first.
                set_by_hand.set(layer, True)
            continue
        if before is None and default.startswith("mixed_"):
            layer_dtypes.give_policy(layer, "float32")
        set_by_hand.set(layer, None)
        layers_before.set(layer, None)
    return chosen


def _is_chosen(layer: Any, default: str) -> bool:
    """Whether a layer's dtype is a user's choice, as far as that can be known."""
    if set_by_hand.get(layer):
        return True
    if is_graph(layer):
        return False  # it computes nothing itself
    before, record = layers_before.get(layer), layer_dtypes.managed_layers.get(layer)
    name = layer_dtypes.float_policy(layer)
    if record is not None and record.raised:
        return name != "float32"
    if before is not None:
        return name != before.given
    if record is not None:
        return name != record.policy_name
    if name == "float32" and default.startswith("mixed_"):
        # In a model read from a file, BatchNormalization is so without anyone's choice.
        return not Policy(default).keeps_float32(type(layer))
    return name != default


def put_on(model: Any, policy: Policy, *, kept: Iterable[Any], chosen: Iterable[int]) -> None:
    """Puts a mixed policy on every layer of a model that nothing keeps from it.

    Everything was taken off the model. What is kept stays float32, with all below it, and what a
    user chose, by its number. A ValueError says which layer of the user's fails in the low dtype.
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
        manage_functional(functional, owner)
    layer_dtypes.models_below_become_parts(model)


def _put_on(layer: Any, policy: Policy, keeps: bool) -> None:
    given = "float32" if keeps else policy.name
    layers_before.set(layer, Before(layer_dtypes.policy_of(layer), layer.autocast, given))
    if not keeps:
        layer_dtypes.give_policy(layer, policy.name)
    manage(layer, policy)
    if layer.built:
        return

    def build(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Layers that it makes in its own `build` get the policy there.
        with policy_scope(policy):
            return original(*args, **kwargs)

    wrap_method(layer, "build", build)


def _holds_its_dtype(layer: Any, policy: Policy) -> bool:
    """Whether a layer is quantized and cannot get a policy, or its code may mix it with such."""
    if is_graph(layer):
        return False  # the layers in it cast what they are given
    return any(layer_dtypes.policy_with(each, policy.name) is None for each in layers_of(layer))


# ---- Single layers by hand -----------------------------------------------------------------------


def set_layer_dtype(
    model_or_layer: Any, dtype: Any, *, pattern: str | None = None
) -> tuple[str, ...]:
    """Makes a layer, or every layer of a pattern, compute in a dtype.

    What MindSpore's `to_float` does. Layers inside are set with it. The casts around follow by
    themselves: a Keras layer casts what it is given, and variables keep the dtype they have, so a
    built and trained model will do. What is set by hand stays when `prepare` puts another level on
    the model, outputs and BatchNormalization included; only level O0 leads back. A layer that Keras
    has quantized stays so.

    Give the model, with a pattern, rather than a layer of it: then all of its symbolic outputs
    say the new dtype, and its compiled functions are traced again.

    Args:
        model_or_layer: A model or layer.
        dtype: "float16", "bfloat16" or "float32".
        pattern: Name or path of layers inside, or a regular expression searched for in the paths
            of layers where none has that very name. None for the given layer itself.

    Returns:
        The paths of the layers that were set.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `dtype` is another one, no layer matches, or a layer stores its weights in
            another low dtype, does not run in this one, or is quantized so that it cannot. Nothing
            has changed then.

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
            protect_values(layer)
        correct_symbolic_dtypes(model_or_layer)
        for layer in targets:
            layer_dtypes.retype_followers(layer)
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
    before, record = layers_before.get(layer), layer_dtypes.managed_layers.get(layer)
    if record is not None and isinstance(layer, keras.layers.BatchNormalization):
        # Its own arithmetic again, in the dtype that was asked for.
        unwrap_methods(layer)
        layer.autocast = True if before is None else before.autocast
    layer_dtypes.managed_layers.set(layer, None)
    layer_dtypes.give_policy(layer, _policy_name(layer, dtype))
    set_by_hand.set(layer, True)
    for node in keras_hooks.inbound_nodes(layer):
        for tensor in node.outputs:
            if tensor.dtype in (*LOW_PRECISION, "float32"):
                keras_hooks.set_symbolic_dtype(tensor, layer.compute_dtype)
