"""Which backend Keras runs on, and an error for what works on TensorFlow only."""

from __future__ import annotations

import keras

from tfamp.core.errors import UnsupportedBackendError


def runs_tensorflow() -> bool:
    """Whether Keras runs on TensorFlow."""
    return bool(keras.backend.backend() == "tensorflow")


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
