"""Names for values of TensorFlow and Keras in annotations: what an argument is, at first sight.

TensorFlow and Keras carry no types that a checker could use, and this package imports neither
of them, so each name is an alias of `Any`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

# Values.
Tensor: TypeAlias = Any  # Eager or symbolic, of TensorFlow or Keras, also `tf.IndexedSlices`.
Variable: TypeAlias = Any  # A `tf.Variable` or `keras.Variable`.
Handle: TypeAlias = Any  # A resource tensor: the handle of a variable.
Nest: TypeAlias = Any  # Tensors in nested lists, tuples and dicts, as `tf.nest` takes them.
Operand: TypeAlias = Any  # A value that an op takes: a tensor, variable, array, number or None.
DType: TypeAlias = Any  # A `tf.DType`, or the name of one.

# Keras.
Layer: TypeAlias = Any  # A `keras.Layer`.
Model: TypeAlias = Any  # A `keras.Model`.
Functional: TypeAlias = Any  # A Functional, alone or inside a Sequential.
Operation: TypeAlias = Any  # A `keras.Operation`, layers included.
KerasNode: TypeAlias = Any  # One symbolic call of an operation.
KerasPolicy: TypeAlias = Any  # A `keras.DTypePolicy`, also a map of them.
Optimizer: TypeAlias = Any  # A `keras.optimizers.Optimizer`.

# Graphs.
GraphDef: TypeAlias = Any  # A `tf.compat.v1.GraphDef`.
FunctionDef: TypeAlias = Any  # A function of a GraphDef's library.
NodeDef: TypeAlias = Any  # A node of either.
TFGraph: TypeAlias = Any  # A `tf.Graph`, also a `FuncGraph`; `graph.graph.Graph` is tfamp's.
Op: TypeAlias = Any  # A `tf.Operation` in a graph.
Trace: TypeAlias = Any  # A concrete function.
Function: TypeAlias = Any  # A `tf.function`.
ArgDef: TypeAlias = Any  # An argument or result in the signature of an op or a function.
AttrValue: TypeAlias = Any  # The value of an attribute of a node.
SavedModel: TypeAlias = Any  # The message in the file of a SavedModel.
MetaGraphDef: TypeAlias = Any  # One graph of a SavedModel, with its signatures.
SignatureDef: TypeAlias = Any  # A signature of one.

# Callables.
Method: TypeAlias = Callable[..., Any]  # A method of any signature, as a wrapper calls it.
