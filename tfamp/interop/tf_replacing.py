"""What autocast puts in the place of private TensorFlow symbols while it is active.

Each function gets the handler and the original of the symbol that `tf_intercept` names with
it, and returns its replacement. Nothing here decides anything: every replacement asks the handler
and calls the original.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.interop.interception import Interception
from tfamp.interop.tf_private import attr_kinds, op_inputs, private_module, private_symbol

# ---- Ops -----------------------------------------------------------------------------------------


def eager_op(handler: Interception, original: Any) -> Any:
    concerns = handler.concerns

    def fast_path(context: Any, op: str, name: Any, *args: Any) -> Any:
        if not concerns(op):
            return original(context, op, name, *args)
        count = len(op_inputs(op))
        adjusted = handler.adjust(op, args[:count])
        if adjusted is not None:
            args = (*adjusted, *_plain_attrs(op, args[count:]))
        return original(context, op, name, *args)

    return fast_path


def _plain_attrs(op: str, attrs: tuple[Any, ...]) -> list[Any]:
    """An op's attributes, name and value by turns, of the types TensorFlow's fast path takes.

    Where it takes one not, TensorFlow goes another way and forgets the inputs put in its place.
    """
    kinds, plain = attr_kinds(op), [_plain(attr) for attr in attrs]
    for place in range(1, len(plain), 2):
        kind = kinds.get(plain[place - 1])
        if kind == "float" and isinstance(plain[place], int):
            plain[place] = float(plain[place])
        elif kind == "type" and isinstance(plain[place], (str, type, np.dtype)):
            plain[place] = tf.as_dtype(plain[place])
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


def graph_op(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def apply_op_helper(op_type_name: str, name: Any = None, **keywords: Any) -> Any:
        if not handler.concerns(op_type_name):
            return original(op_type_name, name, **keywords)
        names = [op_input.name for op_input in op_inputs(op_type_name)]
        adjusted = handler.adjust(op_type_name, [keywords.get(key) for key in names])
        if adjusted is not None:
            keywords |= dict(zip(names, adjusted, strict=True))
        return original(op_type_name, name, **keywords)

    return apply_op_helper


def cast(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def cast(x: Any, DstT: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N803 - TensorFlow's name
        return handler.cast(x, DstT, lambda: original(x, DstT, *args, **kwargs))

    return cast


def public_cast(handler: Interception, original: Any) -> Any:
    @tf.autograph.experimental.do_not_convert
    @functools.wraps(original)
    def cast(x: Any, dtype: Any, name: Any = None) -> Any:
        result = original(x, dtype, name)
        # No op runs where the tensor has the dtype already.
        return handler.kept(result) if result is x else result

    return cast


# ---- Gradients and traces ------------------------------------------------------------------------


def gradient(handler: Interception, original: Any) -> Any:
    @tf.autograph.experimental.do_not_convert
    @functools.wraps(original)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        with handler.paused():
            return original(*args, **kwargs)

    return gradient


def recording(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def change(*args: Any, **kwargs: Any) -> Any:
        handler.recording_changed()
        return original(*args, **kwargs)

    return change


def custom_gradient(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def decorator(f: Any, args: Any, kwargs: Any) -> Any:
        return original(handler.custom_gradient(f), args, kwargs)

    return decorator


def python_function(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def python_function(
        func: Any,
        inp: Any,
        Tout: Any,  # noqa: N803 - TensorFlow's name
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return original(handler.python_function(func, Tout), inp, Tout, *args, **kwargs)

    return python_function


def function_context(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def make_function_context(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        key = handler.trace_key()
        if key is None:
            return made
        eager = made.context._replace(xla_context_id=(made.context.xla_context_id, key))
        return type(made)(eager, made.scope_type)

    return make_function_context


# ---- Control flow --------------------------------------------------------------------------------


def while_loop(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def while_loop(cond: Any, body: Any, loop_vars: Any, *args: Any, **kwargs: Any) -> Any:
        def aligned(*variables: Any) -> Any:
            return handler.align(body(*variables), variables)

        return original(cond, aligned, loop_vars, *args, **kwargs)

    return while_loop


def loop_check(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def verify(
        name: str, check: bool, init: Any, entry: Any, exit_: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # AutoGraph compares a Python loop's variables before the loop above aligns them.
        if tf.is_tensor(exit_):
            exit_ = handler.align(exit_, entry)
        return original(name, check, init, entry, exit_, *args, **kwargs)

    return verify


def branch_check(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def verify(name: str, body_var: Any, orelse_var: Any) -> Any:
        # As for loops: the branches below are aligned later.
        if handler.common_dtype([body_var, orelse_var]):
            return
        original(name, body_var, orelse_var)

    return verify


def branches(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def match(op_type: Any, branch_graphs: Any) -> Any:
        outputs = [graph.outputs for graph in branch_graphs]
        if len({len(each) for each in outputs}) == 1:  # TensorFlow has a message for the others.
            for place, row in enumerate(zip(*outputs, strict=True)):
                if dtype := handler.common_dtype(row):
                    _recast_output(handler, branch_graphs, place, dtype)
        return original(op_type, branch_graphs)

    return match


def _recast_output(handler: Interception, branch_graphs: Any, place: int, dtype: str) -> None:
    for graph in branch_graphs:
        with graph.as_default():
            graph.outputs[place] = handler.recast(graph.outputs[place], dtype)
        pack = private_symbol(private_module("ops.cond_v2"), "_pack_sequence_as")
        graph.structured_outputs = pack(graph.structured_outputs, graph.outputs)


# ---- Python code that refuses mixed dtypes -------------------------------------------------------


def true_division(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def true_division(x: Any, y: Any, name: Any = None) -> Any:
        # It refuses mixed dtypes before any op runs.
        if handler.concerns("RealDiv"):
            x, y = handler.adjust("RealDiv", (x, y)) or (x, y)
        return original(x, y, name=name)

    return true_division


def convert(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def convert_to_tensor(value: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Library code asks for the dtype of an op's first input and fails where this one differs.
        if handler.active():
            value, dtype = handler.convert(value, dtype, sys._getframe(1))
        return original(value, dtype, *args, **kwargs)

    return convert_to_tensor


def stacked(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def pack(values: Any, dtype: Any, name: str) -> Any:
        return original(*handler.stacked(values, dtype), name)

    return pack


def converted_alike(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def convert(values: Any, dtype: Any = None, name: Any = None) -> Any:
        return original(*handler.stacked(values, dtype), name)

    return convert


def mapped(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def to_batchable(values: Any, signature: Any) -> Any:
        # map_fn compares what the function returned with what it was said to return.
        cast = [
            handler.recast(value, spec.dtype.name) if hasattr(spec, "dtype") else value
            for value, spec in zip(values, signature, strict=True)
        ]
        return original(cast, signature)

    return to_batchable


def array_method(place: int, handler: Interception, original: Any) -> Any:
    @tf.autograph.experimental.do_not_convert
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if handler.active():
            if len(args) > place:
                value = handler.recast(args[place], self.dtype.name)
                args = (*args[:place], value, *args[place + 1 :])
            elif "value" in kwargs:
                kwargs["value"] = handler.recast(kwargs["value"], self.dtype.name)
        return original(self, *args, **kwargs)

    return method


def finished_graph(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if handler.active():
            handler.finished_graph(function)
        return original(function, *args, **kwargs)

    return call


def signature_cast(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def cast(self: Any, value: Any, casting_context: Any) -> Any:
        # A function with an input signature, or a concrete one, takes the dtypes it was traced for.
        if handler.active() and tf.is_tensor(value):
            value = handler.recast(value, self.dtype.name)
        return original(self, value, casting_context)

    return cast


def sparse_matmul(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def sparse_matmul(a: Any, b: Any, **kwargs: Any) -> Any:
        # tf.matmul resorts to this op, slow and float32, for bfloat16 with another dtype.
        sparse = kwargs.get("a_is_sparse") or kwargs.get("b_is_sparse")
        if sparse or not handler.active():
            return original(a, b, **kwargs)
        dense = {k: v for k, v in kwargs.items() if not k.endswith("_is_sparse")}
        return tf.raw_ops.MatMul(a=a, b=b, **dense)

    return sparse_matmul


def cross_entropy(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def cross_entropy(*args: Any, **kwargs: Any) -> Any:
        # It computes low-precision logits in float32 and then casts the result back down.
        if "logits" in kwargs:
            kwargs["logits"] = handler.cross_entropy_input(kwargs["logits"])
        elif len(args) > 1:
            args = (args[0], handler.cross_entropy_input(args[1]), *args[2:])
        return original(*args, **kwargs)

    return cross_entropy
