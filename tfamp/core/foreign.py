"""Descriptions of objects given instead of objects of Keras 3, for messages."""

from __future__ import annotations

import re


def described(value: object) -> str:
    """Describes a value that is not of Keras 3, with advice, to end a message."""
    owner = value if isinstance(value, type) else type(value)
    name = f"{owner.__module__}.{owner.__qualname__}".removeprefix("builtins.")
    text = f"the class {name}" if value is owner else f"{value!r:.80} of type {name}"
    return f"{text}.{advice(value)}"


def advice(value: object) -> str:
    """Advice for an object or class of tf_keras, TensorFlow 1 or PyTorch; "" for others."""
    owner = value if isinstance(value, type) else type(value)
    names = [f"{base.__module__}.{base.__name__}" for base in owner.__mro__]
    for pattern, library in (
        (r"tf_keras\.", "tf_keras (Keras 2, which tf.keras is with TF_USE_LEGACY_KERAS)"),
        (r"tensorflow\..*Optimizer$", "TensorFlow 1"),
        (r"torch\.", "PyTorch"),
    ):
        if any(re.match(pattern, name) for name in names):
            return f" That is of {library}: use its counterpart in keras, which is Keras 3."
    return ""
