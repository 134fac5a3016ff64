"""Configurations of the loss scale optimizers of every release of Keras."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import keras

from tfamp.core.errors import TfampWarning
from tfamp.core.options import loss_scale_of_keras_2
from tfamp.interop.patching import level_of_user

_OF_SGD = {"self", "name", "momentum", "nesterov", "kwargs"}
# Settings of every Keras optimizer, which a wrapper leaves to the inner one, with their defaults.
# Keras before 3.12 saved them in the configuration of its LossScaleOptimizer, too.
INNER_SETTINGS: dict[str, Any] = {
    name: each.default
    for name, each in inspect.signature(keras.optimizers.SGD.__init__).parameters.items()
    if name not in _OF_SGD
} | {"learning_rate": 0.0}  # Of Keras's wrapper.


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `tfamp.LossScaleOptimizer` from a configuration, its own or Keras's.

    Inner optimizer and loss scale remain as they are described. Warns of settings that a wrapper
    does not apply, unless they have their defaults.
    """
    arguments = {name: v for name, v in config.items() if name not in INNER_SETTINGS}
    chosen = {k: v for k, v in config.items() if INNER_SETTINGS.get(k, v) != v}
    if chosen:
        named = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
        warnings.warn(
            f"The configuration of {config.get('name', 'a LossScaleOptimizer')!r} has {named}, "
            "which neither Keras's LossScaleOptimizer nor tfamp's applies. Set it on the inner "
            "optimizer.",
            TfampWarning,
            stacklevel=level_of_user(),
        )
    if "optimizer" in arguments:
        arguments["inner_optimizer"] = arguments.pop("optimizer")
        arguments["loss_scale"] = loss_scale_of_keras_2(arguments["loss_scale"])
    return arguments
