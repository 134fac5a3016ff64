"""What tfamp does while models are built and called, one wrapped method per model at a time.

Four things can only be known then: that a subclassed model is the outermost one called, and so
returns float32; that a Functional or Sequential is called by a layer of the user's own, and so is a
part of it; that a Sequential has built a new Functional; that a layer holds one that prepares data,
and so hands its inputs on as they are. The methods are wrapped on the one object,
not on its class: they go on working after the policy has changed, and touch no other model.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.interop import keras_hooks
from tfamp.interop.patching import wrap_method, wrapped_methods
from tfamp.layers import fused_norms, output_dtypes
from tfamp.layers.float32_losses import add_losses_in_float32
from tfamp.layers.float_policies import float_policy, give_policy
from tfamp.layers.roles import ManagedLayer, graph_of, is_built_in, managed_layers, uncast_inputs
from tfamp.policy import Policy, prepares_data


class _Running(threading.local):
    def __init__(self) -> None:
        # Models that are being called with symbolic tensors in this thread.
        self.symbolic: list[Any] = []
        # Models whose output spec is being computed; Keras keeps no account of these.
        self.specs: list[Any] = []


_running = _Running()


def protect_values(layer: Any) -> None:
    """Keeps from low dtypes what they cannot hold: losses, and features that are to be prepared.

    Args:
        layer: A layer of any dtype, whose constructor need not have ended yet.
    """
    add_losses_in_float32(layer)
    if isinstance(layer, keras_hooks.functional_class()):
        return  # casts no inputs
    if is_built_in(layer) and not isinstance(layer, keras.Sequential | keras.layers.Wrapper):
        return  # gets no layers of a user's

    def begin(original: Callable[[], None]) -> None:
        if not layer.built:
            _take_inputs_as_they_are(layer)
        original()

    _take_inputs_as_they_are(layer)
    name = keras_hooks.first_method_of_call(layer)
    if name not in wrapped_methods(layer):
        # A layer gets those inside after its own constructor, so it is known in the first call.
        wrap_method(layer, name, begin)
        if isinstance(layer, keras.Sequential):
            wrap_method(layer, "build", functools.partial(_build_sequential, layer))


def _build_sequential(model: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Has the InputLayer that Keras makes for a Sequential without one take features as they are.

    Keras gives it the dtype in which the first layer computes.
    """
    _take_inputs_as_they_are(model)
    before = keras_hooks.sublayers(model)[:1]
    result = original(*args, **kwargs)
    for layer in keras_hooks.sublayers(model)[:1]:
        made = isinstance(layer, keras.layers.InputLayer) and before != (layer,)
        if made and uncast_inputs.get(model) and layer.dtype in LOW_PRECISION:
            keras_hooks.set_fed_dtype(layer, "float32")
    return result


def _take_inputs_as_they_are(layer: Any) -> None:
    if casts_unprepared(layer):
        layer.autocast = False
        uncast_inputs.set(layer, True)


def casts_unprepared(layer: Any) -> bool:
    """Whether a layer casts its inputs to a low dtype before one inside it prepares them."""
    low = layer.autocast and layer.compute_dtype in LOW_PRECISION
    return low and not isinstance(layer, keras_hooks.functional_class()) and _prepares(layer)


def _prepares(layer: Any) -> bool:
    return any(
        (prepares_data(type(each)) and each.compute_dtype not in LOW_PRECISION) or _prepares(each)
        for each in keras_hooks.sublayers(layer)
    )


def layer_created(layer: Any, policy: Policy) -> None:
    """Takes a new layer into management.

    A model's own policy stays the mixed one: `compile` scales the loss of models that have it.

    Args:
        layer: A layer whose maker gave no dtype.
        policy: The mixed policy in force, which therefore decided its dtype.
    """
    if isinstance(layer, keras.layers.InputLayer):
        return  # its dtype says what is fed
    if fused_norms.can_fuse(type(layer)):
        follows_input = policy.keeps_float32(type(layer))
        managed_layers.set(layer, ManagedLayer(policy, follows_input=follows_input))
        fused_norms.fuse(layer, policy.compute_dtype)
    elif policy.keeps_float32(type(layer)):
        _keep_sublayers_float32(layer, policy)
    elif isinstance(layer, keras.Sequential):
        if policy.float32_outputs:
            _SequentialWatch(layer)
    elif not isinstance(layer, keras_hooks.functional_class()):
        managed_layers.set(layer, ManagedLayer(policy))
        if isinstance(layer, keras.Model) and policy.float32_outputs:
            _cast_outermost(layer, lambda: True)


def layer_adopted(layer: Any, policy: Policy) -> None:
    """Takes a layer into management that exists already, and may be built.

    Args:
        layer: A layer that has the policy's dtype already, or float32 where the policy keeps it.
        policy: A mixed policy.
    """
    if isinstance(layer, keras.Sequential):
        _SequentialWatch(layer).take_over()
    else:
        layer_created(layer, policy)


def functional_adopted(functional: Any, owner: Any) -> None:
    """Gives the layers of a Functional that exists already the dtypes of their roles.

    Args:
        functional: The Functional; its layers are adopted, and its symbolic tensors say so.
        owner: The Sequential it is the inside of; None if it is none's.
    """
    functional_created(functional)
    if owner is not None:
        output_dtypes.own(functional, owner)


@contextlib.contextmanager
def computing_specs_of(model: Any) -> Iterator[None]:
    """A context in which the specs of a model's parts are computed, of which none is outermost."""
    _running.specs.append(model)
    try:
        yield
    finally:
        _running.specs.pop()


def functional_created(functional: Any) -> None:
    """Gives the layers of a new Functional their dtypes, and watches who calls it.

    Args:
        functional: A Functional, just constructed.
    """
    if output_dtypes.settle(functional):
        _watch_functional(functional)


def _watch_functional(functional: Any) -> None:
    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = graph_of(functional)
        # A Sequential calls its Functional's call(); who called the Sequential is its business.
        if found is not None and found[1].owner is None:
            _note_caller(functional)
        return original(*args, **kwargs)

    wrap_method(functional, "call", call)
    wrap_method(functional, "compute_output_spec", functools.partial(_spec_of, functional))


def _spec_of(model: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with computing_specs_of(model):
        return original(*args, **kwargs)


def _inside_another(model: Any) -> bool:
    """Whether a model runs as a part of another layer or model."""
    return any(
        not (layer is model or _is_shell_of(layer, model))
        for layer in (*_running.specs, *keras_hooks.calling_layers())
    )


def _is_shell_of(layer: Any, model: Any) -> bool:
    return isinstance(layer, keras.Sequential) and keras_hooks.functional_of(layer) is model


def _note_caller(model: Any) -> None:
    """Makes a Functional or Sequential a part of the layer that is calling it, if one is."""
    found = graph_of(model)
    # As the last step of a Functional it makes that one's outputs, and stays float32.
    if found is not None and not found[1].output_of.alive() and _inside_another(model):
        output_dtypes.become_part(model)


class _SequentialWatch:
    """Follows the Functionals that one Sequential builds and drops; its methods wrap the model's.

    A Sequential builds a new one whenever a layer is added or taken off, and the former may live on
    for a while.
    """

    def __init__(self, model: Any):
        self._model = model
        self._built: weakref.ref[Any] | None = None
        for name in ("build", "pop", "call", "get_config"):
            wrap_method(model, name, getattr(self, name))
        _cast_outermost(model, self._returns_low)

    def take_over(self) -> None:
        """Starts with the Functional that the model has built, if it has."""
        functional = self._functional()
        self._built = None if functional is None else weakref.ref(functional)

    def build(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._functional() is None:
            self._forget()
        result = original(*args, **kwargs)
        functional = self._functional()
        known = self._built() if self._built is not None else None
        if functional is not None and functional is not known:
            self._forget()
            self._built = weakref.ref(functional)
            if graph_of(self._model) is None:
                # The constructors are no longer wrapped: the policy has changed since.
                output_dtypes.settle(functional)
            output_dtypes.own(functional, self._model)
        return result

    def pop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        layer = original(*args, **kwargs)
        if self._functional() is None:
            self._forget()
        output_dtypes.lower_if_no_output(layer)
        return layer

    def call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        _note_caller(self._model)
        return original(*args, **kwargs)

    def get_config(self, original: Callable[[], Any]) -> Any:
        # The appended layers are in the Functional only, and this lists the Sequential's own.
        config = original()
        appended = output_dtypes.appended_casts(self._functional())
        config["layers"] += [keras.saving.serialize_keras_object(layer) for layer in appended]
        return config

    def _functional(self) -> Any:
        return keras_hooks.functional_of(self._model)

    def _forget(self) -> None:
        old = self._built() if self._built is not None else None
        self._built = None
        if old is not None:
            output_dtypes.forget(old)

    def _returns_low(self) -> bool:
        """Whether nothing else raises the output: no Functional, as for nested inputs."""
        layers = self._model.layers
        return (
            self._functional() is None and bool(layers) and output_dtypes.wants_float32(layers[-1])
        )


def _cast_outermost(model: Any, applies: Callable[[], bool]) -> None:
    """Makes the outermost call of a model return float32, and its spec say so.

    Called inside another layer's call, it returns its low dtype: that is what the next layer wants.
    So it does when called with symbolic tensors: what becomes of those is not known yet, and the
    Functional made of them casts where needed.
    """

    def outermost() -> bool:
        symbolic = any(running is model for running in _running.symbolic)
        return not symbolic and applies() and not _inside_another(model)

    def symbolic_call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        _running.symbolic.append(model)
        try:
            return original(*args, **kwargs)
        finally:
            _running.symbolic.pop()

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outputs = original(*args, **kwargs)
        # Only now: a Sequential may have been built by the call.
        if not outermost():
            return outputs
        return keras.tree.map_structure(functools.partial(_as_float32, model), outputs)

    def compute_output_spec(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        spec = _spec_of(model, original, *args, **kwargs)
        if not outermost():
            return spec
        return keras.tree.map_structure(functools.partial(_spec_as_float32, model), spec)

    for around in (symbolic_call, call, compute_output_spec):
        wrap_method(model, around.__name__, around)


def _is_low(model: Any, dtype: Any) -> bool:
    name = keras.backend.standardize_dtype(dtype)
    return name in LOW_PRECISION and name == model.compute_dtype


def _as_float32(model: Any, value: Any) -> Any:
    if not keras.ops.is_tensor(value) or not _is_low(model, value.dtype):
        return value
    result = keras.ops.cast(value, "float32")
    keras_hooks.copy_mask(value, result)
    return result


def _spec_as_float32(model: Any, spec: Any) -> Any:
    if isinstance(spec, keras.KerasTensor) and _is_low(model, spec.dtype):
        return keras.KerasTensor(spec.shape, dtype="float32", sparse=spec.sparse)
    return spec


def _keep_sublayers_float32(layer: Any, policy: Policy) -> None:
    """Makes a layer that stays float32 keep its sublayers so, before it is built or called.

    It gets them after its own constructor has run, and Keras's wrappers get theirs from outside.
    """

    def settle(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        _set_float32(keras_hooks.sublayers(layer), is_built_in(layer), policy.name)
        return original(*args, **kwargs)

    wrap_method(layer, "build", settle)
    wrap_method(layer, "call", settle)


def _set_float32(layers: tuple[Any, ...], handed_down: bool, policy_name: str) -> None:
    for layer in layers:
        # Keras's own layers give theirs a dtype explicitly; a user's explicit one wins.
        ours = managed_layers.get(layer) is not None or handed_down
        if ours and float_policy(layer) == policy_name:
            give_policy(layer, "float32")
            managed_layers.discard(layer)
        _set_float32(keras_hooks.sublayers(layer), is_built_in(layer), policy_name)
