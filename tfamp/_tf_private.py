"""Every private TensorFlow symbol tfamp uses, each behind one small typed function.

A symbol that a TensorFlow release removed raises `UnsupportedVersionError` with the version found
and the versions tested. Each function has its own test, so a release that changes one says which.
"""

from __future__ import annotations

import tensorflow as tf

from tfamp.errors import UnsupportedVersionError

TESTED_VERSIONS = "2.19 to 2.21"


def strategy_needs_merge_call() -> bool:
    """Whether the current `tf.distribute` strategy updates variables through `merge_call`.

    Such a strategy (MirroredStrategy on CPUs, for one) forbids a `tf.cond` around an update in
    replica context: the condition has to be taken in cross-replica context.

    Symbol: `tf.__internal__.distribute.strategy_supports_no_merge_call`; Keras calls it for the
    same purpose. No public function tells.

    Returns:
        True inside such a strategy, False without a strategy.
    """
    try:
        supports_none = tf.__internal__.distribute.strategy_supports_no_merge_call
    except AttributeError as error:
        raise UnsupportedVersionError(
            "tf.__internal__.distribute.strategy_supports_no_merge_call is not in TensorFlow "
            f"{tf.__version__}; tfamp was tested with TensorFlow {TESTED_VERSIONS}. Install one of "
            "these, or a newer tfamp."
        ) from error
    return not supports_none()
