"""What is timed for a machine profile: small pieces of work, each in every dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfamp.core.profile import DTYPES

# Op types that are timed by themselves, with the names of their inputs: in low precision their CPU
# kernels take from half of float32's time to six times it.
_X, _GRADIENT, _PAIR = ("x",), ("y", "dy"), ("x", "y")
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "Elu": ("features",),
    **dict.fromkeys(("Erf", "Erfc", "Exp", "Log", "Log1p", "Rsqrt", "Sigmoid"), _X),
    "Softplus": ("features",),
    "Tanh": _X,
    **dict.fromkeys(("RsqrtGrad", "SigmoidGrad", "TanhGrad"), _GRADIENT),
    **dict.fromkeys(("Pow", "RealDiv", "SquaredDifference"), _PAIR),
}
SUMS = ("Mean", "Sum")
DEPTHWISE = (
    "DepthwiseConv2dNative",
    "DepthwiseConv2dNativeBackpropFilter",
    "DepthwiseConv2dNativeBackpropInput",
)
OPS = (*FUNCTIONS, *SUMS, *DEPTHWISE)

Run = Callable[[], Any]
_CHAIN = 60
_RESERVED = ("reserve_space_1", "reserve_space_2", "reserve_space_3")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The shapes that are timed: of the size that a small training step has.

    Args:
        matmuls: (rows, depth, columns) of each matmul; its gradients are timed as well.
        convolutions: (batch, height and width, channels, filters, kernel) of each convolution.
        elements: Elements of what elementwise ops take: few enough for the cache, so that it is
            their arithmetic that is timed and not the memory.
        images: (batch, height and width, channels) for pooling, normalization, softmax and so on.
        traffic: Elements of what is read and written to time the memory: more than a cache holds.
        depthwise: (batch, height and width, channels, kernel) of each depthwise convolution.
    """

    matmuls: tuple[tuple[int, int, int], ...] = (
        (256, 1024, 1024),
        (2048, 512, 256),
        (32, 512, 2048),
    )
    convolutions: tuple[tuple[int, int, int, int, int], ...] = (
        (4, 32, 64, 32, 3),
        (8, 16, 256, 64, 1),
        (4, 8, 256, 128, 3),
    )
    elements: int = 1 << 19
    images: tuple[int, int, int] = (16, 32, 32)
    traffic: int = 1 << 22
    depthwise: tuple[tuple[int, int, int, int], ...] = ((8, 14, 128, 3), (8, 14, 128, 7))

    @staticmethod
    def of(device: str) -> Sizes:
        """Returns those for a kind of device: a GPU needs more work to be busy."""
        if device != "gpu":
            return Sizes()
        return Sizes(
            matmuls=((2048, 4096, 4096), (16384, 1024, 1024)),
            convolutions=((64, 56, 64, 64, 3), (64, 28, 512, 128, 1), (64, 14, 256, 256, 3)),
            elements=1 << 22,
            images=(64, 56, 64),
            traffic=1 << 25,
            depthwise=((64, 56, 128, 3), (64, 14, 256, 7)),
        )


@dataclass(frozen=True, slots=True)
class Work:
    """One piece of work.

    Attributes:
        kind: A kind of a profile's peaks, one of `OPS`, or "traffic", "cast traffic", "short chain"
            or "long chain".
        amount: How much work it is: operations, elements, bytes or Casts.
        make: Returns what does the work in a dtype.
        dtypes: The dtypes; for the first one there must be a kernel.
    """

    kind: str
    amount: float
    make: Callable[[str], Run]
    dtypes: tuple[str, ...] = DTYPES


def works(sizes: Sizes) -> Iterator[Work]:
    """Makes everything that is timed for a profile, on the device that is current."""
    for rows, depth, columns in sizes.matmuls:
        yield from _matmuls(rows, depth, columns)
    for shape in sizes.convolutions:
        yield from _convolutions(*shape)
    for pictures in sizes.depthwise:
        yield from _depthwise(*pictures)
    yield from _elementwise(sizes.elements)
    yield from _functions(sizes.elements)
    yield from _special(*sizes.images)
    yield from _traffic(sizes.traffic)
    yield from _chains()


def _matmuls(rows: int, depth: int, columns: int) -> Iterator[Work]:
    """A layer's product and those of its gradients, which are slower in float32."""
    raw: Any = tf.raw_ops

    def forward(dtype: str) -> Run:
        x, w = tf.ones((rows, depth), dtype), tf.ones((depth, columns), dtype)
        return lambda: raw.MatMul(a=x, b=w)

    def input_gradient(dtype: str) -> Run:
        dy, w = tf.ones((rows, columns), dtype), tf.ones((depth, columns), dtype)
        return lambda: raw.MatMul(a=dy, b=w, transpose_b=True)

    def weight_gradient(dtype: str) -> Run:
        x, dy = tf.ones((rows, depth), dtype), tf.ones((rows, columns), dtype)
        return lambda: raw.MatMul(a=x, b=dy, transpose_a=True)

    for make in (forward, input_gradient, weight_gradient):
        yield Work("matmul", 2.0 * rows * depth * columns, make)


def _convolutions(
    batch: int, size: int, channels: int, filters: int, kernel: int
) -> Iterator[Work]:
    raw: Any = tf.raw_ops
    common = {"strides": [1, 1, 1, 1], "padding": "SAME"}
    images, weights = [batch, size, size, channels], [kernel, kernel, channels, filters]

    def forward(dtype: str) -> Run:
        x, w = tf.ones(images, dtype), tf.ones(weights, dtype)
        return lambda: raw.Conv2D(input=x, filter=w, **common)

    def input_gradient(dtype: str) -> Run:
        w, dy = tf.ones(weights, dtype), tf.ones([batch, size, size, filters], dtype)
        return lambda: raw.Conv2DBackpropInput(
            input_sizes=images, filter=w, out_backprop=dy, **common
        )

    def filter_gradient(dtype: str) -> Run:
        x, dy = tf.ones(images, dtype), tf.ones([batch, size, size, filters], dtype)
        return lambda: raw.Conv2DBackpropFilter(
            input=x, filter_sizes=weights, out_backprop=dy, **common
        )

    flops = 2.0 * math.prod(images) * filters * kernel * kernel
    yield Work("conv", flops, forward)
    yield Work("conv_input", flops, input_gradient)
    yield Work("conv_filter", flops, filter_gradient)


def _depthwise(batch: int, size: int, channels: int, kernel: int) -> Iterator[Work]:
    raw: Any = tf.raw_ops
    common = {"strides": [1, 1, 1, 1], "padding": "SAME"}
    images, weights = [batch, size, size, channels], [kernel, kernel, channels, 1]

    def forward(dtype: str) -> Run:
        x, w = tf.ones(images, dtype), tf.ones(weights, dtype)
        return lambda: raw.DepthwiseConv2dNative(input=x, filter=w, **common)

    def filter_gradient(dtype: str) -> Run:
        x = tf.ones(images, dtype)
        return lambda: raw.DepthwiseConv2dNativeBackpropFilter(
            input=x, filter_sizes=weights, out_backprop=x, **common
        )

    def input_gradient(dtype: str) -> Run:
        w, dy = tf.ones(weights, dtype), tf.ones(images, dtype)
        return lambda: raw.DepthwiseConv2dNativeBackpropInput(
            input_sizes=images, filter=w, out_backprop=dy, **common
        )

    flops = 2.0 * math.prod(images) * kernel * kernel
    for op, make in zip(DEPTHWISE, (forward, filter_gradient, input_gradient), strict=True):
        yield Work(op, flops, make)


def _elementwise(elements: int) -> Iterator[Work]:
    raw: Any = tf.raw_ops
    values = _values([elements])
    works: list[Callable[[Any], Any]] = [
        lambda x: raw.AddV2(x=x, y=x),
        lambda x: raw.Mul(x=x, y=x),
        lambda x: raw.Relu(features=x),
        lambda x: raw.ReluGrad(gradients=x, features=x),
    ]
    for work in works:
        yield Work("elementwise", float(elements), _on(values, work))


def _functions(elements: int) -> Iterator[Work]:
    values = _values([elements])
    rows = tf.reshape(values, [-1, math.gcd(elements, 512)])
    for op, names in FUNCTIONS.items():
        yield Work(op, float(elements), _on(values, _call(op, names)))
    for op in SUMS:
        yield Work(op, float(elements), _on(rows, _call(op, ("input",), axis=1)))


def _call(op: str, names: tuple[str, ...], **options: int) -> Callable[[Any], Any]:
    """Runs an op on the same tensor for each of its inputs."""
    function = getattr(tf.raw_ops, op)
    return lambda x: function(**dict.fromkeys(names, x), **options)


def _special(batch: int, size: int, channels: int) -> Iterator[Work]:
    raw: Any = tf.raw_ops
    images = _values([batch, size, size, channels])
    rows = tf.reshape(images, [batch * size, size * channels])
    pool = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
    ones, nothing = tf.ones((channels,)), tf.zeros((0,))

    def normalized(x: Any) -> Any:
        return raw.FusedBatchNormV3(x=x, scale=ones, offset=ones, mean=nothing, variance=nothing)

    def pool_gradient(dtype: str) -> Run:
        x = tf.cast(images, dtype)
        y = raw.MaxPool(input=x, **pool)
        return lambda: raw.MaxPoolGrad(orig_input=x, orig_output=y, grad=y, **pool)

    def norm_gradient(dtype: str) -> Run:
        x = tf.cast(images, dtype)
        reserved = dict(zip(_RESERVED, normalized(x)[3:], strict=True))
        return lambda: raw.FusedBatchNormGradV3(y_backprop=x, x=x, scale=ones, **reserved)

    makers = [
        _on(rows, lambda x: raw.Softmax(logits=x)),
        _on(images, lambda x: raw.MaxPool(input=x, **pool)),
        pool_gradient,
        _on(images, normalized),
        norm_gradient,
    ]
    for make in makers:
        yield Work("special", float(batch * size * size * channels), make)


def _on(values: Any, work: Callable[[Any], Any]) -> Callable[[str], Run]:
    def make(dtype: str) -> Run:
        x = tf.cast(values, dtype)
        return lambda: work(x)

    return make


def _values(shape: list[int]) -> Any:
    return tf.random.stateless_uniform(shape, (1, 2), 0.1, 1.0)


def _traffic(elements: int) -> Iterator[Work]:
    raw: Any = tf.raw_ops

    def add(dtype: str) -> Run:
        x, y = tf.ones((elements,), dtype), tf.ones((elements,), dtype)
        return lambda: raw.AddV2(x=x, y=y)

    def cast(target: Any) -> Callable[[str], Run]:
        def make(dtype: str) -> Run:
            x = tf.ones((elements,), dtype)
            return lambda: raw.Cast(x=x, DstT=target)

        return make

    # An Add reads two tensors and writes one.
    yield Work("traffic", 3.0 * 4 * elements, add, ("float32",))
    for target in (tf.bfloat16, tf.float16):
        yield Work("cast traffic", 6.0 * elements, cast(target), ("float32",))
        yield Work("cast traffic", 6.0 * elements, cast(tf.float32), (target.name,))


def _chains() -> Iterator[Work]:
    """Two chains of small Casts in traced functions: what the longer one takes more is overhead."""

    def chain(length: int) -> Callable[[str], Run]:
        def function(x: Any) -> Any:
            for _ in range(length):
                x = tf.raw_ops.Cast(x=tf.raw_ops.Cast(x=x, DstT=tf.bfloat16), DstT=tf.float32)
            return x

        def make(dtype: str) -> Run:
            # A concrete function runs as a graph also after tf.config.run_functions_eagerly(True).
            traced = tf.function(function, autograph=False)
            concrete = traced.get_concrete_function(tf.TensorSpec((8,), dtype))
            x = tf.ones((8,), dtype)
            return lambda: concrete(x)

        return make

    yield Work("short chain", 0.0, chain(1), ("float32",))
    yield Work("long chain", 2.0 * _CHAIN, chain(1 + _CHAIN), ("float32",))
