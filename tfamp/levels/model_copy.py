"""Copies a model with its weights stored in other dtypes; the given model is not modified."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import random
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION, float_format
from tfamp.interop import keras_hooks
from tfamp.interop.keras_hooks import layers_of
from tfamp.interop.patching import patched_here, wrap_method
from tfamp.layers.layer_dtypes import float_policy, is_plain
from tfamp.layers.policy_state import policy_scope
from tfamp.levels.model_structure import is_graph, path_of
from tfamp.policy import prepares_data

_rebuilding = threading.Lock()


def copy_model(model: Any, values: Callable[[Any], Iterable[Any]]) -> Any:
    """Copies a built model, with weights in the dtypes of its layers' policies; not compiled.

    The given weights may have other dtypes. `values` maps weights to their exact values. A
    ValueError says that the model cannot be made from its configuration, or names a weight that is
    out of range in its new dtype.
    """
    with _without_initializing() as postponed, _building_in_own_policies():
        made = _from_config(model)
        _set_late_policies(model, made)
        _build_like(model, made)
    old, new = model.weights, made.weights
    if _shapes(old) != _shapes(new):
        raise ValueError(_difference(model, made))
    _share_generators(model, made)
    copied = {id(each) for each in new}
    for layer, counterpart in same_layers(model, made):
        copied |= _copy_own_state(layer, counterpart)
    for value, before, after in zip(values(old), old, new, strict=True):
        _copy_weight(value, before, after)
    for variable, initializer in postponed:
        if id(variable) not in copied:
            made_by = keras.initializers.get(initializer)
            variable.assign(made_by(variable.shape, dtype=variable.dtype))
    return made


@contextlib.contextmanager
def _without_initializing() -> Iterator[list[tuple[Any, Any]]]:
    """A context in which new variables are zeros; yields them with their initializers.

    Initializers may fail in the new dtype, take time, and draw random numbers. Most variables are
    assigned the values of a model's, and only those without a counterpart are initialized.
    """
    postponed: list[tuple[Any, Any]] = []

    def variable_init(
        original: Any, variable: Any, initializer: Any, *args: Any, **kwargs: Any
    ) -> None:
        is_value = not (callable(initializer) or isinstance(initializer, str))
        original(variable, initializer if is_value else "zeros", *args, **kwargs)
        if not is_value:
            postponed.append((variable, initializer))

    with _rebuilding, patched_here(variable_init=variable_init):
        # Layers and initializers without a seed draw one when they are made.
        drawn = random.getstate()
        try:
            yield postponed
        finally:
            random.setstate(drawn)


@contextlib.contextmanager
def _building_in_own_policies() -> Iterator[None]:
    """A context in which the layers that a new layer's `build` makes get its policy."""
    with contextlib.ExitStack() as undo:

        def layer_init(original: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
            original(layer, *args, **kwargs)
            undo.callback(wrap_method(layer, "build", functools.partial(build, layer)))

        def build(layer: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
            with policy_scope(float_policy(layer) or "float32"):
                return original(*args, **kwargs)

        with patched_here(layer_init=layer_init):
            yield


def _from_config(model: Any) -> Any:
    classes = {type(layer).__name__: type(layer) for layer in layers_of(model)}
    try:
        config = {
            "module": type(model).__module__,
            "class_name": type(model).__name__,
            "config": _arguments(model, _config_of(model)),
            "registered_name": type(model).__name__,
        }
        with policy_scope(float_policy(model) or "float32"):
            make = keras.saving.deserialize_keras_object
            return make(config, custom_objects=classes, safe_mode=False)
    except (TypeError, ValueError, NotImplementedError, AttributeError) as error:
        raise ValueError(
            f"{model.name} ({type(model).__name__}) stores its weights in another dtype at this "
            "level, so it has to be made again from its configuration, and that fails: "
            f"{error} Give its classes get_config and from_config, or take level "
            "'O2' without master_weights, which needs no new weights."
        ) from error


def _arguments(layer: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Drops Keras's general keys that the constructor of a user's layer does not accept."""
    if is_graph(layer) or any("from_config" in vars(each) for each in _own_classes(layer)):
        return config
    parameters = inspect.signature(type(layer).__init__).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return config
    general = {"name", "trainable", "dtype", "activity_regularizer"} - set(parameters)
    return {name: value for name, value in config.items() if name not in general}


def _own_classes(layer: Any) -> list[type]:
    return [
        each
        for each in type(layer).__mro__
        if issubclass(each, keras.Layer) and each.__module__.partition(".")[0] != "keras"
    ]


def same_layers(model: Any, made: Any) -> list[tuple[Any, Any]]:
    """Pairs the layers of a model with their counterparts in a copy, holders before what they hold.

    A layer holds the same layers in the same order in both, except for casts, and for layers that
    its `build` will make.
    """
    counterparts = {id(model): made}

    def visit(old: Any, new: Any) -> None:
        remaining = list(keras_hooks.sublayers(new))
        for layer in keras_hooks.sublayers(old):
            kinds = [type(each) for each in remaining]
            if type(layer) in kinds:
                index = kinds.index(type(layer))
                counterpart, remaining = remaining[index], remaining[index + 1 :]
                if id(layer) not in counterparts:
                    counterparts[id(layer)] = counterpart
                    visit(layer, counterpart)

    visit(model, made)
    layers = layers_of(model)
    return [(each, counterparts[id(each)]) for each in layers if id(each) in counterparts]


def _config_of(model: Any) -> dict[str, Any]:
    """Returns a model's configuration, without keys that users' constructors do not accept."""
    config = copy.deepcopy(model.get_config())
    if not is_graph(model):
        return config
    layers = {layer.name: layer for layer in keras_hooks.sublayers(model)}
    # A model with its own constructor, such as KerasHub's backbones, lists no layers.
    for entry in config.get("layers", ()):
        entry.pop("compile_config", None)
        layer = layers.get(entry.get("name", entry["config"].get("name")))
        if is_graph(layer):
            entry["config"] = _config_of(layer)
        elif layer is not None and _own_classes(layer):
            entry.pop("build_config", None)  # its first call builds it
            entry["config"] = _arguments(layer, entry["config"])
    return config


def _set_late_policies(model: Any, made: Any) -> None:
    """Sets the policies of layers that a model's own code makes, while they have no variables."""
    for old, new in same_layers(model, made):
        if not is_plain(new.dtype_policy):
            continue
        wanted = old.dtype_policy.name
        if new.dtype_policy.name == wanted:
            continue
        if new.weights and not isinstance(new, keras.Model):
            raise ValueError(
                f"{path_of(new)} is made with {new.dtype_policy.name} weights by the constructor "
                f"of {type(model).__name__}, and is to have {wanted} ones. Give its class "
                "get_config and from_config, give the layer its dtype there, or take level 'O2' "
                "without master_weights, which needs no new weights."
            )
        new.dtype_policy = wanted


def _build_like(model: Any, made: Any) -> None:
    # Random states too: a model may have all its weights before it is built, and no generator.
    complete = len(made.variables) == len(model.variables)
    if complete or all(new.built for old, new in same_layers(model, made) if old.built):
        return
    config = model.get_build_config()
    if config is None:
        raise ValueError(
            f"{model.name} cannot be built again, as its shapes are not known; build it with "
            "model.build(input_shape)."
        )
    made.build_from_config(config)
    made.built = True


def _copy_weight(value: Any, before: Any, after: Any) -> None:
    _check_range(value, after)
    keras_hooks.place_like(before, after)
    after.assign(keras.ops.cast(value, after.dtype))
    if after.trainable != before.trainable:
        after.trainable = before.trainable
    is_low = after.dtype in LOW_PRECISION
    after.regularizer = _in_float32(before.regularizer, is_low, _RegularizerInFloat32)
    after.constraint = _in_float32(before.constraint, is_low, _ConstraintInFloat32)


def _share_generators(model: Any, made: Any) -> None:
    """Makes layers that share a random generator in a model share one in its copy.

    Configurations hold a generator once for each layer.
    """
    shared: dict[int, Any] = {}
    for old, new in same_layers(model, made):
        generators = (keras_hooks.seed_generators(each) for each in (old, new))
        for before, after in zip(*generators, strict=False):
            first = shared.setdefault(id(before), after)
            if first is not after:
                keras_hooks.replace_generator(new, after, first)


def _copy_own_state(layer: Any, made: Any) -> set[int]:
    """Copies what a layer holds besides weights and layers; returns the `id`s of the variables.

    Keras numbers the names of layers that a model's own code makes.
    """
    made.name = layer.name
    keras_hooks.place_like(layer, made)
    if isinstance(layer, keras_hooks.functional_class()):
        made.output_names = list(layer.output_names)
    if prepares_data(type(layer)):
        _copy_adapted(layer, made)
    if made.trainable != layer.trainable:
        made.trainable = layer.trainable
    made.activity_regularizer = layer.activity_regularizer
    keras_hooks.rematerialize_like(layer, made)
    for name, value in vars(layer).items():
        is_added = name not in vars(made) and not name.startswith("_")
        if is_added and _is_plain_data(value):
            setattr(made, name, value)
    copied, before = set(), _states(layer)
    for name, variable in _states(made).items():
        value = before.get(name)
        if value is not None and value.shape == variable.shape:
            same = value.dtype == variable.dtype
            variable.assign(value if same else keras.ops.cast(value, variable.dtype))
            copied.add(id(variable))
    return copied


def _is_plain_data(value: Any) -> bool:
    """Whether an attribute belongs to no model: no tensors, layers, functions and the like."""
    if isinstance(value, dict):
        return all(map(_is_plain_data, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain_data, value))
    return isinstance(value, bool | int | float | str | bytes | np.generic | np.ndarray | None)


def _states(layer: Any) -> dict[Any, Any]:
    """The variables of a layer that are not weights, by their place in it, without sublayers.

    These are states of random generators and of metrics, and variables of TensorFlow's, which
    Keras does not list.
    """
    states: dict[Any, Any] = {}
    for number, generator in enumerate(keras_hooks.seed_generators(layer)):
        states["seed", number] = generator.state
    for number, metric in enumerate(keras_hooks.own_metrics(layer)):
        states |= {("metric", number, i): each for i, each in enumerate(metric.variables)}
    for name, value in vars(layer).items():
        variable = value.state if isinstance(value, tf.random.Generator) else value
        if isinstance(variable, tf.Variable):
            states["attribute", name] = variable
    return states


def _copy_adapted(layer: Any, made: Any) -> None:
    """Copies the adapted state of a preprocessing layer, as saving and loading it would.

    Not all of it is in weights: vocabularies, and values that are computed from the weights.
    """
    stored: dict[str, Any] = {}
    layer.save_own_variables(stored)
    made.load_own_variables(stored)
    if hasattr(layer, "save_assets"):
        with tempfile.TemporaryDirectory() as directory:
            layer.save_assets(directory)
            made.load_assets(directory)


def _shapes(weights: Iterable[Any]) -> list[tuple[int, ...]]:
    return [tuple(weight.shape) for weight in weights]


def _difference(model: Any, made: Any) -> str:
    pairs = same_layers(model, made)
    # The innermost layers come last; layers that hold them have their weights too.
    grown = [old for old, new in pairs if _shapes(old.weights) != _shapes(new.weights)]
    layer = grown[-1] if grown else model
    return (
        f"{model.name} stores its weights in another dtype at this level, so it is made again from "
        f"its configuration. {path_of(layer)} ({type(layer).__name__}) has weights then that are "
        "not those it has now: it was changed since it was built, by enable_lora for example. "
        "Change it after prepare, have its get_config say so, or take level 'O2' without "
        "master_weights, which needs no new weights."
    )


def _in_float32(function: Any, is_low: bool, kind: type[_InFloat32]) -> Any:
    """Returns what regularizes or constrains a weight, as it is or, of a low one, in float32."""
    own = function.function if isinstance(function, _InFloat32) else function
    return kind(own) if is_low and own is not None else own


class _InFloat32:
    """A function of a weight, computed in float32: sums of squares exceed float16's range."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function


# Variables of Keras up to 3.14 accept nothing but a `Regularizer` and a `Constraint`.
class _RegularizerInFloat32(_InFloat32, keras.regularizers.Regularizer):
    """A regularizer that computes in float32, the dtype of the loss it is added to."""

    def __call__(self, x: Any) -> Any:
        return self.function(keras.ops.cast(x, "float32"))


class _ConstraintInFloat32(_InFloat32, keras.constraints.Constraint):
    """A constraint that computes in float32."""

    def __call__(self, w: Any) -> Any:
        return keras.ops.cast(self.function(keras.ops.cast(w, "float32")), w.dtype)


def _check_range(value: Any, target: Any) -> None:
    if target.dtype != "float16" or not keras.ops.size(value):
        return
    largest = float(keras.ops.max(keras.ops.abs(keras.ops.cast(value, "float32"))))
    limit = float_format("float16").max
    if limit < largest < float("inf"):
        raise ValueError(
            f"{path_of(target)} holds {largest:g}, and float16 holds up to {limit:g}. Keep its "
            "layer in float32 with keep_float32=, or use dtype='bfloat16'."
        )
