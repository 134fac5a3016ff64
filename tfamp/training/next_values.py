"""Sources of gradients: which of them are the next values of variables.

Keras's float8 layers return the next scale and history of a variable as its gradient, and mark
the variable by `overwrite_with_gradient`. A list of gradients does not tell, so `tape.gradient`
notes on each gradient the variable that it is of.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfamp.core.kinds import Nest, Tensor, Variable
from tfamp.interop.patching import Patch
from tfamp.training.gradients import is_next_value, variable_name

_Targets: TypeAlias = list[Variable]
# Attribute of a gradient: a weak reference to its variable.
_SOURCE = "_tfamp_source"


def watch_tapes(user: object) -> None:
    """Lets tapes note the sources of gradients while `user` exists."""
    _hooks.acquire()
    weakref.finalize(user, _hooks.release).atexit = False


def _gradient(
    original: Callable[..., Any], tape: Any, target: Any, sources: Nest, *args: Any, **kwargs: Any
) -> Any:
    gradients = original(tape, target, sources, *args, **kwargs)
    listed = tf.nest.flatten(sources), tf.nest.flatten(gradients)
    for source, gradient in zip(*listed, strict=False):
        if tf.is_tensor(gradient) and not isinstance(gradient, tf.IndexedSlices):
            setattr(gradient, _SOURCE, weakref.ref(source))
    return gradients


_hooks = Patch(
    optional={
        "gradient": "the next values of float8 layers are told from gradients by variables= only."
    },
    gradient=_gradient,
)


def targets_of(
    gradients: Sequence[Tensor], built: Sequence[Variable], given: Sequence[Variable] | None
) -> _Targets:
    """The variables of gradients, None for those that are not known.

    These are the `given` ones, or those that a tape noted, or those that an optimizer was
    `built` for, if they are as many and of the gradients' shapes.
    """
    if given is not None:
        return _checked(gradients, list(given))
    noted = [_source(gradient) for gradient in gradients]
    fits = len(built) == len(gradients) and all(map(_fits, gradients, built))
    others = list(built) if fits else [None] * len(gradients)
    return [other if own is None else own for own, other in zip(noted, others, strict=True)]


def _checked(gradients: Sequence[Tensor], variables: _Targets) -> _Targets:
    if len(variables) != len(gradients) or not all(map(_fits, gradients, variables)):
        shapes = [None if each is None else tuple(getattr(each, "shape", ())) for each in gradients]
        raise ValueError(
            f"variables has {len(variables)} variables for {len(gradients)} gradients of shapes "
            f"{shapes}. Give the variable of each gradient, in the same order."
        )
    return variables


def _source(gradient: Tensor) -> Variable:
    reference = getattr(gradient, _SOURCE, None)
    return None if reference is None else reference()


def _fits(gradient: Tensor, variable: Variable) -> bool:
    shape = tf.TensorShape(getattr(gradient, "shape", ()))  # A number has none.
    return gradient is None or shape.is_compatible_with(variable.shape)


class KeptValues:
    """Next values that went through unscaling as they were, by variable.

    A step takes these whatever was done to the list since, such as clipping. Of several
    backward passes of one step it takes the largest.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def add(self, gradients: Sequence[Tensor], targets: Sequence[Variable]) -> None:
        """Keeps the next values among gradients."""
        for gradient, variable in zip(gradients, targets, strict=True):
            if gradient is not None and is_next_value(variable):
                before = self._kept.get(id(variable))
                value = gradient if before is None else tf.maximum(before, gradient)
                self._kept[id(variable)] = value

    def put_back(
        self,
        gradients: Sequence[Tensor],
        targets: Sequence[Variable],
        is_unscaled: Callable[[Tensor], bool],
    ) -> list[Tensor]:
        """Returns gradients with the kept next values; raises if one `is_unscaled`."""
        result = []
        for gradient, variable in zip(gradients, targets, strict=True):
            if gradient is None or not is_next_value(variable):
                result.append(gradient)
                continue
            kept = self._kept.get(id(variable))
            if kept is None and is_unscaled(gradient):
                raise ValueError(
                    f"The gradient of {variable_name(variable)} is its next value, as "
                    "overwrite_with_gradient states, and was divided by the loss scale: it was "
                    "unscaled where its variable was not known. Give its variables, as in "
                    "get_unscaled_gradients(gradients, variables=variables), or build the "
                    "optimizer with all of them first."
                )
            result.append(gradient if kept is None else kept)
        return result
