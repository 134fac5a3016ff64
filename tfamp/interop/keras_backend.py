"""Which backend Keras runs on, what its variables hold, and words for what works elsewhere."""

from __future__ import annotations

import re
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


# Where they have another name in Keras than the class of TensorFlow 1 has.
_COUNTERPARTS = {"GradientDescent": "SGD", "Momentum": "SGD", "Functional": "Model"}


def described(value: object) -> str:
    """Says what was given where an object of Keras 3 is expected; ends an error's message.

    Args:
        value: What was given.

    Returns:
        What it is and of which module, with a full stop, and the advice for foreign objects.
    """
    owner = value if isinstance(value, type) else type(value)
    name = f"{owner.__module__}.{owner.__qualname__}".removeprefix("builtins.")
    if value is owner:
        return f"the class {name}.{advice(value)}"
    text = repr(value)
    # What Python writes for objects that do not say what they are, is their type again.
    said = f"an object of type {name}" if " object at 0x" in text else f"{text:.80} of type {name}"
    return f"{said}.{advice(value)}"


def advice(value: object) -> str:
    """What to do where an object or class of tf_keras, TensorFlow 1 or PyTorch was given; or ""."""
    owner = value if isinstance(value, type) else type(value)
    names = [f"{base.__module__}.{base.__name__}" for base in owner.__mro__]
    for pattern, library in (
        (r"tf_keras\.", "tf_keras (Keras 2, which tf.keras is with TF_USE_LEGACY_KERAS)"),
        (r"tensorflow\..*Optimizer$", "TensorFlow 1"),
        (r"torch\.", "PyTorch"),
    ):
        if any(re.match(pattern, name) for name in names):
            return f" That is of {library}, and tfamp works with Keras 3: use {_instead(owner)}."
    return ""


def _instead(owner: type) -> str:
    own = [base.__name__.removesuffix("Optimizer") for base in owner.__mro__]
    for name in (_COUNTERPARTS.get(each, each) for each in own):
        for where in ("keras", "keras.optimizers", "keras.layers"):
            namespace = getattr(keras, where.removeprefix("keras."), keras)
            if isinstance(getattr(namespace, name, None), type):
                return f"{where}.{name}"
    return "its counterpart in the package keras"


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
