"""Which backend Keras runs on, what is inside its variables, and an error for TensorFlow only."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfamp.core.errors import UnsupportedBackendError


def runs_tensorflow() -> bool:
    """Whether Keras runs on TensorFlow."""
    return bool(keras.backend.backend() == "tensorflow")


def native(variable: Any) -> Any:
    """What a `keras.Variable` holds, a `tf.Variable` on TensorFlow; any other variable itself."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def as_tensor(variable: Any) -> Any:
    """The value of a variable as a tensor; on several replicas this one's, or the first one's."""
    # Keras takes its own variable for a tensor, so ops.convert_to_tensor would hand it out.
    value = native(variable)
    return tf.convert_to_tensor(value) if runs_tensorflow() else value


def how_to_change() -> str:
    """What to do where Keras runs on another backend than TensorFlow, as a sentence."""
    return "Set KERAS_BACKEND=tensorflow before Python starts."


def require_tensorflow(feature: str, instead: str = "a mixed policy") -> None:
    """Raises where Keras runs on another backend.

    Args:
        feature: What is called, as the subject of a sentence: "tfamp.rewrite".
        instead: What to use on other backends.

    Raises:
        UnsupportedBackendError: Keras runs on JAX or PyTorch, for example.
    """
    if not runs_tensorflow():
        raise UnsupportedBackendError(
            f"{feature} works on TensorFlow's ops, but Keras runs on the "
            f"{keras.backend.backend()} backend. {how_to_change()} Or use {instead}, which "
            "works on every backend."
        )
