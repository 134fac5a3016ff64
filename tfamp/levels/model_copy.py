"""A model made anew with its weights stored in other dtypes; the given one is left as it was."""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras

from tfamp.core.dtypes import LOW_PRECISION, float_format
from tfamp.interop import keras_hooks
from tfamp.interop.patching import patched_here
from tfamp.layers.layer_dtypes import is_plain
from tfamp.layers.policy_state import policy_scope
from tfamp.levels.model_structure import is_graph, layers_of, path_of
from tfamp.policy import prepares_data

# What KerasHub's backbones note when they enable LoRA on layers they hold.
_LORA_NOTES = ("_lora_enabled_layers", "_lora_rank")

_rebuilding = threading.Lock()


def copy_model(
    model: Any,
    policies: Mapping[int, str],
    values: Callable[[Any], Iterable[Any]] | None = None,
) -> Any:
    """A built model made anew with other dtype policies, and its weights; not compiled.

    Policies go by the numbers of the layers; a layer without one keeps its own. What is given
    weights may know more exact values. A ValueError says that the model cannot be made from its
    configuration, or which weight has no value in its new dtype.
    """
    with _without_initializing() as initializers:
        made = _from_config(model, policies)
        _set_late_policies(model, made, policies)
        _build_like(model, made)
        _enable_lora_like(model, made)
    _copy_weights(model, made, values)
    _copy_trainable(model, made)
    copied = {id(each) for each in (*made.weights, *_copy_seeds(model, made))}
    others = {id(each) for each in (*made.variables, *made.metrics_variables)} - copied
    for variable, initializer in initializers:
        if id(variable) in others:
            initial = keras.initializers.get(initializer)
            variable.assign(initial(variable.shape, dtype=variable.dtype))
    return made


@contextlib.contextmanager
def _without_initializing() -> Iterator[list[tuple[Any, Any]]]:
    """Makes variables zeros, as their values exist; yields them with their initializers.

    An initializer may not run in the new dtype, takes its time, and draws random numbers.
    """
    initializers: list[tuple[Any, Any]] = []

    def variable_init(
        original: Any, variable: Any, initializer: Any, *args: Any, **kwargs: Any
    ) -> None:
        if callable(initializer) or isinstance(initializer, str):  # It may be a value.
            initializers.append((variable, initializer))
            initializer = _zeros
        original(variable, initializer, *args, **kwargs)

    with _rebuilding, patched_here(variable_init=variable_init):
        # Layers and initializers without a seed draw one when they are made.
        drawn = random.getstate()
        try:
            yield initializers
        finally:
            random.setstate(drawn)


def _from_config(model: Any, policies: Mapping[int, str]) -> Any:
    classes = {type(layer).__name__: type(layer) for layer in layers_of(model)}
    try:
        config = {
            "module": type(model).__module__,
            "class_name": type(model).__name__,
            "config": _arguments(model, _with_policies(model, policies)),
            "registered_name": type(model).__name__,
        }
        with policy_scope(policies.get(id(model), "float32")):
            return keras.saving.deserialize_keras_object(
                config, custom_objects=classes, safe_mode=False
            )
    except (TypeError, ValueError, NotImplementedError, AttributeError) as error:
        raise ValueError(
            f"{model.name} ({type(model).__name__}) stores its weights in another dtype at this "
            "level, so it has to be made anew from its configuration, and that fails: "
            f"{_first_cause(error)} Give its classes get_config and from_config, or take level "
            "'O2' without master_weights, which needs no new weights."
        ) from error


def _first_cause(error: BaseException) -> BaseException:
    # Keras puts every error into another one, with the whole configuration.
    while error.__context__ is not None:
        error = error.__context__
    return error


def _arguments(layer: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Leaves out what a user's own constructor does not take but Keras puts into all configs."""
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
    """Each layer of a model with the one that its copy has for it.

    What the copy's own code makes has other names; what was appended to it since, no counterpart.
    """
    old, new = layers_of(model), layers_of(made)
    if [type(layer) for layer in old] == [type(layer) for layer in new]:
        return list(zip(old, new, strict=True))
    remaining: dict[str, list[Any]] = {}
    for layer in new:
        remaining.setdefault(layer.name, []).append(layer)
    return [(layer, remaining[layer.name].pop(0)) for layer in old if remaining.get(layer.name)]


def _with_policies(model: Any, policies: Mapping[int, str]) -> dict[str, Any]:
    """Returns a model's configuration with other policies in it."""
    config = copy.deepcopy(model.get_config())
    if not is_graph(model):
        return config
    if "layers" not in config and id(model) in policies:
        # What its own constructor takes, as KerasHub's backbones do.
        _replace_policies(config, model.dtype_policy.name, policies[id(model)])
    entries = config.get("layers", [])
    if isinstance(model, keras.Sequential):
        layers = list(keras_hooks.sublayers(model))
    else:
        by_name = {operation.name: operation for operation in model.operations}
        layers = [by_name.get(entry["name"]) for entry in entries]
    # What was appended to a Sequential since is in no entry.
    for entry, layer in zip(entries, layers, strict=False):
        entry.pop("compile_config", None)
        if is_graph(layer):
            entry["config"] = _with_policies(layer, policies)
        elif layer is not None:
            if id(layer) in policies:
                _replace_policies(entry["config"], layer.dtype_policy.name, policies[id(layer)])
            if _own_classes(layer):
                entry.pop("build_config", None)  # the call builds it, which Keras can be sure of
                entry["config"] = _arguments(layer, entry["config"])
    return config


def _replace_policies(config: Any, old: str, new: str) -> None:
    """Replaces one policy by another in the configuration of a layer and of those it holds."""
    if isinstance(config, list | tuple):
        for value in config:
            _replace_policies(value, old, new)
    if not isinstance(config, dict):
        return
    for key, value in config.items():
        if key != "dtype":
            _replace_policies(value, old, new)
        # A plain string is what an input is fed, or an output holds: no policy of a layer.
        elif isinstance(value, dict) and value.get("config", {}).get("name") == old:
            config[key] = keras.dtype_policies.serialize(keras.DTypePolicy(new))


def _set_late_policies(model: Any, made: Any, policies: Mapping[int, str]) -> None:
    """Sets the policies of layers that a model's own code makes, while they have no variables."""
    for old, new in zip(layers_of(model), layers_of(made), strict=False):
        if type(old) is not type(new) or not is_plain(new.dtype_policy):
            continue
        wanted = policies.get(id(old), old.dtype_policy.name)
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
            f"{model.name} cannot be built anew, as it does not say for which shapes it was built; "
            "build it with model.build(input_shape)."
        )
    made.build_from_config(config)
    made.built = True


def _enable_lora_like(model: Any, made: Any) -> None:
    """Enables LoRA where it was enabled on a layer whose holder's configuration does not say so."""
    for old, new in same_layers(model, made):
        if getattr(old, "lora_enabled", False):
            if not new.lora_enabled:
                new.enable_lora(old.lora_rank)
            new.lora_alpha = old.lora_alpha
        for name in _LORA_NOTES:
            if hasattr(old, name):
                setattr(new, name, copy.copy(getattr(old, name)))


def _copy_trainable(model: Any, made: Any) -> None:
    for old, new in same_layers(model, made):
        if new.trainable != old.trainable:
            new.trainable = old.trainable
    # Setting a layer's sets all its weights', and LoRA freezes single ones.
    for before, after in zip(model.weights, made.weights, strict=True):
        if after.trainable != before.trainable:
            after.trainable = before.trainable


def _copy_seeds(model: Any, made: Any) -> list[Any]:
    """Makes random layers of a copy go on where the model's are; returns the copied variables."""
    weights = {id(weight) for weight in (*model.weights, *made.weights)}
    old, new = ([x for x in each.variables if id(x) not in weights] for each in (model, made))
    if len(old) != len(new):
        return []
    for source, target in zip(old, new, strict=True):
        target.assign(source)
    return new


def _copy_weights(model: Any, made: Any, values: Any) -> None:
    old, new = model.weights, made.weights
    if _shapes(old) != _shapes(new):
        raise ValueError(_what_is_different(model, made))
    for layer, copied in same_layers(model, made):
        if prepares_data(type(layer)):
            _copy_adapted(layer, copied)
    for value, target in zip(old if values is None else values(old), new, strict=True):
        _check_range(value, target)
        target.assign(keras.ops.cast(value, target.dtype))
        regularizer = getattr(target, "regularizer", None)
        if regularizer is not None and target.dtype in LOW_PRECISION:
            target.regularizer = _InFloat32(regularizer)


def _copy_adapted(layer: Any, made: Any) -> None:
    """Gives a layer that prepares data what another one has adapted to, as a file would.

    Some of it is in no weight: a vocabulary, and what is computed of the weights.
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


def _what_is_different(model: Any, made: Any) -> str:
    pairs = same_layers(model, made)
    # The innermost layers come last, and what holds them has their weights too.
    different = [pair for pair in pairs if _shapes(pair[0].weights) != _shapes(pair[1].weights)]
    old, new = different[-1] if different else (model, made)
    return (
        f"{model.name} stores its weights in another dtype at this level, so it has to be made "
        f"anew from its configuration. {path_of(old)} ({type(old).__name__}) has weights of the "
        f"shapes {_shapes(old.weights)}, and made anew {_shapes(new.weights)}: it was changed "
        "since it was built. Have its get_config say so, or take level 'O2' without "
        "master_weights, which needs no new weights."
    )


class _InFloat32(keras.regularizers.Regularizer):
    """A regularizer that computes in float32, in which Keras adds it to the loss.

    Variables of Keras up to 3.14 take nothing else than a `Regularizer`.
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


def _zeros(shape: Any, dtype: Any = None, **_: Any) -> Any:
    return keras.ops.zeros(shape, dtype)
