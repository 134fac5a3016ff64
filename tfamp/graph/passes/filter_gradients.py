"""Replaces filter gradients of convolutions with faster ops, on CPUs.

The gradient of a 1x1 filter is the product of the transposed image and the upstream gradient,
for which oneDNN is faster than for its filter gradients. If the patches of a larger filter do
not overlap, SpaceToDepth first makes each patch one pixel.

oneDNN has no depthwise filter gradients, and TensorFlow's are slow for large filters. Such a
gradient convolves each image of a batch with its upstream gradient; with the batch moved into
the channels that is one depthwise convolution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfamp.core.device_names import device_kind_of
from tfamp.core.kinds import NodeDef
from tfamp.graph.body import Body
from tfamp.graph.graph import Graph
from tfamp.graph.nodes import attribute, tensor_inputs
from tfamp.graph.ops import FLOAT32_TYPE
from tfamp.planning.options import RewriteOptions
from tfamp.planning.structures import FLOAT32

_GRADIENT = "Conv2DBackpropFilter"
_DEPTHWISE_GRADIENT = "DepthwiseConv2dNativeBackpropFilter"
_ONCE = [1, 1, 1, 1]
# With fewer, as images have, gathering the patches takes longer than the product gains. The
# number is a choice, above the 3 of images.
_LEAST_CHANNELS = 1 << 5
# Of a depthwise filter, 5 x 5: for smaller ones, such as 3 x 3, the original op is faster.
_LEAST_TAPS = 25


@dataclass(frozen=True)
class _Convolution:
    """The shapes of the convolution of a gradient.

    Attributes:
        image: Batch, height, width, channels; an unknown batch is -1.
        result: The same of the convolution's result.
        filter: Height, width, channels of both.
        stride: Vertical and horizontal stride.
        zeros: Padding above and below, left and right.
    """

    image: Sequence[int]
    result: Sequence[int]
    filter: Sequence[int]
    stride: Sequence[int]
    zeros: Sequence[tuple[int, int]]

    @property
    def has_patches(self) -> bool:
        """Whether the patches are square and tile the image."""
        size = self.filter[0]
        square = list(self.stride) == list(self.filter[:2]) == [size, size]
        pairs = zip(self.image[1:3], self.result[1:3], strict=True)
        whole = all(pixels == patches * size for pixels, patches in pairs)
        return square and whole and not any(map(any, self.zeros))

    @property
    def is_large(self) -> bool:
        """Whether a depthwise filter with multiplier 1 is large."""
        multiplier_is_one = self.filter[3] == 1
        has_images = 0 not in (self.image[0], self.result[0])
        dense = list(self.stride) == [1, 1]
        large = math.prod(self.filter[:2]) >= _LEAST_TAPS
        return dense and multiplier_is_one and has_images and large


def run(graph: Graph, options: RewriteOptions) -> None:
    """Replaces filter gradients with other ops where these are faster, in place.

    Filters of several taps only if low products are faster than float32's by the profile, where
    the gain was measured.
    """
    peaks = options.machine.peaks["matmul"]
    low_is_faster = peaks[options.dtype] > peaks[FLOAT32]
    for body in graph.bodies:
        for node in body.of_types(_GRADIENT, _DEPTHWISE_GRADIENT):
            shapes = _convolution(body, node) if _is_plain(node) else None
            if shapes is None:
                continue
            if node.op == _DEPTHWISE_GRADIENT:
                if low_is_faster and shapes.is_large:
                    _Builder(body, node, shapes).convolve()
            elif shapes.has_patches:
                one_pixel = shapes.filter[0] == 1
                is_wide = min(shapes.filter[2:]) >= _LEAST_CHANNELS
                if one_pixel or (low_is_faster and is_wide):
                    _Builder(body, node, shapes).multiply()


def _is_plain(node: NodeDef) -> bool:
    """Whether a node is a float32 gradient by a dense filter that runs on the CPU."""
    channels_last = "data_format" not in node.attr or node.attr["data_format"].s == b"NHWC"
    dense = list(attribute(node, "dilations").list.i) in ([], _ONCE)
    on_cpu = (device_kind_of(node.device) or "cpu") == "cpu"
    is_float32 = attribute(node, "T").type == FLOAT32_TYPE
    return channels_last and dense and on_cpu and is_float32 and len(tensor_inputs(node)) == 3


def _convolution(body: Body, node: NodeDef) -> _Convolution | None:
    """The shapes of a gradient's convolution; None if the graph does not have them."""
    image, result = body.dims(node.input[0]), body.dims(node.input[2])
    kernel = body.dims(body.tensor(node))
    if not len(image) == len(result) == len(kernel) == 4:
        return None
    if min(*image[1:], *result[1:], *kernel) < 1 or image[3] != kernel[2]:
        return None  # Unknown, empty, or in groups.
    stride = list(node.attr["strides"].list.i)[1:3]
    axes = zip(image[1:3], result[1:3], kernel[:2], stride, strict=True)
    missing = [(patches - 1) * step + taps - pixels for pixels, patches, taps, step in axes]
    zeros = [_zeros(node, axis, total) for axis, total in enumerate(missing)]
    return _Convolution(image, result, kernel, stride, zeros)


def _zeros(node: NodeDef, axis: int, missing: int) -> tuple[int, int]:
    """Padding before and after an image along an axis, by its total."""
    padding = node.attr["padding"].s
    before = max(missing, 0) // 2 if padding == b"SAME" else 0
    if padding == b"EXPLICIT":
        before = node.attr["explicit_paddings"].list.i[2 + 2 * axis]
    return before, missing - before


class _Builder:
    """Adds the ops that compute a gradient; its node becomes a Reshape of their result."""

    def __init__(self, body: Body, node: NodeDef, shapes: _Convolution) -> None:
        self._body, self._node, self._shapes = body, node, shapes
        self._image, _, self._upstream = node.input[:3]

    def multiply(self) -> None:
        """Multiplies the transposed image and the upstream gradient."""
        shapes, image = self._shapes, self._image
        size, columns = shapes.filter[0], shapes.filter[3]
        width = math.prod(shapes.filter[:3])
        rows = math.prod(shapes.result[:3]) if shapes.result[0] >= 0 else -1
        if size > 1:
            dims = [*shapes.result[:3], width]
            image = self._add("patches", "SpaceToDepth", [image], dims, block_size=size)
        upstream = self._reshaped(self._upstream, [rows, columns])
        inputs = [self._reshaped(image, [rows, width]), upstream]
        transposed = {"transpose_a": True, "transpose_b": False}
        self._finish(self._add("product", "MatMul", inputs, [width, columns], **transposed))

    def convolve(self) -> None:
        """Convolves each image with its upstream gradient, and sums over the batch."""
        shapes = self._shapes
        (batch, *rows, channels), taps = shapes.image, shapes.filter[:2]
        columns = batch * channels if batch > 0 else -1
        # An unknown batch may be empty, and a convolution needs a channel.
        more = (0, 0 if batch > 0 else channels)
        dims = [1, *rows, columns]
        image = self._as_channels(self._image, shapes.image, dims)
        image = self._padded(image, dims, [(0, 0), *shapes.zeros, more])
        dims = [*shapes.result[1:3], columns, 1]
        upstream = self._as_channels(self._upstream, shapes.result, dims)
        upstream = self._padded(upstream, dims, [(0, 0), (0, 0), more, (0, 0)])
        attrs = {
            "strides": _ONCE,
            "dilations": _ONCE,
            "padding": b"VALID",
            "data_format": b"NHWC",
        }
        inputs, dims = [image, upstream], [1, *taps, columns]
        made = self._add("convolution", "DepthwiseConv2dNative", inputs, dims, **attrs)
        inputs = [self._reshaped(made, [*taps, batch, channels]), self._constant("axes", [2])]
        axes = {"Tidx": tf.int32, "keep_dims": False}
        self._finish(self._add("sum", "Sum", inputs, [*taps, channels], **axes))

    def _as_channels(self, images: str, dims: Sequence[int], shape: Sequence[int]) -> str:
        """Moves the batch of images into the channels."""
        order = (1, 2, 0, 3)
        inputs, sizes = [images, self._constant("perm", order)], [dims[i] for i in order]
        moved = self._add("moved", "Transpose", inputs, sizes, Tperm=tf.int32)
        return self._reshaped(moved, shape)

    def _padded(self, image: str, dims: Sequence[int], edges: Sequence[tuple[int, int]]) -> str:
        """Pads an image with zeros along each axis."""
        if not any(map(any, edges)):
            return image
        pairs = zip(dims, edges, strict=True)
        sizes = [size if size < 0 else size + sum(edge) for size, edge in pairs]
        inputs = [image, self._constant("paddings", edges)]
        return self._add("padded", "Pad", inputs, sizes, Tpaddings=tf.int32)

    def _reshaped(self, tensor: str, dims: Sequence[int]) -> str:
        inputs = [tensor, self._constant("shape", dims)]
        return self._add("reshaped", "Reshape", inputs, dims, Tshape=tf.int32)

    def _finish(self, tensor: str) -> None:
        inputs = [tensor, self._constant("shape", self._shapes.filter)]
        self._body.become(self._node, "Reshape", inputs, T=tf.float32, Tshape=tf.int32)

    def _constant(self, wanted: str, values: Any) -> str:
        return self._body.constant(f"{self._node.name}/{wanted}", values, self._node.device)

    def _add(
        self, wanted: str, op: str, inputs: Sequence[str], dims: Sequence[int], **attrs: Any
    ) -> str:
        name, device = f"{self._node.name}/{wanted}", self._node.device
        return self._body.add(name, op, inputs, dims, device, T=tf.float32, **attrs)
