"""Changes the dtypes of a model that exists: all of it, or single layers by hand; and back again.

Variables stay what they are. A level is put on a model in two steps: everything that tfamp did to
it is taken off, and then the policy put on, so that levels can follow each other in any order.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import keras

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.interop import keras_hooks
from tfamp.interop.keras_hooks import described
from tfamp.interop.patching import rewrap_methods, unwrap_methods, wrap_method, wrapped_methods
from tfamp.layers import layer_dtypes
from tfamp.layers.layer_dtypes import (
    WeakMap,
    float_policy,
    give_policy,
    managed_layers,
    policy_of,
    policy_with,
    quantization_of,
)
from tfamp.layers.model_calls import manage, manage_functional, protect_values, uncast_inputs
from tfamp.layers.policy_state import policy_scope
from tfamp.levels.model_structure import (
    computing_layers_of,
    correct_symbolic_dtypes,
    drop_traced_functions,
    functionals_of,
    is_graph,
    layers_of,
    path_of,
    select,
)
from tfamp.levels.precision_config import check_pattern, read_dtype, wrong_type
from tfamp.policy import Policy, prepares_data


@dataclass(frozen=True, slots=True)
class Before:
    """A layer's own policy and `autocast` before a policy was put on it, and that one's name."""

    policy: Any
    autocast: bool
    given: str


layers_before: WeakMap[Before] = WeakMap()
set_by_hand: WeakMap[bool] = WeakMap()


def note_state(*roots: Any) -> Callable[[], None]:
    """Returns what puts back the dtypes, replaced methods and appended casts that models have now.

    With it a failure leaves no trace of what `prepare` changes about a model.
    """
    registries: tuple[WeakMap[Any], ...] = (managed_layers, layers_before, set_by_hand)
    layers, functionals = layers_of(*roots), [found for found, _ in functionals_of(*roots)]
    noted = [(x, wrapped_methods(x), policy_of(x), x.autocast) for x in layers]
    records = [(registry, x, registry.get(x)) for x in layers for registry in registries]
    records += [(layer_dtypes.graphs, x, layer_dtypes.graphs.get(x)) for x in functionals]
    outputs = [keras_hooks.outputs_of(x) for x in functionals]
    # Those behind a layer may be of ops that are no layers, such as a sum of two outputs.
    nodes = [
        n for x in layers for n in (*keras_hooks.inbound_nodes(x), *keras_hooks.outbound_nodes(x))
    ]
    symbolic = [(tensor, tensor.dtype) for node in nodes for tensor in node.outputs]

    def restore() -> None:
        for layer, methods, policy, autocast in noted:
            rewrap_methods(layer, methods)
            give_policy(layer, policy)
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
    own = float_policy(model) or "float32"
    if own.startswith("mixed_"):
        return own
    counts = Counter(name for name in map(float_policy, layers) if name is not None)
    most = max(counts, key=lambda x: (counts[x], x == "float32", x), default="float32")
    return most if most != "float64" else "float32"


def take_off(model: Any, *, keep_by_hand: bool) -> set[int]:
    """Takes off a model what a policy of tfamp's, or a level before, put on it.

    Its layers then have the dtypes they had, or float32 where they were made under a mixed policy;
    its symbolic tensors do not say so yet. Returns the numbers of the layers whose dtype a user
    chose: those set by hand since may be kept.
    """
    default = default_policy(model)
    chosen: set[int] = set()
    for functional, _ in functionals_of(model):
        layer_dtypes.dissolve(functional)
    for layer in computing_layers_of(model):
        now, before = policy_of(layer), layers_before.get(layer)
        is_chosen = _is_chosen(layer, default)
        _take_off(layer, default, is_chosen)
        if is_chosen and (keep_by_hand or before is None):
            give_policy(layer, now)
            chosen.add(id(layer))
            if before is not None:  # It stays, for the way back: what the layer was at first.
                set_by_hand.set(layer, True)
        else:
            set_by_hand.discard(layer)
            layers_before.discard(layer)
    return chosen


def _is_chosen(layer: Any, default: str) -> bool:
    """Whether a layer's dtype is a user's choice, as far as that can be known."""
    if set_by_hand.get(layer):
        return True
    if is_graph(layer):
        return False  # it computes nothing itself
    before, record = layers_before.get(layer), managed_layers.get(layer)
    name = float_policy(layer)
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


def _take_off(layer: Any, default: str, is_chosen: bool) -> None:
    before = layers_before.get(layer)
    unwrap_methods(layer)
    managed_layers.discard(layer)
    if before is not None:
        layer.autocast = before.autocast
        give_policy(layer, before.policy)
        return
    if isinstance(layer, keras.layers.BatchNormalization) or uncast_inputs.get(layer):
        layer.autocast = True  # layers.fused_norms or layers.model_calls switched it off
    if not is_chosen and default.startswith("mixed_"):
        give_policy(layer, "float32")


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
        correct_symbolic_dtypes(functional)
        manage_functional(functional, owner)
    layer_dtypes.models_below_become_parts(model)


def _put_on(layer: Any, policy: Policy, keeps: bool) -> None:
    given = "float32" if keeps else policy.name
    layers_before.set(layer, Before(policy_of(layer), layer.autocast, given))
    if not keeps:
        give_policy(layer, policy.name)
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
    return any(policy_with(each, policy.name) is None for each in layers_of(layer))


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
    say the new dtype, and its compiled functions are traced anew.

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
    chosen = _chosen(model_or_layer, pattern)
    targets = [x for x in computing_layers_of(*chosen) if float_policy(x) is not None]
    _check_can_compute(targets, name)
    with contextlib.ExitStack() as undo:
        undo.callback(note_state(model_or_layer))
        for layer in targets:
            _set(layer, name)
            protect_values(layer)
        for functional, _ in functionals_of(model_or_layer):
            correct_symbolic_dtypes(functional)
        for layer in targets:
            layer_dtypes.retype_followers(layer)
        undo.pop_all()
    drop_traced_functions(model_or_layer)
    return tuple(path_of(layer) for layer in chosen)


def _chosen(owner: Any, pattern: str | None) -> list[Any]:
    if pattern is None:
        return [owner]
    if not isinstance(pattern, str):
        raise wrong_type("pattern must be a string", pattern)
    check_pattern("pattern", pattern)
    return select(layers_of(owner)[1:], [pattern], "pattern")


def _check_can_compute(layers: list[Any], dtype: str) -> None:
    for layer in layers:
        for stored in (weight.dtype for weight in layer.weights):
            if stored in LOW_PRECISION and stored != dtype:
                raise ValueError(
                    f"{path_of(layer)} stores its weights in {stored}, so it cannot compute in "
                    f"{dtype}. Set the dtype first, then prepare the model for O3 or master "
                    "weights."
                )
    without = [layer for layer in layers if policy_with(layer, _policy_name(layer, dtype)) is None]
    if without:
        names = ", ".join(f"{path_of(layer)} ({quantization_of(layer)})" for layer in without)
        raise ValueError(
            f"Keras has quantized {names}, and a layer quantized so cannot be set to {dtype}: its "
            "predictions would change by more than rounding. Leave it out with pattern=, or set "
            "the dtype first and quantize then."
        )


def _policy_name(layer: Any, dtype: str) -> str:
    stores_low = any(weight.dtype in LOW_PRECISION for weight in layer.weights)
    return dtype if dtype == "float32" or stores_low else f"mixed_{dtype}"


def _set(layer: Any, dtype: str) -> None:
    before, record = layers_before.get(layer), managed_layers.get(layer)
    if record is not None and isinstance(layer, keras.layers.BatchNormalization):
        # Its own arithmetic again, in the dtype that was asked for.
        unwrap_methods(layer)
        layer.autocast = True if before is None else before.autocast
    managed_layers.discard(layer)
    give_policy(layer, _policy_name(layer, dtype))
    set_by_hand.set(layer, True)
    for node in keras_hooks.inbound_nodes(layer):
        for tensor in node.outputs:
            if tensor.dtype in (*LOW_PRECISION, "float32"):
                keras_hooks.set_symbolic_dtype(tensor, layer.compute_dtype)
