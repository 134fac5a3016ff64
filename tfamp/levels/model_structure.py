"""The structure of a model: its layers, Functionals, outputs, and layers that a user means."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from tfamp.core.kinds import Functional, Layer, Model
from tfamp.core.messages import advice, described
from tfamp.core.options import checked_pattern, nearest
from tfamp.interop import keras_hooks
from tfamp.interop.keras_hooks import layers_of
from tfamp.layers import layer_dtypes, model_roles, symbolic_dtypes


def computing_layers_of(*roots: Layer) -> list[Layer]:
    """Returns the layers of models and layers, without input layers."""
    layers = layers_of(*roots)
    return [layer for layer in layers if not isinstance(layer, keras.layers.InputLayer)]


def functionals_of(model: Model) -> list[tuple[Functional, Model | None]]:
    """Returns the Functionals in a model, innermost first, with the Sequentials that run them.

    The Sequential is None for a standalone Functional.
    """
    pairs: dict[int, tuple[Functional, Model | None]] = {}
    for layer in reversed(layers_of(model)):
        owner = layer if isinstance(layer, keras.Sequential) else None
        functional = keras_hooks.functional_of(layer) if owner is not None else layer
        if isinstance(functional, keras_hooks.functional_class()):
            pairs.setdefault(id(functional), (functional, owner))
    return list(pairs.values())


def output_layers_of(layer: Layer) -> list[Layer]:
    """Returns the layers that make the outputs of a Functional or Sequential.

    A layer makes its outputs itself; which layers of a subclassed model do only its code says.
    """
    if isinstance(layer, keras.Sequential):
        makers = layer.layers[-1:]
    elif model_roles.is_graph(layer):
        makers = model_roles.output_makers(keras_hooks.outputs_of(layer))
    else:
        return [] if isinstance(layer, keras.Model) else [layer]
    return [layer for maker in makers for layer in output_layers_of(maker)]


def models_held_by_models(model: Model) -> list[Model]:
    """Returns the Functionals and Sequentials that subclassed models in a model hold."""
    holders = filter(model_roles.is_subclassed_model, layers_of(model))
    return [
        sub
        for holder in holders
        for sub in keras_hooks.sublayers(holder)
        if model_roles.is_graph(sub)
    ]


def correct_symbolic_dtypes(model: Model) -> None:
    """Gives the symbolic tensors of a model the dtypes that its layers return.

    Nested models are included. A ValueError names a layer that fails.
    """
    for functional, _ in functionals_of(model):
        symbolic_dtypes.correct(functional)


def drop_traced_functions(model: Model) -> None:
    """Drops the traced steps of a model and of models inside it: the next call traces again."""
    for layer in layers_of(model):
        if isinstance(layer, keras.Model):
            for name in ("train_function", "test_function", "predict_function"):
                setattr(layer, name, None)
            # Of KerasHub's tasks, which keep it, too, until it is None.
            if hasattr(layer, "generate_function"):
                layer.generate_function = None


def path_of(layer: Layer) -> str:
    """Returns the path of a layer in its model, or its name before it is built."""
    return str(getattr(layer, "path", None) or layer.name)


def quantized_names(layers: Iterable[Layer]) -> str:
    """Returns the paths of quantized layers with their modes, as text; "" for none."""
    modes = [(layer, layer_dtypes.quantization_of(layer)) for layer in layers]
    return ", ".join(f"{path_of(layer)} ({mode})" for layer, mode in modes if mode is not None)


def select(layers: list[Layer], selectors: Iterable[Any], argument: str) -> list[Layer]:
    """Returns the layers that a user selects, in their order, without their sublayers.

    Selectors are names or paths; regular expressions, searched for in the paths where no name
    matches exactly; layer classes; layers. An error names the argument.
    """
    chosen: set[int] = set()
    for selector in selectors:
        meant = _meant(layers, selector, argument)
        if not meant:
            is_text = isinstance(selector, str)
            name = getattr(selector, "__name__", selector)
            names = [layer.name if is_text else type(layer).__name__ for layer in layers]
            raise ValueError(
                f"{argument} holds {selector!r}, which means no layer of the model. The "
                f"nearest is {nearest(name, names)!r}.{advice(selector)}"
            )
        chosen |= {id(layer) for layer in meant}
    return [layer for layer in layers if id(layer) in chosen]


def _meant(layers: list[Layer], selector: Any, argument: str) -> list[Layer]:
    if isinstance(selector, str):
        exact = [layer for layer in layers if selector in (layer.name, path_of(layer))]
        if exact:
            return exact
        pattern = checked_pattern(argument, selector)
        return [x for x in layers if pattern.search(x.name) or pattern.search(path_of(x))]
    if isinstance(selector, type):
        return [layer for layer in layers if isinstance(layer, selector)]
    if isinstance(selector, keras.Layer):
        return [layer for layer in layers if layer is selector]
    raise TypeError(
        f"{argument} takes names of layers, regular expressions, layer classes and layers; got "
        f"{described(selector)}"
    )
