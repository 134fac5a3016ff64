"""Which ops may run in the low precision, as an immutable value; framework-free.

TensorFlow's own lists, and what autocast needs beyond the four colours, are in
`planning.op_sets`. This file holds the value, how tfamp's defaults differ from TensorFlow's,
and how a user changes them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.names import Device, LowDtype
from tfamp.core.options import checked_word, nearest
from tfamp.planning import op_sets
from tfamp.planning.options import COLORS, DEVICES, Color, OpColors, strings
from tfamp.planning.structures import LOOPS, op_types

_OP_SETS = (*COLORS, "as_given")

# Differences of tfamp's defaults from Grappler's.

# Conv is Conv2D and Conv3D in one, and newer than Grappler's lists; Grappler allows the others
# in bfloat16 only.
_FLOAT16_ALLOW_ADDED = op_types("Conv FusedPadConv2D FusedResizeAndPadConv2D")
# It has no float16 kernel for CPUs, which excludes "auto".
_FLOAT16_ALLOW_ADDED_ON_GPU = frozenset({"BatchMatMulV3"})
# Float32 only: converting them makes an invalid graph.
_FLOAT16_ALLOW_DROPPED = frozenset({"GRUBlockCell", "GRUBlockCellGrad"})

# Two are newer than Grappler's lists. Those for bfloat16 are of CPUs; on GPUs cuDNN's have
# kernels.
_BFLOAT16_ALLOW_ADDED = op_sets.CUDNN_RNN | {"BatchMatMulV3", "Conv"}
# bfloat16 has float32's range, so that low precision only rounds these: by about eps for a
# power, 2 eps for the gradient of rsqrt. A denied op keeps everything behind it in float32,
# such as the gradients of tanh-GELU and of a squared loss; an unlisted op also blocks its
# neighbours, such as the gradient of layer normalization.
_BFLOAT16_INFER_ADDED = frozenset({"Pow", "RsqrtGrad"})
# Its results are float32, and XLA does not compile the gradients that a Cast behind it has.
_BFLOAT16_CLEAR_DROPPED = frozenset({"ResizeBilinear"})
# Loop variables may be low, together with the body. Grappler's bfloat16 list has loops, but
# leaves their bodies float32. Not conditionals: a branch may return its argument as it is.
_CLEAR_ADDED = LOOPS

# Ops that need inputs of one dtype, whichever list they are on.
_SAME_DTYPE = op_sets.JOINING | op_sets.FLOAT16_ALLOW | op_sets.BFLOAT16_ALLOW
_FLOAT32 = op_sets.PRECISE | op_sets.FLOAT32_KERNELS


@dataclass(frozen=True, kw_only=True, repr=False)
class OpLists(OpColors):
    """Which TensorFlow ops may run in the low precision: four lists of op types.

    An op type is the name in a graph, such as "MatMul" or "AddV2". An op on no list stays as it
    is. Lists are values: they cannot be changed, can be hashed, and equal others with the same
    contents. Start from `OpLists.default` or `OpLists.grappler` and go on with `with_changes`.

    Args:
        allow: Ops that are fast and safe in the low precision; always converted.
        infer: Ops that are safe unless what they are computed from came out of a denied op.
        deny: Ops that need float32, and whose results need it downstream as well.
        clear: Ops that do not compute, such as a reshape; converted between converted ops.
        as_given: Ops that autocast computes in the dtype of their inputs, and in float32
            without this entry. `with_changes` maintains it.
        exact_statistics: Whether a rewrite computes normalizations in float32, from low inputs,
            whatever lists their ops are on: the mean, the variance, its root, and the
            normalized data. They are found by structure, see `planning/exact_values.py`.
            `default` has it, `grappler` has not.

    Raises:
        TypeError: An argument is not a collection of strings, or `exact_statistics` is not a
            bool.
        ValueError: An op is on two lists, or is in `as_given` and on `allow` or `deny`.

    Example:
        >>> lists = OpLists.default("float16").with_changes(allow_add=["Tanh"])
        >>> lists.color("Tanh"), lists.color("MatMul"), lists.color("Sum")
        ('allow', 'allow', 'deny')
        >>> OpLists.default("float16").color("Tanh")
        'infer'
    """

    allow: frozenset[str] = frozenset()
    infer: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()
    clear: frozenset[str] = frozenset()
    as_given: frozenset[str] = frozenset()
    exact_statistics: bool = False

    def __post_init__(self) -> None:
        # The dataclass is frozen for its users; this is where its values are made.
        for name in _OP_SETS:
            object.__setattr__(self, name, frozenset(strings(name, getattr(self, name))))
        if not isinstance(self.exact_statistics, bool):
            got = self.exact_statistics
            raise TypeError(f"exact_statistics must be True or False; got {got!r}.")
        _refuse_op_on_two_lists({color: getattr(self, color) for color in COLORS})
        if fixed := sorted(self.as_given & (self.allow | self.deny)):
            raise ValueError(
                f"as_given must hold no op that is on allow or deny; got {fixed[0]!r}, which "
                f"is on {self.color(fixed[0])}. Put it on infer or clear, or leave it out of "
                "as_given."
            )

    def __repr__(self) -> str:
        sizes = (f"{name}: {len(getattr(self, name))}" for name in _OP_SETS)
        exact = "; exact statistics" if self.exact_statistics else ""
        return f"<OpLists, numbers of ops: {', '.join(sizes)}{exact}>"

    @staticmethod
    def default(dtype: LowDtype, device: Device = "auto") -> OpLists:
        """Returns tfamp's lists: Grappler's, plus missing ops, minus ops without kernels.

        Args:
            dtype: "float16" or "bfloat16".
            device: Kind of device the ops run on: "cpu", "gpu" or "tpu". With "auto" no allowed
                op lacks a kernel, whichever device TensorFlow places it on.

        Returns:
            The lists; the same object for the same arguments.

        Raises:
            ValueError: `dtype` or `device` is none of these names.

        Example:
            >>> OpLists.default("bfloat16").color("Exp")
            'deny'
        """
        checked_word("dtype", dtype, LOW_PRECISION, exact=True)
        checked_word("device", device, DEVICES, exact=True)
        return default_lists(dtype, device)

    @staticmethod
    def grappler(dtype: LowDtype) -> OpLists:
        """Returns the lists of TensorFlow's own pass, as they are.

        The float16 lists are for current GPUs and the bfloat16 lists for CPUs, the only devices
        that Grappler converts to these dtypes by default.

        Args:
            dtype: "float16" or "bfloat16".

        Returns:
            The lists; the same object for the same argument.

        Raises:
            ValueError: `dtype` is neither.

        Example:
            >>> OpLists.grappler("float16").color("FusedBatchNormV3")
            'infer'
        """
        return _grappler_lists(checked_word("dtype", dtype, LOW_PRECISION, exact=True))

    @property
    def low(self) -> frozenset[str]:
        """Ops that autocast computes in low precision: their float32 inputs are cast down."""
        return self.allow

    @functools.cached_property
    def float32(self) -> frozenset[str]:
        """Ops that autocast computes in float32: their low-precision inputs are cast up.

        The denied ones, and those that round or overflow badly, or have no kernel, in the low
        precision, unless `with_changes` put them on another list.
        """
        return self.deny | (_FLOAT32 - self.allow - self.as_given)

    @functools.cached_property
    def widest(self) -> frozenset[str]:
        """Ops that autocast gives the widest of their inputs' float dtypes, if these differ."""
        return _SAME_DTYPE - self.low - self.float32

    def color(self, op: str) -> Color | None:
        """Returns the list an op is on.

        Args:
            op: An op type.

        Returns:
            "allow", "infer", "deny" or "clear", or None if it is on no list.

        Example:
            >>> OpLists.default("float16").color("Reshape")
            'clear'
        """
        return next((color for color in COLORS if op in getattr(self, color)), None)

    def with_changes(
        self,
        *,
        allow_add: Iterable[str] = (),
        allow_remove: Iterable[str] = (),
        infer_add: Iterable[str] = (),
        infer_remove: Iterable[str] = (),
        deny_add: Iterable[str] = (),
        deny_remove: Iterable[str] = (),
        clear_add: Iterable[str] = (),
        clear_remove: Iterable[str] = (),
        exact_statistics: bool | None = None,
    ) -> OpLists:
        """Returns lists with ops added, moved or removed; these lists stay as they are.

        Adding an op to a list takes it off the list that held it. Under autocast, an op put on
        `infer` or `clear`, or taken off `deny`, is computed in the dtype it is given.

        Args:
            allow_add: Op types to put on `allow`.
            allow_remove: Op types to take off `allow`; they are on no list then.
            infer_add: Op types to put on `infer`.
            infer_remove: Op types to take off `infer`.
            deny_add: Op types to put on `deny`.
            deny_remove: Op types to take off `deny`.
            clear_add: Op types to put on `clear`.
            clear_remove: Op types to take off `clear`.
            exact_statistics: Whether normalizations stay float32; None for what these lists
                say.

        Returns:
            The new lists.

        Raises:
            TypeError: An argument is not a collection of strings, or `exact_statistics` is not
                a bool.
            ValueError: TensorFlow does not know an op, an op is added to two lists, added to
                and removed from the same one, or removed from a list it is not on.

        Example:
            >>> lists = OpLists.default("bfloat16").with_changes(deny_add=["Softmax"])
            >>> lists.color("Softmax"), "Softmax" in lists.infer
            ('deny', False)
        """
        added = _op_sets("add", allow_add, infer_add, deny_add, clear_add)
        removed = _op_sets("remove", allow_remove, infer_remove, deny_remove, clear_remove)
        _refuse_op_on_two_lists(added)
        added_ops = frozenset[str]().union(*added.values())
        touched = added_ops.union(*removed.values())
        self._refuse_unknown(touched)
        for color in COLORS:
            name = f"{color}_remove"
            both = {f"{color}_add": added[f"{color}_add"], name: removed[name]}
            _refuse_op_on_two_lists(both)
            for op in sorted(removed[name] - getattr(self, color)):
                raise ValueError(
                    f"{name} must hold ops that are on {color}; got {op!r}, but it is on "
                    f"{self.color(op) or 'no list'}."
                )
        freed = added["infer_add"] | added["clear_add"] | (removed["deny_remove"] - added_ops)
        exact = self.exact_statistics if exact_statistics is None else exact_statistics
        colors = {
            color: (getattr(self, color) - touched) | added[f"{color}_add"] for color in COLORS
        }
        return OpLists(
            **colors,
            as_given=(self.as_given - touched) | freed,
            exact_statistics=exact,
        )

    def _refuse_unknown(self, ops: frozenset[str]) -> None:
        # What is on a list already need not be known: Grappler names ops of other libraries.
        for op in sorted(ops - self.allow - self.infer - self.deny - self.clear):
            from tfamp.interop import tf_private  # Late: lists alone need no framework.

            if tf_private.op_definition(op) is None:
                near = nearest(op.rpartition(".")[2].replace("_", ""), tf_private.known_ops())
                raise ValueError(
                    f"TensorFlow knows no op {op!r}; the nearest name is {near!r}. Give op "
                    "types as in a graph; an op of a library of yours is known once "
                    "tf.load_op_library has loaded it."
                )


_Changes = Mapping[str, frozenset[str]]


@functools.cache
def _grappler_lists(dtype: str) -> OpLists:
    names = {color: f"{dtype}_{color}".upper() for color in COLORS}
    return OpLists(**{color: getattr(op_sets, name) for color, name in names.items()})


@functools.cache
def default_lists(dtype: str, device: str) -> OpLists:
    """Returns tfamp's lists for names that were checked."""
    lists = _grappler_lists(dtype)
    lists = dataclasses.replace(
        lists,
        clear=lists.clear | _CLEAR_ADDED,
        exact_statistics=True,
    )
    if dtype == "bfloat16":
        return dataclasses.replace(
            lists,
            allow=lists.allow | _BFLOAT16_ALLOW_ADDED,
            infer=lists.infer | _BFLOAT16_INFER_ADDED,
            deny=lists.deny - _BFLOAT16_INFER_ADDED,
            clear=lists.clear - _BFLOAT16_CLEAR_DROPPED,
        )
    allow = lists.allow - op_sets.EXTERNAL - _FLOAT16_ALLOW_DROPPED | _FLOAT16_ALLOW_ADDED
    # Grappler infers squares in float16 on CPUs; the square of 256 is inf in float16.
    on_gpu = _FLOAT16_ALLOW_ADDED_ON_GPU if device == "gpu" else frozenset()
    return dataclasses.replace(lists, allow=allow | on_gpu)


def _op_sets(change: str, *changes: Iterable[str]) -> _Changes:
    names = (f"{color}_{change}" for color in COLORS)
    pairs = zip(names, changes, strict=True)
    return {name: frozenset(strings(name, ops)) for name, ops in pairs}


def _refuse_op_on_two_lists(lists: _Changes) -> None:
    for (one, held), (other, ops) in itertools.combinations(lists.items(), 2):
        if both := sorted(held & ops):
            raise ValueError(
                f"an op must be on one list at most; got {both[0]!r} in both {one} and "
                f"{other}. Keep it in one of them."
            )
