"""The structure of a model: its layers, Functionals, outputs, and the layers that a user means."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES
from tfamp.core.foreign import advice, described
from tfamp.core.options import nearest
from tfamp.interop import keras_hooks
from tfamp.interop.keras_hooks import layers_of
from tfamp.layers import layer_dtypes, model_calls, model_roles

# Symbolic dtypes are corrected in passes until a fixed point. A layer called several times may need
# as many passes; more than this means that it never settles.
_MOST_PASSES = 20


def computing_layers_of(*roots: Any) -> list[Any]:
    """Returns the layers of models and layers, without input layers."""
    return [each for each in layers_of(*roots) if not isinstance(each, keras.layers.InputLayer)]


def functionals_of(model: Any) -> list[tuple[Any, Any]]:
    """Returns the Functionals in a model, innermost first, each with the Sequential that runs it.

    The Sequential is None for a standalone Functional.
    """
    found: dict[int, tuple[Any, Any]] = {}
    for layer in reversed(layers_of(model)):
        owner = layer if isinstance(layer, keras.Sequential) else None
        functional = keras_hooks.functional_of(layer) if owner is not None else layer
        if isinstance(functional, keras_hooks.functional_class()):
            found.setdefault(id(functional), (functional, owner))
    return list(found.values())


def output_layers_of(layer: Any) -> list[Any]:
    """Returns the layers that make the outputs of a Functional or Sequential.

    A layer makes its own; which ones do in a subclassed model only its code says.
    """
    if isinstance(layer, keras.Sequential):
        makers = layer.layers[-1:]
    elif is_graph(layer):
        makers = model_roles.output_makers(keras_hooks.outputs_of(layer))
    else:
        return [] if isinstance(layer, keras.Model) else [layer]
    return [each for maker in makers for each in output_layers_of(maker)]


def is_graph(layer: Any) -> bool:
    """Whether a layer is a Functional or Sequential model."""
    return isinstance(layer, keras.Sequential | keras_hooks.functional_class())


def models_held_by_models(model: Any) -> list[Any]:
    """Returns the Functional and Sequential models held by a model, or one in it, if subclassed."""
    holders = filter(model_roles.is_subclassed_model, layers_of(model))
    return [sub for holder in holders for sub in keras_hooks.sublayers(holder) if is_graph(sub)]


def correct_symbolic_dtypes(model: Any) -> None:
    """Gives the symbolic tensors of a model, nested ones included, the dtypes its layers return.

    A ValueError names a layer that fails.
    """
    for functional, _ in functionals_of(model):
        correct_symbolic_dtypes_of(functional)


def correct_symbolic_dtypes_of(functional: Any) -> None:
    """Gives the symbolic tensors of one Functional the dtypes its layers return."""
    nodes = [
        node
        for operation in functional.operations
        if not isinstance(operation, keras.layers.InputLayer)
        for node in keras_hooks.inbound_nodes(operation)
        if any(tensor.dtype in FLOAT_DTYPES for tensor in node.outputs)
    ]
    with model_calls.computing_specs_of(functional):
        for _ in range(_MOST_PASSES):
            # A list: any() of a generator would stop at the first change.
            changed = [_corrected(node) for node in nodes]
            if not any(changed):
                return


def _corrected(node: Any) -> bool:
    try:
        return model_roles.respecify(node)
    except (TypeError, ValueError, RuntimeError, NotImplementedError, tf.errors.OpError) as error:
        operation = node.operation
        dtype = getattr(operation, "compute_dtype", "low precision")
        raise ValueError(
            f"{operation.name} ({type(operation).__name__}) cannot be computed in {dtype}: {error} "
            f"Keep it in float32 with keep_float32=[{operation.name!r}]."
        ) from error


def drop_traced_functions(model: Any) -> None:
    """Drops the traced steps of a model and of models inside it: the next call traces again."""
    for layer in layers_of(model):
        if isinstance(layer, keras.Model):
            for name in ("train_function", "test_function", "predict_function"):
                setattr(layer, name, None)


def path_of(layer: Any) -> str:
    """Returns the path of a layer in its model, or its name before it is built."""
    return str(getattr(layer, "path", None) or layer.name)


def quantized_names(layers: Iterable[Any]) -> str:
    """Returns the paths of quantized layers, each with its mode, as text; "" for none."""
    modes = [(layer, layer_dtypes.quantization_of(layer)) for layer in layers]
    return ", ".join(f"{path_of(layer)} ({mode})" for layer, mode in modes if mode is not None)


def select(layers: list[Any], wanted: Iterable[Any], argument: str) -> list[Any]:
    """Returns the layers that a user selects, in their order, without their sublayers.

    `wanted` holds names or paths; regular expressions, searched for in the paths where no name
    matches exactly; layer classes; layers. An error names the argument.
    """
    chosen: set[int] = set()
    for each in wanted:
        found = _meant(layers, each, argument)
        if not found:
            is_text = isinstance(each, str)
            names = [x.name if is_text else type(x).__name__ for x in layers]
            raise ValueError(
                f"{argument} holds {each!r}, which means no layer of the model. The nearest is "
                f"{nearest(getattr(each, '__name__', each), names)!r}.{advice(each)}"
            )
        chosen |= {id(layer) for layer in found}
    return [layer for layer in layers if id(layer) in chosen]


def _meant(layers: list[Any], wanted: Any, argument: str) -> list[Any]:
    if isinstance(wanted, str):
        exact = [layer for layer in layers if wanted in (layer.name, path_of(layer))]
        if exact:
            return exact
        try:
            pattern = re.compile(wanted)
        except re.error as error:
            raise ValueError(
                f"{argument} holds {wanted!r}, which is not a regular expression: {error}."
            ) from error
        return [x for x in layers if pattern.search(x.name) or pattern.search(path_of(x))]
    if isinstance(wanted, type):
        return [layer for layer in layers if isinstance(layer, wanted)]
    if isinstance(wanted, keras.Layer):
        return [layer for layer in layers if layer is wanted]
    raise TypeError(
        f"{argument} takes names of layers, regular expressions, layer classes and layers; got "
        f"{described(wanted)}"
    )
