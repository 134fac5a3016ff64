"""Methods of Keras classes that are replaced while something of tfamp's is active.

Each function replaces one method of a public class and returns what puts it back.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from tfamp.interop.keras_hooks import keras_module, keras_symbol


def intercept_layer_calls(
    dtype: Callable[[], str | None], paused: Callable[[], contextlib.AbstractContextManager[None]]
) -> Callable[[], None]:
    """Makes Keras layers of float32 read their variables in a dtype while they are called.

    Keras does the same for mixed policies. Only variables that take part in it are read so: those
    of BatchNormalization, and of an optimizer, are not. Layers that Keras has quantized run paused,
    on inputs of their own dtype: sums and scales of integers are beyond float16.

    Symbols: `keras.src.backend.common.variables.AutocastScope`, whose `original_scope` is the scope
    around it, and `get_autocast_scope`.

    Args:
        dtype: Returns the dtype for the calling thread; None for the layers' own.
        paused: Makes a context in which the thread has no such dtype.

    Returns:
        A function that puts everything back.
    """
    variables = keras_module("keras.src.backend.common.variables")
    scope_class = keras_symbol(variables, "AutocastScope")
    current_scope = keras_symbol(variables, "get_autocast_scope")

    class Scope(scope_class):  # type: ignore[misc, valid-type]
        """A scope of this function's, not of a layer with a mixed policy."""

    def reads_float32(layer: Any) -> bool:
        """Whether a layer reads float32 by itself, and not because a layer around it does."""
        if not (layer.autocast and layer.compute_dtype == "float32"):
            return False
        scope = current_scope()
        # Inside of a scope of another dtype, which is this one's, layers open their own first.
        return scope is None or isinstance(scope.original_scope, Scope)

    # What a layer calls when it has chosen its scope.
    original = keras.Operation.__call__

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        low = dtype() if isinstance(self, keras.layers.Layer) else None
        if low is not None and self.quantization_mode is not None:
            with paused():
                own = functools.partial(_in_dtype, dtype=self.compute_dtype)
                args, kwargs = keras.tree.map_structure(own, (args, kwargs))
                return original(self, *args, **kwargs)
        if low is None or not reads_float32(self):
            return original(self, *args, **kwargs)
        with Scope(low):
            return original(self, *args, **kwargs)

    keras.Operation.__call__ = __call__

    def restore() -> None:
        keras.Operation.__call__ = original

    return restore


def _in_dtype(value: Any, dtype: str) -> Any:
    if not keras.ops.is_tensor(value) or isinstance(value, keras.KerasTensor):
        return value
    is_float = keras.backend.is_float_dtype(keras.backend.standardize_dtype(value.dtype))
    return keras.ops.cast(value, dtype) if is_float else value


def variables_as_stored() -> contextlib.AbstractContextManager[None]:
    """A context in which a layer being called reads its variables in the dtype they have.

    Symbol: `keras.src.backend.common.variables.AutocastScope`.
    """
    variables = keras_module("keras.src.backend.common.variables")
    scope: contextlib.AbstractContextManager[None] = keras_symbol(variables, "AutocastScope")(None)
    return scope


def intercept_optimizer_steps(
    context: Callable[[], contextlib.AbstractContextManager[None]],
) -> Callable[[], None]:
    """Makes Keras optimizers update variables inside a context.

    Args:
        context: Makes the context, in the calling thread.

    Returns:
        A function that puts everything back.
    """
    owner = next(each for each in keras.optimizers.Optimizer.__mro__ if "apply" in vars(each))
    original = vars(owner)["apply"]

    @functools.wraps(original)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        with context():
            return original(self, *args, **kwargs)

    owner.apply = apply

    def restore() -> None:
        owner.apply = original

    return restore


def intercept_batch_normalization(
    call: Callable[[Any, Callable[..., Any], Any, Any, Any], Any],
) -> Callable[[], None]:
    """Puts a function in the place of what Keras's BatchNormalization computes.

    Args:
        call: Gets the layer, Keras's own method, the inputs, `training` and `mask`.

    Returns:
        A function that puts everything back.
    """
    original = keras.layers.BatchNormalization.call

    @functools.wraps(original)
    def replaced(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return call(self, functools.partial(original, self), inputs, training, mask)

    keras.layers.BatchNormalization.call = replaced

    def restore() -> None:
        keras.layers.BatchNormalization.call = original

    return restore


def observe_layer_calls(
    around: Callable[[Any, Callable[[], Any]], Any],
) -> Callable[[], None]:
    """Puts a function around every call of a Keras layer, in all threads.

    Args:
        around: Gets the layer and a function that makes the call; returns the call's result.

    Returns:
        A function that ends this.
    """
    original = keras.layers.Layer.__call__
    active = True

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(original, self, *args, **kwargs)
        # Off while something that was patched on top of this, in another thread, still holds it.
        return around(self, call) if active else call()

    keras.layers.Layer.__call__ = __call__

    def restore() -> None:
        nonlocal active
        active = False
        if keras.layers.Layer.__call__ is __call__:
            keras.layers.Layer.__call__ = original

    return restore


def replace_initializers(replace: Callable[[Any, Any], Any]) -> Callable[[], None]:
    """Puts other initializers in the place of those that Keras variables are made with.

    Args:
        replace: Gets each variable, before it is made, and its initializer - a function, the name
            of one, or a value - and returns the one to make it with.

    Returns:
        A function that ends this.
    """
    owner = next(each for each in keras.Variable.__mro__ if "__init__" in vars(each))
    original = vars(owner)["__init__"]

    @functools.wraps(original)
    def __init__(self: Any, initializer: Any, *args: Any, **kwargs: Any) -> None:
        original(self, replace(self, initializer), *args, **kwargs)

    owner.__init__ = __init__

    def restore() -> None:
        owner.__init__ = original

    return restore
