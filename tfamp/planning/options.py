"""How to rewrite graphs, as one value that is checked where it is made; framework-free."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.options import PLACEMENTS
from tfamp.core.profile import MachineProfile
from tfamp.planning import grappler_lists
from tfamp.planning.coloring import Updates
from tfamp.planning.ranges import Limits, Ranges
from tfamp.planning.structures import FLOAT32

Color = Literal["allow", "infer", "deny", "clear"]

COLORS: tuple[Color, ...] = ("allow", "infer", "deny", "clear")
DEVICES = ("auto", "cpu", "gpu", "tpu")
_ON_ERROR = ("raise", "keep")
# Ops that accept float32 only, with the successors that do the same and also take low precision.
# The successors keep the statistics in float32.
SUCCESSORS = {
    "FusedBatchNorm": "FusedBatchNormV2",
    "FusedBatchNormGrad": "FusedBatchNormGradV2",
}


class OpColors:
    """The part of `tfamp.OpLists` that decides about graphs; its changes need TensorFlow."""

    allow: frozenset[str]
    infer: frozenset[str]
    deny: frozenset[str]
    clear: frozenset[str]
    exact_statistics: bool


@dataclass(frozen=True)
class RewriteOptions:
    """How to rewrite graphs: the arguments of `tfamp.rewrite`, with the defaults it has.

    What is left open (`op_lists`, `device` and `profile`) depends on the machine;
    `tfamp.graph.rewrite.resolved` fills it in.

    Attributes:
        dtype: The low dtype; "float32" where nothing is to be converted.
        op_lists: Which ops may be low; tfamp's own for the device if None.
        keep_float32: Patterns of names of nodes that stay float32.
        force_low: Patterns of names of nodes that are converted whatever the lists say.
        calibration: A `tfamp.graph.Calibration`, or None.
        placement: "min_cut", "lists" or "fused".
        device: Kind of device of nodes that are pinned to none.
        profile: How fast the machine is; "builtin" for fixed figures, None for this machine's.
        on_error: "raise" or "keep".
        may_miss: Patterns that need not match a node, nor change one.

    Raises:
        TypeError, ValueError: A value is wrong; the message names what is allowed.

    Example:
        >>> RewriteOptions("bfloat16", keep_float32=["head/"]).keep_float32
        ('head/',)
    """

    dtype: str = FLOAT32
    op_lists: OpColors | None = None
    keep_float32: Iterable[str] = ()
    force_low: Iterable[str] = ()
    calibration: Any = None
    placement: str = "min_cut"
    device: str = "auto"
    profile: MachineProfile | str | None = None
    on_error: str = "raise"
    may_miss: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype != FLOAT32:
            check_choice("dtype", self.dtype, LOW_PRECISION)
        check_choice("on_error", self.on_error, _ON_ERROR)
        check_choice("device", self.device, DEVICES)
        _check_placement(self.placement)
        _check_lists(self.op_lists)
        _check_profile(self.profile)
        for name in ("keep_float32", "force_low"):
            # The dataclass is frozen for its users; this is where its values are made.
            object.__setattr__(self, name, strings(name, getattr(self, name)))
        self.patterns  # noqa: B018 -- It raises for what is not a regular expression.

    @functools.cached_property
    def patterns(self) -> Mapping[str, tuple[re.Pattern[str], ...]]:
        """The regular expressions in `keep_float32` and `force_low`, compiled."""
        given = {"keep_float32": self.keep_float32, "force_low": self.force_low}
        return {name: tuple(_compiled(name, each) for each in given[name]) for name in given}

    @functools.cached_property
    def colors(self) -> Mapping[str, Color]:
        """Colour of every op type that is on a list, or whose successor is; needs `op_lists`."""
        colors = {op: color for color in COLORS for op in getattr(self.op_lists, color)}
        successors = {op: colors[new] for op, new in SUCCESSORS.items() if new in colors}
        return successors | colors

    @functools.cached_property
    def updates(self) -> Updates:
        """How far arithmetic on gradients, on its way to variables, may be low; needs `op_lists`.

        Only Grappler's own lists, unchanged, give Grappler's result. Elsewhere optimizers compute
        in float32: with bfloat16 from the last reduction on, as it has float32's range; with
        float16 from the start, as squares of gradients, and gradients whose loss scale is taken
        off, vanish.
        """
        theirs = (getattr(grappler_lists, f"{self.dtype}_{color}".upper()) for color in COLORS)
        if not self.exact_statistics and all(
            getattr(self.op_lists, color) == ops for color, ops in zip(COLORS, theirs, strict=True)
        ):
            return "low"
        return "reduced" if self.dtype == "bfloat16" else "float32"

    @property
    def exact_statistics(self) -> bool:
        """Whether normalizations stay float32, unless they are forced low; needs `op_lists`."""
        return cast(OpColors, self.op_lists).exact_statistics

    @property
    def machine(self) -> MachineProfile:
        """The profile, once `resolved` has filled it in."""
        return cast(MachineProfile, self.profile)

    def keeping(self, more: Iterable[str]) -> RewriteOptions:
        """Returns the options with more patterns of nodes that stay float32 and may match none."""
        more = tuple(more)
        return dataclasses.replace(
            self, keep_float32=(*self.keep_float32, *more), may_miss=(*self.may_miss, *more)
        )

    def for_gradients(self) -> RewriteOptions:
        """Returns the options for custom gradients, where no pattern need match a node."""
        every = (*self.keep_float32, *self.force_low)
        return dataclasses.replace(self, may_miss=every, calibration=None)


@dataclass(frozen=True)
class GraphUse:
    """The tensors of one graph that are used, and what was measured on it.

    Attributes:
        fetches: Names of tensors or operations whose results are used.
        feeds: Names of tensors that are given a value.
        ranges: What was measured, if anything was.
        limits: From where on measured values need float32, unless the caller forces them low.

    Raises:
        TypeError: `fetches` or `feeds` is a string, or holds something else.
    """

    fetches: Iterable[str]
    feeds: Iterable[str] = ()
    ranges: Ranges | None = None
    limits: Limits | None = None

    def __post_init__(self) -> None:
        for name in ("fetches", "feeds"):
            object.__setattr__(self, name, strings(name, getattr(self, name)))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all fetches and feeds."""
        return (*self.fetches, *self.feeds)


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raises a ValueError that names the allowed values unless `value` is one."""
    # Not "in allowed" alone: tf.float16 equals "float16" without being a string.
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.")


def strings(argument: str, names: Iterable[str]) -> tuple[str, ...]:
    """Returns an argument that holds names, which must not be a single string."""
    if isinstance(names, str):
        raise TypeError(f"{argument} must be a collection of strings; got the string {names!r}.")
    result = tuple(names)
    for name in result:
        if not isinstance(name, str):
            raise TypeError(f"{argument} must hold strings; got {name!r}.")
    return result


def _compiled(argument: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"{argument} must hold regular expressions; got {pattern!r}: {error}."
        ) from error


def _check_placement(value: str) -> None:
    try:
        check_choice("placement", value, PLACEMENTS)
    except ValueError as error:
        raise ValueError(f"{error} To measure which is the fastest, use tfamp.tune.") from None


def _check_lists(op_lists: Any) -> None:
    if op_lists is not None and not isinstance(op_lists, OpColors):
        raise TypeError(
            f"op_lists must be a tfamp.OpLists or None; got {type(op_lists).__name__}. Start from "
            "OpLists.default(dtype).with_changes(...)."
        )


def _check_profile(profile: Any) -> None:
    if profile is None or profile == "builtin" or isinstance(profile, MachineProfile):
        return
    is_text = isinstance(profile, str)
    got = repr(profile) if is_text else type(profile).__name__
    raise (ValueError if is_text else TypeError)(
        f'profile must be a tfamp.graph.MachineProfile or None; got {got}. "builtin" stands for '
        "fixed figures; a file's is MachineProfile.from_json(text)."
    )
