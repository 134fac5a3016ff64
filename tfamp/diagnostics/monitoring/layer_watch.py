"""Seeing what layers return while a model is trained."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES
from tfamp.interop.keras_backend import described
from tfamp.interop.patching import wrap_method
from tfamp.interop.tracing import as_written
from tfamp.training.gradients import dtype_name


def chosen_layers(model: keras.Model, activations: Any) -> list[keras.layers.Layer]:
    """Returns the layers whose outputs are to be seen.

    Args:
        model: The model.
        activations: True for its layers, False for none, or a list of layers or their names.

    Raises:
        ValueError: The model has no layer of a given name.
        TypeError: What is given is something else.
    """
    if isinstance(activations, bool):
        wanted: Sequence[Any] = model.layers if activations else ()
        return [layer for layer in wanted if not isinstance(layer, keras.layers.InputLayer)]
    if isinstance(activations, str) or not isinstance(activations, Iterable):
        raise TypeError(
            "activations must be True, False or a list of layers or of their names; got "
            f"{activations!r}."
        )
    return [_layer(model, each) for each in activations]


def _layer(model: keras.Model, given: Any) -> keras.layers.Layer:
    if isinstance(given, keras.layers.Layer):
        return given
    if not isinstance(given, str):
        raise TypeError(f"activations must hold layers or names of layers; got {described(given)}")
    known = [each for each in model._flatten_layers(include_self=False) if each.name == given]
    if not known:
        names = ", ".join(layer.name for layer in model.layers)
        raise ValueError(f"The model has no layer {given!r}; its layers are {names}.")
    return known[0]


def watch_layers(
    model: keras.Model,
    layers: Sequence[keras.layers.Layer],
    observer: Callable[[int, Any], None],
) -> Callable[[], None]:
    """Has a function see what layers return in the train step, and in no other call.

    Args:
        model: The model that is trained; its train function has to be made again.
        layers: The layers.
        observer: Called with the position of a layer and a float tensor it returned.

    Returns:
        A function that takes the observer off again.
    """
    training = threading.local()  # Each replica of a MirroredStrategy traces in its own thread.

    @as_written
    def train_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        training.on = True
        try:
            return original(*args, **kwargs)
        finally:
            training.on = False

    undo = [wrap_method(model, "train_step", train_step)]
    for position, layer in enumerate(layers):
        around = _watched_call(functools.partial(observer, position), training)
        undo.append(wrap_method(layer, "call", around))

    def take_off() -> None:
        for each in undo:
            each()

    return take_off


def _watched_call(observer: Callable[[Any], None], training: threading.local) -> Callable[..., Any]:
    @as_written
    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outputs = original(*args, **kwargs)
        if getattr(training, "on", False):
            for tensor in keras.tree.flatten(outputs):
                if tf.is_tensor(tensor) and dtype_name(tensor) in FLOAT_DTYPES:
                    observer(tensor)
                    break  # Of several outputs the first stands for the layer.
        return outputs

    return call
