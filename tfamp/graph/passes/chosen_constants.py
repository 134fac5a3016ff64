"""Constants that Selects choose stay finite.

softmax(where(mask, logits, -2e38)): float32's softmax gives a row that is masked as a whole equal
weights. Cast to float16, the constant is -inf, and that row NaN.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfamp.graph.editor import control_inputs_of, renamed_output
from tfamp.graph.functions import bodies, respell
from tfamp.graph.index import largest_finite
from tfamp.graph.passes.frozen_casts import stored_as
from tfamp.planning.exact_values import CHOICES
from tfamp.planning.structures import RewritePlan


def keep_choices_finite(graph_def: Any, plan: RewritePlan) -> None:
    """Ends constants at the largest value of the dtype they are cast to for a choice, in place.

    Only for ops that hand them on as they are or compare them, which then take a constant of the
    dtype and no Cast: in arithmetic, infinity is an error that shows, and another value one that
    does not.
    """
    limit = float(tf.as_dtype(plan.dtype).max)
    changes = {scope.scope: scope.casts for scope in plan.scopes if scope.casts}
    for scope, nodes, function in bodies(graph_def):
        by_name = {node.name: node for node in nodes} if scope in changes else {}
        ended = []
        for cast in changes.get(scope, ()):
            constant = by_name.get(cast.producer)
            if constant is None or constant.op != "Const":
                continue
            users = [by_name.get(consumer) for consumer, _ in cast.consumers]
            chosen = all(user is not None and user.op in CHOICES for user in users)
            if chosen and largest_finite(constant.attr["value"].tensor) > limit:
                stored_as(constant, [by_name[cast.name]], limit)
                by_name[cast.name].input.extend(control_inputs_of(constant))
                ended.append(cast.name)
        if function is not None:
            respell(
                function,
                renamed_output(ended, "y", "output"),
            )
