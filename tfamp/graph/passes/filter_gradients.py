"""Gradients of convolutions by their filters as ops that are faster; graph -> graph, on CPUs.

oneDNN's kernels for them take longer than its products of the same matrices: the gradient by each
tap of a filter is the product of the image, shifted by the tap and transposed, and of the upstream
gradient.

For depthwise convolutions it has none, and TensorFlow's takes long for large filters: there each
image of a batch is convolved with its upstream gradient, all as channels of one image, which is a
depthwise convolution too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfamp.graph.editor import (
    add_constant,
    attributes_of,
    become,
    control_inputs_of,
    dims_of,
    first_output,
    set_shape,
)
from tfamp.graph.functions import bodies
from tfamp.interop.tf_private import device_kind_of
from tfamp.planning.structures import MAIN_GRAPH, free_name

_GRADIENT = "Conv2DBackpropFilter"
_DEPTHWISE_GRADIENT = "DepthwiseConv2dNativeBackpropFilter"
_GRADIENTS = frozenset({_GRADIENT, _DEPTHWISE_GRADIENT})
_FLOAT32 = tf.float32.as_datatype_enum
_ONCE = [1, 1, 1, 1]
# Names of results in functions, where they are no "output".
_OUTPUTS = {"MatMul": "product", "Transpose": "y"}
# With more pixels or fewer channels, copying shifted images takes what the product gains; and with
# fewer channels, as images have, moving the pixels of patches together.
_MOST_PIXELS, _LEAST_CHANNELS = 1 << 10, 1 << 7
_LEAST_OF_PATCHES = 1 << 5
# Of a depthwise filter: for smaller ones the gradient's own kernel is faster.
_LEAST_TAPS = 25


@dataclass(frozen=True)
class _Convolution:
    """What a gradient is of, by shapes.

    Attributes:
        image: Batch, height, width, channels; a batch that is not known is -1.
        result: The same of what the filter makes of it.
        filter: Height, width, channels of both.
        stride: By how many pixels it moves on, down and to the right.
        zeros: Rows above and below the image, and columns on its left and right.
    """

    image: Sequence[int]
    result: Sequence[int]
    filter: Sequence[int]
    stride: Sequence[int]
    zeros: Sequence[tuple[int, int]]

    @property
    def is_pointwise(self) -> bool:
        return self._is_dense and list(self.filter[:2]) == [1, 1] and not self.has_zeros

    @property
    def has_zeros(self) -> bool:
        return any(map(any, self.zeros))

    @property
    def has_patches(self) -> bool:
        """Whether the filter sees square patches of the image, each pixel once."""
        size = self.filter[0]
        square = list(self.stride) == list(self.filter[:2]) == [size, size]
        whole = all(a == b * size for a, b in zip(self.image[1:3], self.result[1:3], strict=True))
        return square and whole and not self.has_zeros and min(self.filter[2:]) >= _LEAST_OF_PATCHES

    @property
    def pixels(self) -> int:
        """Of all images of the batch; -1 for one that is not known."""
        return -1 if self.result[0] < 0 else math.prod(self.result[:3])

    @property
    def is_small(self) -> bool:
        """Whether the product is faster in a low dtype, though images are copied for it."""
        return (
            self._is_dense
            and 0 < self.pixels <= _MOST_PIXELS
            and min(self.filter[2:]) >= _LEAST_CHANNELS
        )

    @property
    def is_large(self) -> bool:
        """Whether a depthwise filter, of one for each channel, is."""
        each_channel = self.filter[3] == 1 and 0 not in (self.image[0], self.pixels)
        return self._is_dense and each_channel and math.prod(self.filter[:2]) >= _LEAST_TAPS

    @property
    def _is_dense(self) -> bool:
        return list(self.stride) == [1, 1]

    @property
    def taps(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*map(range, self.filter[:2]))


def by_faster_ops(graph_def: Any, device: str, low_is_faster: bool) -> None:
    """Makes gradients by filters other ops where these are faster, in place.

    Args:
        graph_def: The graph; float32.
        device: The kind of device of nodes that are pinned to none.
        low_is_faster: Whether products of the low dtype are faster than float32's here: only there
            it is known of filters of more than one tap.
    """
    for scope, nodes, function in bodies(graph_def):
        gradients = [node for node in nodes if _is_gradient(node, device)]
        attrs = attributes_of(nodes, function) if gradients else {}
        for node in gradients:
            found = _convolution(node, attrs)
            if found is None:
                continue
            builder = _Builder(nodes, node, attrs, scope == MAIN_GRAPH)
            if node.op == _GRADIENT:
                image = _image_of_taps(builder, found, low_is_faster)
                if image:
                    builder.finish(builder.product(image, found), found)
            elif low_is_faster and found.is_large:
                builder.finish(builder.convolution(found), found)


def _is_gradient(node: Any, device: str) -> bool:
    """Whether a node is a float32 gradient by a filter that runs on the CPU."""
    if node.op not in _GRADIENTS or "T" not in node.attr or node.attr["T"].type != _FLOAT32:
        return False
    if len(node.input) - len(control_inputs_of(node)) != 3:
        return False
    channels_last = "data_format" not in node.attr or node.attr["data_format"].s == b"NHWC"
    apart = "dilations" in node.attr and list(node.attr["dilations"].list.i) != _ONCE
    place = device_kind_of(node.device) or device
    return bool(channels_last and place == "cpu" and not apart)


def _convolution(node: Any, attrs: Any) -> _Convolution | None:
    """Its shapes; None where the graph does not tell them."""
    image, result = dims_of(node.input[0], attrs), dims_of(node.input[2], attrs)
    kernel = dims_of(node.name, attrs)
    if not len(image) == len(result) == len(kernel) == 4:
        return None
    if min(*image[1:], *result[1:], *kernel) < 1 or image[3] != kernel[2]:
        return None  # Unknown, empty, or in groups.
    stride = list(node.attr["strides"].list.i)[1:3]
    zeros = [
        _zeros(node, i, (result[i + 1] - 1) * stride[i] + kernel[i] - image[i + 1]) for i in (0, 1)
    ]
    return _Convolution(image, result, kernel, stride, zeros)


def _zeros(node: Any, axis: int, missing: int) -> tuple[int, int]:
    """How many zeros are in front of an image and behind it, along an axis that needs so many."""
    padding = node.attr["padding"].s
    before = max(missing, 0) // 2 if padding == b"SAME" else 0
    if padding == b"EXPLICIT":
        before = node.attr["explicit_paddings"].list.i[2 + 2 * axis]
    return before, missing - before


def _image_of_taps(builder: _Builder, found: _Convolution, low_is_faster: bool) -> str:
    """An image whose channels are what each tap of the filter sees; "" where it does not pay."""
    if found.is_pointwise:
        return builder.image
    if low_is_faster and found.has_patches:
        return builder.patches(found)
    if low_is_faster and found.is_small:
        image = builder.padded(builder.image, found.image, [(0, 0), *found.zeros, (0, 0)])
        return builder.joined([builder.shifted(image, tap, found) for tap in found.taps], found)
    return ""


class _Builder:
    """Adds nodes to a graph or a function in the place of a gradient; methods return tensors."""

    def __init__(self, nodes: Any, node: Any, attrs: dict[str, Any], main: bool) -> None:
        self._nodes, self._node, self._attrs, self._main = nodes, node, attrs, main
        self._made: dict[Any, str] = {}

    @property
    def image(self) -> str:
        return str(self._node.input[0])

    def patches(self, found: _Convolution) -> str:
        size = found.filter[0]
        dims = [*found.result[:3], size * size * found.image[3]]
        return self._add("patches", "SpaceToDepth", [self.image], dims, block_size=size)

    def padded(self, image: str, dims: Sequence[int], edges: Sequence[tuple[int, int]]) -> str:
        """An image with zeros in front of it and behind it, along each axis."""
        if not any(map(any, edges)):
            return image
        sizes = [
            size if size < 0 else size + sum(edge) for size, edge in zip(dims, edges, strict=True)
        ]
        inputs = [image, self._constant("paddings", edges)]
        return self._add("padded", "Pad", inputs, sizes, Tpaddings=tf.int32)

    def shifted(self, image: str, tap: Sequence[int], found: _Convolution) -> str:
        dims = [*found.result[:3], found.image[3]]
        begin, size = self._constant("begin", [0, *tap, 0]), self._constant("size", dims)
        return self._add("shifted", "Slice", [image, begin, size], dims, Index=tf.int32)

    def joined(self, images: Sequence[str], found: _Convolution) -> str:
        if len(images) == 1:
            return images[0]
        count, axis = len(images), self._constant("axis", 3)
        dims = [*found.result[:3], found.image[3] * count]
        return self._add("joined", "ConcatV2", [*images, axis], dims, N=count, Tidx=tf.int32)

    def product(self, image: str, found: _Convolution) -> str:
        """That of an image, transposed, and the upstream gradient."""
        rows, width, columns = found.pixels, math.prod(found.filter[:3]), found.filter[3]
        upstream = self._reshaped(self._node.input[2], [rows, columns])
        inputs = [self._reshaped(image, [rows, width]), upstream]
        transposed = {"transpose_a": True, "transpose_b": False}
        return self._add("product", "MatMul", inputs, [width, columns], **transposed)

    def convolution(self, found: _Convolution) -> str:
        """That of each image with its upstream gradient, added up over the batch."""
        (batch, *rows, channels), taps = found.image, found.filter[:2]
        columns = batch * channels if batch > 0 else -1
        # A batch that is not known may be empty, and no convolution is of no channels.
        more = (0, 0 if batch > 0 else channels)
        dims = [1, *rows, columns]
        image = self._as_channels(self.image, found.image, dims)
        image = self.padded(image, dims, [(0, 0), *found.zeros, more])
        dims = [*found.result[1:3], columns, 1]
        upstream = self._as_channels(self._node.input[2], found.result, dims)
        upstream = self.padded(upstream, dims, [(0, 0), (0, 0), more, (0, 0)])
        made = self._add(
            "convolution",
            "DepthwiseConv2dNative",
            [image, upstream],
            [1, *taps, columns],
            strides=_ONCE,
            dilations=_ONCE,
            padding=b"VALID",
            data_format=b"NHWC",
        )
        inputs = [self._reshaped(made, [*taps, batch, channels]), self._constant("axes", [2])]
        return self._add("sum", "Sum", inputs, [*taps, channels], Tidx=tf.int32, keep_dims=False)

    def _as_channels(self, images: str, dims: Sequence[int], shape: Sequence[int]) -> str:
        """Images in a shape that has the batch of them as a part of its channels."""
        order = (1, 2, 0, 3)
        inputs = [images, self._constant("perm", order)]
        sizes = [dims[i] for i in order]
        return self._reshaped(self._add("moved", "Transpose", inputs, sizes, Tperm=tf.int32), shape)

    def finish(self, product: str, found: _Convolution) -> None:
        """Makes the gradient a Reshape of a product; it keeps its name."""
        node = self._node
        node.input[:] = [product, self._constant("shape", found.filter), *control_inputs_of(node)]
        become(node, "Reshape")
        node.attr["T"].type, node.attr["Tshape"].type = _FLOAT32, tf.int32.as_datatype_enum

    def _reshaped(self, tensor: str, dims: Sequence[int]) -> str:
        shape = self._constant("shape", dims)
        return self._add("reshaped", "Reshape", [tensor, shape], dims, Tshape=tf.int32)

    def _constant(self, wanted: str, values: Any) -> str:
        key = wanted, str(values)
        if key not in self._made:
            name = self._free(wanted)
            made = add_constant(self._nodes, name, values, self._node.device)
            self._attrs[name] = made.attr
            self._made[key] = first_output(name, not self._main)
        return self._made[key]

    def _add(
        self, wanted: str, op: str, inputs: Sequence[str], dims: Sequence[int], **attrs: Any
    ) -> str:
        key = op, *inputs
        if key not in self._made:
            name = self._free(wanted)
            made = self._nodes.add(name=name, op=op, input=inputs, device=self._node.device)
            made.attr["T"].type = _FLOAT32
            for attr, value in attrs.items():
                _set(made.attr[attr], value)
            set_shape(made, (None if size < 0 else size for size in dims))
            self._attrs[name] = made.attr
            output = _OUTPUTS.get(op, "output")
            self._made[key] = name if self._main else f"{name}:{output}:0"
        return self._made[key]

    def _free(self, wanted: str) -> str:
        return free_name(f"{self._node.name}/{wanted}", self._attrs)


def _set(attr: Any, value: Any) -> None:
    if isinstance(value, tf.DType):
        attr.type = value.as_datatype_enum
    elif isinstance(value, bool):
        attr.b = value
    elif isinstance(value, bytes):
        attr.s = value
    elif isinstance(value, list):
        attr.list.i.extend(value)
    else:
        attr.i = value
