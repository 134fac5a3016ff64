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
    step = model.train_step

    @functools.wraps(step)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        training.on = True
        try:
            return step(*args, **kwargs)
        finally:
            training.on = False

    # Past Keras's __setattr__: these are functions for a while, no parts of the model.
    vars(model)["train_step"] = tf.autograph.experimental.do_not_convert(train_step)
    for position, layer in enumerate(layers):
        vars(layer)["call"] = _watched_call(layer, position, observer, training)

    def take_off() -> None:
        vars(model).pop("train_step", None)
        for layer in layers:
            vars(layer).pop("call", None)

    return take_off


def _watched_call(
    layer: keras.layers.Layer,
    position: int,
    observer: Callable[[int, Any], None],
    training: threading.local,
) -> Callable[..., Any]:
    original = layer.call

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        outputs = original(*args, **kwargs)
        if getattr(training, "on", False):
            for tensor in keras.tree.flatten(outputs):
                if tf.is_tensor(tensor) and dtype_name(tensor) in FLOAT_DTYPES:
                    observer(position, tensor)
                    break  # Of several outputs the first stands for the layer.
        return outputs

    kept: Callable[..., Any] = tf.autograph.experimental.do_not_convert(call)
    return kept
