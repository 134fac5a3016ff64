"""How TensorFlow and Keras save an optimizer that holds another one."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfamp.core.errors import TfampWarning
from tfamp.core.kinds import Optimizer, Variable
from tfamp.interop.patching import SAVING, Patch, check_saving, level_of_user

# Names under which `tf.train.Checkpoint` finds the state of every Keras optimizer.
_LISTS = ("_variables", "_trainable_variables")
_OF_EVERY_OPTIMIZER = {*_LISTS, "_trainable_variables_indices", "_iterations", "_learning_rate"}
_INNER = "inner_optimizer"
# What a Keras file holds of a variable: the kind of its numbers and its shape.
_Form: TypeAlias = tuple[str, tuple[int, ...]]
# The first variables of Keras's LossScaleOptimizer: its iterations and learning rate, then its
# step counter and scale or, before it is built, those of the inner optimizer.
_OF_KERAS_WRAPPER: list[_Form] = [("int", ()), ("float", ()), ("int", ()), ("float", ())]
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


def read_by_saving() -> bool:
    """Whether the property that calls this is read by a walk over all attributes."""
    check_saving()
    return sys._getframe(2).f_globals.get("__name__", "").startswith(SAVING)


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


@dataclass
class _Waiting:
    """Values of a file for variables that the inner optimizer will create.

    Attributes:
        values: All values of the inner optimizer.
        early: The variables that existed, with the value each had before the file's.
        beside: Values of what a wrapper stores beside the weights, such as masters.
        of: Whose file it is, for a warning.
    """

    values: list[Any]
    early: list[tuple[Variable, Any]] = field(default_factory=list)
    beside: Sequence[Any] = ()
    of: str = "an optimizer without loss scaling"


class RestoresInner:
    """Mixin of an optimizer wrapper that also restores what its inner optimizer saved alone.

    Keras's files hold the variables of an optimizer by number. A wrapper's start with its own,
    flags among them, and no optimizer of Keras has a flag: a file that does not start with
    variables of these kinds and shapes is another optimizer's, and none of its values goes to
    the wrapper.

    TensorFlow restores an object's children by name. The variables of a wrapper and those of a
    bare optimizer have the same names, so that a momentum would become the loss scale. A
    wrapper therefore saves its state under other names, and what a checkpoint holds under
    the common names goes to the inner optimizer. Checkpoints that hold both, as Keras's wrapper
    and tfamp 1.0.0rc1 write them, are recognized by an `inner_optimizer`.

    A wrapper with master weights also restores what one without them saved, and the other way
    round: slots are cast, and masters start from the weights.
    """

    inner_optimizer: Optimizer
    stored_weights: Any
    variables: list[Variable]
    built: bool
    name: str
    _variables: list[Variable]
    _master_list: Sequence[Variable] = ()
    _trainable_variables: list[Variable]
    _waiting: _Waiting | None = None

    def load_own_variables(self, store: Any) -> None:
        """Loads the state from a Keras file, also one that the inner optimizer saved alone.

        Values for variables that do not exist yet are kept until `build`.

        Args:
            store: The saved variables by number, as Keras gives them.

        Warns:
            TfampWarning: The file is of an optimizer that the inner one does not match.
        """
        self._waiting = None
        forms = [_form(variable) for variable in self._variables]
        last_flag = max(i for i, (kind, _) in enumerate(forms) if kind == "bool")
        inner, count = self.inner_optimizer, len(store.keys())
        if "0" not in store:
            super().load_own_variables(store)  # type: ignore[misc]
        elif _starts_with(store, forms[: last_flag + 1]):
            if not self._load_of_wrapper([store[str(i)] for i in range(count)]):
                super().load_own_variables(store)  # type: ignore[misc]
        elif _starts_with(store, _OF_KERAS_WRAPPER) and not hasattr(inner, "optimizers"):
            # Keras warns of another number of variables. The same number is none to go by.
            other = count != len(self.variables)
            super().load_own_variables(store if other else {})  # type: ignore[misc]
        else:
            values = [store[str(i)] for i in range(count)]
            self._load_or_wait(_Waiting(values))

    def _load_of_wrapper(self, values: list[Any]) -> bool:
        """Loads a wrapper's file, if only now one of it and the optimizer has masters or slots.

        Returns False, and changes nothing, if Keras loads the file, or warns that it cannot.
        """
        inner, beside = self.inner_optimizer, self._master_list
        own = self._variables[: len(self._variables) - len(beside)]
        rest, first = values[len(own) :], inner._variables  # The iterations, for example.
        if _fit(values, self.variables) or not _fit(values[: len(own)], own):
            return False
        starts = (i for i in range(len(rest)) if _fit(rest[i : i + len(first)], first))
        if (start := next(starts, None)) is None:
            return False
        waiting = _Waiting(rest[start:], beside=rest[:start], of="another optimizer")
        if inner.built and not _fit(waiting.values, inner.variables):
            return False
        for variable, value in zip(own, values, strict=False):
            variable.assign(value)
        self._load_or_wait(waiting)
        return True

    def _load_or_wait(self, waiting: _Waiting) -> None:
        """Loads values into the inner optimizer, now or as soon as it has the variables."""
        self._waiting = waiting
        inner, values = self.inner_optimizer, waiting.values
        if inner.built or _fit(values, inner.variables):
            self._load_waiting()
        elif _fit(values[: len(inner._variables)], inner._variables):
            early = list(inner._variables)  # The iterations, for example.
            before = map(keras.ops.convert_to_numpy, early)
            waiting.early = list(zip(early, before, strict=True))
            for variable, value in zip(early, values, strict=False):
                variable.assign(value)

    def _load_waiting(self) -> None:
        """Loads what a file holds of variables that exist now."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        inner, values = self.inner_optimizer, waiting.values
        if _fit(values, inner.variables):
            early = {id(variable) for variable, _ in waiting.early}
            for variable, value in zip(inner.variables, values, strict=True):
                if id(variable) not in early:  # The program may have assigned others since.
                    variable.assign(value)
            self._load_beside(waiting.beside)
            return
        for (variable, before), value in zip(waiting.early, values, strict=False):
            if np.array_equal(keras.ops.convert_to_numpy(variable), value):
                variable.assign(before)
        warnings.warn(
            f"Nothing was restored into the inner_optimizer of {self.name}, "
            f"{inner.name}: the file holds {len(values)} variables of {waiting.of}, "
            f"whose number or shapes are not those of its {len(inner.variables)}. For "
            "its slots and iterations, give LossScaleOptimizer an inner_optimizer of the same "
            "class, settings and trainable variables as the one that was saved.",
            TfampWarning,
            stacklevel=level_of_user(),
        )

    def _load_beside(self, values: Sequence[Any]) -> None:
        """Loads masters; without any in the file they start from the weights."""
        if _fit(values, self._master_list):
            for variable, value in zip(self._master_list, values, strict=True):
                variable.assign(value)
        else:  # Also weights that are loaded later are taken over, by the next step.
            weights = self._trainable_variables
            self.stored_weights.set_exact(weights, weights)

    @property
    def _deferred_dependencies(self) -> Any:
        return _Deferred(self, super()._deferred_dependencies)  # type: ignore[misc]

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
        if name == _INNER:
            children.has_inner = True
            return None  # `_Deferred` restores it, as dtypes are known only there.
        if name in children:
            return children[name]
        if name in _LISTS:
            return _State(self, name, children)
        # The values of the other common names are in the lists, too.
        if name in _OF_EVERY_OPTIMIZER:
            return None
        found = self.inner_optimizer._lookup_dependency(name)
        if isinstance(found, list):
            return _State(self, name, children)
        in_list = any(found is variable for variable in self.inner_optimizer._variables)
        return None if in_list else found


class _Children(dict[str, Trackable]):
    """Objects of a wrapper that a checkpoint may hold; one mapping per checkpoint."""

    has_inner = False
    # Whether the checkpoint and the optimizer hold floats of one and the same dtype, if known.
    one_dtype: bool | None = None


_Trackable: Any = tf.__internal__.tracking.Trackable


class _Deferred(collections.UserDict[str, Any]):
    """Values in a checkpoint of children that a wrapper does not have yet.

    TensorFlow adds what `_lookup_dependency` found no object for: the inner optimizer, too, which
    is restored at once.
    """

    def __init__(self, wrapper: RestoresInner, deferred: dict[str, Any]) -> None:
        self._wrapper, self.data = wrapper, deferred

    def setdefault(self, name: str, default: Any = None) -> Any:
        """The list to append a position to, which TensorFlow asks for."""
        if name != _INNER:
            return self.data.setdefault(name, default)
        return SimpleNamespace(append=self._restore)

    def _restore(self, position: Any) -> None:
        wrapper, value = self._wrapper, _Value(position, self._wrapper)
        if value.of_one_dtype_with_wrapper():
            position.restore(wrapper.inner_optimizer)
        else:
            value.restore(wrapper.inner_optimizer)


class _State(_Trackable):
    """Stands for a list of variables, a wrapper's or its inner optimizer's.

    TensorFlow restores what is in it after it has looked up all children of the wrapper, so
    that `has_inner` is known by then.
    """

    def __init__(self, wrapper: RestoresInner, name: str, children: _Children) -> None:
        self._wrapper, self._name, self._siblings = wrapper, name, children

    @property
    def _list(self) -> Trackable | None:
        """The list that TensorFlow restores; None if `_restore_inner` casts each value.

        None also for a wrapper's variables to train, which are not its state.
        """
        has_inner, wrapper = self._siblings.has_inner, self._wrapper
        if not has_inner and not self._siblings.one_dtype:
            return None
        variables = getattr(wrapper if has_inner else wrapper.inner_optimizer, self._name)
        return variables if isinstance(variables, _Trackable) else None

    def _trackable_children(self, *args: Any, **kwargs: Any) -> Mapping[str, Trackable]:
        variables = self._list
        return {} if variables is None else variables._trackable_children(*args, **kwargs)

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Trackable | None:
        variables = self._list
        return None if variables is None else variables._lookup_dependency(name)

    @property
    def _deferred_dependencies(self) -> Any:
        # Of variables that are created later. TensorFlow adds what it found no object for: of
        # what a bare optimizer saved also the rest, as the dtype of a value is known only here.
        if not self._siblings.has_inner:
            return self
        variables = self._list
        if variables is None:
            return super()._deferred_dependencies
        return variables._deferred_dependencies

    def setdefault(self, name: str, default: Any) -> SimpleNamespace:
        """As of the dict of deferred dependencies, whose items are lists to append to."""
        return SimpleNamespace(append=functools.partial(self._restore_inner, name))

    def _restore_inner(self, name: str, position: Any) -> None:
        """Restores a bare optimizer's value, now or when the inner one creates the variable."""
        wrapper, number, value = self._wrapper, int(name), _Value(position, self._wrapper)
        if self._siblings.one_dtype is None:
            self._siblings.one_dtype = value.of_one_dtype_with_wrapper()
        held = getattr(wrapper.inner_optimizer, self._name)
        if not isinstance(held, _Trackable):
            return
        if number >= len(held):
            held._deferred_dependencies.setdefault(name, []).append(value)
        elif self._name == _LISTS[1]:
            # The weight, and the master that the inner optimizer updates instead.
            target, weights = held[number], wrapper._trainable_variables[number : number + 1]
            targets = wrapper.stored_weights.targets(weights)
            replaced = any(variable is target for variable in targets)
            stored = [weight for weight in weights if replaced and weight is not target]
            value.restore(*stored, target)
        elif isinstance(held[number], _Trackable):
            value.restore(held[number])


class _Value:
    """A value in a checkpoint, in place of TensorFlow's position, that is cast to a variable."""

    def __init__(self, position: Any, wrapper: RestoresInner) -> None:
        self.position, self.checkpoint, self._wrapper = position, position.checkpoint, wrapper

    def of_one_dtype_with_wrapper(self) -> bool:
        """Whether all floats of the checkpoint and the wrapper have one dtype: none is cast."""
        inner = self._wrapper.inner_optimizer
        lists = inner._variables, inner._trainable_variables, self._wrapper._trainable_variables
        ours = {tf.as_dtype(variable.dtype) for variables in lists for variable in variables}
        dtypes = ours | {dtype.base_dtype for dtype in self.checkpoint.dtype_map.values()}
        return sum(dtype.is_floating for dtype in dtypes) == 1

    def restore(self, target: Trackable, *copies: Variable) -> None:
        """Restores a value into a variable and what holds more of its digits, or all children."""
        saved = {
            self.checkpoint.dtype_map[attribute.checkpoint_key].base_dtype
            for attribute in self.position.object_proto.attributes
        }
        if not saved:  # An optimizer or a list.
            self._restore_children(target)
        elif not copies and saved == {tf.as_dtype(target.dtype)}:
            self.position.restore(target)
        else:
            weight = self._wrapper.stored_weights.weight_of(target)
            stored = [] if weight is None else [weight]
            self._restore_cast(_Cast((target, *copies, *stored), *saved))

    def _restore_children(self, owner: Trackable) -> None:
        """As TensorFlow restores the children of an object, now or when it gets them."""
        position = self.position
        if not position.bind_object(owner):
            return
        owner._maybe_initialize_trackable()
        owner._update_uid = position.restore_uid
        children = owner._trackable_children()
        for child in position.object_proto.children:
            value = _Value(position.create_child_position(child.node_id), self._wrapper)
            found = owner._lookup_dependency(child.local_name, children)
            if found is None:
                owner._deferred_dependencies.setdefault(child.local_name, []).append(value)
            else:
                value.restore(found)

    def _restore_cast(self, cast: _Cast) -> None:
        position = self.position
        if self.checkpoint.object_by_proto_id.get(position.proto_id) is None:
            position.restore(cast)
        else:  # A weight of the model, which TensorFlow restores: its master has no value.
            cast._restore_from_tensors(position.value_tensors())


class _Cast(_Trackable):
    """Stands for variables, to restore a value of another dtype into each."""

    def __init__(self, variables: Sequence[Variable], dtype: tf.DType) -> None:
        self._targets, self._dtype = variables, dtype

    def _serialize_to_tensors(self) -> dict[str, Any]:
        value = tf.convert_to_tensor(self._targets[0])
        return {"VARIABLE_VALUE": tf.cast(value, self._dtype)}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, Any]) -> None:
        value = restored_tensors["VARIABLE_VALUE"]
        for variable in self._targets:
            variable.assign(tf.cast(value, variable.dtype))


# Inner optimizers whose state was in the place of the wrapper's, and that have none of their own.
_restored: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def restore_bare_optimizers(wanted: bool) -> None:
    """While it is wanted, Keras's wrapper also loads what its inner optimizer saved alone.

    Under a float16 policy Keras wraps the optimizer of each model that it loads, and the file of a
    model that was compiled in float32 has no wrapper's variables: Keras would skip the state.
    """
    _loading.keep(wanted)


def _load_into_inner(original: Callable[..., None], optimizer: Optimizer, store: Any) -> None:
    if optimizer in _restored and not store.keys():
        _restored.discard(optimizer)  # Keras would warn that nothing is restored.
        return
    # tfamp's has a `load_own_variables` that does so at all times.
    is_keras_s = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if is_keras_s and not isinstance(optimizer, RestoresInner):
        inner = optimizer.inner_optimizer
        names = [str(i) for i in range(len(inner.variables))]
        # An optimizer of a user's may name what it saves; Keras says that it does not fit.
        is_keras_layout = bool(names) and set(store.keys()) == set(names)
        if is_keras_layout and _fit([store[name] for name in names], inner.variables):
            original(inner, store)
            _restored.add(inner)
            return
    original(optimizer, store)


_loading = Patch(
    optional={
        "load_optimizer": "the state of an optimizer without loss scaling is not restored from a "
        ".keras file that is loaded under a float16 policy."
    },
    load_optimizer=_load_into_inner,
)


def _form(value: Any) -> _Form:
    """Kind and shape of a variable or of a value in a file."""
    dtype = keras.backend.standardize_dtype(value.dtype)
    return next((k for k in ("bool", "int") if k in dtype), "float"), tuple(value.shape)


def _starts_with(store: Any, forms: Sequence[_Form]) -> bool:
    return len(store.keys()) >= len(forms) and all(
        _form(store[str(i)]) == form for i, form in enumerate(forms)
    )


def _fit(values: Sequence[Any], variables: Sequence[Variable]) -> bool:
    """Whether values are of the number, the kinds and the shapes of variables."""
    return [_form(value) for value in values] == [_form(variable) for variable in variables]
