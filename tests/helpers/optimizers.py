"""Every optimizer that Keras has, found and not listed."""

from __future__ import annotations

import importlib
import pkgutil

import keras

WRAPPERS = ("LossScaleOptimizer", "MultiOptimizer")


def optimizer_classes() -> dict[str, type]:
    """The optimizers that Keras exports, and those that it has and does not."""
    source = importlib.import_module("keras.src.optimizers")
    modules = [keras.optimizers]
    for found in pkgutil.iter_modules(source.__path__):
        if not found.name.endswith("_test"):
            modules.append(importlib.import_module(f"{source.__name__}.{found.name}"))
    kinds = {x for each in modules for x in vars(each).values() if isinstance(x, type)}
    bases = keras.optimizers.Optimizer.__mro__
    return {
        kind.__name__: kind
        for kind in kinds
        if issubclass(kind, keras.optimizers.Optimizer) and kind not in bases
    }


def plain_optimizers() -> dict[str, type]:
    """The same by name in a fixed order, without those that wrap others."""
    return {
        name: kind for name, kind in sorted(optimizer_classes().items()) if name not in WRAPPERS
    }
