"""The share of updates of weights that rounding loses, as a `NumericsMonitor` records it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import one_in
from helpers.training import BATCH
from tfamp.diagnostics import NumericsMonitor

SPACINGS = {"float16": (2.0**-10, 2.0**-14), "bfloat16": (2.0**-7, 2.0**-126)}
WAYS = {
    "float32": {},
    "masters": {"master_weights": True},
    "to nearest": {"master_weights": False},
    "stochastic": {"weight_rounding": "stochastic"},
    "split": {"weight_rounding": "split"},
}


class Values(keras.callbacks.Callback):
    """Keeps what is known of the weights behind every step."""

    def __init__(self, exact):
        super().__init__()
        self.exact, self.seen = exact, []

    def on_train_batch_end(self, batch, logs=None):
        variables = self.model.trainable_variables
        values = self.model.optimizer.stored_weights.exact_values(variables)
        values = values if self.exact else variables
        self.seen.append([np.array(tf.cast(value, tf.float32)) for value in values])


def made(way):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(16, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    level = {"level": "O0"} if way == "float32" else {"level": "O3", "dtype": "bfloat16"}
    sgd = keras.optimizers.SGD(2e-3)
    model, prepared = tfamp.prepare(model, sgd, loss_scale=1.0, **level, **WAYS[way])
    model.compile(prepared, "mse", jit_compile=way == "split", auto_scale_loss=False)
    return model


def batches(number):
    x = np.random.default_rng(0).standard_normal((number * BATCH, 8)).astype("float32")
    return x, x[:, :1]


def shares(before, after, dtype):
    """The share of updates under half the distance to the next number."""
    eps, tiny = SPACINGS[dtype]
    spacing = 2.0 ** np.floor(np.log2(np.maximum(np.abs(before), tiny))) * eps
    update = np.abs(after - before)
    moved = update > 0
    return (moved & (update < spacing / 2)).sum() / moved.sum()


@pytest.mark.parametrize("way", one_in(2, WAYS))
def test_the_share_of_lost_updates_is_in_records_and_logs(way):
    model, monitor = made(way), NumericsMonitor(every=2)
    exact = way not in ("to nearest", "stochastic")
    values = Values(exact)
    history = model.fit(
        *batches(4), batch_size=BATCH, epochs=1, verbose=0, shuffle=False,
        callbacks=[monitor, values],
    )  # fmt: skip
    assert [record["lost_updates"]["step"] for record in monitor.history] == [2, 4]
    record = monitor.history[1]
    before, after = (np.concatenate([each.ravel() for each in step]) for step in values.seen[2:])
    lost = {name: share for name, share in record["lost_updates"].items() if name != "step"}
    if exact:
        assert lost == {d: pytest.approx(shares(before, after, d)) for d in SPACINGS}
        assert 0.05 < lost["bfloat16"] < 1
        assert lost["float16"] < lost["bfloat16"]
    else:
        assert lost == {"bfloat16": pytest.approx((before == after).mean())}
        assert 0.05 < lost["bfloat16"] < 1
    kernel = model.trainable_variables[0].path
    own = record["variables"][kernel]["lost_updates"]
    assert set(own) == set(lost)
    assert history.history["lost_updates_bfloat16"] == [lost["bfloat16"]]
    assert np.isnan(history.history["lost_updates_float16"]) != exact
    sentence = f"loses, at step 4: {', '.join(f'{lost[d]:.1%} in {d}' for d in lost)}"
    assert sentence in monitor.to_text()


def test_a_skipped_step_and_steps_executed_together_have_no_share():
    model, monitor = made("to nearest"), NumericsMonitor(every=2)
    x, y = batches(4)
    x[BATCH : 2 * BATCH] = np.inf
    model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False, callbacks=[monitor])
    assert [record["skipped"] for record in monitor.history] == [[2], []]
    assert monitor.history[0]["lost_updates"] is None
    assert monitor.history[1]["lost_updates"]["step"] == 4
    model.compile(model.optimizer, "mse", steps_per_execution=2, auto_scale_loss=False)
    model.fit(*batches(2), batch_size=BATCH, verbose=0, callbacks=[again := NumericsMonitor(2)])
    assert again.history[-1]["lost_updates"] is None
    assert "rounding to nearest" not in again.to_text()


@pytest.mark.parametrize("eager", [True, False])
def test_custom_loops_are_looked_at_from_outside(eager):
    weight = keras.Variable([1.0, 1.0, 1.0, 1.0])
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(1.0), loss_scale=1.0)
    optimizer.build([weight])
    monitor = NumericsMonitor(every=3)

    def step(gradient):
        monitor.record([gradient], [weight], optimizer=optimizer)
        optimizer.apply([gradient], [weight])

    # Under half of bfloat16's spacing, of float16's too, zero, and neither.
    gradient = tf.constant([2.0**-10, 2.0**-13, 0.0, 2.0**-3])
    run = step if eager else tf.function(step)
    for _ in range(3):
        run(gradient)
        if not eager:
            monitor.advance()
    (record,) = monitor.history
    assert record["lost_updates"]["step"] == (2 if eager else 3)
    assert record["lost_updates"]["float16"] == pytest.approx(1 / 3)
    assert record["lost_updates"]["bfloat16"] == pytest.approx(2 / 3)
