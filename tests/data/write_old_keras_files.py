"""Writes a compiled, trained model with the Keras that is installed: tests/data/keras-<x.y>.keras.

    python -m venv old && old/bin/pip install keras==3.3.3 tensorflow-cpu==2.16.2
    old/bin/python tests/data/write_old_keras_files.py

once for each release of Keras, in an environment of its own; tfamp is not needed. The tests read
the files with the Keras of today: tests/test_optimizer_old_keras.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np


def main() -> int:
    """Writes the file."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype="float32")])
    inner = keras.optimizers.Adam(0.01, clipnorm=1.0, use_ema=True, ema_momentum=0.9)
    optimizer = keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=2.0**12, dynamic_growth_steps=3
    )
    model.compile(optimizer, "mse", jit_compile=False)
    x = np.linspace(-1, 1, 30, dtype="float32").reshape(10, 3)
    x[2] = np.inf  # The second step is skipped, the scale halved.
    model.fit(x, x[:, :2].clip(-1, 1), batch_size=2, shuffle=False, verbose=0)
    release = ".".join(keras.__version__.split(".")[:2])
    path = Path(__file__).parent / f"keras-{release}.keras"
    model.save(path)
    sys.stdout.write(f"Keras {keras.__version__}: {path.name}, {path.stat().st_size} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
