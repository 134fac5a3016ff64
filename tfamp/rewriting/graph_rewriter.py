"""How graphs are rewritten: what `tfamp.rewrite` was told, for every trace."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfamp.core.errors import NothingToLowerWarning
from tfamp.core.profile import MachineProfile
from tfamp.graph import request
from tfamp.graph.calibration import Calibration
from tfamp.graph.op_lists import OpLists
from tfamp.graph.rewrite import rewrite_graph_def
from tfamp.machine.profile_choice import check_profile, resolve_profile
from tfamp.planning.ranges import Ranges
from tfamp.planning.structures import RewritePlan

_ON_ERROR = ("raise", "keep")


@dataclass(frozen=True)
class RewriteSettings:
    """How to rewrite a graph; see `rewrite`.

    A pattern that matches no node is an error, unless `patterns_may_miss`.
    """

    dtype: str | None
    op_lists: OpLists | None
    keep_float32: tuple[str, ...]
    force_low: tuple[str, ...]
    calibration: Calibration | None
    placement: str
    profile: MachineProfile | str | None
    on_error: str
    cache_weights: bool = False
    patterns_may_miss: bool = False

    def __post_init__(self) -> None:
        request.check_choice("on_error", self.on_error, _ON_ERROR)
        request.check_choice("placement", self.placement, request.PLACEMENTS)
        request.check_lists(self.op_lists)
        check_profile(self.profile)
        request.patterns("keep_float32", self.keep_float32)
        request.patterns("force_low", self.force_low)


@dataclass(frozen=True)
class GraphRewriter:
    """Rewrites a graph and keeps the plan.

    Attributes:
        settings: How.
        measure: Measures the values in a graph on the data of a calibration.
        cached: Tells the names of handles of variables of which low-precision copies are kept.
        plans: The plans made.
    """

    settings: RewriteSettings
    measure: Callable[[Any, Calibration], Ranges] | None = None
    cached: Callable[[Any], Collection[str]] | None = None
    plans: list[RewritePlan] = field(default_factory=list)

    def __call__(self, graph_def: Any, fetches: Sequence[str], feeds: Sequence[str]) -> Any:
        """Returns a graph rewritten as the settings say; in float32 where they name no dtype."""
        settings, dtype = self.settings, self.settings.dtype
        if dtype is None:
            return graph_def
        if settings.patterns_may_miss:
            settings = dataclasses.replace(
                settings,
                keep_float32=request.matching_patterns(graph_def, settings.keep_float32),
                force_low=request.matching_patterns(graph_def, settings.force_low),
            )
        calibration, ranges, limits = settings.calibration, None, None
        if calibration is not None and self.measure is not None:
            ranges = self.measure(graph_def, calibration)
            limits = calibration.limits(dtype)
        result = rewrite_graph_def(
            graph_def,
            fetches,
            feeds=feeds,
            dtype=dtype,
            op_lists=settings.op_lists,
            keep_float32=settings.keep_float32,
            force_low=settings.force_low,
            placement=settings.placement,
            profile=resolve_profile(settings.profile, settings.placement),
            ranges=ranges,
            limits=limits,
            cached=self.cached(graph_def) if self.cached is not None else (),
        )
        self.plans.append(result.plan)
        return result.graph_def


def rewrite_gradient(
    settings: RewriteSettings, graph_def: Any, fetches: Sequence[str], feeds: Sequence[str]
) -> Any:
    """Rewrites what a custom gradient does: often nothing, and no pattern need match a node."""
    own = dataclasses.replace(settings, patterns_may_miss=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingToLowerWarning)
        return GraphRewriter(own)(graph_def, fetches, feeds)
