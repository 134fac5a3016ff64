"""A run whose steps are all skipped gets one warning, in every kind of loop, and costs no reads."""

import contextlib
import threading
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of, tiers
from helpers.training import data, small_model, train_step


def loss_scale_optimizer(**arguments):
    return tfamp.LossScaleOptimizer(keras.optimizers.SGD(1e-3), **arguments)


@contextlib.contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", tfamp.TfampWarning)
        yield


def texts(record):
    said = [each for each in record if each.category is tfamp.TfampWarning]
    assert {each.filename for each in said} == {__file__}  # Where the user's loop is.
    return [str(each.message) for each in said]


def applied(weight, optimizer):
    """A step that applies one gradient, which it is given."""

    def step(gradient):
        optimizer.apply_gradients([(gradient, weight)], unscaled=True)

    return step


# ---- Loops ---------------------------------------------------------------------------------------


def nested(step):
    inner = tf.function(step)
    return tf.function(lambda gradient: inner(gradient))


def traced_before(step):
    """A function whose trace was made before its first call."""
    function = tf.function(step)
    function.get_concrete_function(tf.TensorSpec(()))
    return function


def planned(step):
    rewritten = tfamp.rewrite(step, on_error="keep")
    rewritten.concrete(tf.TensorSpec(()))
    return rewritten


def around_a_traced_function(step):
    inner = traced_before(step)
    return tf.function(lambda gradient: inner(gradient))


LOOPS = {
    "eager": lambda step: step,
    "function": tf.function,
    "xla": lambda step: tf.function(step, jit_compile=True),
    "nested": nested,
    "traced before": traced_before,
    "around a traced function": around_a_traced_function,
    "rewritten": planned,
}


@pytest.mark.parametrize(
    "kind",
    tiers(["function"], [each for each in LOOPS if each != "function"]),
)
def test_the_twentieth_skipped_step_of_a_loop_is_warned_of_once(kind):
    weight, optimizer = keras.Variable(1.0), loss_scale_optimizer()
    optimizer.build([weight])
    step = LOOPS[kind](applied(weight, optimizer))
    bad = tf.constant(np.inf)
    with no_warning():
        for _ in range(19):
            step(bad)
    with pytest.warns(tfamp.TfampWarning, match="has skipped the last 20 steps") as record:
        for _ in range(60):
            step(bad)
    (text,) = texts(record)
    assert "find_nonfinite" in text
    assert "its loss scale is 0.03125" in text  # 2**15 / 2**20


@pytest.mark.parametrize("kind", first_of(["function", "eager"]))
def test_after_finite_steps_the_warning_comes_at_the_twentieth_in_a_row_too(kind):
    weight, optimizer = keras.Variable(1.0), loss_scale_optimizer()
    step = LOOPS[kind](applied(weight, optimizer))
    with no_warning():
        for number in range(100):
            step(tf.constant(1.0 if number == 19 or 30 <= number < 90 else np.inf))
        for _ in range(9):
            step(tf.constant(np.inf))
    with pytest.warns(tfamp.TfampWarning, match="has skipped the last 20 steps"):
        step(tf.constant(np.inf))
        if kind == "function":
            step(tf.constant(np.inf))  # As a call begins, the steps before it are looked at.


def test_a_function_that_runs_many_steps_a_call_is_looked_at_after_the_first():
    weight, optimizer = keras.Variable(1.0), loss_scale_optimizer()

    @tf.function
    def epoch(gradient):
        for _ in tf.range(100):
            optimizer.apply_gradients([(gradient, weight)], unscaled=True)

    epoch(tf.constant(np.nan))
    with pytest.warns(tfamp.TfampWarning, match="has skipped the last 100 steps"):
        epoch(tf.constant(np.nan))


def test_the_optimizers_of_one_function_are_watched_each():
    good, bad = keras.Variable(1.0), keras.Variable(1.0)
    optimizers = [loss_scale_optimizer(name=name) for name in ("generator", "critic")]

    @tf.function
    def step(gradient):
        optimizers[0].apply_gradients([(tf.constant(1.0), good)], unscaled=True)
        optimizers[1].apply_gradients([(gradient, bad)], unscaled=True)

    with pytest.warns(tfamp.TfampWarning) as record:
        for _ in range(30):
            step(tf.constant(np.nan))
    (text,) = texts(record)
    assert text.startswith("critic has skipped the last 20 steps")


def test_replicas_of_a_strategy_are_watched():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        weight = tf.Variable(1.0)
        optimizer = loss_scale_optimizer()
        optimizer.build([weight])
    step = applied(weight, optimizer)
    distributed = tf.function(lambda gradient: strategy.run(step, (gradient,)))
    with pytest.warns(tfamp.TfampWarning, match="has skipped the last 20 steps") as record:
        for _ in range(25):
            distributed(tf.constant(np.inf))
    assert len(texts(record)) == 1


@pytest.mark.parametrize("kind", first_of(["function", "eager"]))
def test_a_healthy_loop_reads_a_counter_once_in_twenty_steps(kind):
    reads = []

    class Counted(tfamp.LossScaleOptimizer):
        @property
        def consecutive_skipped_steps(self):
            reads.append(1)
            return super().consecutive_skipped_steps

    weight, optimizer = keras.Variable(1.0), Counted(keras.optimizers.SGD(1e-3))
    step = LOOPS[kind](applied(weight, optimizer))
    for _ in range(200):
        step(tf.constant(1.0))
    assert 5 <= len(reads) <= 5 + 200 // 20


def test_functions_without_an_optimizer_and_nested_ones_work_as_ever_while_one_lives():
    optimizer = loss_scale_optimizer()  # noqa: F841

    @tf.function
    def inner(x):
        """Doubles."""
        return 2 * x

    @tf.function
    def outer(x, *, times):
        for _ in range(times):
            x = inner(x)
        return x

    assert float(outer(tf.constant(1.0), times=3)) == 8.0
    assert inner.__doc__ == "Doubles."
    with pytest.raises(TypeError, match="missing a required argument|times"):
        outer(tf.constant(1.0))
    assert float(outer(tf.constant(1.0), times=1)) == 2.0


def test_steps_in_another_thread_are_not_those_of_a_function_that_runs_meanwhile():
    weight, optimizer = keras.Variable(1.0), loss_scale_optimizer()
    optimizer.build([weight])
    step, bad = tf.function(applied(weight, optimizer)), tf.constant(np.inf)

    def other(x):
        thread = threading.Thread(target=lambda: step(bad))  # It traces `step` the first time.
        thread.start()
        thread.join()
        return 2 * x

    for _ in range(3):
        assert float(tf.function(other)(tf.constant(2.0))) == 4.0  # Each is traced.
    unrelated = tf.function(lambda x: x + 1)
    with no_warning():
        for _ in range(40):
            unrelated(tf.constant(1.0))
    assert int(optimizer.skipped_steps) == 3
    np.testing.assert_array_equal(weight.numpy(), 1.0)


def test_a_saved_step_runs_after_it_is_loaded(tmp_path):
    module = tf.Module()
    module.weight = keras.Variable(1.0, dtype="float32").value
    module.optimizer = loss_scale_optimizer(loss_scale=1.0)
    module.optimizer.build([module.weight])
    step = applied(module.weight, module.optimizer)
    module.step = tf.function(step, input_signature=[tf.TensorSpec(())])
    module.step(tf.constant(1.0))
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    loaded.step(tf.constant(1.0))
    assert float(loaded.weight) == pytest.approx(1.0 - 2e-3, abs=1e-7)


def test_an_optimizer_leaves_functions_as_they_are_and_a_deleted_one_fit_too():
    kind = type(tf.function(lambda: None))
    before = kind.__call__, keras.Model.fit
    optimizer = loss_scale_optimizer()
    during = kind.__call__, keras.Model.fit
    del optimizer
    after = kind.__call__, keras.Model.fit
    assert before[0] is during[0] is after[0]
    # Another test's optimizer may live in a frame or a cycle.
    assert after == before or before == during


# ---- fit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", first_of([{"jit_compile": False}, {"run_eagerly": True}]), ids=str)
def test_a_run_of_fit_that_skips_every_step_gets_one_warning(way):
    model, (x, _) = small_model(), data(3)
    model.compile(loss_scale_optimizer(), "mse", **way)
    with pytest.warns(tfamp.TfampWarning, match="find_nonfinite") as record:
        model.fit(x, np.full((24, 1), np.nan), batch_size=1, epochs=3, verbose=0)
    assert int(model.optimizer.skipped_steps) == 72
    (text,) = texts(record)
    assert "skipped the last 20 steps" in text


@pytest.mark.parametrize(
    "way",
    first_of(
        [
            {"jit_compile": False},
            {"run_eagerly": True},
            {"jit_compile": False, "steps_per_execution": 4},
        ]
    ),
    ids=str,
)
def test_a_run_of_fit_that_ends_before_the_twentieth_skipped_step_is_warned_of(way):
    model, (x, y) = small_model(), data(8)
    model.compile(loss_scale_optimizer(), "mse", **way)
    with pytest.warns(tfamp.TfampWarning, match="updated nothing .* skipped 8 steps") as record:
        model.fit(x, y * np.nan, batch_size=8, verbose=0)
    (text,) = texts(record)
    assert "find_nonfinite" in text
    with no_warning():
        model.fit(x, y * np.nan, batch_size=8, verbose=0)  # 16 in a row, and said already.
    with pytest.warns(tfamp.TfampWarning, match="has skipped the last"):
        model.fit(x, y * np.nan, batch_size=8, verbose=0)


def test_train_on_batch_is_watched():
    model, (x, y) = small_model(), data(1)
    model.compile(loss_scale_optimizer(), "mse", jit_compile=False)
    with pytest.warns(tfamp.TfampWarning, match="has skipped the last 20 steps"):
        for _ in range(21):
            model.train_on_batch(x, y * np.inf)


def test_a_scale_that_finds_its_place_is_not_warned_of():
    model, (x, y) = small_model(), data(20)
    model.compile(loss_scale_optimizer(), "mse", jit_compile=False)
    x[: 8 * 15] = np.nan
    with no_warning():
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, epochs=3)
    assert int(model.optimizer.skipped_steps) == 45


class _Client:
    """Not connected: it raises whatever it is asked for."""

    def __getattr__(self, name):
        raise ConnectionError(f"{name} was read")


class _Proxy:
    """Raises even for its class."""

    def __getattribute__(self, name):
        raise ConnectionError(f"{name} was read")


def with_foreign_attributes(model):
    model.client = _Client()
    vars(model)["proxy"] = _Proxy()  # Keras would ask it for its class.
    return model


def test_foreign_attributes_of_a_model_are_not_touched():
    model, (x, y) = with_foreign_attributes(small_model()), data(1)
    model.compile(loss_scale_optimizer(), "mse", jit_compile=False)
    with pytest.warns(tfamp.TfampWarning, match="updated nothing"):
        model.fit(x, y * np.nan, verbose=0)


def test_nor_are_those_of_a_model_without_loss_scaling_while_an_optimizer_lives():
    optimizer = loss_scale_optimizer()  # noqa: F841
    model, (x, y) = with_foreign_attributes(small_model()), data(1)
    model.compile("sgd", "mse", jit_compile=False)
    history = model.fit(x, y, verbose=0, epochs=2).history
    assert history["loss"][1] < history["loss"][0]


def test_the_optimizers_in_attributes_of_a_model_are_watched():
    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.net, self.own = small_model(), loss_scale_optimizer(name="own")

        def train_step(self, pair):
            train_step(self.net, self.own)(*pair)
            return {"loss": tf.constant(0.0)}

    model, (x, y) = Two(), data(3)
    model.compile()
    # As the first steps are often skipped, and these are three.
    with pytest.warns(tfamp.TfampWarning, match="own has updated nothing in this fit.*train for"):
        model.fit(x, y * np.nan, batch_size=8, verbose=0)
