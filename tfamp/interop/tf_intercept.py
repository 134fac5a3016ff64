"""The private TensorFlow symbols that autocast replaces while it is active, and by what.

The replacements are in `tf_replacing`. When a TensorFlow release moves a symbol, this file says
which and replaces none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.interop import tf_replacing as replacing
from tfamp.interop.interception import Interception
from tfamp.interop.tf_private import missing_symbol, private_module, private_symbol

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
    found += [(owner, "cast", replacing.public_cast) for owner in (tf, tf.dtypes)]
    originals = [vars(owner)[name] for owner, name, _ in found]
    # Only now that every symbol is known to be there.
    for (owner, name, replacement), original in zip(found, originals, strict=True):
        setattr(owner, name, replacement(handler, original))

    def restore() -> None:
        for (owner, name, _), original in zip(found, originals, strict=True):
            setattr(owner, name, original)

    return restore


# The number says where the methods of an array take the value.
INTERCEPTED = (
    Intercepted("pywrap_tfe", "TFE_Py_FastPathExecute", replacing.eager_op),
    Intercepted("framework.op_def_library", "_apply_op_helper", replacing.graph_op),
    Intercepted("ops.gen_math_ops", "cast", replacing.cast),
    Intercepted("eager.imperative_grad", "imperative_grad", replacing.gradient),
    Intercepted("eager.backprop", "GradientTape._push_tape", replacing.recording),
    Intercepted("eager.backprop", "GradientTape.watch", replacing.recording),
    Intercepted("eager.forwardprop", "ForwardAccumulator._push_accumulator", replacing.recording),
    Intercepted("eager.forwardprop", "ForwardAccumulator._watch", replacing.recording),
    Intercepted("eager.backprop", "GradientTape.jacobian", replacing.gradient),
    Intercepted("eager.backprop", "GradientTape.batch_jacobian", replacing.gradient),
    Intercepted("ops.gradients_util", "_GradientsHelper", replacing.gradient),
    Intercepted("ops.parallel_for.pfor", "PFor.convert", replacing.gradient),
    Intercepted("ops.custom_gradient", "_eager_mode_decorator", replacing.custom_gradient),
    Intercepted("ops.custom_gradient", "_graph_mode_decorator", replacing.custom_gradient),
    Intercepted("ops.script_ops", "_internal_py_func", replacing.python_function),
    # NumPy's functions, which eager mode runs without an op.
    Intercepted("ops.script_ops", "py_func_common", replacing.python_function),
    Intercepted(
        "eager.polymorphic_function.function_context",
        "make_function_context",
        replacing.function_context,
    ),
    Intercepted(
        "eager.polymorphic_function.concrete_function",
        "ConcreteFunction.__call__",
        replacing.finished_graph,
    ),
    Intercepted(
        "saved_model.function_deserialization", "_call_concrete_function", replacing.finished_graph
    ),
    Intercepted("ops.while_loop", "while_loop", replacing.while_loop),
    Intercepted(
        "autograph.operators.control_flow", "_verify_single_loop_var", replacing.loop_check
    ),
    Intercepted(
        "autograph.operators.control_flow", "verify_single_cond_var", replacing.branch_check
    ),
    Intercepted("ops.cond_v2", "_make_indexed_slices_indices_types_match", replacing.branches),
    Intercepted("framework.ops", "convert_to_tensor", replacing.convert),
    Intercepted(
        "ops.ragged.ragged_tensor", "convert_to_tensor_or_ragged_tensor", replacing.convert
    ),
    Intercepted("ops.array_ops", "_autopacking_helper", replacing.stacked),
    Intercepted(
        "framework.indexed_slices",
        "convert_n_to_tensor_or_indexed_slices",
        replacing.converted_alike,
    ),
    Intercepted("ops.map_fn", "_result_value_flat_to_batchable", replacing.mapped),
    Intercepted("framework.tensor", "TensorSpec.cast", replacing.signature_cast),
    Intercepted("ops.math_ops", "_truediv_python3", replacing.true_division),
    Intercepted("ops.math_ops", "sparse_matmul", replacing.sparse_matmul),
    Intercepted(
        "ops.nn_ops", "softmax_cross_entropy_with_logits_v2_helper", replacing.cross_entropy
    ),
    Intercepted("ops.nn_ops", "sparse_softmax_cross_entropy_with_logits", replacing.cross_entropy),
    Intercepted("ops.tensor_array_ops", "TensorArray.write", partial(replacing.array_method, 1)),
    Intercepted("ops.tensor_array_ops", "TensorArray.scatter", partial(replacing.array_method, 1)),
    Intercepted("ops.tensor_array_ops", "TensorArray.unstack", partial(replacing.array_method, 0)),
    Intercepted("ops.tensor_array_ops", "TensorArray.split", partial(replacing.array_method, 0)),
)
