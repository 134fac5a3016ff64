"""How TensorFlow and Keras save an optimizer that holds another one."""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections.abc import Mapping
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfamp.core.errors import TfampWarning
from tfamp.core.kinds import Optimizer
from tfamp.interop.patching import level_of_user

# Names under which `tf.train.Checkpoint` finds the state of every Keras optimizer.
_LISTS = ("_variables", "_trainable_variables")
_OF_EVERY_OPTIMIZER = {*_LISTS, "_trainable_variables_indices", "_iterations", "_learning_rate"}
_INNER = "inner_optimizer"
# What TensorFlow tracks and saves.
Trackable: TypeAlias = Any
# Settings of an optimizer that Keras 3 does not have.
_ONLY_IN_KERAS_2 = {"is_legacy_optimizer", "jit_compile"}
_OF_SGD = {"self", "name", "momentum", "nesterov", "kwargs"}
# Settings of every Keras optimizer, which a wrapper leaves to the inner one, with their
# defaults. Keras before 3.12 saved them in the configuration of its LossScaleOptimizer, too.
INNER_SETTINGS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(keras.optimizers.SGD.__init__).parameters.items()
    if name not in _OF_SGD
} | {"learning_rate": 0.0}  # Of Keras's wrapper.
# Modules that read all attributes of an object to find what to save.
_SAVING = ("keras.src.saving.", "tensorflow.python.trackable.")


def read_by_saving() -> bool:
    """Whether the property that calls this is read by a walk over all attributes."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith(_SAVING)


def wrapper_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A wrapper's configuration without the settings of the inner optimizer.

    Warns of those that a user chose: neither Keras's wrapper nor tfamp's applies them.
    """
    chosen = {
        name: value
        for name, value in config.items()
        if name in INNER_SETTINGS and INNER_SETTINGS[name] != value
    }
    if chosen:
        named = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
        warnings.warn(
            f"The configuration of {config.get('name', 'a LossScaleOptimizer')!r} has {named}, "
            "which neither Keras's LossScaleOptimizer nor tfamp's applies. Set it on the inner "
            "optimizer.",
            TfampWarning,
            stacklevel=level_of_user(),
        )
    return {name: value for name, value in config.items() if name not in INNER_SETTINGS}


def read_optimizer(saved: Any, custom_objects: Mapping[str, Any] | None) -> Optimizer:
    """Makes the optimizer of a configuration, which may be of Keras 2, or of a name."""
    if isinstance(saved, Mapping):
        saved = dict(saved)
        if saved.get("module") == "keras.optimizers.legacy":
            saved["module"] = "keras.optimizers"
        if "config" in saved:
            config = dict(saved["config"])
            for name in _ONLY_IN_KERAS_2:
                config.pop(name, None)
            saved["config"] = config
    # A scope hides those around it, such as load_model's.
    scope = keras.saving.custom_object_scope
    with scope(custom_objects) if custom_objects else contextlib.nullcontext():
        if isinstance(saved, Mapping) and "module" in saved:
            saved = keras.saving.deserialize_keras_object(saved)
        return keras.optimizers.get(saved)


class RestoresInner:
    """Mixin of an optimizer wrapper that also restores what its inner optimizer saved alone.

    TensorFlow restores an object's children by name. The variables of a wrapper and those of a
    bare optimizer have the same names, so that a momentum would become the loss scale. A
    wrapper therefore saves its state under other names, and what a checkpoint holds under
    the common names goes to the inner optimizer. Checkpoints that hold both, as Keras's wrapper
    and tfamp 1.0.0rc1 write them, are recognized by an `inner_optimizer`.
    """

    inner_optimizer: Optimizer

    def _only_in_saved_models(self) -> dict[str, Trackable]:
        """Variables that functions capture, and that no checkpoint holds."""
        return {}

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Trackable]:
        children: dict[str, Trackable]
        children = super()._trackable_children(save_type, **kwargs)  # type: ignore[misc]
        if save_type != "checkpoint":
            return children | self._only_in_saved_models()
        common = _OF_EVERY_OPTIMIZER
        return _Children({name: x for name, x in children.items() if name not in common})

    def _lookup_dependency(
        self, name: str, cached_dependencies: Mapping[str, Trackable] | None = None
    ) -> Trackable | None:
        children = cached_dependencies
        if not isinstance(children, _Children):  # Not while a checkpoint is restored.
            return super()._lookup_dependency(name, children)  # type: ignore[misc]
        children.has_inner |= name == _INNER
        if name in children:
            return children[name]
        if name in _LISTS:
            return _State(self, name, children)
        # The values of the other common names are in the lists, too.
        if name in _OF_EVERY_OPTIMIZER:
            return None
        return self.inner_optimizer._lookup_dependency(name)


class _Children(dict[str, Trackable]):
    """Objects of a wrapper that a checkpoint may hold; one mapping per checkpoint."""

    has_inner = False


_Trackable: Any = tf.__internal__.tracking.Trackable


class _State(_Trackable):
    """Stands for a list of variables, a wrapper's or its inner optimizer's.

    TensorFlow restores what is in it after it has looked up all children of the wrapper, so
    that `has_inner` is known by then.
    """

    def __init__(self, wrapper: RestoresInner, name: str, children: _Children) -> None:
        self._wrapper, self._name, self._siblings = wrapper, name, children

    @property
    def _list(self) -> Trackable | None:
        """The list; None for a wrapper's variables to train, which are not its state."""
        has_inner, wrapper = self._siblings.has_inner, self._wrapper
        variables = getattr(wrapper if has_inner else wrapper.inner_optimizer, self._name)
        return variables if isinstance(variables, _Trackable) else None

    def _trackable_children(self, *args: Any, **kwargs: Any) -> Mapping[str, Trackable]:
        variables = self._list
        return {} if variables is None else variables._trackable_children(*args, **kwargs)

    def _lookup_dependency(self, *args: Any, **kwargs: Any) -> Trackable | None:
        variables = self._list
        return None if variables is None else variables._lookup_dependency(*args, **kwargs)

    @property
    def _deferred_dependencies(self) -> Any:
        # Of variables that are created later.
        variables = self._list
        if variables is None:
            return super()._deferred_dependencies
        return variables._deferred_dependencies
