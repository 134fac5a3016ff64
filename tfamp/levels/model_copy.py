"""Copies a model with its weights stored in other dtypes; the original is not modified."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import random
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION, float_format
from tfamp.core.kinds import Layer, Method, Model, Tensor, Variable
from tfamp.interop import keras_hooks
from tfamp.interop.keras_hooks import layers_of
from tfamp.interop.patching import patched_here, wrap_method
from tfamp.layers import model_roles
from tfamp.layers.layer_dtypes import float_policy, give_policy, is_plain
from tfamp.layers.policy_in_force import policy_scope
from tfamp.levels.model_structure import path_of
from tfamp.policy import policy_named, prepares_data

# A Keras initializer, a function, the name of one, or a value.
Initializer: TypeAlias = Any
# A seed generator of Keras's.
Generator: TypeAlias = Any
# Regularizes or constrains a weight.
WeightFunction: TypeAlias = Callable[[Variable], Tensor]

# Reentrant: a class of a user may prepare a model in its `from_config`.
_rebuilding = threading.RLock()


def copy_model(
    model: Model, values: Callable[[list[Variable]], Iterable[Tensor | Variable]]
) -> Model:
    """Copies a built model, with weights in the dtypes of its layers' policies; not compiled.

    The weights of the original may have other dtypes. `values` maps weights to their exact
    values. A ValueError says that the model cannot be made from its configuration, or names a
    weight that is out of range in its new dtype.
    """
    with _without_initializing() as postponed, _building_in_the_policies_of_layers():
        new_model = _from_config(model)
        _set_late_policies(model, new_model)
        _build_like(model, new_model)
    old_weights, new_weights = model.weights, new_model.weights
    if _shapes(old_weights) != _shapes(new_weights):
        raise ValueError(_difference(model, new_model))
    _share_generators(model, new_model)
    with_values = {id(weight) for weight in new_weights}
    for old, new in same_layers(model, new_model):
        with_values |= _copy_state(old, new)
    exact_values = values(old_weights)
    for value, weight, new_weight in zip(exact_values, old_weights, new_weights, strict=True):
        _copy_weight(value, weight, new_weight)
    for variable, initializer in postponed:
        if id(variable) not in with_values:
            initialize = keras.initializers.get(initializer)
            variable.assign(initialize(variable.shape, dtype=variable.dtype))
    return new_model


@contextlib.contextmanager
def _without_initializing() -> Iterator[list[tuple[Variable, Initializer]]]:
    """A context in which new variables are zeros; yields them with their initializers.

    Initializers may fail in the new dtype, take time, and draw random numbers. Most variables
    are assigned the values of a model's, and only those without a counterpart are initialized.
    """
    postponed: list[tuple[Variable, Initializer]] = []

    def variable_init(
        original: Method,
        variable: Variable,
        initializer: Initializer,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        is_value = not (callable(initializer) or isinstance(initializer, str))
        original(variable, initializer if is_value else "zeros", *args, **kwargs)
        if not is_value:
            postponed.append((variable, initializer))

    with _rebuilding, patched_here(variable_init=variable_init):
        # Layers and initializers without a seed draw one when they are made.
        random_state = random.getstate()
        try:
            yield postponed
        finally:
            random.setstate(random_state)


@contextlib.contextmanager
def _building_in_the_policies_of_layers() -> Iterator[None]:
    """A context in which the layers that a new layer's `build` makes get its policy."""
    with contextlib.ExitStack() as undo:

        def layer_init(original: Method, layer: Layer, *args: Any, **kwargs: Any) -> None:
            original(layer, *args, **kwargs)
            undo.callback(wrap_method(layer, "build", functools.partial(build, layer)))

        def build(layer: Layer, original: Method, *args: Any, **kwargs: Any) -> Any:
            with policy_scope(policy_named(float_policy(layer) or "float32")):
                return original(*args, **kwargs)

        with patched_here(layer_init=layer_init):
            yield


def _from_config(model: Model) -> Model:
    classes = {type(layer).__name__: type(layer) for layer in layers_of(model)}
    try:
        config = {
            "module": type(model).__module__,
            "class_name": type(model).__name__,
            "config": _arguments(model, _config_of(model)),
            "registered_name": type(model).__name__,
        }
        with policy_scope(policy_named(float_policy(model) or "float32")):
            make = keras.saving.deserialize_keras_object
            return make(config, custom_objects=classes, safe_mode=False)
    except (TypeError, ValueError, NotImplementedError, AttributeError) as error:
        raise ValueError(
            f"{model.name} ({type(model).__name__}) stores its weights in another dtype at "
            "this level, so it has to be made again from its configuration, and that fails: "
            f"{error} Give its classes get_config and from_config, or take level "
            "'O2' without master_weights, which needs no new weights."
        ) from error


def _arguments(layer: Layer, config: dict[str, Any]) -> dict[str, Any]:
    """Drops Keras's general keys that the constructor of a user's layer does not accept."""
    has_from_config = any("from_config" in vars(base) for base in _user_classes(layer))
    if model_roles.is_graph(layer) or has_from_config:
        return config
    parameters = inspect.signature(type(layer).__init__).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return config
    general = {"name", "trainable", "dtype", "activity_regularizer"} - set(parameters)
    return {name: value for name, value in config.items() if name not in general}


def _user_classes(layer: Layer) -> list[type]:
    """Returns the classes of a layer that Keras does not define, the layer's class first."""
    return [
        base
        for base in type(layer).__mro__
        if issubclass(base, keras.Layer) and base.__module__.partition(".")[0] != "keras"
    ]


def same_layers(model: Model, new_model: Model) -> list[tuple[Layer, Layer]]:
    """Pairs the layers of a model with their counterparts in a copy.

    Holders come before the layers that they hold. A layer holds the same layers in the same
    order in both, except for casts, and for layers that its `build` will make.
    """
    counterparts = {id(model): new_model}

    def visit(old: Layer, new: Layer) -> None:
        candidates = list(keras_hooks.sublayers(new))
        for layer in keras_hooks.sublayers(old):
            classes = [type(candidate) for candidate in candidates]
            if type(layer) not in classes:
                continue
            index = classes.index(type(layer))
            counterpart, candidates = candidates[index], candidates[index + 1 :]
            if id(layer) not in counterparts:
                counterparts[id(layer)] = counterpart
                visit(layer, counterpart)

    visit(model, new_model)
    layers = [layer for layer in layers_of(model) if id(layer) in counterparts]
    return [(layer, counterparts[id(layer)]) for layer in layers]


def _config_of(model: Model) -> dict[str, Any]:
    """Returns a model's configuration, without keys that users' constructors do not accept."""
    config = copy.deepcopy(model.get_config())
    if not model_roles.is_graph(model):
        return config
    layers = {layer.name: layer for layer in keras_hooks.sublayers(model)}
    # A model with a constructor of the user's, such as KerasHub's backbones, lists no layers.
    for entry in config.get("layers", ()):
        entry.pop("compile_config", None)
        layer = layers.get(entry.get("name", entry["config"].get("name")))
        if model_roles.is_graph(layer):
            entry["config"] = _config_of(layer)
        elif layer is not None and _user_classes(layer):
            entry.pop("build_config", None)  # its first call builds it
            entry["config"] = _arguments(layer, entry["config"])
    return config


def _set_late_policies(model: Model, new_model: Model) -> None:
    """Sets the policies of layers that a model's code makes, while they have no variables."""
    for old, new in same_layers(model, new_model):
        if not is_plain(new.dtype_policy):
            continue
        policy_name = old.dtype_policy.name
        if new.dtype_policy.name == policy_name:
            continue
        if new.weights and not isinstance(new, keras.Model):
            raise ValueError(
                f"{path_of(new)} is made with {new.dtype_policy.name} weights by the "
                f"constructor of {type(model).__name__}, and is to have {policy_name} ones. "
                "Give its class get_config and from_config, give the layer its dtype there, or "
                "take level 'O2' without master_weights, which needs no new weights."
            )
        give_policy(new, policy_name)


def _build_like(model: Model, new_model: Model) -> None:
    # Random states too: a model may have all its weights before it is built, and no generator.
    if len(new_model.variables) == len(model.variables):
        return
    if all(new.built for old, new in same_layers(model, new_model) if old.built):
        return
    config = model.get_build_config()
    if config is None:
        raise ValueError(
            f"{model.name} cannot be built again, as its shapes are not known; build it with "
            "model.build(input_shape)."
        )
    new_model.build_from_config(config)
    new_model.built = True


def _copy_weight(value: Tensor, weight: Variable, new_weight: Variable) -> None:
    _check_range(value, new_weight)
    keras_hooks.place_like(weight, new_weight)
    new_weight.assign(keras.ops.cast(value, new_weight.dtype))
    if new_weight.trainable != weight.trainable:
        new_weight.trainable = weight.trainable
    is_low = new_weight.dtype in LOW_PRECISION
    new_weight.regularizer = _in_float32(weight.regularizer, is_low, _RegularizerInFloat32)
    new_weight.constraint = _in_float32(weight.constraint, is_low, _ConstraintInFloat32)


def _share_generators(model: Model, new_model: Model) -> None:
    """Makes layers that share a random generator in a model share one in its copy.

    Configurations hold a generator once per layer.
    """
    shared: dict[int, Generator] = {}
    for old, new in same_layers(model, new_model):
        old_generators = keras_hooks.seed_generators(old)
        new_generators = keras_hooks.seed_generators(new)
        for old_generator, generator in zip(old_generators, new_generators, strict=False):
            first = shared.setdefault(id(old_generator), generator)
            if first is not generator:
                keras_hooks.replace_generator(new, generator, first)


def _copy_state(old: Layer, new: Layer) -> set[int]:
    """Copies what a layer holds besides weights and layers; returns the `id`s of the variables.

    Keras numbers the names of layers that a model's code makes.
    """
    new.name = old.name
    keras_hooks.place_like(old, new)
    if isinstance(old, keras_hooks.functional_class()):
        new.output_names = list(old.output_names)
    if prepares_data(type(old)):
        _copy_adapted(old, new)
    if new.trainable != old.trainable:
        new.trainable = old.trainable
    new.activity_regularizer = old.activity_regularizer
    keras_hooks.rematerialize_like(old, new)
    for name, value in vars(old).items():
        is_added = name not in vars(new) and not name.startswith("_")
        if is_added and _is_plain_data(value):
            setattr(new, name, value)
    with_values, old_variables = set(), _variables_besides_weights(old)
    for place, variable in _variables_besides_weights(new).items():
        source = old_variables.get(place)
        if source is not None and source.shape == variable.shape:
            same = source.dtype == variable.dtype
            variable.assign(source if same else keras.ops.cast(source, variable.dtype))
            with_values.add(id(variable))
    return with_values


def _is_plain_data(value: Any) -> bool:
    """Whether an attribute belongs to no model: no tensors, layers, functions and the like."""
    if isinstance(value, dict):
        return all(map(_is_plain_data, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain_data, value))
    return isinstance(value, bool | int | float | str | bytes | np.generic | np.ndarray | None)


def _variables_besides_weights(layer: Layer) -> dict[tuple[str | int, ...], Variable]:
    """The variables of a layer that are not weights, by their place in it, without sublayers.

    These are states of random generators and of metrics, and variables of TensorFlow's, which
    Keras does not list.
    """
    by_place: dict[tuple[str | int, ...], Variable] = {}
    for number, generator in enumerate(keras_hooks.seed_generators(layer)):
        by_place["seed", number] = generator.state
    for number, metric in enumerate(keras_hooks.own_metrics(layer)):
        for index, variable in enumerate(metric.variables):
            by_place["metric", number, index] = variable
    for name, value in vars(layer).items():
        variable = value.state if isinstance(value, tf.random.Generator) else value
        if isinstance(variable, tf.Variable):
            by_place["attribute", name] = variable
    return by_place


def _copy_adapted(old: Layer, new: Layer) -> None:
    """Copies the adapted state of a preprocessing layer, as saving and loading it would.

    Not all of it is in weights: vocabularies, and values that are computed from the weights.
    """
    stored: dict[str, Variable] = {}
    old.save_own_variables(stored)
    new.load_own_variables(stored)
    if hasattr(old, "save_assets"):
        with tempfile.TemporaryDirectory() as directory:
            old.save_assets(directory)
            new.load_assets(directory)


def _shapes(weights: Iterable[Variable]) -> list[tuple[int, ...]]:
    return [tuple(weight.shape) for weight in weights]


def _difference(model: Model, new_model: Model) -> str:
    pairs = same_layers(model, new_model)
    # The innermost layers come last; layers that hold them have their weights too.
    grown = [old for old, new in pairs if _shapes(old.weights) != _shapes(new.weights)]
    layer = grown[-1] if grown else model
    return (
        f"{model.name} stores its weights in another dtype at this level, so it is made again "
        f"from its configuration. {path_of(layer)} ({type(layer).__name__}) has weights then "
        "that are not those it has now: it was changed since it was built, by enable_lora for "
        "example. Change it after prepare, have its get_config say so, or take level 'O2' "
        "without master_weights, which needs no new weights."
    )


def _in_float32(
    function: WeightFunction | None, is_low: bool, wrapper: type[_InFloat32]
) -> WeightFunction | _InFloat32 | None:
    """Returns the regularizer or constraint of a weight, in float32 if the weight is low."""
    unwrapped = function.function if isinstance(function, _InFloat32) else function
    return wrapper(unwrapped) if is_low and unwrapped is not None else unwrapped


class _InFloat32:
    """A function of a weight, computed in float32: sums of squares exceed float16's range."""

    def __init__(self, function: WeightFunction) -> None:
        self.function = function


# Variables of Keras up to 3.14 accept nothing but a `Regularizer` and a `Constraint`.
class _RegularizerInFloat32(_InFloat32, keras.regularizers.Regularizer):
    """A regularizer that computes in float32, the dtype of the loss it is added to."""

    def __call__(self, x: Variable) -> Tensor:
        return self.function(keras.ops.cast(x, "float32"))


class _ConstraintInFloat32(_InFloat32, keras.constraints.Constraint):
    """A constraint that computes in float32."""

    def __call__(self, w: Variable) -> Tensor:
        return keras.ops.cast(self.function(keras.ops.cast(w, "float32")), w.dtype)


def _check_range(value: Tensor, target: Variable) -> None:
    if target.dtype != "float16" or not keras.ops.size(value):
        return
    largest = float(keras.ops.max(keras.ops.abs(keras.ops.cast(value, "float32"))))
    limit = float_format("float16").max
    if limit < largest < float("inf"):
        raise ValueError(
            f"{path_of(target)} holds {largest:g}, and float16 holds up to {limit:g}. Keep its "
            "layer in float32 with keep_float32=, or use dtype='bfloat16'."
        )
