"""A model, or the file of one, as a traced float32 function whose graph tells its shapes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from zipfile import BadZipFile

import keras
import tensorflow as tf

from tfamp.core.errors import SavedModelError
from tfamp.diagnostics.model_runs import computing_in, layer_path, observing_layers
from tfamp.rewriting import saved_files
from tfamp.rewriting.pipeline import FlatGraph, into_current_graph

# A concrete function, and by names of its ops the paths of the layers that made them, where known.
Traced: TypeAlias = tuple[Any, Mapping[str, str]]

DEFAULT_SIGNATURE = "serving_default"
# What Keras raises for an archive or a configuration it cannot make a model of.
_KERAS_ERRORS = (AttributeError, ImportError, KeyError, OSError, TypeError, ValueError, BadZipFile)


def traced_model(
    source: Any, batch_size: int | None, signature: str | None, training: bool, example_args: Any
) -> Traced:
    """Traces a model, or the file of one, in float32; runs nothing of it.

    A SavedModel and a function are traced as they are, low ops included.
    """
    model = _load(Path(source)) if isinstance(source, str | os.PathLike) else source
    if hasattr(model, "signatures") and not isinstance(model, keras.Model):
        if training:
            raise ValueError("training=True needs a Keras model: a SavedModel only infers.")
        return _with_batch(signature_of(model, signature, source)[1], batch_size), {}
    if signature is not None:
        raise ValueError(
            f"A signature is of a SavedModel; got signature {signature!r} for {source!r}."
        )
    if isinstance(model, tf.types.experimental.ConcreteFunction):
        return _with_batch(model, batch_size), {}
    if not callable(model):
        raise TypeError(
            "model_report takes the path of a SavedModel or a .keras file, a Keras model or a "
            f"function; got {type(source).__name__}."
        )
    inputs = _inputs(model) if example_args is None else tuple(example_args)
    inputs = tf.nest.map_structure(functools.partial(_spec, batch_size=batch_size), inputs)
    if not isinstance(model, keras.Layer):
        if training:
            raise TypeError(f"training=True needs a Keras model; got {type(model).__name__}.")
        written = getattr(model, "python_function", model)
        return tf.function(written).get_concrete_function(*inputs), {}
    function = _step(model) if training else lambda *given: model(*given)
    return _traced_layers(model, function, inputs)


def _traced_layers(model: Any, function: Callable[..., Any], inputs: Any) -> Traced:
    makers: dict[str, str] = {}

    def around(layer: Any, call: Callable[[], Any]) -> Any:
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        result = call()
        # A layer in this one was there first.
        for op in graph.get_operations()[before:]:
            makers.setdefault(op.name, layer_path(layer))
        return result

    with computing_in(model, "float32"), observing_layers(around):
        concrete = tf.function(function, autograph=False).get_concrete_function(*inputs)
    return concrete, makers


def _load(path: Path) -> Any:
    if path.suffix != ".keras":
        if path.is_file():
            raise SavedModelError(
                f"{path} is neither a .keras file nor the directory of a SavedModel. Load it in "
                "Python and give model_report the model."
            )
        saved_files.read_saved_model(path)  # It says what is missing or broken.
        return tf.saved_model.load(os.fspath(path))
    if not path.exists():
        raise SavedModelError(f"There is no file {path}; give a .keras file or a SavedModel.")
    try:
        return keras.saving.load_model(path, compile=False, safe_mode=True)
    except _KERAS_ERRORS as error:
        raise SavedModelError(
            f"{path} cannot be loaded: {saved_files.first_line(error)} Load a model with "
            "code of its own in Python and give model_report the model."
        ) from error


def signature_of(model: Any, name: str | None, source: Any) -> tuple[str, Any]:
    """Returns a signature of a loaded SavedModel with its name; None is the default one."""
    signatures = dict(model.signatures)
    if name is None:
        name = DEFAULT_SIGNATURE if DEFAULT_SIGNATURE in signatures else next(iter(signatures), "")
    if name not in signatures:
        known = f"its signatures are {sorted(signatures)}" if signatures else "it has none"
        raise ValueError(f"{source} has no signature {name!r}: {known}.")
    return name, signatures[name]


def _with_batch(concrete: Any, batch_size: int | None) -> Any:
    """The function with its calls inlined and shapes inferred again, for a batch of a size."""
    captured = concrete.captured_inputs
    own = concrete.inputs[: len(concrete.inputs) - len(captured)]
    specs = [_spec(tf.TensorSpec(x.shape, x.dtype, x.op.name), batch_size) for x in own]

    def flat(*tensors: Any) -> list[Any]:
        return into_current_graph(FlatGraph.of(concrete), [*tensors, *captured])[0]

    return tf.function(flat, autograph=False).get_concrete_function(*specs)


def _inputs(model: Any) -> tuple[Any, ...]:
    """Specs of what a Keras model is called with."""
    if tensors := getattr(model, "inputs", None):
        # A Sequential takes one.
        structure = tensors[0] if isinstance(model, keras.Sequential) else model.input
        return (tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), structure),)
    config = model.get_build_config() if isinstance(model, keras.Model) else None
    shape = (config or {}).get("input_shape")
    if not shape or not all(size is None or isinstance(size, int) for size in shape):
        raise ValueError(
            "The model does not tell the shape of its input: give example_args=(x,), the arguments "
            "of a call."
        )
    # What it was built with has the batch of that call.
    return (tf.TensorSpec((None, *shape[1:]), "float32"),)


def _spec(value: Any, batch_size: int | None) -> Any:
    is_open = isinstance(value, tf.TensorSpec) and value.shape.rank and value.shape[0] is None
    if batch_size is None or not is_open:
        return value
    return tf.TensorSpec((batch_size, *value.shape[1:]), value.dtype, value.name)


def _step(model: Any) -> Any:
    """The forward and backward pass: the gradient of the mean square of all outputs."""

    def step(*inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(model(*inputs, training=True))
            # Not linear, so that the forward pass is needed to its end.
            squares = [tf.square(tf.cast(each, "float32")) for each in outputs]
            loss = tf.add_n([*map(tf.reduce_mean, squares)])
        return tape.gradient(loss, model.trainable_variables)

    return step
