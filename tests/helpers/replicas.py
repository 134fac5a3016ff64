"""Values of which every replica of a strategy gets its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf


def per_replica(strategy: tf.distribute.Strategy, *values: Any) -> Any:
    """The first value for the first replica, and so on."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group])
    )


def halves(strategy: tf.distribute.Strategy, value: Iterable[Any]) -> Any:
    """An array of which each of two replicas gets a half."""
    return per_replica(strategy, *np.split(value, 2))
