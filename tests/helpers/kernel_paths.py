"""How far the ways to low precision, and kernels themselves, are from float32 in a `KernelCase`."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

import tfamp
from helpers.kernel_cases import KernelCase
from tfamp.interop import tf_private
from tfamp.planning.kernels import OpCall

OUTER_TAPE = "rewrite, outer tape"
FUNCTION_PATHS = ("rewrite", OUTER_TAPE, "autocast", "eager autocast")
LAYER_PATHS = ("policy", "eager policy", "O2")
# Keras's own policy, without tfamp, for comparison.
KERAS = "Keras's policy"


class Deviation(NamedTuple):
    """How far a result is from the reference, relative to the reference's magnitude."""

    of: str  # "result", "gradient 0", "gradient of kernel".
    error: float  # Root mean square; NaN and infinity count as infinite.
    bias: float


def limit(dtype: str, roundings: int = 1) -> float:
    """The largest error of an exact kernel: four times that of rounding one value.

    Numbers of random size are off by about a quarter of eps then, as a root mean square: at most
    half of it just above a power of two, and half of that just below the next one, all divided by
    the square root of three. Roundings that follow each other are added up, without cancellation.
    """
    return 4 * roundings * float(ml_dtypes.finfo(dtype).eps) / 4


def is_available(case: KernelCase) -> bool:
    """False for shapes on which oneDNN's kernel corrupts memory, for the float32 reference too."""
    return not (case.crashes_onednn and tf_private.uses_onednn())


def has_kernel(op: str, dtype: str, device: str = "cpu") -> bool:
    return any(
        dtype in dtypes
        for kernel in tf_private.kernels(op)
        if kernel.device in (device, "default")
        for dtypes in kernel.dtypes.values()
    )


def deviations(case: KernelCase, path: str, dtype: str) -> list[Deviation]:
    """Runs a case in float32 and by a path; returns the deviation of each result."""
    if path == "raw":
        return _deviations(["result", "result in a graph"], *_raw_results(case, dtype))
    return (_layer_deviations if _is_layer(path) else _function_deviations)(case, path, dtype)


def largest(found: Sequence[Deviation]) -> Deviation:
    return max(found, key=lambda each: each.error)


def _is_layer(path: str) -> bool:
    return path in (*LAYER_PATHS, KERAS)


def _deviations(names: Sequence[str], actual: Any, expected: Any) -> list[Deviation]:
    return [
        Deviation(name, *_relative(np.asarray(a, np.float64), np.asarray(b, np.float64)))
        for name, a, b in zip(names, actual, expected, strict=True)
    ]


def _relative(actual: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    assert actual.shape == expected.shape
    if not np.isfinite(actual).all():
        return np.inf, np.nan
    difference = actual - expected
    size = float(np.sqrt(np.mean(expected**2))) or 1.0
    return float(np.sqrt(np.mean(difference**2))) / size, float(np.mean(difference)) / size


# ---- Data ----------------------------------------------------------------------------------------


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values that a low dtype holds, so that converting them is exact; integers as they are."""
    return values.astype(dtype).astype("float32") if values.dtype.kind == "f" else values


def _random(case: KernelCase) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(case.name.encode()))


def arrays_of(case: KernelCase, dtype: str) -> list[np.ndarray]:
    random = _random(case)
    return [_rounded(np.asarray(make(random)), dtype) for make in case.arrays]


def _upstream(shape: Sequence[int], dtype: str) -> np.ndarray:
    return _rounded(np.random.default_rng(1).uniform(0.5, 1.5, shape), dtype)


# ---- Kernels -------------------------------------------------------------------------------------


def _raw_results(case: KernelCase, dtype: str) -> tuple[list[Any], list[Any]]:
    """The results of an eager op and of one in a graph, for which oneDNN has more kernels."""
    arrays = arrays_of(case, dtype)
    low = [tf.cast(array, dtype) for array in arrays]
    found = [case.call(*low), tf.function(case.call, autograph=False)(*low)]
    return _wide(found), _wide([_wide_result(case, arrays)] * 2)


def _wide_result(case: KernelCase, arrays: Sequence[np.ndarray]) -> Any:
    try:
        return case.call(*(tf.cast(array, "float64") for array in arrays))
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError, TypeError):
        return case.call(*(tf.cast(array, "float32") for array in arrays))  # No float64 kernel.


@functools.cache
def op_call(case: KernelCase, dtype: str) -> OpCall:
    """The call of a raw case's op in its graph, as plans look it up in the table of kernels."""

    def call(*tensors: Any) -> Any:
        return case.call(*tensors)

    shapes = [tf.TensorSpec(array.shape, dtype) for array in arrays_of(case, dtype)]
    graph = tf.function(call, autograph=False).get_concrete_function(*shapes).graph
    (op,) = [each for each in graph.get_operations() if each.type == case.rows[0]]
    return OpCall(
        op.type,
        [_shape(tensor) for tensor in op.inputs],
        _shape(op.outputs[0]),
        {name: _attribute(op, name) for name in op.node_def.attr},
        [tensor.op.type for tensor in op.inputs],
    )


def _shape(tensor: Any) -> tuple[int | None, ...] | None:
    return None if tensor.shape.rank is None else tuple(tensor.shape)


def _attribute(op: Any, name: str) -> Any:
    value = op.get_attr(name)
    return value.decode() if isinstance(value, bytes) else value


# ---- Functions -----------------------------------------------------------------------------------


def _forward(case: KernelCase) -> Callable[..., Any]:
    """The call between products, so that its tensors are low in both directions."""
    return lambda *tensors: _through_product(case.call(*map(_through_product, tensors)))


def _with_gradients(case: KernelCase, forward: Callable[..., Any]) -> Callable[..., list[Any]]:
    """A function of the case's arguments and the upstream gradient: the result and gradients."""

    def run(upstream: Any, *tensors: Any) -> list[Any]:
        watched = [tensors[i] for i in case.wrt]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            result = forward(*tensors)
        if not watched:
            return [result]
        given = tf.cast(upstream, result.dtype)
        return [result, *map(tf.convert_to_tensor, tape.gradient(result, watched, given))]

    return run


def _through_product(x: Any) -> Any:
    """Returns the values that it is given, as the result of a product in low precision."""
    side = 4 if (x.shape.num_elements() or 0) % 4 == 0 else 1
    return tf.reshape(tf.reshape(x, (-1, side)) @ tf.eye(side), tf.shape(x))


def _function_deviations(case: KernelCase, path: str, dtype: str) -> list[Deviation]:
    tensors = [tf.constant(array) for array in arrays_of(case, dtype)]
    given = tf.constant(_upstream(case.call(*tensors).shape, dtype))
    forward = _forward(case)
    plain = _with_gradients(case, forward)
    expected = tf.function(plain, autograph=False)(given, *tensors)
    if path == OUTER_TAPE:
        run = _with_gradients(case, tfamp.rewrite(forward, dtype=dtype))
    else:
        run = _by_path(plain, path, dtype)
    actual = run(given, *tensors)
    names = ["result", *(f"gradient {i}" for i in case.wrt)]
    return _deviations(names, _wide(actual), _wide(expected))


def _wide(values: Sequence[Any]) -> list[Any]:
    return [tf.cast(value, "float64") for value in values]


def _by_path(function: Callable[..., Any], path: str, dtype: str) -> Callable[..., Any]:
    if path == "rewrite":
        return tfamp.rewrite(function, dtype=dtype)

    def within_autocast(*tensors: Any) -> Any:
        with tfamp.autocast(dtype):
            return function(*tensors)

    if path == "eager autocast":
        return within_autocast
    return tf.function(within_autocast, autograph=False)


# ---- Layers --------------------------------------------------------------------------------------


def _layer_deviations(case: KernelCase, path: str, dtype: str) -> list[Deviation]:
    arrays = arrays_of(case, dtype)
    reference = _model(case, arrays)
    weights = _weights(case, reference, dtype)
    reference.set_weights(weights)
    expected = _model_results(reference, arrays, dtype)
    low = _low_model(case, arrays, path, dtype)
    low.set_weights(weights)
    with _layer_scope(path, dtype):
        if path == "O2":
            low = tfamp.prepare(low, "sgd", level="O2", dtype=dtype)[0]
        actual = _model_results(low, arrays, dtype, in_graph=not path.startswith("eager"))
    names = ["result", *_gradient_names(reference, arrays)]
    return _deviations(names, _wide(actual), _wide(expected))


def _layer_scope(path: str, dtype: str) -> Any:
    return (
        tfamp.policy_scope(f"mixed_{dtype}")
        if path.endswith("policy") and path != KERAS
        else (nullcontext())
    )


def _low_model(case: KernelCase, arrays: Sequence[np.ndarray], path: str, dtype: str) -> Any:
    if path == KERAS:
        return _model(case, arrays, dtype=keras.DTypePolicy(f"mixed_{dtype}"))
    with _layer_scope(path, dtype):
        return _model(case, arrays)


def _model(case: KernelCase, arrays: Sequence[np.ndarray], **arguments: Any) -> Any:
    inputs = [keras.Input(a.shape[1:], a.shape[0], dtype=a.dtype.name) for a in arrays]
    layer = case.call(**arguments)
    # Levels leave a model's last layer in float32: it is to be another one.
    outputs = keras.layers.Activation("linear", **arguments)(layer(*inputs))
    return keras.Model(inputs, outputs)


def _weights(case: KernelCase, model: Any, dtype: str) -> list[np.ndarray]:
    """Positive weights with sums of some 1, as initializers make them, but none that cancel."""
    random = _random(case)
    return [
        _rounded(random.uniform(0.5, 1.5, weight.shape) / max(weight.shape[0], 1), dtype)
        for weight in model.get_weights()
    ]


def _model_results(
    model: Any, arrays: Sequence[np.ndarray], dtype: str, *, in_graph: bool = True
) -> list[Any]:
    def run(*tensors: Any) -> list[Any]:
        watched = [*model.trainable_variables, *(x for x in tensors if x.dtype.is_floating)]
        watched = [getattr(each, "value", each) for each in watched]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            result = model(list(tensors) if len(tensors) > 1 else tensors[0], training=True)
        given = tf.cast(_upstream(result.shape, dtype), result.dtype)
        gradients = tape.gradient(result, watched, given)
        return [result, *(tf.convert_to_tensor(g) for g in gradients)]

    called = tf.function(run, autograph=False) if in_graph else run
    return called(*map(tf.constant, arrays))


def _gradient_names(model: Any, arrays: Sequence[np.ndarray]) -> Iterator[str]:
    yield from (f"gradient of {variable.path}" for variable in model.trainable_variables)
    yield from (f"gradient of input {i}" for i, a in enumerate(arrays) if a.dtype.kind == "f")
