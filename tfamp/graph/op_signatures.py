"""What the definition of an op says about its dtypes, as plain values.

The definitions come from TensorFlow's registry, or from a graph's function library: a function may
be called by its name, like an op.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfamp.interop import tf_private

# Ops that accept float32 only, with the successors that do the same and also take low precision.
# The successors keep the statistics in float32.
SUCCESSORS = {
    "FusedBatchNorm": "FusedBatchNormV2",
    "FusedBatchNormGrad": "FusedBatchNormGradV2",
}
# The type attribute the successors have in addition.
STATISTICS_ATTR = "U"

# Ops that run Python, which may do anything to a variable.
PYTHON = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})
# What writes variables besides Assign..VariableOp, ResourceApply.. and ResourceScatter..
_OTHER_WRITES = frozenset(
    {"AssignVariableXlaConcatND", "ResourceCountUpTo", "ResourceStridedSliceAssign"}
)


@dataclass(frozen=True, slots=True)
class Argument:
    """An input or output of an op.

    Attributes:
        name: Its name.
        number_attr: Attribute that says how many tensors it is; "" for one.
        type_attr: Attribute that holds its dtype, or "".
        type_list_attr: Attribute that holds a dtype for each of its tensors, or "".
        dtype: Its dtype where the op fixes it.
    """

    name: str
    number_attr: str
    type_attr: str
    type_list_attr: str
    dtype: str


@dataclass(frozen=True, slots=True)
class OpSignature:
    """Arguments of an op and what it says about its type attributes.

    Attributes:
        inputs: Its inputs.
        outputs: Its outputs.
        allowed: For each type attribute, lists of types included, the dtypes it may be; None
            stands for any.
        lists: The type attributes that are lists.
        defaults: Default values of attributes a node may leave out: a dtype, a tuple or a number.
        numbers: Attributes that say how many tensors an argument is.
        uses_references: Whether an argument is a reference to a variable's memory.
    """

    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    allowed: Mapping[str, frozenset[str] | None]
    lists: frozenset[str]
    defaults: Mapping[str, Any]
    numbers: frozenset[str]
    uses_references: bool


def signature(definition: Any) -> OpSignature:
    """Returns what an `OpDef` message says."""
    types = [attr for attr in definition.attr if attr.type in ("type", "list(type)")]
    return OpSignature(
        inputs=tuple(map(argument, definition.input_arg)),
        outputs=tuple(map(argument, definition.output_arg)),
        allowed={attr.name: _allowed(attr) for attr in types},
        lists=frozenset(attr.name for attr in types if attr.type == "list(type)"),
        defaults={
            attr.name: attribute_value(attr.default_value)
            for attr in definition.attr
            if attr.HasField("default_value")
        },
        numbers=frozenset(
            arg.number_attr
            for arg in (*definition.input_arg, *definition.output_arg)
            if arg.number_attr
        ),
        uses_references=any(arg.is_ref for arg in (*definition.input_arg, *definition.output_arg)),
    )


@functools.cache
def registered_signature(op: str) -> OpSignature | None:
    """Returns the signature of an op type of TensorFlow's; None for one it does not know."""
    definition = tf_private.op_definition(op)
    return None if definition is None else signature(definition)


def attribute_value(value: Any) -> Any:
    """Returns an `AttrValue` as a plain value: a dtype's name, a tuple of these, or a number.

    Other kinds of attributes decide no dtype: they are None.
    """
    kind = value.WhichOneof("value")
    if kind == "type":
        return tf_private.dtype_name(value.type)
    if kind == "i":
        return value.i
    if kind == "list":
        return tuple(tf_private.dtype_name(each) for each in value.list.type)
    return None


def has_kernel(op: str, device: str, types: tuple[tuple[str, tuple[str, ...]], ...]) -> bool:
    """Whether a device kind has a kernel for an op with these type attributes.

    Args:
        op: Op type.
        device: "cpu", "gpu" or "tpu". A TPU compiles its ops: nothing is known before.
        types: Name and dtypes of each type attribute.

    Returns:
        True if a kernel accepts all of them.
    """
    return device == "tpu" or tf_private.has_kernel(op, device, types)


def writes_variable(op: str) -> bool:
    """Whether an op assigns or updates variables."""
    if op in _OTHER_WRITES or (op.startswith("Assign") and op.endswith("VariableOp")):
        return True
    return op.startswith(("ResourceApply", "ResourceSparse", "ResourceScatter"))


def first_ports(own: OpSignature, node: Any) -> dict[str, int]:
    """Returns which output of a node is the first of each output its op names."""
    ports, first = {}, 0
    for arg in own.outputs:
        ports[arg.name] = first
        attr = arg.type_list_attr or arg.number_attr
        value = attribute_value(node.attr[attr]) if attr in node.attr else own.defaults.get(attr, 1)
        first += len(value) if isinstance(value, tuple) else value
    return ports


def argument(arg: Any) -> Argument:
    """Returns an input or output of an `OpDef` as plain values."""
    return Argument(
        name=arg.name,
        number_attr=arg.number_attr,
        type_attr=arg.type_attr,
        type_list_attr=arg.type_list_attr,
        dtype=tf_private.dtype_name(arg.type) if arg.type else "",
    )


def _allowed(attr: Any) -> frozenset[str] | None:
    if not attr.HasField("allowed_values"):
        return None
    return frozenset(tf_private.dtype_name(each) for each in attr.allowed_values.list.type)


# What kernels refuse although they are registered for a dtype, which TensorFlow tells only when one
# runs. A CPU's float16 kernels of these ops are the plain ones, while those of float32 and bfloat16
# are oneDNN's, which take all of it. These do not spread a filter out. Conv2D's kernel does, but
# its gradients, which TensorFlow adds in the dtype of the op, cannot.
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
# These take images with channels last only.
_CHANNELS_LAST = _NOT_DILATED | {
    "AvgPool",
    "AvgPoolGrad",
    "DepthwiseConv2dNativeBackpropFilter",
    "DepthwiseConv2dNativeBackpropInput",
    "MaxPool",
    "MaxPoolGrad",
}


def refused_options(node: Any) -> tuple[bool, bool]:
    """Whether a node has its channels first, and whether it spreads a filter out."""
    attr = node.attr if node.op in _CHANNELS_LAST else {}
    first = "data_format" in attr and attr["data_format"].s.startswith(b"NC")
    dilated = node.op in _NOT_DILATED and "dilations" in attr
    return first, dilated and any(each > 1 for each in attr["dilations"].list.i)
