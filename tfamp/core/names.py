"""Names that arguments take, as types: a type checker finds a misspelled one before it runs.

The tuples of names that checks and messages use are made of these types. At run time every
argument is checked all the same, and a name may be any string, such as one from a file.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias

Level: TypeAlias = Literal["O0", "O1", "O2", "O3", "auto"]
"""A level of `tfamp.prepare`."""

PolicyName: TypeAlias = Literal[
    "float16", "bfloat16", "float32", "float64", "mixed_float16", "mixed_bfloat16", "auto"
]
"""The name of a `tfamp.Policy`."""

LowDtype: TypeAlias = Literal["float16", "bfloat16"]
"""A low dtype."""

ComputeDtype: TypeAlias = Literal["float16", "bfloat16", "float32"]
"""A dtype that layers, ops or the slots of an optimizer can be set to."""

Placement: TypeAlias = Literal["min_cut", "lists", "fused"]
"""A way to select the nodes to convert among the safe ones."""

CandidateName: TypeAlias = Literal[
    "float32", "lists", "min_cut", "fused", "xla", "min_cut_xla", "lists_xla"
]
"""A way to run a function that `tfamp.tune` compares."""

Device: TypeAlias = Literal["auto", "cpu", "gpu", "tpu"]
"""A kind of device."""

OnError: TypeAlias = Literal["raise", "keep"]
"""What happens where a graph cannot be rewritten."""

WeightRounding: TypeAlias = Literal["stochastic", "split"]
"""A way to update low-precision weights without float32 copies."""

Float32Outputs: TypeAlias = bool | Literal["sums"]
"""Whether models return float32, or sum in float32."""

ScaleName: TypeAlias = Literal["dynamic", "none"]
"""A loss scale by its name."""


class Named(Protocol):
    """A dtype of TensorFlow or NumPy: an object with a name."""

    @property
    def name(self) -> Any:
        """The name."""


class NamedPolicy(Protocol):
    """A policy: a `tfamp.Policy` or a `keras.DTypePolicy`.

    Keras has no types: written as its class, the argument would accept any string.
    """

    @property
    def name(self) -> Any:
        """The name."""

    @property
    def compute_dtype(self) -> Any:
        """The dtype of computations."""

    @property
    def variable_dtype(self) -> Any:
        """The dtype of variables."""


DTypeObject: TypeAlias = Named | type[Any]
"""A dtype of TensorFlow or NumPy, such as `tf.bfloat16` or `numpy.float16`."""

LowDtypeLike: TypeAlias = LowDtype | Literal["auto"] | DTypeObject
"""What stands for a low dtype; "auto" is the one that this machine multiplies natively."""

ComputeDtypeLike: TypeAlias = ComputeDtype | DTypeObject
"""What stands for a dtype that can be computed in."""
