"""Calls of ops with low kernels, over sizes: some kernels fail for some sizes only.

`tests/kernels/faults.py` runs them, each in a process with a time limit.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from helpers.kernel_cases import RAW_CASES, Data, KernelCase, R, positive
from helpers.kernel_categories import CATEGORIES
from helpers.kernel_path_cases import FUNCTION_CASES
from tfamp.core.dtypes import LOW_PRECISION
from tfamp.interop import tf_private
from tfamp.planning.kernels import OPS

SIDES = (1, 2, 3, 5, 7, 9, 11, 13, 14, 15, 16, 17, 21, 31, 33, 65, 129)
CHANNELS = (1, 4, 16, 32, 128)
# An image of one dimension, and the side of one of two.
_LENGTH, _SIDE = 256, 64
# More multiplications than this take a slow kernel seconds.
_MOST_WORK = 3e7
_WINDOWS = {"strides": [1] * 4, "padding": "SAME"}
# Elementwise ops are called with vectors of these lengths.
_LENGTHS = (1, 1000, 1 << 18)
_NOT_CALLED = (
    "variables: as exact as their dtype, which the user or a level chooses",
    "updates by optimizers, of variables",
    "accumulators of gradients, which add up in the dtype that the user gives them",
    "control flow, lists, stacks, debugging, calls",
    "cannot be called any more: TensorFlow refuses it in today's graphs",
    "kernels on GPUs only, not measured",
)


def fault_cases() -> list[KernelCase]:
    """Returns cases of unique names, in a fixed order."""
    cases = (
        *_convolutions(),
        *_by_definition(),
        *_cells(),
        *_products(),
        *RAW_CASES,
        *FUNCTION_CASES,
    )
    named = {case.name: case for case in cases}
    return list(named.values())


def uncalled_ops() -> list[str]:
    """Ops that can be called with low tensors on a CPU, and that no case calls."""
    called = {case.rows[0] for case in fault_cases()}
    return sorted(op for op in _ops() - called if low_dtypes(op))


def _ops() -> frozenset[str]:
    """Ops of the table and of the categories that compute."""
    return OPS.union(*(ops for key, ops in CATEGORIES.items() if key not in _NOT_CALLED))


@functools.cache
def low_dtypes(op: str) -> tuple[str, ...]:
    """Returns the low dtypes that an op has kernels for on a CPU."""
    found = set()
    for kernel in tf_private.kernels(op):
        if kernel.device in ("cpu", "default"):
            found.update(*kernel.dtypes.values())
    return tuple(dtype for dtype in LOW_PRECISION if dtype in found)


def _case(op: str, sizes: str, call: Callable[..., Any], *arrays: Data, **more: Any) -> KernelCase:
    return KernelCase(f"{op}, {sizes}", (op,), call, arrays, dtypes=low_dtypes(op), **more)


# ---- Windows and filters -------------------------------------------------------------------------


def _shapes() -> Iterator[tuple[list[int], list[int]]]:
    """Sides of filters and of images, of one and of two dimensions."""
    for side in SIDES:
        yield [1, side], [1, _LENGTH]
        if 1 < side <= _SIDE:
            yield [side, side], [_SIDE, _SIDE]


def _convolutions() -> Iterator[KernelCase]:
    for (window, image), channels in itertools.product(_shapes(), CHANNELS):
        pixels = positive(1, *image, channels)
        sizes = f"{'x'.join(map(str, window))} on {'x'.join(map(str, image))}, {channels} channels"
        work = math.prod(window) * math.prod(image) * channels
        if work <= _MOST_WORK:
            yield from _of_filter("DepthwiseConv2dNative", sizes, [*window, channels, 1], pixels)
            yield from _grouped(sizes, window, channels, pixels)
        if work * channels <= _MOST_WORK:
            yield from _of_filter("Conv2D", sizes, [*window, channels, channels], pixels)
        if channels in (4, 32):
            yield from _pools(sizes, window, image, channels)
    for side, channels in itertools.product((1, 3, 7, 9, 15), (1, 4, 16)):
        if side**3 * 16**3 * channels**2 <= _MOST_WORK:
            yield from _volumes(side, channels)


def _of_filter(op: str, sizes: str, shape: Sequence[int], pixels: Data) -> Iterator[KernelCase]:
    """A convolution that keeps the image's shape, and its two gradients."""
    weights, filter_gradient, image_gradient = positive(*shape), *_gradients(op)

    def of_filter(x: Any, upstream: Any) -> Any:
        given = {"input": x, "filter_sizes": shape, "out_backprop": upstream, **_WINDOWS}
        return getattr(R, filter_gradient)(**given)

    def of_image(x: Any, w: Any) -> Any:
        given = {"input_sizes": x.shape, "filter": w, "out_backprop": x, **_WINDOWS}
        return getattr(R, image_gradient)(**given)

    forward = functools.partial(getattr(R, op), **_WINDOWS)
    yield _case(op, sizes, lambda x, w: forward(input=x, filter=w), pixels, weights)
    yield _case(filter_gradient, sizes, of_filter, pixels, pixels)
    yield _case(image_gradient, sizes, of_image, pixels, weights)


def _gradients(op: str) -> tuple[str, str]:
    return f"{op}BackpropFilter", f"{op}BackpropInput"


def _grouped(
    sizes: str, window: Sequence[int], channels: int, pixels: Data
) -> Iterator[KernelCase]:
    """A Conv2D with as many groups as channels, which is a depthwise convolution."""
    if channels > 1:
        weights = positive(*window, 1, channels)
        yield _case(
            "Conv2D", f"{sizes}, grouped",
            lambda x, w: R.Conv2D(input=x, filter=w, **_WINDOWS), pixels, weights,
        )  # fmt: skip


def _pools(
    sizes: str, window: Sequence[int], image: Sequence[int], channels: int
) -> Iterator[KernelCase]:
    pixels, ksize = positive(1, *image, channels), [1, *window, 1]
    sums = functools.partial(R.AvgPool, ksize=ksize, **_WINDOWS)
    peaks = functools.partial(R.MaxPool, ksize=ksize, **_WINDOWS)
    yield _case("AvgPool", sizes, lambda x: sums(value=x), pixels, wrt=(0,))
    yield _case("MaxPool", sizes, lambda x: peaks(input=x), pixels, wrt=(0,))


def _volumes(side: int, channels: int) -> Iterator[KernelCase]:
    sizes = f"{side}x{side}x{side} on 16x16x16, {channels} channels"
    pixels, weights = positive(1, 16, 16, 16, channels), positive(*[side] * 3, channels, channels)
    unit = {"strides": [1] * 5, "padding": "SAME"}
    forward = functools.partial(R.Conv3D, **unit)
    yield _case("Conv3D", sizes, lambda x, w: forward(input=x, filter=w), pixels, weights,
                wrt=(0, 1))  # fmt: skip
    for op in ("AvgPool3D", "MaxPool3D"):
        pool = functools.partial(getattr(R, op), ksize=[1, *[side] * 3, 1], **unit)
        yield _case(op, sizes, lambda x, pool=pool: pool(input=x), pixels, wrt=(0,))


# ---- Products, and ops by their definitions ------------------------------------------------------


def _products() -> Iterator[KernelCase]:
    for rows, inner, columns in itertools.product((1, 15, 256), (1, 17, 129, 1000), (1, 33, 128)):
        sizes = f"{rows} x {inner} by {inner} x {columns}"
        a, b = positive(rows, inner), positive(inner, columns)
        yield _case("MatMul", sizes, lambda a, b: R.MatMul(a=a, b=b), a, b, wrt=(0, 1))
        a, b = positive(4, rows, inner), positive(4, inner, columns)
        yield _case("BatchMatMulV2", f"4 of {sizes}", lambda a, b: R.BatchMatMulV2(x=a, y=b), a, b)
        yield _case(
            "Einsum", f"4 of {sizes}",
            lambda a, b: R.Einsum(inputs=[a, b], equation="bij,bjk->bik"), a, b,
        )  # fmt: skip


# It ends the process for inputs of other shapes, in float32 too.
_BY_SHAPE = {"LSTMBlockCell"}


def _cells() -> Iterator[KernelCase]:
    for batch, units in itertools.product((1, 33), (1, 17, 128)):
        names = ("x", "cs_prev", "h_prev", "w", "wci", "wcf", "wco", "b")
        state, weights = positive(batch, units), positive(2 * units, 4 * units)
        peepholes, bias = [positive(units)] * 3, positive(4 * units)

        def call(*tensors: Any, names: Sequence[str] = names) -> Any:
            return R.LSTMBlockCell(**dict(zip(names, tensors, strict=True))).h

        data = (state, state, state, weights, *peepholes, bias)
        yield _case("LSTMBlockCell", f"{units} units of {batch}", call, *data)


def _by_definition() -> Iterator[KernelCase]:
    """Ops that take nothing but tensors of one low dtype, called with vectors and images."""
    for op in sorted(_ops()):
        count, function = _operands(op), getattr(R, op, None)
        if not count or function is None or not low_dtypes(op) or op in _BY_SHAPE:
            continue
        names = [op_input.name for op_input in tf_private.op_inputs(op)]

        def call(*tensors: Any, names: Sequence[str] = names, function: Any = function) -> Any:
            results = function(**dict(zip(names, tensors, strict=True)))
            return tf.nest.flatten(results)[0]

        for length in _LENGTHS:
            data = [positive(length, scale=0.25)] * count
            yield _case(op, f"{length} values", call, *data, wrt=tuple(range(count)))
            image = [positive(2, length // 100 + 1, 5, 10, scale=0.25)] * count
            yield _case(op, f"images of {length} values", call, *image, wrt=tuple(range(count)))


def _operands(op: str) -> int:
    """The number of inputs, if all are single tensors of the attribute T and no other is needed."""
    definition = tf_private.op_definition(op)
    if definition is None or definition.is_stateful:
        return 0
    needed = {a.name for a in definition.attr if not a.HasField("default_value")}
    single = all(arg.type_attr == "T" and not arg.number_attr for arg in definition.input_arg)
    return len(definition.input_arg) if single and needed <= {"T"} else 0
