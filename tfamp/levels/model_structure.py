"""What a model is made of: its layers, the graphs of symbolic tensors among them, and their dtypes.

Nothing here decides on a dtype; `layer_policies` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES
from tfamp.interop import keras_hooks
from tfamp.interop.keras_hooks import advice, described
from tfamp.layers.layer_dtypes import is_subclassed_model, respecify
from tfamp.layers.model_calls import computing_specs_of
from tfamp.levels.precision_config import nearest

# Symbolic dtypes are corrected in passes until none changes. A layer called several times may need
# as many passes; more than this is a layer that changes its mind.
_MOST_PASSES = 20


def layers_of(*roots: Any) -> list[Any]:
    """Layers and all below them, each once, a layer before those it holds."""
    return _walked(roots)[0]


def _walked(roots: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Layers and all below them, each once: before those it holds, and behind them."""
    before: dict[int, Any] = {}
    behind: list[Any] = []

    def visit(layer: Any) -> None:
        if id(layer) not in before:
            before[id(layer)] = layer
            for sub in keras_hooks.sublayers(layer):
                visit(sub)
            behind.append(layer)

    for root in roots:
        visit(root)
    return list(before.values()), behind


def computing_layers_of(*roots: Any) -> list[Any]:
    """The same without what only takes the inputs."""
    return [each for each in layers_of(*roots) if not isinstance(each, keras.layers.InputLayer)]


def functionals_of(*roots: Any) -> list[tuple[Any, Any]]:
    """The Functionals in models, the innermost first, each with the Sequential it is the inside of.

    That is None where it is none's.
    """
    found: dict[int, tuple[Any, Any]] = {}
    for layer in _walked(roots)[1]:
        owner = layer if isinstance(layer, keras.Sequential) else None
        functional = keras_hooks.functional_of(layer) if owner is not None else layer
        if isinstance(functional, keras_hooks.functional_class()):
            found.setdefault(id(functional), (functional, owner))
    return list(found.values())


def is_graph(layer: Any) -> bool:
    """Whether a layer is a Functional or Sequential model."""
    return isinstance(layer, keras.Sequential | keras_hooks.functional_class())


def models_held_by_models(model: Any) -> list[Any]:
    """The Functional and Sequential models that subclassed models hold, a model being one too."""
    holders = filter(is_subclassed_model, layers_of(model))
    return [sub for holder in holders for sub in keras_hooks.sublayers(holder) if is_graph(sub)]


def correct_symbolic_dtypes(functional: Any) -> None:
    """Makes the symbolic tensors of a Functional say what its layers return now.

    Those of models inside it are right already. A ValueError names the layer that fails.
    """
    nodes = [
        node
        for operation in functional.operations
        if not isinstance(operation, keras.layers.InputLayer)
        for node in keras_hooks.inbound_nodes(operation)
        if any(tensor.dtype in FLOAT_DTYPES for tensor in node.outputs)
    ]
    with computing_specs_of(functional):
        for _ in range(_MOST_PASSES):
            # A list, not any(...) of a generator: every node is to be corrected.
            changed = [_corrected(node) for node in nodes]
            if not any(changed):
                return


def _corrected(node: Any) -> bool:
    try:
        return respecify(node)
    except (TypeError, ValueError, RuntimeError, NotImplementedError, tf.errors.OpError) as error:
        operation = node.operation
        dtype = getattr(operation, "compute_dtype", "low precision")
        raise ValueError(
            f"{operation.name} ({type(operation).__name__}) cannot be computed in {dtype}: {error} "
            f"Keep it in float32 with keep_float32=[{operation.name!r}]."
        ) from error


def drop_traced_functions(model: Any) -> None:
    """Makes a model, and those inside it, trace their steps anew: they have other dtypes now."""
    for layer in layers_of(model):
        if isinstance(layer, keras.Model):
            for name in ("train_function", "test_function", "predict_function"):
                setattr(layer, name, None)


def path_of(layer: Any) -> str:
    """Where a layer is in its model, as Keras says it; its name before it is built."""
    return str(getattr(layer, "path", None) or layer.name)


def select(layers: list[Any], wanted: Iterable[Any], argument: str) -> list[Any]:
    """The layers that a user means, in their order, without those below them.

    Wanted are names or paths of layers; regular expressions, searched for in the paths where no
    layer has that very name; layer classes; layers. An error says of which argument it is: a
    ValueError names the layer nearest to what means none.
    """
    chosen: set[int] = set()
    for each in wanted:
        found = _meant(layers, each, argument)
        if not found:
            raise ValueError(
                f"{argument} holds {each!r}, which means no layer of the model. "
                f"{_what_there_is(layers, each)}"
            )
        chosen |= {id(layer) for layer in found}
    return [layer for layer in layers if id(layer) in chosen]


def _meant(layers: list[Any], wanted: Any, argument: str) -> list[Any]:
    if isinstance(wanted, str):
        exact = [layer for layer in layers if wanted in (layer.name, path_of(layer))]
        if exact:
            return exact
        pattern = re.compile(wanted)
        return [x for x in layers if pattern.search(x.name) or pattern.search(path_of(x))]
    if isinstance(wanted, type):
        return [layer for layer in layers if isinstance(layer, wanted)]
    if isinstance(wanted, keras.Layer):
        return [layer for layer in layers if layer is wanted]
    raise TypeError(
        f"{argument} takes names of layers, regular expressions, layer classes and layers; got "
        f"{described(wanted)}"
    )


def _what_there_is(layers: list[Any], wanted: Any) -> str:
    if not isinstance(wanted, str):
        return f"It has {', '.join(sorted({type(x).__name__ for x in layers}))}.{advice(wanted)}"
    return f"The nearest name is {nearest(wanted, [layer.name for layer in layers])!r}."
