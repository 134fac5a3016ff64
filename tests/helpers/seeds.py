"""Random numbers that are the same each time, whatever the release of Keras."""

from __future__ import annotations

import keras
from keras.src.backend.common import global_state


def set_random_seed(seed):
    """`keras.utils.set_random_seed`, after which Keras 3.12 goes on with its generator."""
    keras.utils.set_random_seed(seed)
    global_state.set_global_attribute("global_seed_generator", None)
