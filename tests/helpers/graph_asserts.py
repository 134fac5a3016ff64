"""Which dtypes the ops of a traced function compute in, nested functions included.

Closeness to float32 alone also passes on a graph that nobody changed: assert with these first that
low precision was used.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator

import tensorflow as tf

from tfamp.planning.structures import op_types

LOW_PRECISION = frozenset({"float16", "bfloat16"})
# What mixed precision is for; BatchMatMul is what einsum and attention become.
COMPUTE_OPS = op_types("""
    BatchMatMulV2 BatchMatMulV3 Conv2D Conv3D DepthwiseConv2dNative Einsum MatMul _FusedConv2D
    _FusedMatMul
""")
# Attribute that holds the dtype an op computes in, first match wins. A Cast counts under what it
# casts to.
_DTYPE_ATTRS = ("T", "DstT", "dtype", "out_type")


def concrete(fn: Callable, *args, **kwargs):
    """The concrete function of `fn`, traced for the arguments if it is not one already."""
    if hasattr(fn, "graph"):
        return fn
    fn = fn if hasattr(fn, "get_concrete_function") else tf.function(fn)
    return fn.get_concrete_function(*args, **kwargs)


def op_numbers(fn: Callable, *args, **kwargs) -> collections.Counter[str]:
    """How often each op type is in the graph of `fn`, nested functions included."""
    graph_def = concrete(fn, *args, **kwargs).graph.as_graph_def()
    return collections.Counter(node.op for node in _reachable_nodes(graph_def))


def branches(fn: Callable, *args, **kwargs) -> int:
    """The number of branches in the graph of `fn`, for each of which a GPU's host waits."""
    found = op_numbers(fn, *args, **kwargs)
    return sum(found[op] for op in ("If", "StatelessIf", "Case", "StatelessCase", "Switch"))


def op_dtypes(fn: Callable, *args, **kwargs) -> dict[str, set[str]]:
    """Maps every op type in the graph of `fn`, nested functions included, to its dtypes."""
    return graph_op_dtypes(concrete(fn, *args, **kwargs).graph.as_graph_def())


def graph_op_dtypes(graph_def) -> dict[str, set[str]]:
    """Maps every op type in a GraphDef and the functions it reaches to its dtypes."""
    found = collections.defaultdict(set)
    for node in _reachable_nodes(graph_def):
        dtype = next((node.attr[name].type for name in _DTYPE_ATTRS if name in node.attr), None)
        if dtype:
            found[node.op].add(tf.dtypes.as_dtype(dtype).name)
    return dict(found)


def assert_computes_in(dtype: str, fn: Callable, *args, **kwargs) -> None:
    """Asserts that the graph has matmuls or convolutions and that all of them are in `dtype`."""
    compute = _compute_dtypes(fn, *args, **kwargs)
    assert all(dtypes == {dtype} for dtypes in compute.values()), (
        f"expected every matmul and convolution in {dtype}; found {compute}"
    )


def assert_has_low_precision(fn: Callable, *args, **kwargs) -> None:
    """Asserts that at least one matmul or convolution is in float16 or bfloat16."""
    compute = _compute_dtypes(fn, *args, **kwargs)
    assert any(dtypes & LOW_PRECISION for dtypes in compute.values()), (
        f"no matmul or convolution in float16 or bfloat16; found {compute}"
    )


def _compute_dtypes(fn: Callable, *args, **kwargs) -> dict[str, set[str]]:
    found = op_dtypes(fn, *args, **kwargs)
    compute = {op: dtypes for op, dtypes in found.items() if op in COMPUTE_OPS}
    assert compute, f"no matmul or convolution in the graph; it has {sorted(found)}"
    return compute


def _reachable_nodes(graph_def) -> Iterator:
    library = {function.signature.name: function for function in graph_def.library.function}
    # The library also holds functions that nothing calls any more: follow the calls.
    pending, seen = [graph_def.node], set()
    while pending:
        for node in pending.pop():
            yield node
            for name in _called_functions(node):
                if name in library and name not in seen:
                    seen.add(name)
                    pending.append(library[name].node_def)


def _called_functions(node) -> Iterator[str]:
    yield node.op
    for attr in node.attr.values():
        if attr.HasField("func"):
            yield attr.func.name
        yield from (func.name for func in attr.list.func)
