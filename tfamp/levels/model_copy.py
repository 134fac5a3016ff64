"""Copies a model with its weights stored in other dtypes; the given model is not modified."""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from tfamp.core.dtypes import LOW_PRECISION, float_format
from tfamp.interop import keras_hooks
from tfamp.interop.keras_hooks import layers_of
from tfamp.interop.patching import patched_here
from tfamp.layers.layer_dtypes import float_policy, is_plain
from tfamp.layers.policy_state import policy_scope
from tfamp.levels.layer_policies import is_graph, path_of
from tfamp.policy import prepares_data

_rebuilding = threading.Lock()


def copy_model(model: Any, values: Callable[[Any], Iterable[Any]]) -> Any:
    """Copies a built model, with weights in the dtypes of its layers' policies; not compiled.

    The given weights may have other dtypes. `values` maps weights to their exact values. A
    ValueError says that the model cannot be made from its configuration, or names a weight that is
    out of range in its new dtype.
    """
    with _without_initializing():
        made = _from_config(model)
        _set_late_policies(model, made)
        _build_like(model, made)
    old, new = model.weights, made.weights
    if _shapes(old) != _shapes(new):
        raise ValueError(_difference(model, made))
    for layer, copied in same_layers(model, made):
        if prepares_data(type(layer)):
            _copy_adapted(layer, copied)
        if copied.trainable != layer.trainable:
            copied.trainable = layer.trainable
    for value, before, after in zip(values(old), old, new, strict=True):
        _copy_weight(value, before, after)
    return made


@contextlib.contextmanager
def _without_initializing() -> Iterator[None]:
    """A context in which new variables are zeros; their values are assigned later.

    Initializers may fail in the new dtype, take time, and draw random numbers.
    """

    def variable_init(
        original: Any, variable: Any, initializer: Any, *args: Any, **kwargs: Any
    ) -> None:
        is_value = not (callable(initializer) or isinstance(initializer, str))
        original(variable, initializer if is_value else "zeros", *args, **kwargs)

    with _rebuilding, patched_here(variable_init=variable_init):
        # Layers and initializers without a seed draw one when they are made.
        drawn = random.getstate()
        try:
            yield
        finally:
            random.setstate(drawn)


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
    general = {"name", "trainable", "dtype"} - set(parameters)
    return {name: value for name, value in config.items() if name not in general}


def _own_classes(layer: Any) -> list[type]:
    return [
        each
        for each in type(layer).__mro__
        if issubclass(each, keras.Layer) and each.__module__.partition(".")[0] != "keras"
    ]


def same_layers(model: Any, made: Any) -> list[tuple[Any, Any]]:
    """Pairs each layer of a model with its counterpart in a copy, which may have more casts.

    Layers that a model's own code makes have other names in the copy, but the same order.
    """
    remaining = iter(layers_of(made))
    pairs = [
        (layer, next((each for each in remaining if type(each) is type(layer)), None))
        for layer in layers_of(model)
    ]
    return [(old, new) for old, new in pairs if new is not None]


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
    for old, new in zip(layers_of(model), layers_of(made), strict=False):
        if type(old) is not type(new) or not is_plain(new.dtype_policy):
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
    missing = len(made.weights) != len(model.weights)
    if not missing or all(new.built for old, new in same_layers(model, made) if old.built):
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
    after.assign(keras.ops.cast(value, after.dtype))
    if after.trainable != before.trainable:
        after.trainable = before.trainable
    regularizer = getattr(after, "regularizer", None)
    if regularizer is not None and after.dtype in LOW_PRECISION:
        after.regularizer = _InFloat32(regularizer)


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


class _InFloat32(keras.regularizers.Regularizer):
    """A regularizer that computes in float32, the dtype of the loss it is added to.

    A `Regularizer`, as variables of Keras up to 3.14 accept nothing else.
    """

    def __init__(self, regularizer: Callable[[Any], Any]) -> None:
        self.regularizer = regularizer

    def __call__(self, x: Any) -> Any:
        return self.regularizer(keras.ops.cast(x, "float32"))


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
