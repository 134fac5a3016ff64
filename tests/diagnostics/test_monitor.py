"""`NumericsMonitor`: what it records, wherever it is used, and when it stops training."""

import contextlib
import copy
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import tiers
from helpers.training import (
    BATCH,
    assert_identical,
    assert_same_values,
    data,
    scaled_gradients,
    small_model,
    snapshot,
)
from tfamp.diagnostics import NumericsMonitor


def optimizer(**options):
    return tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.01), **options)


def fit(monitor, model=None, made=None, epochs=1, batches=4, x=None, **compile_options):
    keras.backend.clear_session()
    model = model or small_model()
    model.compile(made or optimizer(), "mse", **compile_options)
    given, y = data(batches)
    x = given if x is None else x
    model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=[monitor])
    return model


def poisoned(batches, first_bad, last_bad=None):
    """Inputs whose batches from `first_bad` to `last_bad`, counted from 1, hold an inf."""
    x, _ = data(batches)
    x = x.copy()
    last_bad = batches if last_bad is None else last_bad
    x[(first_bad - 1) * BATCH : last_bad * BATCH] = np.inf
    return x


@pytest.mark.parametrize(
    "options",
    tiers([{"steps_per_execution": 2}], [{}], [{"run_eagerly": True}, {"jit_compile": True}]),
    ids=lambda options: next(iter(options), "graph"),
)
def test_the_gradients_of_fit_are_counted_and_summed_up(options):
    monitor = NumericsMonitor(every=2)
    assert monitor.to_text() == "no record yet"
    start = small_model()
    model = fit(monitor, batches=1, epochs=4, **options)
    # Training is the same without a monitor.
    bare = fit(keras.callbacks.Callback(), batches=1, epochs=4, **options)
    assert_same_values(snapshot(model), snapshot(bare))
    text = monitor.to_text()
    assert "loss scale 2^15, skipped 0 steps" in text
    assert all(variable.path in text for variable in model.trainable_variables)
    assert "suggested loss scale: 2^" in text
    assert [record["step"] for record in monitor.history] == [2, 4]
    record = monitor.history[0]
    assert record["loss_scale"] == 2.0**15
    assert list(record["variables"]) == [v.path for v in model.trainable_variables]
    # The second step's gradients, computed in another way.
    x, y = data(1)
    sgd = keras.optimizers.SGD(0.01)
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(start(x) - y))
        grads = tape.gradient(loss, [v.value for v in start.trainable_variables])
        sgd.apply(grads, start.trainable_variables)
    for described, gradient in zip(record["variables"].values(), grads, strict=True):
        size = np.abs(gradient.numpy())
        assert described["values"] == size.size
        assert described["zeros"] == pytest.approx((size == 0).mean())
        assert described["largest"] == pytest.approx(size.max(), rel=1e-4)
        assert sum(described["exponents"].values()) == (size > 0).sum()
        assert max(described["exponents"]) == np.floor(np.log2(size.max()))


@pytest.mark.slow
def test_every_keras_optimizer_gives_the_same_gradients_without_its_scale():
    found = {}
    for name, made in {
        "tfamp": optimizer(initial_scale=8.0),
        "bare": keras.optimizers.SGD(0.01),
        "Keras's scaling": keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01)),
        "fixed by Keras": keras.optimizers.SGD(0.01, loss_scale_factor=8.0),
    }.items():
        monitor, other = NumericsMonitor(every=2), NumericsMonitor(every=2)
        model = fit([monitor, other], made=made, batches=2)
        found[name] = [each["gradients"]["exponents"] for each in monitor.history]
        assert other.history == monitor.history
        assert "apply" not in vars(model.optimizer)
    assert len(found["tfamp"]) == 1
    assert all(each == found["tfamp"] for each in found.values()), found


def test_the_figures_are_in_the_logs_of_every_epoch(tmp_path):
    monitor = NumericsMonitor(every=4)
    model, (x, y) = small_model(), data(2)
    x = np.concatenate([poisoned(1, 1), x[BATCH:]])
    model.compile(optimizer(initial_scale=64.0, dynamic_growth_steps=3), "mse", jit_compile=False)
    seen = []
    callbacks = [
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        monitor,
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs))),
    ]
    options = {"batch_size": BATCH, "epochs": 3, "shuffle": False, "verbose": 0}
    logged = model.fit(x, y, callbacks=callbacks, validation_data=(x[BATCH:], y[BATCH:]), **options)
    # One step of two is skipped each epoch.
    assert logged.history["loss_scale"] == [32.0, 16.0, 8.0]
    assert logged.history["skipped_steps"] == [1, 2, 3]
    suggested = logged.history["suggested_scale"]
    assert np.isnan(suggested[0])
    assert suggested[1:] == [monitor.history[0]["suggested_scale"]] * 2
    assert [each["gradients_under_2**-14"] for each in seen[1:]] == [
        monitor.history[0]["gradients"]["under_2**-14"]
    ] * 2
    assert {type(each) for each in seen[0].values()} <= {int, float}
    head, *rows = (tmp_path / "log.csv").read_text().splitlines()
    columns = [dict(zip(head.split(","), row.split(","), strict=True)) for row in rows]
    assert [float(each["loss_scale"]) for each in columns] == [32.0, 16.0, 8.0]
    assert "val_loss_scale" not in head


def test_replicas_count_together_and_one_bad_one_is_named_and_stops_training(two_replicas):
    with two_replicas.scope():
        model, made = small_model(), optimizer(initial_scale=4.0)
    monitor = NumericsMonitor(every=2, max_consecutive_skips=2)
    fit(monitor, model, made)
    assert [record["step"] for record in monitor.history] == [2, 4]
    parameters = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert monitor.history[0]["gradients"]["values"] == 2 * parameters
    x = poisoned(6, 1)
    x[::2] = 1.0  # Each replica takes half of a batch.
    with pytest.raises(tfamp.SkippedStepsError, match="dense"):
        fit(monitor, model, made, batches=6, x=x)


def test_scales_and_skipped_steps_of_every_step_are_in_the_records(tmp_path):
    path = tmp_path / "new" / "log.jsonl"
    monitor = NumericsMonitor(every=3, jsonl=path)
    made = optimizer(initial_scale=1024.0, dynamic_growth_steps=3)
    fit(monitor, made=made, batches=9, x=poisoned(9, 2, 2))
    first, second, third = monitor.history
    assert (first["skipped"], first["skipped_steps"]) == ([2], 1)
    assert first["loss_scales"] == [[1, 1024.0], [3, 512.0]]
    assert second["loss_scales"] == [[4, 512.0], [6, 1024.0]]
    assert second["loss_scale"] == 1024.0
    assert (third["skipped"], third["skipped_steps"]) == ([], 1)
    assert [record["first_nonfinite"] for record in monitor.history] == [None] * 3
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines == json.loads(json.dumps(monitor.history))


def test_shares_are_those_in_the_backward_pass_and_without_scale():
    monitor = NumericsMonitor(every=1)
    variables = [keras.Variable(np.zeros(4, "float32"), name="small")]
    scaled = tf.constant([2.0**-20, 2.0**-10, 1.0, 2.0**17])
    monitor.record([scaled], variables, optimizer=optimizer(initial_scale=256.0))
    described = monitor.history[0]["variables"]["small"]
    assert described["exponents"] == {-28: 1, -18: 1, -8: 1, 9: 1}
    shares = ("under_2**-24", "under_2**-14", "over_65504")
    assert [described[share] for share in shares] == [0.0, 0.25, 0.25]
    assert [described["unscaled"][share] for share in shares] == [0.25, 0.5, 0.0]
    assert described["largest"] == 512.0
    assert monitor.history[0]["suggested_scale"] == 2.0**5


def test_training_stops_after_so_many_skipped_steps_and_no_later(tmp_path):
    model, made, seen = small_model(), optimizer(), []
    before, variable = snapshot(model), model.trainable_variables[0].path
    monitor = NumericsMonitor(max_consecutive_skips=3, jsonl=tmp_path / "log.jsonl")
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(1))
    model.compile(made, "mse")
    x, y = poisoned(9, 1), data(9)[1]
    with pytest.raises(tfamp.SkippedStepsError, match="3 steps in a row") as error:
        model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False, callbacks=[monitor, count])
    assert len(seen) == 3
    for words in ("3 steps in a row", variable, "find_nonfinite"):
        assert words in str(error.value)
    assert_identical(snapshot(model), before)
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(line)["first_nonfinite"] == variable
    # Nothing is left behind: the model trains on without the monitor.
    assert not made.gradient_observers
    model.fit(*data(1), batch_size=BATCH, verbose=0)


def test_skips_that_end_in_time_do_not_stop_training():
    made = optimizer()
    fit(NumericsMonitor(max_consecutive_skips=4), made=made, batches=9, x=poisoned(9, 3, 5))
    assert int(made.skipped_steps) == 3
    made = optimizer()
    fit(NumericsMonitor(max_consecutive_skips=None), made=made, batches=9, x=poisoned(9, 1))
    assert int(made.skipped_steps) == 9


def test_the_first_bad_variable_is_named_and_not_the_good_ones():
    monitor = NumericsMonitor(max_consecutive_skips=1)
    variables = [keras.Variable(0.0, name=name) for name in ("good", "bad", "worse", "fine")]
    gradients = [tf.constant(value) for value in (1.0, np.inf, np.nan, 2.0)]
    made = optimizer()
    with pytest.raises(tfamp.SkippedStepsError, match="bad variable was bad") as error:
        for _ in range(2):
            made.scale_loss(1.0)
            monitor.record(gradients, variables, optimizer=made)
            made.apply_gradients(zip(gradients, variables, strict=True))
    assert "bad variable was bad, of 2" in str(error.value)
    assert "comes to worse first" in str(error.value)
    assert [float(v) for v in variables] == [0.0] * 4


@pytest.mark.parametrize(
    ("jit_compile", "unscaled"),
    tiers([(None, True)], [(True, True)], [(False, False)]),
    ids=["eager", "XLA", "graph"],
)
def test_a_custom_loop_records(jit_compile, unscaled):
    model, made, monitor = small_model(), optimizer(initial_scale=64.0), NumericsMonitor(every=2)
    x, y = (tf.constant(each) for each in data(1))

    def step(x, y):
        gradients = scaled_gradients(model, made, x, y)
        if unscaled:
            gradients = made.get_unscaled_gradients(gradients)
        variables = model.trainable_variables
        monitor.record(gradients, variables, optimizer=made, unscaled=unscaled)
        made.apply_gradients(zip(gradients, variables, strict=True))

    taken = step if jit_compile is None else tf.function(step, jit_compile=jit_compile)
    for _ in range(5):
        taken(x, y)
        if jit_compile is not None:
            monitor.advance()
    expected = NumericsMonitor(every=2)
    fit(expected, batches=1, epochs=5)
    assert [record["step"] for record in monitor.history] == [2, 4]
    found, known = monitor.history[0], expected.history[0]
    assert found["gradients"]["exponents"] == known["gradients"]["exponents"]
    assert found["loss_scale"] == 64.0


def test_a_grad_scalers_skips_are_counted_from_what_it_returned():
    scaler, sgd = tfamp.GradScaler(init_scale=4.0), keras.optimizers.SGD(1.0)
    weight = keras.Variable(1.0, name="weight")
    monitor = NumericsMonitor(every=1, max_consecutive_skips=2)
    for value in (1.0, np.inf, 1.0, np.inf, np.inf):
        scale, pairs = scaler.get_scale(), [(tf.constant(value), weight)]
        given = {"loss_scale": scale, "finite": scaler.step(sgd, pairs), "optimizer": scaler}
        last = pytest.raises(tfamp.SkippedStepsError, match="weight")
        with last if len(monitor.history) == 4 else contextlib.nullcontext():
            monitor.record(pairs, **given)
        scaler.update()
    assert [each["loss_scale"] for each in monitor.history] == [4.0, 4.0, 2.0, 2.0, 1.0]
    assert [each["skipped"] for each in monitor.history] == [[], [2], [], [4], [5]]
    assert monitor.history[1]["first_nonfinite"] == "weight"


def test_steps_can_be_numbered_and_gradients_be_missing_or_sparse():
    table, other = keras.Variable(np.zeros((9, 2), "float32")), keras.Variable(0.0)
    sparse = tf.IndexedSlices(tf.ones((3, 2)), tf.constant([0, 1, 1]), tf.constant([9, 2]))
    monitor = NumericsMonitor(every=10)
    monitor.record([(sparse, table), (None, other)], step=70)
    for _ in range(12):
        monitor.record([(sparse, table), (None, other)])
    assert monitor.history[-1]["step"] == 80
    values = [each["values"] for each in monitor.history[-1]["variables"].values()]
    assert values == [6, 0]
    # Steps that were never taken have no loss scale.
    assert monitor.history[0]["loss_scales"] == [[70, 1.0]]
    monitor.record([(sparse, table), (None, other)], step=95)
    for _ in range(8):
        monitor.record([(sparse, table), (None, other)])
    assert monitor.history[-1]["step"] == 100
    assert monitor.history[-1]["loss_scales"] == [[95, 1.0]]


def test_tensorboard_reads_scalars_and_histograms(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monitor = copy.deepcopy(NumericsMonitor(every=2, tensorboard=tmp_path))  # as tuners do
    fit(monitor)
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    scales = events.Tensors("numerics/loss_scale")
    found = [(each.step, tf.make_ndarray(each.tensor_proto)) for each in scales]
    assert found == [(2, 32768.0), (4, 32768.0)]
    name = next(iter(monitor.history[0]["variables"]))
    (first, _) = events.Tensors(f"numerics/variables/{name}")
    bins = {int(left): int(n) for left, _, n in tf.make_ndarray(first.tensor_proto) if n}
    assert bins == monitor.history[0]["variables"][name]["exponents"]


@pytest.mark.slow
def test_a_monitor_goes_on_in_a_second_fit_and_can_be_taken_off():
    monitor = NumericsMonitor(every=3)
    model = fit(monitor)
    model.fit(*data(4), batch_size=BATCH, verbose=0, callbacks=[monitor])
    assert [record["step"] for record in monitor.history] == [3, 6]

    def interrupt(batch, logs):
        raise KeyboardInterrupt

    interrupts = keras.callbacks.LambdaCallback(on_train_batch_begin=interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.fit(*data(4), batch_size=BATCH, verbose=0, callbacks=[monitor, interrupts])
    assert model.optimizer.gradient_observers
    monitor.detach()
    assert not model.optimizer.gradient_observers
    # Another one records beside what an interrupted fit left.
    with pytest.raises(KeyboardInterrupt):
        model.fit(*data(4), batch_size=BATCH, verbose=0, callbacks=[monitor, interrupts])
    other = NumericsMonitor(every=3)
    model.fit(*data(4), batch_size=BATCH, verbose=0, callbacks=[other])
    assert [record["step"] for record in other.history] == [9, 12]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tensorboard": f"{__file__}/events"}, tf.errors.OpError, "is not a directory"),
        ({"every": 0}, ValueError, "every must be at least 1; got 0"),
        ({"jsonl": 3}, TypeError, "PathLike.*not int"),
        ({"jsonl": "/"}, ValueError, "must be a file to append to; / is a directory"),
        ({"jsonl": f"{__file__}/log.jsonl"}, OSError, "test_monitor.py"),
        ({"every": 1.5}, TypeError, "every must be a whole number; got 1.5"),
        ({"max_consecutive_skips": 0}, ValueError, "max_consecutive_skips must be at least 1"),
    ],
)
def test_bad_arguments_say_what_is_wrong(arguments, error, message):
    with pytest.raises(error, match=message):
        NumericsMonitor(**arguments)


def test_micro_batches_have_the_scale_of_their_accumulators_optimizer():
    variables = [keras.Variable(np.zeros(2, "float32"), name="weight")]
    scaling = optimizer(initial_scale=256.0)
    accumulator = tfamp.GradientAccumulator(scaling, steps=2)
    assert accumulator.optimizer is scaling
    monitor = NumericsMonitor(every=1)
    for _ in range(2):
        scaled = [tf.constant([256.0, 512.0])]
        monitor.record(scaled, variables, optimizer=accumulator)
        accumulator.apply_gradients(zip(scaled, variables, strict=True))
    assert [record["loss_scale"] for record in monitor.history] == [256.0, 256.0]
    assert [record["skipped_steps"] for record in monitor.history] == [0, 0]
    assert monitor.history[1]["variables"]["weight"]["largest"] == 2.0


def test_bad_records_say_what_is_wrong():
    weight, monitor = keras.Variable(1.0), NumericsMonitor()
    with pytest.raises(TypeError, match="optimizer must be a Keras optimizer"):
        monitor.record([tf.constant(1.0)], [weight], optimizer="adam")
    with pytest.raises(ValueError, match="one gradient for each of the 1 variables"):
        monitor.record([tf.constant(1.0)] * 2, [weight])
    monitor.record([tf.constant(1.0)], [weight])
    with pytest.raises(ValueError, match="one NumericsMonitor for each set"):
        monitor.record([tf.constant(1.0)], [keras.Variable(1.0)])
