"""Graph -> graph that computes the same and is better to convert, or cheaper once it is converted.

Products that are added up become one, Einsums of attention become batches of products, gradients of
biases become sums or zeros, weights that a loop reads are read before it, and, in a graph whose
weights are constants, what a loop casts is cast before it and a constant that is cast is stored so.
A constant that Selects choose stays finite.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.graph.apply import cast_node
from tfamp.graph.functions import (
    bodies,
    calls_in,
    copied,
    function_attributes,
    library_of,
    reached_functions,
    replace_nodes,
    respell,
)
from tfamp.graph.index import largest_finite
from tfamp.graph.op_signatures import PYTHON, writes_variable
from tfamp.interop.tf_private import device_kind_of
from tfamp.planning.cost import counted_shape
from tfamp.planning.exact_values import CHOICES
from tfamp.planning.structures import (
    FLOAT32,
    LOOPS,
    MAIN_GRAPH,
    NodePlan,
    Reason,
    RewritePlan,
    free_name,
    node_name,
    reach,
)

_SHAPES = "_output_shapes"
_FLOAT32 = tf.float32.as_datatype_enum
_LOW = {tf.as_dtype(name).as_datatype_enum for name in LOW_PRECISION}


# ---- Gradients of biases -------------------------------------------------------------------------
#
# On CPUs the bfloat16 kernel of BiasAddGrad loses small terms: over 8192 rows it is off by half, so
# the op is on no list, and a Cast of the whole upstream gradient comes before it. Sum of the same
# rows adds up in float32 and rounds once.

_GRADIENT, _SUM = "BiasAddGrad", "Sum"
# Where the channels are, by data_format.
_CHANNELS = {b"NHWC": -1, b"NCHW": 1}
_LEAST_RANK = 2

# (scope, name) of each node that became a Sum -> the node as it was.
Sums = Mapping[tuple[str, str], Any]


def sums_are_better(colors: Mapping[str, str], dtype: str, device: str) -> bool:
    """Returns whether gradients of biases are to be converted as sums.

    Not where they are on a list for CPUs, as on Grappler's: then that list decides. The lists for
    GPUs have them on one, and mean the kernel of GPUs.
    """
    free = (None, "allow", "infer") if device == "gpu" else (None,)
    safe = colors.get(_GRADIENT) in free and colors.get(_SUM) in ("allow", "infer")
    return dtype == "bfloat16" and safe


def as_sums(graph_def: Any, device: str) -> Sums:
    """Makes each float32 BiasAddGrad of known rank that runs on the CPU a Sum, in place.

    Each gets a constant for its axes. The device is that of nodes that are pinned to none. Returns
    which nodes these are.
    """
    sums: dict[tuple[str, str], Any] = {}
    for scope, nodes, function in bodies(graph_def):
        gradients = [node for node in nodes if _is_gradient(node, device)]
        attrs = attributes_of(nodes, function) if gradients else {}
        for node in gradients:
            rank = _rank(node.input[0], attrs)
            given = node.attr["data_format"].s if "data_format" in node.attr else b"NHWC"
            channels = _CHANNELS.get(given)
            if rank < _LEAST_RANK or channels is None or _axes_name(node) in attrs:
                continue
            before = sums[scope, node.name] = type(node)()
            before.CopyFrom(node)
            axes = [axis for axis in range(rank) if axis != channels % rank]
            add_constant(nodes, _axes_name(node), axes, node.device)
            _become_sum(node, "" if scope == MAIN_GRAPH else ":output:0")
    return sums


def without_idle_sums(graph_def: Any, plan: RewritePlan, sums: Sums) -> RewritePlan:
    """Takes back, in place, Sums that stayed float32; the plan tells of nodes as they were."""
    for scope, nodes, _ in bodies(graph_def) if sums else ():
        made = [node for node in nodes if (scope, node.name) in sums]
        back = [node for node in made if node.attr["T"].type == _FLOAT32]
        for node in back:
            given = node.input[0]
            node.CopyFrom(sums[scope, node.name])
            node.input[0] = given  # Perhaps a Cast now.
        unused = set(map(_axes_name, back))
        if unused:
            replace_nodes(nodes, (node for node in nodes if node.name not in unused))
    nodes = tuple(
        _described(each) if (each.scope, each.name) in sums else each for each in plan.nodes
    )
    return dataclasses.replace(plan, nodes=nodes)


def _described(plan: NodePlan) -> NodePlan:
    """What a plan says of a Sum, said of what it was."""
    inputs = tuple(name for name in plan.inputs if name != _axes_name(plan))
    reason = plan.reason
    if plan.dtype != FLOAT32:
        reason = Reason(reason.rule, f"{reason}; as a Sum, which adds up in float32")
    return dataclasses.replace(plan, op=_GRADIENT, inputs=inputs, reason=reason)


def _is_gradient(node: Any, device: str) -> bool:
    """Whether a node is a float32 BiasAddGrad that runs on the CPU."""
    if node.op != _GRADIENT or "T" not in node.attr or not node.input:
        return False
    place = device_kind_of(node.device) or device
    return bool(node.attr["T"].type == _FLOAT32 and place == "cpu")


def attributes_of(nodes: Iterable[Any], function: Any) -> dict[str, Any]:
    """The attributes of nodes, and of arguments where there are some, by name."""
    arguments = enumerate(function.signature.input_arg if function else ())
    known = {arg.name: function.arg_attr[i].attr for i, arg in arguments if i in function.arg_attr}
    return known | {node.name: node.attr for node in nodes}


def _rank(tensor: str, attrs: Mapping[str, Any]) -> int:
    """The rank of a tensor, as far as the graph tells; else 0."""
    return len(dims_of(tensor, attrs))


def dims_of(tensor: str, attrs: Mapping[str, Any]) -> list[int]:
    """The dimensions of a tensor, -1 for one that the graph does not tell; [] for no known rank."""
    name, _, place = tensor.partition(":")
    shapes = attrs[name][_SHAPES].list.shape if _SHAPES in attrs.get(name, ()) else ()
    # In functions "name:output:0", where only an op with one output has no other "0".
    port = int(place) if place.isdigit() else 0
    if port >= len(shapes) or (":" in place and len(shapes) > 1) or shapes[port].unknown_rank:
        return []
    return [int(dim.size) for dim in shapes[port].dim]


def _axes_name(node: Any) -> str:
    return f"{node.name}/axes"


def _become_sum(node: Any, output: str) -> None:
    node.op = _SUM
    node.input.insert(1, f"{_axes_name(node)}{output}")
    node.attr.pop("data_format", None)
    node.attr["Tidx"].type = tf.int32.as_datatype_enum
    node.attr["keep_dims"].b = False


# ---- Gradients of weights that multiply a batch of matrices --------------------------------------
#
# For [b, n, d] x [d, k] TensorFlow multiplies b times [d, n] x [n, k] and then adds up the b
# products, as in every projection of Keras's attention. One product of [b * n, d] and [b * n, k] is
# the same; it adds up in float32 in every dtype, and b - 1 matrices less are written and read.

_FLOATS = _LOW | {_FLOAT32}
_BATCHED, _GRADIENT_AXES = "BatchMatMulV2", "BroadcastGradientArgs"


def join_products(graph_def: Any, keep: Collection[str] = ()) -> None:
    """Makes each batch of products that is summed over its batch only one product, in place.

    Where ranks, widths and axes are known, and nothing else uses the batch of products, of which no
    tensor ("x:0") or node ("x") is to keep. The Sums become Identities.
    """
    for scope, nodes, function in bodies(graph_def):
        batched = {node.name: node for node in nodes if _is_batch_of_gradients(node)}
        if not batched:
            continue
        uses = Counter(node_name(name) for node in nodes for name in node.input)
        uses.update(map(node_name, function.ret.values() if function else keep))
        attrs = attributes_of(nodes, function)
        made = {node.name: node for node in nodes}
        for total in [node for node in nodes if node.op == _SUM and len(node.input) > 1]:
            product = batched.get(node_name(total.input[0]))
            if product is not None and uses[product.name] == 1:
                widths = _joined_widths(product, total, attrs, made)
                if widths:
                    _join(nodes, product, total, widths, attrs, scope == MAIN_GRAPH)


def _join(
    nodes: Any, product: Any, total: Any, widths: list[int], attrs: dict[str, Any], main: bool
) -> None:
    dtype = product.attr["T"].type
    for i, width in enumerate(widths):
        product.input[i] = _as_rows(nodes, product, i, width, attrs, "" if main else ":output:0")
    grads = {
        f"grad_{'ab'[i]}": product.attr[name].b
        for i, name in enumerate(("grad_x", "grad_y"))
        if name in product.attr
    }
    become(product, "MatMul")
    product.attr["T"].type = dtype
    for name, value in {"transpose_a": True, "transpose_b": False, **grads}.items():
        product.attr[name].b = value
    set_shape(product, widths)
    total.input[:] = [f"{product.name}{'' if main else ':product:0'}", *control_inputs_of(total)]
    _become_identity(total, dtype)


def _is_batch_of_gradients(node: Any) -> bool:
    """Whether a node multiplies transposed matrices, as gradients by weights do."""
    data = len(node.input) - len(control_inputs_of(node))
    transposed = "adj_x" in node.attr and node.attr["adj_x"].b
    plain = transposed and not ("adj_y" in node.attr and node.attr["adj_y"].b)
    known = "T" in node.attr and node.attr["T"].type in _FLOATS
    return bool(node.op == _BATCHED and plain and known and data == 2)


def _joined_widths(
    product: Any, total: Any, attrs: Mapping[str, Any], made: Mapping[str, Any]
) -> list[int]:
    """The widths of the matrices, if a sum over all of their batch, and no more, follows; or []."""
    left, right = (dims_of(name, attrs) for name in product.input[:2])
    axes = made.get(node_name(total.input[1]))
    if axes is None or not len(left) == len(right) > 2 or min(left[-1], right[-1]) < 1:
        return []
    if "keep_dims" in total.attr and total.attr["keep_dims"].b:
        return []
    batches = list(zip(left[:-2], right[:-2], strict=True))
    if axes.op == "Const":
        same = all(a == b >= 0 for a, b in batches)
        summed = sorted(int(axis) % len(left) for axis in _value(axes).flat)
        fit = same and summed == [*range(len(batches))]
    else:
        fit = _are_batch_axes(axes, total.input[1], len(batches), attrs)
        fit = fit and not any(a != b and min(a, b) >= 0 for a, b in batches)
    return [left[-1], right[-1]] if fit else []


def _value(constant: Any) -> Any:
    return tf.make_ndarray(constant.attr["value"].tensor)


def _are_batch_axes(axes: Any, tensor: str, count: int, attrs: Mapping[str, Any]) -> bool:
    """Whether axes are the first ones, where a batch meets a weight that has none.

    The weight's batch is a shape of no numbers. Only the gradient of a product sums products by
    such axes, and there both operands have one batch, known or not.
    """
    if axes.op != _GRADIENT_AXES or len(axes.input) < 2:
        return False
    second = tensor.endswith((":1", ":r1:0"))
    batch, weight = (dims_of(name, attrs) for name in axes.input[:2][:: 1 if second else -1])
    return weight == [0] and batch == [count]


def _as_rows(
    nodes: Any, product: Any, i: int, width: int, attrs: dict[str, Any], suffix: str
) -> str:
    """Adds nodes that put the rows of a batch of matrices below each other; returns the tensor."""
    shape_name, name = (
        free_name(f"{product.name}/{'xy'[i]}{what}", attrs) for what in ("_shape", "_rows")
    )
    shape = add_constant(nodes, shape_name, [-1, width], product.device)
    rows = nodes.add(name=name, op="Reshape", device=product.device)
    rows.input[:] = [product.input[i], f"{shape_name}{suffix}"]
    rows.attr["T"].type = product.attr["T"].type
    rows.attr["Tshape"].type = tf.int32.as_datatype_enum
    above = dims_of(product.input[i], attrs)[:-1]
    set_shape(rows, [None if -1 in above else math.prod(above), width])
    attrs |= {shape_name: shape.attr, name: rows.attr}
    return f"{name}{suffix}"


def set_shape(node: Any, dims: Iterable[int | None]) -> None:
    """Says of a node that it makes one tensor, and of which shape."""
    del node.attr[_SHAPES].list.shape[:]
    node.attr[_SHAPES].list.shape.append(tf.TensorShape(dims).as_proto())


def add_constant(nodes: Any, name: str, values: Any, device: str, dtype: Any = tf.int32) -> Any:
    """Adds integers, mostly a vector, to nodes."""
    constant = nodes.add(name=name, op="Const", device=device)
    constant.attr["dtype"].type = dtype.as_datatype_enum
    constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(values, dtype))
    set_shape(constant, np.shape(values))
    return constant


# ---- Einsums of attention ------------------------------------------------------------------------
#
# The kernel of Einsum moves the dimensions of its operands and of its result itself. On CPUs it
# takes 1.1 to 1.7 times as long as Transposes around BatchMatMulV2 where it moves the result's.
# Where it moves only the operands' it takes as long, or less; then a product pays only if others
# have its operands transposed already.

_EINSUM = "Einsum"
# Of the result. With fewer, starting three more ops takes what they gain.
_LEAST_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class _Batches:
    """An Einsum as a batch of products of two matrices, in its labels.

    Attributes:
        exchanged: Whether its second operand is multiplied from the left.
        operands: What is multiplied, as it is given.
        transposed: The same as it is multiplied: batch, then rows and columns or these exchanged.
        adjoint: Which of both have rows and columns exchanged.
        product: What that gives.
        result: What the Einsum gives.
    """

    exchanged: bool
    operands: tuple[str, str]
    transposed: tuple[str, str]
    adjoint: tuple[bool, bool]
    product: str
    result: str


@dataclass(frozen=True)
class _AttentionProduct:
    """An Einsum of a graph, how it is multiplied, and how large each label is, -1 if not known."""

    node: Any
    batches: _Batches
    sizes: Mapping[str, int]

    @property
    def operands(self) -> Iterator[tuple[str, str, str]]:
        """The tensors that are multiplied, with their labels and those that they need."""
        tensors = self.node.input[:2][:: -1 if self.batches.exchanged else 1]
        return zip(tensors, self.batches.operands, self.batches.transposed, strict=True)

    @property
    def moved(self) -> set[tuple[str, str, tuple[int, ...]]]:
        """What is to be transposed: device, tensor and order."""
        return {
            (self.node.device, tensor, _order(given, needed))
            for tensor, given, needed in self.operands
            if given != needed
        }

    @property
    def moves_result(self) -> bool:
        """Whether the result is to be transposed."""
        return self.batches.product != self.batches.result

    def shape(self, labels: str) -> list[int | None]:
        return [None if self.sizes[label] < 0 else self.sizes[label] for label in labels]


def as_batches(graph_def: Any, device: str, keep: Collection[str] = ()) -> None:
    """Makes Einsums on CPUs a BatchMatMulV2 each, between Transposes, where that pays, in place.

    Where the graph tells the shapes of both operands, and no tensor ("x:0") or node ("x") is to
    keep. The device is that of nodes that are pinned to none.
    """
    kept = set(map(node_name, keep))
    for scope, nodes, function in bodies(graph_def):
        einsums = [node for node in nodes if _is_einsum(node, device)]
        if not einsums:
            continue
        attrs = attributes_of(nodes, function)
        found = [_attention_product(node, attrs) for node in einsums]
        known = [each for each in found if each is not None]
        paying = _paying([p for p in known if function is not None or p.node.name not in kept])
        moved: dict[tuple[str, str, tuple[int, ...]], str] = {}
        for each in paying:
            _multiply(nodes, each, moved, attrs, scope == MAIN_GRAPH)
        _move_results(nodes, [each for each in paying if each.moves_result], attrs, function)


def _is_einsum(node: Any, device: str) -> bool:
    """Whether a node is an Einsum of two floats that runs on the CPU."""
    if node.op != _EINSUM or "equation" not in node.attr or "T" not in node.attr:
        return False
    data = len(node.input) - len(control_inputs_of(node))
    place = device_kind_of(node.device) or device
    return bool(data == 2 and place == "cpu" and node.attr["T"].type in _FLOATS)


def _attention_product(node: Any, attrs: Mapping[str, Any]) -> _AttentionProduct | None:
    """How an Einsum is multiplied; None for one that is no batch of products of two matrices."""
    batches = _batches(node.attr["equation"].s.decode(errors="backslashreplace"))
    if batches is None:
        return None
    sizes: dict[str, int] = {}
    given = batches.operands[:: -1 if batches.exchanged else 1]
    for tensor, labels in zip(node.input[:2], given, strict=True):
        dims = dims_of(tensor, attrs)
        if len(dims) != len(labels):
            return None
        sizes |= {a: dim for a, dim in zip(labels, dims, strict=True) if dim >= sizes.get(a, -1)}
    return _AttentionProduct(node, batches, sizes)


def _batches(equation: str) -> _Batches | None:
    """An Einsum as products of matrices: of rows, columns and what is summed there is one each."""
    given, _, result = equation.replace(" ", "").partition("->")
    operands = given.split(",")
    # No ellipsis, no diagonal, and no result without an arrow.
    plain = all(each.isalpha() and len(set(each)) == len(each) for each in (*operands, result))
    if len(operands) != 2 or not plain:
        return None
    left, right = map(set, operands)
    batch = left & right & set(result)
    summed, rows, columns = (left & right) - batch, left - right, right - left
    if not batch or {len(summed), len(rows), len(columns)} != {1}:
        return None
    if set(result) != batch | rows | columns:
        return None
    (row,), (column,), (inner,) = rows, columns, summed
    exchanged = result.index(column) < result.index(row)
    x, y = operands[::-1] if exchanged else operands
    count = len(batch)
    first = next((e[:count] for e in (result, x, y) if set(e[:count]) == batch), None)
    front = first or "".join(label for label in result if label in batch)
    ends = ["".join(label for label in each if label not in batch) for each in (x, y)]
    adjoint = (ends[0][0] == inner, ends[1][1] == inner)
    product = front + "".join(label for label in ends[0] + ends[1] if label != inner)
    return _Batches(exchanged, (x, y), (front + ends[0], front + ends[1]), adjoint, product, result)


def _paying(products: Sequence[_AttentionProduct]) -> list[_AttentionProduct]:
    """Those of which results are moved, and those whose operands are transposed for these."""
    moving = [each for each in products if each.moves_result and _is_large(each)]
    moved = {key for each in moving for key in each.moved}
    also = [p for p in products if not p.moves_result and p.moved and p.moved <= moved]
    return moving + also


def _is_large(product: _AttentionProduct) -> bool:
    dims = counted_shape(product.shape(product.batches.result))
    return math.prod(dims) >= _LEAST_ELEMENTS


def _multiply(
    nodes: Any,
    product: _AttentionProduct,
    moved: dict[tuple[str, str, tuple[int, ...]], str],
    attrs: dict[str, Any],
    main: bool,
) -> None:
    """Makes an Einsum a BatchMatMulV2 of transposed operands, each of them transposed once."""
    node, batches = product.node, product.batches
    tensors = []
    for end, (tensor, given, needed) in zip("xy", tuple(product.operands), strict=True):
        key = (node.device, tensor, _order(given, needed))
        if given != needed and key not in moved:
            name = free_name(f"{node.name}/{end}_transposed", attrs)
            made = _add_transpose(nodes, name, key, node.attr["T"].type, attrs, main)
            set_shape(made, product.shape(needed))
            moved[key] = name if main else f"{name}:y:0"
        tensors.append(tensor if given == needed else moved[key])
    dtype = node.attr["T"].type
    become(node, _BATCHED)
    node.attr["T"].type = dtype
    node.attr["adj_x"].b, node.attr["adj_y"].b = batches.adjoint
    node.input[:] = [*tensors, *control_inputs_of(node)]
    set_shape(node, product.shape(batches.product))


def _move_results(
    nodes: Any, products: Sequence[_AttentionProduct], attrs: dict[str, Any], function: Any
) -> None:
    """Transposes what products give, and gives that to all who take it."""
    output, moved = ("", "") if function is None else (":output:0", ":y:0")
    names = {p.node.name: free_name(f"{p.node.name}/transposed", attrs) for p in products}
    spelled = {f"{name}{output}": f"{made}{moved}" for name, made in names.items()}
    if function is None:
        spelled |= {f"{name}:0": made for name, made in names.items()}
        for node in nodes if spelled else ():
            node.input[:] = [spelled.get(name, name) for name in node.input]
    else:
        respell(function, spelled)
    for each in products:
        node, batches = each.node, each.batches
        order = _order(batches.product, batches.result)
        key = (node.device, f"{node.name}{output}", order)
        dtype = node.attr["T"].type
        made = _add_transpose(nodes, names[node.name], key, dtype, attrs, function is None)
        set_shape(made, each.shape(batches.result))


def _add_transpose(
    nodes: Any,
    name: str,
    key: tuple[str, str, tuple[int, ...]],
    dtype: int,
    attrs: dict[str, Any],
    main: bool,
) -> Any:
    """Adds a Transpose of a device, a tensor and an order."""
    device, tensor, order = key
    constant = add_constant(nodes, free_name(f"{name}/perm", attrs), order, device)
    perm = constant.name if main else f"{constant.name}:output:0"
    made = nodes.add(name=name, op="Transpose", input=[tensor, perm], device=device)
    made.attr["T"].type = dtype
    made.attr["Tperm"].type = tf.int32.as_datatype_enum
    attrs |= {constant.name: constant.attr, name: made.attr}
    return made


def _order(labels: str, wanted: str) -> tuple[int, ...]:
    return tuple(map(labels.index, wanted))


# ---- Gradients of biases in front of BatchNormalization ------------------------------------------
#
# BatchNormalization takes the mean of its batch off, and with it any bias before it: in training
# its gradient adds up to 0 for every channel. What the sum gives is what rounding left.

_NORMALIZATIONS = tuple(f"FusedBatchNormGrad{version}" for version in ("", "V2", "V3"))


def as_zeros(graph_def: Any) -> None:
    """Makes each float32 gradient of a bias that BatchNormalization takes off zeros, in place."""
    for scope, nodes, function in bodies(graph_def):
        gradients = [node for node in nodes if node.op == _GRADIENT and node.input]
        made = {node.name: node for node in nodes if node.op in _NORMALIZATIONS}
        spelled = {}
        for node in gradients if made else ():
            name, _, port = node.input[0].partition(":")
            behind = made.get(name)
            if behind is not None and port in _FIRST and _sums_to_zero(node, behind):
                scale = behind.input[2]
                become(node, "ZerosLike")
                node.attr["T"].type = _FLOAT32
                node.input[0] = scale
                spelled[f"{node.name}:output:0"] = f"{node.name}:y:0"
        if scope != MAIN_GRAPH:
            respell(function, spelled)


# How the first output of a normalization's gradient is written, in graphs and in functions.
_FIRST = ("", "x_backprop:0")


def _sums_to_zero(gradient: Any, normalization: Any) -> bool:
    """Whether both have their channels in one place, and the statistics are those of the batch."""
    attrs = normalization.attr
    formats = (
        node.attr["data_format"].s if "data_format" in node.attr else b"NHWC"
        for node in (gradient, normalization)
    )
    training = "is_training" not in attrs or attrs["is_training"].b
    plain = all(
        "T" in node.attr and node.attr["T"].type == _FLOAT32 for node in (gradient, normalization)
    )
    return bool(training and plain and len(set(formats)) == 1 and len(normalization.input) > 2)


# ---- Weights that a loop of a training step reads in every iteration -----------------------------
#
# w -> While(body: w -> ReadVariableOp -> Cast -> MatMul) becomes w -> ReadVariableOp ->
# While(body: MatMul), where the Cast then goes before the loop too: an LSTM casts its weights once
# a step and not once a token.

# How many of a loop's first results TensorFlow differentiates: those behind them are what the loop
# keeps for a gradient that is in the graph already.
_ORIGINAL = "_num_original_outputs"


def read_before_loops(graph_def: Any, keep: Collection[str] = ()) -> frozenset[tuple[str, str]]:
    """Takes reads of float32 variables out of the loops of a training step, in place.

    Only reads of variables that the graph writes behind the loop, with what the loop led to: such a
    graph is the last to need gradients by them. In others, one that clips its weights before it
    uses them included, a loop's constants stay float32, as their gradients, which would get the
    same dtype, add up over the iterations. Loops in functions stay, and those of which a tensor
    ("x:0") or the node ("x") is to keep.

    Returns:
        The new arguments of loops' functions as (function, argument): what was read. The reads in
        the bodies are Identities of these now.
    """
    kept = set(map(node_name, keep))
    library = library_of(graph_def)
    added = []
    for body, condition, loops in own_functions(graph_def, library):
        loop = loops[0]
        if len(loops) == 1 and loop.name not in kept and not _writes(loop, library):
            reads = _invariant_reads(loop, body)
            handles = {handle for _, handle in reads}
            written = _written_behind(loop, graph_def.node, library, handles)
            wanted = [(node, handle) for node, handle in reads if handle in written]
            added += [_hoist(graph_def, loop, body, condition, *each) for each in wanted]
    return frozenset(added)


def own_functions(graph: Any, library: Mapping[str, Any]) -> Iterator[tuple[Any, Any, list[Any]]]:
    """Each body and condition with the loops of the graph that run them, if nothing else does.

    Several loops share those of one model where a graph has several signatures.
    """
    groups = defaultdict[tuple[str, ...], list[Any]](list)
    for loop in graph.node:
        if loop.op in LOOPS:
            functions = dict(function_attributes(loop))
            groups[functions.get("body", ""), functions.get("cond", "")].append(loop)
    if not groups:
        return
    reached = reached_functions(library, calls_in(graph.node))
    uses = Counter(calls_in(itertools.chain(graph.node, *(library[n].node_def for n in reached))))
    for names, loops in groups.items():
        if all(name in library and uses[name] == len(loops) for name in names):
            yield library[names[0]], library[names[1]], loops


def _invariant_reads(loop: Any, body: Any) -> list[tuple[Any, str]]:
    """The reads of float32 variables in the body of a loop, with the handles that it takes."""
    arguments, results = body.signature.input_arg, body.signature.output_arg
    if not len(arguments) == len(results) == len(loop.attr["T"].list.type):
        return []  # No valid loop.
    # A loop may carry handles, and exchange them.
    same = {
        argument.name: handle
        for argument, result, handle in zip(arguments, results, loop.input, strict=False)
        if body.ret[result.name] in _copies(body, argument.name)
    }
    return [
        (node, same[node.input[0]])
        for node in body.node_def
        if node.op == "ReadVariableOp"
        and node.input[0] in same
        and node.attr["dtype"].type == _FLOAT32
    ]


def _copies(body: Any, argument: str) -> Collection[str]:
    """An argument of a body, and what Identities make of it."""

    def made_of(name: str) -> Iterator[str]:
        for node in body.node_def:
            if node.op == "Identity" and name in node.input:
                yield f"{node.name}:output:0"

    return reach([argument], made_of)


def _writes(node: Any, library: Mapping[str, Any]) -> bool:
    """Whether a node, or a function that it runs, may write variables."""
    inside = reached_functions(library, calls_in([node]))
    return _may_write(node) or any(_may_write(n) for name in inside for n in library[name].node_def)


def _may_write(node: Any) -> bool:
    return writes_variable(node.op) or node.op in PYTHON


def _written_behind(
    loop: Any, nodes: Sequence[Any], library: Mapping[str, Any], handles: set[str]
) -> set[str]:
    """Those of some handles that are written with values that depend on a loop."""
    behind = _behind(loop.name, nodes) if handles else ()
    return {
        name
        for node in nodes
        for name in handles.intersection(node.input)
        if node.name in behind and node.op not in LOOPS and _writes(node, library)
    }


def _behind(start: str, nodes: Sequence[Any]) -> Collection[str]:
    """The nodes that a node's results lead to, also through variables that are written and read."""
    loops = {node.name for node in nodes if node.op in LOOPS}
    users = defaultdict[str, list[str]](list)
    for node in nodes:
        for name in node.input:
            # A read waits for a write. What only waits for a loop does not depend on its results.
            if not (name.startswith("^") and node_name(name) in loops):
                users[node_name(name)].append(node.name)
    return reach([start], users.__getitem__)


def _hoist(
    graph: Any, loop: Any, body: Any, condition: Any, read: Any, handle: str
) -> tuple[str, str]:
    """Reads a variable before a loop, and gives the loop what was read."""
    before = _read_before(graph, loop, read, handle)
    wanted = f"{read.name}_before"
    name = add_loop_variable(graph, loop, (body, condition), before, _FLOAT32, wanted)
    read.input[:] = [name, *control_inputs_of(read)]
    _become_identity(read, _FLOAT32)
    respell(body, {f"{read.name}:value:0": f"{read.name}:output:0"})
    return body.signature.name, name


def add_loop_variable(
    graph: Any, loop: Any, functions: tuple[Any, Any], start: Any, dtype: int, wanted: str
) -> str:
    """Gives a loop one more variable, which starts as what a node makes; its body returns it as is.

    Returns the name of the argument, of the body's result and of the condition's argument.
    """
    place = new_place(loop)
    _extend_loop(loop, place, start, dtype)
    _renumber(graph.node, loop.name, place)
    name = _free_argument(wanted, functions)
    for function in functions:
        for table in (function.arg_attr, function.resource_arg_unique_id):
            _make_room(table, place)
        _insert_argument(function.signature.input_arg, place, name, dtype)
        if _SHAPES in start.attr:
            function.arg_attr[place].attr[_SHAPES].CopyFrom(start.attr[_SHAPES])
    body = functions[0]
    _insert_argument(body.signature.output_arg, place, name, dtype)
    body.ret[name] = name
    return name


def _insert_argument(arguments: Any, position: int, name: str, dtype: int) -> None:
    arguments.insert(position, type(arguments[0])(name=name, type=dtype))


def new_place(loop: Any) -> int:
    """Where a new variable of a loop goes: TensorFlow differentiates those before it only."""
    attrs = loop.attr
    return int(attrs[_ORIGINAL].i) if _ORIGINAL in attrs else len(attrs["T"].list.type)


def _read_before(graph: Any, loop: Any, read: Any, handle: str) -> Any:
    name = free_name(f"{loop.name}/{read.name}", {node.name for node in graph.node})
    inputs = [handle, *control_inputs_of(loop)]
    node = graph.node.add(name=name, op="ReadVariableOp", input=inputs, device=loop.device)
    for attr in ("dtype", _SHAPES):
        if attr in read.attr:
            node.attr[attr].CopyFrom(read.attr[attr])
    return node


def control_inputs_of(node: Any) -> list[str]:
    """What a node waits for, as it is written among its inputs."""
    return [name for name in node.input if name.startswith("^")]


def _extend_loop(loop: Any, place: int, start: Any, dtype: int) -> None:
    loop.input.insert(place, start.name)
    loop.attr["T"].list.type.insert(place, dtype)
    for name in ("output_shapes", _SHAPES):
        if name in loop.attr and len(loop.attr[name].list.shape):
            loop.attr[name].list.shape.insert(place, _shape(start))
    if _ORIGINAL in loop.attr:
        loop.attr[_ORIGINAL].i += 1


def _shape(node: Any) -> Any:
    if _SHAPES in node.attr and len(node.attr[_SHAPES].list.shape):
        return node.attr[_SHAPES].list.shape[0]
    return tf.TensorShape(None).as_proto()


def _renumber(nodes: Iterable[Any], loop: str, place: int) -> None:
    """Follows the results of a loop that a new one came before."""
    for node in nodes:
        for i, name in enumerate(node.input):
            made, _, port = name.partition(":")
            if made == loop and port and int(port) >= place:
                node.input[i] = f"{loop}:{int(port) + 1}"


def _make_room(table: Any, place: int) -> None:
    """Moves what a map of protobuf says of arguments from a place on."""
    for position in sorted((each for each in table if each >= place), reverse=True):
        value = table.pop(position)
        if hasattr(value, "SerializeToString"):
            table[position + 1].CopyFrom(value)
        else:
            table[position + 1] = value


def become(node: Any, op: str) -> None:
    """Makes a node one of another op, without the attributes of its own."""
    for name in [name for name in node.attr if not name.startswith("_")]:
        del node.attr[name]
    node.op = op


def _become_identity(node: Any, dtype: int) -> None:
    become(node, "Identity")
    node.attr["T"].type = dtype


def _free_argument(wanted: str, functions: Iterable[Any]) -> str:
    """A name that functions have for no argument, result or node, for a new argument."""
    parts = ((f.signature.input_arg, f.signature.output_arg, f.node_def) for f in functions)
    taken = {each.name for part in itertools.chain(*parts) for each in part}
    return free_name(wanted.replace("/", "_").lower(), taken)


# ---- Constants that a loop carries unchanged and casts in every iteration ------------------------
#
# w -> While(body: w -> Cast -> MatMul) becomes w -> Cast -> While(body: w -> MatMul).


def cast_before_loops(graph_def: Any) -> tuple[Any, frozenset[tuple[str, str]]]:
    """Takes Casts of loop-invariant float32 arguments out of the loops of a graph.

    Only where the loop does nothing else with the argument, and nothing uses what it becomes. Loops
    in functions stay.

    Returns:
        A new `tf.compat.v1.GraphDef`, and the Casts that loops no longer have as (function, name).
    """
    result = copied(graph_def)
    library = library_of(result)
    used = {name.removeprefix("^") for node in result.node for name in node.input}
    gone: set[tuple[str, str]] = set()
    for body, condition, loops in own_functions(result, library):
        for i, number in enumerate(list(loops[0].attr["T"].list.type)):
            outputs = {loop.name if i == 0 else f"{loop.name}:{i}" for loop in loops}
            if number != _FLOAT32 or outputs & used:
                continue
            users = _casting_users(body, condition, i)
            casts = [node for node in users if node.op == "Cast"]
            if casts:
                gone |= {(body.signature.name, node.name) for node in casts}
                low = int(casts[0].attr["DstT"].type)
                _convert_body(body, condition, i, users, low)
                for loop in loops:
                    _cast_before(result, loop, i, low)
    return result, frozenset(gone)


def _casting_users(body: Any, condition: Any, i: int) -> list[Any]:
    """The nodes that take a body's argument, if it is not changed, and only cast to one dtype."""
    tested = condition.signature.input_arg[i].name
    if tested in itertools.chain(condition.ret.values(), *(n.input for n in condition.node_def)):
        return []
    same = set(_copies(body, body.signature.input_arg[i].name))
    users = [node for node in body.node_def if not same.isdisjoint(node.input)]
    results = [arg.name for arg in body.signature.output_arg]
    returned = [name for name in results if body.ret[name] in same]
    dtypes = {node.attr["DstT"].type for node in users if node.op == "Cast"}
    unchanged = returned == [results[i]] and all(map(_only_casts, users))
    return users if len(dtypes) == 1 and unchanged else []


def _convert_body(body: Any, condition: Any, i: int, users: Sequence[Any], low: int) -> None:
    """Makes an argument of a loop's functions low."""
    respell(body, {f"{n.name}:y:0": f"{n.name}:output:0" for n in users if n.op == "Cast"})
    for node in users:
        _become_identity(node, low)
    body.signature.output_arg[i].type = low
    for function in (body, condition):
        function.signature.input_arg[i].type = low


def _cast_before(graph: Any, loop: Any, i: int, low: int) -> None:
    name, types = f"{loop.name}/{i}-CastBefore", loop.attr["T"].list.type
    graph.node.append(cast_node(name, loop.input[i], types[i], low, loop.device))
    types[i] = low
    loop.input[i] = name


# ---- Constants that are chosen -------------------------------------------------------------------
#
# softmax(where(mask, logits, -2e38)): float32's softmax gives a row that is masked as a whole equal
# weights. Cast to float16, the constant is -inf, and that row NaN.


def keep_choices_finite(graph_def: Any, plan: RewritePlan) -> None:
    """Ends constants at the largest value of the dtype they are cast to for a choice, in place.

    Only for ops that hand them on as they are or compare them, which then take a constant of the
    dtype and no Cast: in arithmetic, infinity is an error that shows, and another value one that
    does not.
    """
    limit = float(tf.as_dtype(plan.dtype).max)
    changes = {scope.scope: scope.casts for scope in plan.scopes if scope.casts}
    for scope, nodes, function in bodies(graph_def):
        by_name = {node.name: node for node in nodes} if scope in changes else {}
        ended = []
        for cast in changes.get(scope, ()):
            constant = by_name.get(cast.producer)
            if constant is None or constant.op != "Const":
                continue
            users = [by_name.get(consumer) for consumer, _ in cast.consumers]
            chosen = all(user is not None and user.op in CHOICES for user in users)
            if chosen and largest_finite(constant.attr["value"].tensor) > limit:
                _fold(constant, [by_name[cast.name]], limit)
                by_name[cast.name].input.extend(control_inputs_of(constant))
                ended.append(cast.name)
        if function is not None:
            respell(function, {f"{name}:y:0": f"{name}:output:0" for name in ended})


# ---- Constants that are cast ---------------------------------------------------------------------
#
# w (Const) -> read (Identity) -> Cast -> MatMul becomes Const -> MatMul: the value is cast when the
# graph is written, not each time it runs, and the constant takes half the bytes.


def fold_casts(graph_def: Any, keep: Iterable[str] = ()) -> tuple[Any, frozenset[tuple[str, str]]]:
    """Folds Casts of float32 constants to a low dtype, in functions also.

    A constant that is used in float32 as well keeps its Casts: two copies of it would take more
    bytes than one. So does one that is used from outside, among the tensors or nodes to keep. A
    value beyond the range of the dtype becomes infinite, as it does in a Cast.

    Returns:
        A new `tf.compat.v1.GraphDef`, and the Casts it no longer has as (function, name); the
        function is "" for the graph itself.

    Example:
        >>> import tensorflow as tf
        >>> half = tf.function(lambda: tf.cast(tf.constant([1.0, 2.0]), tf.float16))
        >>> graph = half.get_concrete_function().graph.as_graph_def()
        >>> folded, casts = fold_casts(graph, keep=["Identity:0"])
        >>> [node.op for node in folded.node], sorted(casts)
        (['Const', 'Identity'], [('', 'Cast')])
    """
    result = copied(graph_def)
    gone: set[tuple[str, str]] = set()
    for scope, nodes, function in bodies(result):
        if function is not None:
            keep = [*function.ret.values(), *function.control_ret.values()]
        casts = _fold_scope(nodes, set(map(node_name, keep)))
        if function is not None:
            # A Cast's output is "y", that of what it became "output".
            respell(function, {f"{name}:y:0": f"{name}:output:0" for name in casts})
        gone |= {(scope, name) for name in casts}
    return result, frozenset(gone)


def _fold_scope(nodes: Any, kept: Set[str]) -> list[str]:
    """Folds in place; returns the names of the Casts that are gone."""
    consumers = defaultdict[str, list[Any]](list)
    for node in nodes:
        for name in node.input:
            consumers[node_name(name)].append(node)

    def identities(name: str) -> Iterator[str]:
        return (node.name for node in consumers[name] if node.op == "Identity")

    gone: list[str] = []
    removed: set[str] = set()
    for constant in nodes:
        if constant.op != "Const" or constant.attr["dtype"].type != _FLOAT32:
            continue
        passing = reach([str(constant.name)], identities)
        users = [node for each in passing for node in consumers[each]]
        casts = sorted((n for n in users if n.op == "Cast"), key=lambda n: n.name)
        if casts and kept.isdisjoint(passing) and all(map(_only_casts, users)):
            _fold(constant, casts)
            removed.update(passing)
            gone += [node.name for node in casts]
    if removed:
        replace_nodes(nodes, (node for node in nodes if node.name not in removed))
        places = {f"loc:@{name}".encode() for name in removed}
        for node in nodes:
            _forget_places(node, places)
    return gone


def _only_casts(node: Any) -> bool:
    """Whether a node does nothing but pass a constant on or cast it to a low dtype."""
    casts = node.op == "Cast" and node.attr["DstT"].type in _LOW
    alone = len(node.input) == 1 and not node.input[0].startswith("^")
    return alone and (casts or node.op == "Identity")


def _fold(constant: Any, casts: Iterable[Any], limit: float = math.inf) -> None:
    """Makes the first Cast to a dtype the constant, and the others its copies.

    Finite values of a larger magnitude than `limit` become it.
    """
    values: dict[int, str] = {}
    value = constant.attr["value"].tensor
    for node in casts:
        low = int(node.attr["DstT"].type)
        if low in values:
            suffix = ":output:0" if ":" in node.input[0] else ""
            node.input[:] = [f"{values[low]}{suffix}"]
            _become_identity(node, low)
            continue
        values[low] = node.name
        become(node, "Const")
        node.device = constant.device
        del node.input[:]
        node.attr["dtype"].type = low
        given = tf.make_ndarray(value)
        with np.errstate(over="ignore"):
            ended = np.where(np.isfinite(given), np.clip(given, -limit, limit), given)
            content = ended.astype(tf.as_dtype(low).as_numpy_dtype)
        tensor = node.attr["value"].tensor
        tensor.dtype = low
        tensor.tensor_shape.CopyFrom(value.tensor_shape)
        # Not make_tensor_proto's half_val, which takes up to four bytes for a number of two.
        tensor.tensor_content = content.tobytes()


def _forget_places(node: Any, removed: Set[bytes]) -> None:
    """Takes out the wish to be on the device of a node that is no longer there."""
    places = node.attr["_class"].list.s if "_class" in node.attr else []
    left = [each for each in places if each not in removed]
    places[:] = left
    if "_class" in node.attr and not left:
        del node.attr["_class"]
