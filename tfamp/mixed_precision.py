"""The names of `tf.keras.mixed_precision`, for code written for it to run on Keras 3.

    from tfamp import mixed_precision      # was: from tensorflow.keras import mixed_precision

Example:
    >>> from tfamp import mixed_precision
    >>> mixed_precision.Policy("mixed_float16").compute_dtype
    'float16'
"""

from tfamp.layers.policy_in_force import global_policy as global_policy
from tfamp.layers.policy_in_force import set_global_policy as set_global_policy
from tfamp.optimizer import LossScaleOptimizer as LossScaleOptimizer
from tfamp.policy import Policy as Policy

__all__ = ["LossScaleOptimizer", "Policy", "global_policy", "set_global_policy"]
