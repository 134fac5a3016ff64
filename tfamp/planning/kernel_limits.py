"""What kernels refuse although they are registered for a dtype; framework-free.

TensorFlow tells this only when such a kernel runs. A CPU's float16 kernels of these ops are the
plain ones, while those of float32 and bfloat16 are oneDNN's, which take all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

# These take images with channels last only.
_CHANNELS_LAST = frozenset(
    {
        "AvgPool",
        "AvgPoolGrad",
        "Conv2D",
        "Conv2DBackpropFilter",
        "Conv2DBackpropInput",
        "Conv3D",
        "Conv3DBackpropFilterV2",
        "Conv3DBackpropInputV2",
        "DepthwiseConv2dNative",
        "DepthwiseConv2dNativeBackpropFilter",
        "DepthwiseConv2dNativeBackpropInput",
        "MaxPool",
        "MaxPoolGrad",
    }
)
# These do not spread a filter out. Conv2D's kernel does, but its gradients, which TensorFlow adds
# in the dtype of the op, cannot.
_NOT_DILATED = frozenset(
    {
        "Conv2D",
        "Conv2DBackpropFilter",
        "Conv2DBackpropInput",
        "Conv3D",
        "Conv3DBackpropFilterV2",
        "Conv3DBackpropInputV2",
        "DepthwiseConv2dNative",
    }
)


def kernel_refuses(
    op: str, dtype: str, device: str, data_format: str, dilations: Sequence[int]
) -> bool:
    """Whether a node would fail in a dtype for which its op has a kernel.

    Args:
        op: Op type.
        dtype: The low dtype.
        device: "cpu", "gpu" or "tpu".
        data_format: The attribute of this name, such as "NCHW"; "" if there is none.
        dilations: The attribute of this name; empty if there is none.

    Example:
        >>> kernel_refuses("Conv2D", "float16", "cpu", "NCHW", (1, 1, 1, 1))
        True
        >>> kernel_refuses("Conv2D", "bfloat16", "cpu", "NCHW", (1, 1, 1, 1))
        False
    """
    if (dtype, device) != ("float16", "cpu"):
        return False
    if op in _CHANNELS_LAST and data_format.startswith("NC"):
        return True
    return op in _NOT_DILATED and any(each > 1 for each in dilations)
