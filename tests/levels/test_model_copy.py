"""Models made anew with low weights: what hangs on the weights goes with them."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfamp
from helpers.tolerances import tolerance


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("arguments", [{"level": "O3"}, {"level": "O2", "master_weights": True}])
def test_regularizers_of_low_weights_compute_in_float32(arguments, dtype):
    keras.utils.set_random_seed(0)
    regularized = keras.layers.Dense(8, kernel_regularizer="l2", activation="relu")
    model = keras.Sequential([keras.Input((4,)), regularized, keras.layers.Dense(2)])
    # The sum of its squares is 320,000, which float16 cannot hold.
    model.layers[0].kernel.assign(keras.ops.full((4, 8), 100.0))
    model.compile(keras.optimizers.SGD(1e-6), "mse")
    x = np.ones((8, 4), "float32") / 100
    expected = model.evaluate(x, x[:, :2], verbose=0)
    made, _ = tfamp.prepare(model, dtype=dtype, **arguments)
    assert made.layers[0].kernel.dtype == dtype
    np.testing.assert_allclose(
        made.evaluate(x, x[:, :2], verbose=0), expected, rtol=tolerance(dtype)
    )
    history = made.fit(x, x[:, :2], verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert np.isfinite(np.asarray(made.layers[0].kernel, "float32")).all()
    back, _ = tfamp.prepare(made, level="O0")
    assert back.evaluate(x, x[:, :2], verbose=0) == pytest.approx(expected, rel=0.05)
