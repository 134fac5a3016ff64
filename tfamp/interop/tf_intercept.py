"""The private TensorFlow symbols that autocast replaces while it is active, and by what.

Nothing here decides anything: every replacement asks a
`tfamp.interop.interception.Interception` and calls the original. When a TensorFlow release
moves a symbol, this file says which and replaces none.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfamp.interop.interception import Interception
from tfamp.interop.tf_private import (
    attr_kinds,
    missing_symbol,
    op_inputs,
    private_module,
    private_symbol,
)

_Replacement = Callable[[Interception, Any], Any]


class Intercepted(NamedTuple):
    """One symbol that is replaced.

    Attributes:
        module: Module, below TensorFlow's package of Python code.
        name: Name in the module; a method as "Class.method".
        replacement: Makes what takes its place, from the handler and the original.
    """

    module: str
    name: str
    replacement: _Replacement

    def owner(self) -> Any:
        """The module or class that holds the symbol."""
        owner = private_module(self.module)
        for part in self.name.split(".")[:-1]:
            owner = private_symbol(owner, part)
        return owner

    @property
    def attribute(self) -> str:
        """The name the owner holds it under."""
        return self.name.rpartition(".")[2]


def intercept(handler: Interception) -> Callable[[], None]:
    """Puts a handler between TensorFlow's Python API and its ops, in the whole process.

    Every op TensorFlow's generated wrappers and `tf.raw_ops` run goes through two functions, one in
    eager mode and one while a graph is built; replacing these two reaches all of them, however they
    were imported. The other symbols are Python code that would refuse mixed dtypes before it runs
    an op, or that must know of the handler's mode. `INTERCEPTED` lists them all.

    Args:
        handler: Decides. It is called in every thread.

    Returns:
        A function that puts everything back.

    Raises:
        UnsupportedVersionError: A symbol is missing; then nothing is replaced.
    """
    found: list[tuple[Any, str, _Replacement]] = []
    for each in INTERCEPTED:
        owner = each.owner()
        # Not with getattr: a method taken from the class may still be found in its parents.
        if each.attribute not in vars(owner):
            raise missing_symbol(f"{each.module}.{each.name}")
        found.append((owner, each.attribute, each.replacement))
    found += [(owner, "cast", _public_cast) for owner in (tf, tf.dtypes)]
    originals = [vars(owner)[name] for owner, name, _ in found]
    # Only now that every symbol is known to be there.
    for (owner, name, replacement), original in zip(found, originals, strict=True):
        setattr(owner, name, replacement(handler, original))

    def restore() -> None:
        for (owner, name, _), original in zip(found, originals, strict=True):
            setattr(owner, name, original)

    return restore


# ---- Ops -----------------------------------------------------------------------------------------


def _eager_op(handler: Interception, original: Any) -> Any:
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


def _graph_op(handler: Interception, original: Any) -> Any:
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


def _cast(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def cast(x: Any, DstT: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N803 - TensorFlow's name
        return handler.cast(x, DstT, lambda: original(x, DstT, *args, **kwargs))

    return cast


def _public_cast(handler: Interception, original: Any) -> Any:
    @tf.autograph.experimental.do_not_convert
    @functools.wraps(original)
    def cast(x: Any, dtype: Any, name: Any = None) -> Any:
        result = original(x, dtype, name)
        # No op runs where the tensor has the dtype already.
        return handler.kept(result) if result is x else result

    return cast


# ---- Gradients and traces ------------------------------------------------------------------------


def _gradient(handler: Interception, original: Any) -> Any:
    @tf.autograph.experimental.do_not_convert
    @functools.wraps(original)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        with handler.paused():
            return original(*args, **kwargs)

    return gradient


def _recording(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def change(*args: Any, **kwargs: Any) -> Any:
        handler.recording_changed()
        return original(*args, **kwargs)

    return change


def _custom_gradient(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def decorator(f: Any, args: Any, kwargs: Any) -> Any:
        return original(handler.custom_gradient(f), args, kwargs)

    return decorator


def _python_function(handler: Interception, original: Any) -> Any:
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


def _function_context(handler: Interception, original: Any) -> Any:
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


def _while_loop(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def while_loop(cond: Any, body: Any, loop_vars: Any, *args: Any, **kwargs: Any) -> Any:
        def aligned(*variables: Any) -> Any:
            return handler.align(body(*variables), variables)

        return original(cond, aligned, loop_vars, *args, **kwargs)

    return while_loop


def _loop_check(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def verify(
        name: str, check: bool, init: Any, entry: Any, exit_: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # AutoGraph compares a Python loop's variables before the loop above aligns them.
        if tf.is_tensor(exit_):
            exit_ = handler.align(exit_, entry)
        return original(name, check, init, entry, exit_, *args, **kwargs)

    return verify


def _branch_check(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def verify(name: str, body_var: Any, orelse_var: Any) -> Any:
        # As for loops: the branches below are aligned later.
        if handler.common_dtype([body_var, orelse_var]):
            return
        original(name, body_var, orelse_var)

    return verify


def _branches(handler: Interception, original: Any) -> Any:
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


def _true_division(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def true_division(x: Any, y: Any, name: Any = None) -> Any:
        # It refuses mixed dtypes before any op runs.
        if handler.concerns("RealDiv"):
            x, y = handler.adjust("RealDiv", (x, y)) or (x, y)
        return original(x, y, name=name)

    return true_division


def _convert(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def convert_to_tensor(value: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Library code asks for the dtype of an op's first input and fails where this one differs.
        if handler.active():
            value, dtype = handler.convert(value, dtype, sys._getframe(1))
        return original(value, dtype, *args, **kwargs)

    return convert_to_tensor


def _stacked(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def pack(values: Any, dtype: Any, name: str) -> Any:
        return original(*handler.stacked(values, dtype), name)

    return pack


def _converted_alike(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def convert(values: Any, dtype: Any = None, name: Any = None) -> Any:
        return original(*handler.stacked(values, dtype), name)

    return convert


def _mapped(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def to_batchable(values: Any, signature: Any) -> Any:
        # map_fn compares what the function returned with what it was said to return.
        cast = [
            handler.recast(value, spec.dtype.name) if hasattr(spec, "dtype") else value
            for value, spec in zip(values, signature, strict=True)
        ]
        return original(cast, signature)

    return to_batchable


def _array_method(place: int, handler: Interception, original: Any) -> Any:
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


def _finished_graph(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if handler.active():
            handler.finished_graph(function)
        return original(function, *args, **kwargs)

    return call


def _signature_cast(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def cast(self: Any, value: Any, casting_context: Any) -> Any:
        # A function with an input signature, or a concrete one, takes the dtypes it was traced for.
        if handler.active() and tf.is_tensor(value):
            value = handler.recast(value, self.dtype.name)
        return original(self, value, casting_context)

    return cast


def _sparse_matmul(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def sparse_matmul(a: Any, b: Any, **kwargs: Any) -> Any:
        # tf.matmul resorts to this op, slow and float32, for bfloat16 with another dtype.
        sparse = kwargs.get("a_is_sparse") or kwargs.get("b_is_sparse")
        if sparse or not handler.active():
            return original(a, b, **kwargs)
        dense = {k: v for k, v in kwargs.items() if not k.endswith("_is_sparse")}
        return tf.raw_ops.MatMul(a=a, b=b, **dense)

    return sparse_matmul


def _cross_entropy(handler: Interception, original: Any) -> Any:
    @functools.wraps(original)
    def cross_entropy(*args: Any, **kwargs: Any) -> Any:
        # It computes low-precision logits in float32 and then casts the result back down.
        if "logits" in kwargs:
            kwargs["logits"] = handler.cross_entropy_input(kwargs["logits"])
        elif len(args) > 1:
            args = (args[0], handler.cross_entropy_input(args[1]), *args[2:])
        return original(*args, **kwargs)

    return cross_entropy


# The number says where the methods of an array take the value.
INTERCEPTED = (
    Intercepted("pywrap_tfe", "TFE_Py_FastPathExecute", _eager_op),
    Intercepted("framework.op_def_library", "_apply_op_helper", _graph_op),
    Intercepted("ops.gen_math_ops", "cast", _cast),
    Intercepted("eager.imperative_grad", "imperative_grad", _gradient),
    Intercepted("eager.backprop", "GradientTape._push_tape", _recording),
    Intercepted("eager.backprop", "GradientTape.watch", _recording),
    Intercepted("eager.forwardprop", "ForwardAccumulator._push_accumulator", _recording),
    Intercepted("eager.forwardprop", "ForwardAccumulator._watch", _recording),
    Intercepted("eager.backprop", "GradientTape.jacobian", _gradient),
    Intercepted("eager.backprop", "GradientTape.batch_jacobian", _gradient),
    Intercepted("ops.gradients_util", "_GradientsHelper", _gradient),
    Intercepted("ops.parallel_for.pfor", "PFor.convert", _gradient),
    Intercepted("ops.custom_gradient", "_eager_mode_decorator", _custom_gradient),
    Intercepted("ops.custom_gradient", "_graph_mode_decorator", _custom_gradient),
    Intercepted("ops.script_ops", "_internal_py_func", _python_function),
    Intercepted("ops.script_ops", "py_func_common", _python_function),  # NumPy's, in eager mode
    Intercepted(
        "eager.polymorphic_function.function_context", "make_function_context", _function_context
    ),
    Intercepted(
        "eager.polymorphic_function.concrete_function", "ConcreteFunction.__call__", _finished_graph
    ),
    Intercepted("saved_model.function_deserialization", "_call_concrete_function", _finished_graph),
    Intercepted("ops.while_loop", "while_loop", _while_loop),
    Intercepted("autograph.operators.control_flow", "_verify_single_loop_var", _loop_check),
    Intercepted("autograph.operators.control_flow", "verify_single_cond_var", _branch_check),
    Intercepted("ops.cond_v2", "_make_indexed_slices_indices_types_match", _branches),
    Intercepted("framework.ops", "convert_to_tensor", _convert),
    Intercepted("ops.ragged.ragged_tensor", "convert_to_tensor_or_ragged_tensor", _convert),
    Intercepted("ops.array_ops", "_autopacking_helper", _stacked),
    Intercepted(
        "framework.indexed_slices", "convert_n_to_tensor_or_indexed_slices", _converted_alike
    ),
    Intercepted("ops.map_fn", "_result_value_flat_to_batchable", _mapped),
    Intercepted("framework.tensor", "TensorSpec.cast", _signature_cast),
    Intercepted("ops.math_ops", "_truediv_python3", _true_division),
    Intercepted("ops.math_ops", "sparse_matmul", _sparse_matmul),
    Intercepted("ops.nn_ops", "softmax_cross_entropy_with_logits_v2_helper", _cross_entropy),
    Intercepted("ops.nn_ops", "sparse_softmax_cross_entropy_with_logits", _cross_entropy),
    Intercepted("ops.tensor_array_ops", "TensorArray.write", partial(_array_method, 1)),
    Intercepted("ops.tensor_array_ops", "TensorArray.scatter", partial(_array_method, 1)),
    Intercepted("ops.tensor_array_ops", "TensorArray.unstack", partial(_array_method, 0)),
    Intercepted("ops.tensor_array_ops", "TensorArray.split", partial(_array_method, 0)),
)
