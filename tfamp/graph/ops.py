"""Op types: their signatures, the dtypes they may have, and groups of them.

The definitions of ops come from TensorFlow's registry, or from a graph's function library: a
function may be called by its name, like an op.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.kinds import ArgDef, AttrValue, NodeDef
from tfamp.interop import tf_private
from tfamp.planning.options import SUCCESSORS
from tfamp.planning.structures import FLOAT32, op_types

FLOAT32_TYPE = tf.float32.as_datatype_enum
LOW_TYPES = {tf.as_dtype(name).as_datatype_enum for name in LOW_PRECISION}
FLOAT_TYPES = LOW_TYPES | {FLOAT32_TYPE}

# The type attribute the successors have in addition.
STATISTICS_ATTR = "U"

CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
# Loops and conditionals of TensorFlow 1. Nodes belong to a frame through their inputs, so that
# inlined constants would be outside of it.
FRAMES = frozenset({"Enter", "RefEnter"})
OLD_CONTROL_FLOW = FRAMES | {"Merge", "Switch", "RefMerge", "RefSwitch"}
# Ops that run Python, which may do anything to a variable.
PYTHON = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})
# What writes variables besides Assign..VariableOp, ResourceApply.. and ResourceScatter..
_OTHER_WRITES = frozenset(
    {"AssignVariableXlaConcatND", "ResourceCountUpTo", "ResourceStridedSliceAssign"}
)


# ---- Signatures ----------------------------------------------------------------------------------


class OpSignature(NamedTuple):
    """Arguments and type attributes of an op.

    Attributes:
        inputs: The `OpDef.ArgDef`s of its inputs, shared by all callers: not to be changed.
        outputs: The same of its outputs.
        allowed: For each type attribute, lists of types included, the dtypes it may be; None
            stands for any.
        lists: The type attributes that are lists.
        defaults: Default values of attributes a node may leave out: a dtype, a tuple or a
            number.
        numbers: Attributes that hold the number of tensors of an argument.
        deciding: The type attributes and these.
        uses_references: Whether an argument is a reference to a variable's memory.
    """

    inputs: tuple[ArgDef, ...]
    outputs: tuple[ArgDef, ...]
    allowed: Mapping[str, frozenset[str] | None]
    lists: frozenset[str]
    defaults: Mapping[str, Any]
    numbers: frozenset[str]
    deciding: tuple[str, ...]
    uses_references: bool

    def value(self, node: NodeDef, attr: str, otherwise: Any = None) -> Any:
        """Returns an attribute of a node as a plain value, or its default if it is left out."""
        stated = _plain(node.attr[attr]) if attr in node.attr else None
        return self.defaults.get(attr, otherwise) if stated is None else stated


def signature(definition: Any) -> OpSignature:
    """Returns the signature that an `OpDef` defines."""
    arguments = (*definition.input_arg, *definition.output_arg)
    types = [attr for attr in definition.attr if attr.type in ("type", "list(type)")]
    with_default = [attr for attr in definition.attr if attr.HasField("default_value")]
    allowed = {attr.name: _allowed(attr) for attr in types}
    numbers = frozenset(arg.number_attr for arg in arguments) - {""}
    return OpSignature(
        inputs=tuple(definition.input_arg),
        outputs=tuple(definition.output_arg),
        allowed=allowed,
        lists=frozenset(attr.name for attr in types if attr.type == "list(type)"),
        defaults={attr.name: _plain(attr.default_value) for attr in with_default},
        numbers=numbers,
        deciding=(*allowed, *sorted(numbers)),
        uses_references=any(arg.is_ref for arg in arguments),
    )


@tf_private.cache_of_ops
def registered_signature(op: str) -> OpSignature | None:
    """Returns the signature of an op type, or of its successor; None of an unknown one."""
    definition = tf_private.op_definition(SUCCESSORS.get(op, op))
    known = None if definition is None else signature(definition)
    if known is None or op not in SUCCESSORS:
        return known
    return known._replace(defaults={**known.defaults, STATISTICS_ATTR: FLOAT32})


def _plain(value: AttrValue) -> Any:
    """An `AttrValue` as a plain value: a dtype's name, a tuple of these, or a number.

    Other kinds of attributes decide no dtype: they are None.
    """
    kind = value.WhichOneof("value")
    if kind == "type":
        return tf_private.dtype_of_number(value.type)
    if kind == "i":
        return value.i
    if kind == "list":
        return tuple(tf_private.dtype_of_number(dtype) for dtype in value.list.type)
    return None


def first_ports(op_signature: OpSignature, node: NodeDef) -> dict[str, int]:
    """Returns the port at which each named output of a node's op begins."""
    outputs = op_signature.outputs
    deciding = (output.type_list_attr or output.number_attr for output in outputs)
    values = (op_signature.value(node, attr, 1) for attr in deciding)
    counts = (len(value) if isinstance(value, tuple) else int(value or 0) for value in values)
    firsts = itertools.accumulate(counts, initial=0)
    return {arg.name: first for arg, first in zip(outputs, firsts, strict=False)}


def _allowed(attr: Any) -> frozenset[str] | None:
    if not attr.HasField("allowed_values"):
        return None
    return frozenset(tf_private.dtype_of_number(dtype) for dtype in attr.allowed_values.list.type)


# ---- Properties of ops ---------------------------------------------------------------------------


def writes_variable(op: str) -> bool:
    """Whether an op assigns or updates variables."""
    if op in _OTHER_WRITES or (op.startswith("Assign") and op.endswith("VariableOp")):
        return True
    return op.startswith(("ResourceApply", "ResourceSparse", "ResourceScatter"))


# Options that registered kernels refuse at run time. A CPU's float16 kernels of these ops are
# TensorFlow's own; its float32 and bfloat16 kernels are oneDNN's, which support all options.
# The former do not support dilation. Conv2D's kernel does, but its gradients, which TensorFlow
# adds in the dtype of the op, do not.
_NOT_DILATED = op_types("""
    Conv2D Conv2DBackpropFilter Conv2DBackpropInput Conv3D Conv3DBackpropFilterV2
    Conv3DBackpropInputV2 DepthwiseConv2dNative
""")
# These support NHWC only.
_CHANNELS_LAST = _NOT_DILATED | {
    "AvgPool",
    "AvgPoolGrad",
    "DepthwiseConv2dNativeBackpropFilter",
    "DepthwiseConv2dNativeBackpropInput",
    "MaxPool",
    "MaxPoolGrad",
}


def refused_options(node: NodeDef) -> tuple[bool, bool]:
    """Whether a node is NCHW, and whether it dilates its filter."""
    attr = node.attr if node.op in _CHANNELS_LAST else {}
    first = "data_format" in attr and attr["data_format"].s.startswith(b"NC")
    dilated = node.op in _NOT_DILATED and "dilations" in attr
    return first, dilated and any(step > 1 for step in attr["dilations"].list.i)


def has_side_effects(op: str) -> bool:
    """Whether an op is stateful, or unknown."""
    definition = tf_private.op_definition(op)
    return definition is None or definition.is_stateful
