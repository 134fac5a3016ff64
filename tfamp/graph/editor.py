"""Nodes of a GraphDef: how their tensors are spelled, their ops' signatures, and edits in place.

The definitions of ops come from TensorFlow's registry, or from a graph's function library: a
function may be called by its name, like an op.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.interop import tf_private
from tfamp.planning.options import SUCCESSORS
from tfamp.planning.structures import FLOAT32, op_types

# The attribute that holds the shapes of a node's outputs, in a graph exported with shapes.
SHAPES = "_output_shapes"


def is_control(name: str) -> bool:
    """Whether an input is a node that is waited for ("^node"), not a tensor."""
    return name.startswith("^")


def tensor_inputs(node: Any) -> list[str]:
    """Returns the tensors that a node takes."""
    return [name for name in node.input if not is_control(name)]


def control_inputs_of(node: Any) -> list[str]:
    """Returns the inputs that a node only waits for."""
    return [name for name in node.input if is_control(name)]


def first_output(name: str, in_function: bool, output: str = "output") -> str:
    """Returns the first tensor of a node: "node" in a graph, "node:output:0" in a function.

    In a function it has the name that the op gives this output, which for most is "output".
    """
    return f"{name}:{output}:0" if in_function else name


def renamed_output(names: Iterable[str], before: str, after: str) -> dict[str, str]:
    """Returns how the first tensors of nodes of a function are spelled, whose op has changed."""
    return {first_output(name, True, before): first_output(name, True, after) for name in names}


# ---- Signatures of ops ---------------------------------------------------------------------------

# The type attribute the successors have in addition.
STATISTICS_ATTR = "U"

# Ops that run Python, which may do anything to a variable.
PYTHON = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})
# What writes variables besides Assign..VariableOp, ResourceApply.. and ResourceScatter..
_OTHER_WRITES = frozenset(
    {"AssignVariableXlaConcatND", "ResourceCountUpTo", "ResourceStridedSliceAssign"}
)


class OpSignature(NamedTuple):
    """Arguments of an op and what it says about its type attributes.

    Attributes:
        inputs: The `OpDef.ArgDef`s of its inputs, shared by all callers: not to be changed.
        outputs: Those of its outputs.
        allowed: For each type attribute, lists of types included, the dtypes it may be; None
            stands for any.
        lists: The type attributes that are lists.
        defaults: Default values of attributes a node may leave out: a dtype, a tuple or a number.
        numbers: Attributes that say how many tensors an argument is.
        uses_references: Whether an argument is a reference to a variable's memory.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    allowed: Mapping[str, frozenset[str] | None]
    lists: frozenset[str]
    defaults: Mapping[str, Any]
    numbers: frozenset[str]
    uses_references: bool

    def value(self, node: Any, attr: str, otherwise: Any = None) -> Any:
        """Returns an attribute of a node as a plain value, or its default if it is left out."""
        given = _plain(node.attr[attr]) if attr in node.attr else None
        return self.defaults.get(attr, otherwise) if given is None else given


def signature(definition: Any) -> OpSignature:
    """Returns what an `OpDef` message says."""
    arguments = (*definition.input_arg, *definition.output_arg)
    types = [attr for attr in definition.attr if attr.type in ("type", "list(type)")]
    given = [attr for attr in definition.attr if attr.HasField("default_value")]
    return OpSignature(
        inputs=tuple(definition.input_arg),
        outputs=tuple(definition.output_arg),
        allowed={attr.name: _allowed(attr) for attr in types},
        lists=frozenset(attr.name for attr in types if attr.type == "list(type)"),
        defaults={attr.name: _plain(attr.default_value) for attr in given},
        numbers=frozenset(arg.number_attr for arg in arguments) - {""},
        uses_references=any(arg.is_ref for arg in arguments),
    )


@functools.cache
def registered_signature(op: str) -> OpSignature | None:
    """Returns the signature of an op type, or of its successor; None if TensorFlow knows none."""
    definition = tf_private.op_definition(SUCCESSORS.get(op, op))
    own = None if definition is None else signature(definition)
    if own is None or op not in SUCCESSORS:
        return own
    return own._replace(defaults={**own.defaults, STATISTICS_ATTR: FLOAT32})


def _plain(value: Any) -> Any:
    """An `AttrValue` as a plain value: a dtype's name, a tuple of these, or a number.

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


def writes_variable(op: str) -> bool:
    """Whether an op assigns or updates variables."""
    if op in _OTHER_WRITES or (op.startswith("Assign") and op.endswith("VariableOp")):
        return True
    return op.startswith(("ResourceApply", "ResourceSparse", "ResourceScatter"))


def first_ports(own: OpSignature, node: Any) -> dict[str, int]:
    """Returns which output of a node is the first of each output its op names."""
    values = (own.value(node, arg.type_list_attr or arg.number_attr, 1) for arg in own.outputs)
    counts = (len(value) if isinstance(value, tuple) else value for value in values)
    firsts = itertools.accumulate(counts, initial=0)
    return {arg.name: first for arg, first in zip(own.outputs, firsts, strict=False)}


def _allowed(attr: Any) -> frozenset[str] | None:
    if not attr.HasField("allowed_values"):
        return None
    return frozenset(tf_private.dtype_name(each) for each in attr.allowed_values.list.type)


# What kernels refuse although they are registered for a dtype, which TensorFlow tells only when one
# runs. A CPU's float16 kernels of these ops are the plain ones, while those of float32 and bfloat16
# are oneDNN's, which take all of it. These do not spread a filter out. Conv2D's kernel does, but
# its gradients, which TensorFlow adds in the dtype of the op, cannot.
_NOT_DILATED = op_types("""
    Conv2D Conv2DBackpropFilter Conv2DBackpropInput Conv3D Conv3DBackpropFilterV2
    Conv3DBackpropInputV2 DepthwiseConv2dNative
""")
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


# ---- Edits ---------------------------------------------------------------------------------------

FLOAT32_TYPE = tf.float32.as_datatype_enum


LOW_TYPES = {tf.as_dtype(name).as_datatype_enum for name in LOW_PRECISION}
FLOAT_TYPES = LOW_TYPES | {FLOAT32_TYPE}


def attributes_of(nodes: Iterable[Any], function: Any) -> dict[str, Any]:
    """The attributes of nodes, and of arguments where there are some, by name."""
    arguments = enumerate(function.signature.input_arg if function else ())
    known = {arg.name: function.arg_attr[i].attr for i, arg in arguments if i in function.arg_attr}
    return known | {node.name: node.attr for node in nodes}


def dims_of(tensor: str, attrs: Mapping[str, Any]) -> list[int]:
    """The dimensions of a tensor, -1 for one that the graph does not tell; [] for no known rank."""
    name, _, place = tensor.partition(":")
    shapes = attrs[name][SHAPES].list.shape if SHAPES in attrs.get(name, ()) else ()
    # In functions "name:output:0", where only an op with one output has no other "0".
    port = int(place) if place.isdigit() else 0
    if port >= len(shapes) or (":" in place and len(shapes) > 1) or shapes[port].unknown_rank:
        return []
    return [int(dim.size) for dim in shapes[port].dim]


def set_shape(node: Any, dims: Iterable[int | None]) -> None:
    """Says of a node that it makes one tensor, and of which shape."""
    del node.attr[SHAPES].list.shape[:]
    node.attr[SHAPES].list.shape.append(tf.TensorShape(dims).as_proto())


def add_constant(nodes: Any, name: str, values: Any, device: str, dtype: Any = tf.int32) -> Any:
    """Adds integers, mostly a vector, to nodes."""
    constant = nodes.add(name=name, op="Const", device=device)
    constant.attr["dtype"].type = dtype.as_datatype_enum
    constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(values, dtype))
    set_shape(constant, np.shape(values))
    return constant


def become(node: Any, op: str) -> None:
    """Makes a node one of another op, without the attributes of its own."""
    for name in [name for name in node.attr if not name.startswith("_")]:
        del node.attr[name]
    node.op = op


def become_identity(node: Any, dtype: int) -> None:
    """Makes a node hand on its first input."""
    become(node, "Identity")
    node.attr["T"].type = dtype
