"""Mixed precision of whole graphs, and the op lists that both the graph and autocast go by.

Importing this module loads nothing else: every public name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfamp import lazy_names

if TYPE_CHECKING:
    from tfamp.core.profile import MachineProfile as MachineProfile
    from tfamp.graph.calibration import Calibration as Calibration
    from tfamp.graph.op_lists import OpLists as OpLists
    from tfamp.graph.rewrite import rewrite_graph_def as rewrite_graph_def
    from tfamp.planning.structures import RewritePlan as RewritePlan
    from tfamp.planning.structures import RewriteResult as RewriteResult

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".calibration": ("Calibration",),
        ".op_lists": ("OpLists",),
        ".rewrite": ("rewrite_graph_def",),
        "tfamp.core.profile": ("MachineProfile",),
        "tfamp.planning.structures": ("RewritePlan", "RewriteResult"),
    },
)
