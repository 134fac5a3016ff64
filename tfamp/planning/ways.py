"""The ways to run a step that `tune` compares: what it computes in, compiled as a whole or not.

facts about device and ops -> the ways to try, a reason for each one left out, the incumbent

Pure: nothing is traced or run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from tfamp.core.options import PLACEMENTS, checked_word
from tfamp.planning.structures import FLOAT32

FUSED: Final = "fused"
# Keras layers with a low policy. Not a placement: the step is not rewritten.
POLICY = "O2"
_XLA = "xla"

# A whole step that has more convolutions per product takes longer compiled by XLA for a CPU,
# whose convolutions are slower than oneDNN's: resnet50 1.5 times as long, unet 1.4. A vision
# transformer, with one in its patches, takes 1.2 times less, and so do convolutions along one
# axis, of sequences: 1.05 and 1.4 times on two CPUs. See docs/benchmarks.md.
_MOST_CONVOLUTIONS = 1 / 8
# For a CPU XLA takes about a millisecond to compile an op: on two cores a first call took 3 s
# longer than without XLA for the 2,576 ops of BERT's train step, and for the 2,410 of another
# transformer's.
_SECONDS_PER_OP = 1.5e-3
_PRODUCTS = ("MatMul", "BatchMatMul", "Einsum")
_LOOPS = ("While", "StatelessWhile")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a step.

    Attributes:
        placement: "float32", "O2", or a placement of `tfamp.rewrite`.
        is_compiled: Whether XLA compiles the step as a whole.

    Example:
        >>> Way("float32", is_compiled=True).name, Way("min_cut").name
        ('xla', 'min_cut')
    """

    placement: str
    is_compiled: bool = False

    @property
    def name(self) -> str:
        """Its name in arguments and reports."""
        if not self.is_compiled:
            return self.placement
        return _XLA if self.placement == FLOAT32 else f"{self.placement}_{_XLA}"


# What nothing else is chosen over without a gain: the function as it is written.
AS_IT_IS = Way(FLOAT32)
# "fused" has parts of the step compiled, which the whole includes.
_COMPILED = tuple(Way(name, True) for name in (FLOAT32, *PLACEMENTS) if name != FUSED)
_WAYS = {way.name: way for way in (*map(Way, (FLOAT32, "lists", "min_cut", FUSED)), *_COMPILED)}
WAY_NAMES = tuple(_WAYS)


def way_named(name: str) -> Way:
    """Returns the way of a name in a report."""
    policies = {way.name: way for way in (Way(POLICY), Way(POLICY, True))}
    return (_WAYS | policies)[name]


def ways_of(names: Iterable[str]) -> tuple[Way, ...]:
    """Returns the ways of these names, float32 first, each once.

    Raises:
        TypeError, ValueError: A name is not the name of a way; the message lists these.
    """
    unique = dict.fromkeys((FLOAT32, *names))
    return tuple(_WAYS[checked_word("candidates", name, WAY_NAMES, exact=True)] for name in unique)


def usual_ways(device: str) -> tuple[Way, ...]:
    """The ways to compare on a kind of device unless others are given.

    XLA for CPUs computes in float32 and rounds after every op, so that low precision only costs
    time there.
    """
    compiled = (way for way in _COMPILED if device != "cpu" or way.placement == FLOAT32)
    return tuple(way for way in _WAYS.values() if not way.is_compiled) + tuple(compiled)


def why_not_here(way: Way, *, xla_works: bool, why_not_compiled: str) -> str:
    """Why a way cannot be tried on a machine; "" if it can.

    `why_not_compiled` is why the function is not to be compiled, "" if it may be.
    """
    if not xla_works and (way.is_compiled or way.placement == FUSED):
        return "XLA does not work here"
    return why_not_compiled if way.is_compiled else ""


def why_not_worth_it(
    way: Way, device: str, ops: Mapping[str, int], seconds: float, along_one_axis: int = 0
) -> str:
    """Why measuring a compiled way would be a waste of time; "" if it may be the fastest.

    On accelerators compiled steps lead, so all are tried.

    Args:
        way: The way.
        device: Kind of the device.
        ops: Number of ops of each type in the float32 graph.
        seconds: How long measuring may take.
        along_one_axis: Number of convolutions among the ops whose filters have one axis.

    Example:
        >>> ops = {"Conv2D": 20, "Conv2DBackpropFilter": 20, "MatMul": 3}
        >>> why_not_worth_it(Way("float32", is_compiled=True), "cpu", ops, 10.0)
        '40 convolutions, which XLA makes slower on a CPU'
    """
    if not way.is_compiled or device != "cpu":
        return ""
    convolutions = sum(count for op, count in ops.items() if "Conv" in op) - along_one_axis
    products = sum(count for op, count in ops.items() if op.startswith(_PRODUCTS))
    if convolutions > _MOST_CONVOLUTIONS * products:
        return f"{convolutions} convolutions, which XLA makes slower on a CPU"
    if loops := sum(ops.get(op, 0) for op in _LOOPS):
        return f"{loops} loops, which XLA makes slower on a CPU"
    expected = _SECONDS_PER_OP * sum(ops.values())
    if expected > seconds:
        return f"XLA would compile for about {expected:.0f} s"
    return ""


def incumbent_of(ways: Iterable[Way], *, is_native: bool, device: str) -> Way:
    """The way that level "auto" takes without a measurement, or else float32.

    Args:
        ways: The ways to compare.
        is_native: Whether the device multiplies the low dtype natively.
        device: Kind of the device. On accelerators `fit` compiles.

    Example:
        >>> ways = usual_ways("cpu")
        >>> [incumbent_of(ways, is_native=n, device="cpu").name for n in (True, False)]
        ['fused', 'float32']
    """
    there = tuple(ways)
    low: tuple[Way, ...] = (Way(FUSED), Way("min_cut"))
    if device != "cpu":
        low = (Way(POLICY, True), Way(POLICY), Way("min_cut", True), *low)
    floats = (Way(FLOAT32),) if device == "cpu" else (Way(FLOAT32, True), Way(FLOAT32))
    preferred = (*(low if is_native else ()), *floats)
    return next((way for way in preferred if way in there), AS_IT_IS)
