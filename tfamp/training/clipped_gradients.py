"""Whether gradients were clipped while they were still multiplied by a loss scale.

Clipped to a norm of 1 and then divided by a scale of 2**15, gradients move no weight, in silence.

A graph shows it while it is traced, so that nothing is computed or read for it: a gradient is
multiplied by a number that was computed from it, or lies between two bounds. In eager mode the
norms of an optimizer's first steps show it, which are read once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfamp.core.kinds import Optimizer, Tensor

_SAME = frozenset({"Identity", "Cast"})
_PRODUCTS = frozenset({"Mul", "RealDiv", "DivNoNan"})
_BOUNDS = {"Maximum": "Minimum", "Minimum": "Maximum"}
# From the factor of `tf.clip_by_global_norm` back to the gradients are 9 ops, and one more for
# each of them. A choice: what is further away is not looked at.
_FAR = 16
_MANY = 20_000
# Choices: so many finite norms that agree to 3 digits, and are small once they are unscaled, are
# those of a clip. Without one a batch of other data has another norm.
_STEPS = 20
_AGREE = 1e-3
_SMALL = 1e-2
# Steps after which eager norms are kept no more, whatever they are.
_LAST = 100

_norms: weakref.WeakKeyDictionary[Optimizer, list[Tensor]] = weakref.WeakKeyDictionary()


def were_clipped(optimizer: Optimizer, gradients: Sequence[Tensor], scale: Tensor) -> bool:
    """Whether gradients, which are still scaled, were clipped, as far as is known yet."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    tensors = [value for value in values if tf.is_tensor(value)]
    if not tf.executing_eagerly():
        reach = _Reach()
        return any(_is_clipped(each, reach) for each in tensors if hasattr(each, "graph"))
    if tf.distribute.has_strategy():
        return False  # The gradients of one replica.
    return _norms_are_constant(optimizer, tensors, scale)


def _norms_are_constant(optimizer: Optimizer, tensors: list[Tensor], scale: Tensor) -> bool:
    kept = _norms.setdefault(optimizer, [])
    if not tensors or len(kept) >= _LAST:
        return False
    norm = tf.linalg.global_norm([tf.cast(each, tf.float32) for each in tensors])
    kept.append(tf.stack([norm, tf.cast(scale, tf.float32)]))
    if len(kept) % _STEPS:
        return False
    norms, scales = tf.stack(kept).numpy().T
    finite = np.isfinite(norms)
    if finite.sum() < _STEPS:  # The first ones overflow while a scale falls.
        return False
    norms, scales = norms[finite], scales[finite]
    kept.extend(kept[:1] * _LAST)  # Decided.
    agree = np.ptp(norms) <= _AGREE * norms.max()
    return bool(agree and norms.max() > 0 and (norms / scales).max() < _SMALL)


def _is_clipped(value: Tensor, reach: _Reach) -> bool:
    op = _peeled(value).op
    if op.type == "ClipByValue":
        return True
    parts = _parts(op)
    if parts is None:
        return False
    whole, number = parts
    if op.type in _BOUNDS:
        inner = _peeled(whole).op
        return inner.type == _BOUNDS[op.type] and _parts(inner) is not None
    return any(each.op in reach.of(number) for each in _without_factors(whole))


def _parts(op: tf.Operation) -> tuple[Tensor, Tensor] | None:
    """The tensor that an op multiplies by one number, or bounds by one, and that number."""
    if op.type not in _PRODUCTS and op.type not in _BOUNDS:
        return None
    first, second = op.inputs
    if _is_number(second) and not _is_number(first):
        return first, second
    is_reversed = _is_number(first) and not _is_number(second)
    return (second, first) if is_reversed and not op.type.endswith(("Div", "NoNan")) else None


def _is_number(tensor: Tensor) -> bool:
    return bool(tensor.shape.num_elements() == 1)


def _peeled(tensor: Tensor) -> Tensor:
    while tensor.op.type in _SAME:
        tensor = tensor.op.inputs[0]
    return tensor


def _without_factors(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor, and what it is a multiple of by single numbers."""
    yield tensor
    while True:
        tensor = _peeled(tensor)
        yield tensor
        parts = _parts(tensor.op) if tensor.op.type in _PRODUCTS else None
        if parts is None:
            return
        tensor = parts[0]
        yield tensor


class _Reach:
    """The ops that numbers are computed from, each looked for once."""

    def __init__(self) -> None:
        self._found: dict[int, set[tf.Operation]] = {}

    def of(self, number: Tensor) -> set[tf.Operation]:
        key = id(number.op)
        if key not in self._found:
            self._found[key] = self._search(number.op)
        return self._found[key]

    def _search(self, op: tf.Operation) -> set[tf.Operation]:
        found, level = {op}, [op]
        for _ in range(_FAR):
            before = {each.op for this in level for each in this.inputs} - found
            if not before or len(found) > _MANY:
                break
            found |= before
            level = list(before)
        return found
