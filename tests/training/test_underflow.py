"""The warning of float16 gradients that underflow because no loss scale multiplies the loss."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.interop.patching import locate
from tfamp.training import underflow

ZERO = (
    "gradients that sgd was given in its first steps are exactly zero.*"
    "LossScaleOptimizer.*GradScaler.*bfloat16"
)


@pytest.fixture(autouse=True)
def _nothing_was_watched():
    underflow._counts.clear()
    yield
    underflow.watch("next steps", wanted=False)


def autocast_step(dtype, factor, scale=1.0, optimizer=None):
    """A step of a relu network whose gradients are about `factor`, and its weights.

    Without a dtype there is no autocast.
    """
    random = np.random.default_rng(0)
    weights = [
        keras.Variable(np.float32(random.normal(size=shape) / 4)) for shape in ((16, 16), (16, 16))
    ]
    x = tf.constant(random.normal(size=(1, 16)), tf.float32)
    optimizer = optimizer or keras.optimizers.SGD(2.0**-10, name="sgd")
    optimizer.build(weights)

    def step():
        with tf.GradientTape() as tape:
            with tfamp.autocast(dtype) if dtype else contextlib.nullcontext():
                y = tf.nn.relu(x @ weights[0].value) @ weights[1].value
            loss = tf.reduce_sum(tf.cast(y, tf.float32)) * (factor * scale)
        gradients = tape.gradient(loss, [w.value for w in weights])
        optimizer.apply([g / scale for g in gradients], weights)
        return gradients

    return step, weights


def run(step, traced, count=5):
    step = tf.function(step) if traced else step
    for _ in range(count):
        gradients = step()
    return gradients


@contextlib.contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", tfamp.TfampWarning)
        yield


def share_of_zeros(gradients):
    return np.mean([np.mean(g.numpy() == 0.0) for g in gradients])


def float32_gradients(factor):
    """The gradients of `autocast_step` in float32."""
    return autocast_step(None, factor)[0]()


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("factor", [2.0**-27, 2.0**-40], ids=["most", "all"])
def test_underflow_is_warned_of_once(factor, traced):
    expected = float32_gradients(factor)
    step, _ = autocast_step("float16", factor)
    step = tf.function(step) if traced else step
    with pytest.warns(tfamp.TfampWarning, match=ZERO) as caught:
        gradients = run(step, traced=False)
    assert sum("exactly zero" in str(each.message) for each in caught) == 1
    assert {each.filename for each in caught} == {__file__}
    assert share_of_zeros(gradients) > 0.5 > share_of_zeros(expected)
    with no_warning():
        run(step, traced=False)


def test_traced_steps_are_counted_as_eager_ones_are():
    numbers = []
    for traced in (False, True):
        underflow._counts.clear()
        underflow.watch("next steps")
        step, _ = autocast_step("float16", 1.0)
        run(step, traced)
        (counts,) = underflow._counts.values()
        numbers.append(counts.numbers)
    assert numbers[0] == numbers[1]
    assert numbers[0][:2] == (3.0, 3.0 * 512)


def test_a_loop_within_a_function_is_warned_of_at_the_next_call():
    step, _ = autocast_step("float16", 2.0**-40)

    @tf.function
    def steps():
        for _ in tf.range(4):
            step()

    with no_warning():
        steps()
    with pytest.warns(tfamp.TfampWarning, match="100%.*" + ZERO):
        steps()
    with no_warning():
        steps()


def test_a_watched_step_is_called_from_branches_of_other_functions():
    step, _ = autocast_step("float16", 2.0**-40)
    inner = tf.function(step)
    run(inner, traced=False, count=1)
    outer = tf.function(lambda flag: tf.cond(flag, lambda: inner()[0], lambda: tf.ones((16, 16))))
    found = [outer(tf.constant(True)) for _ in range(5)]
    with pytest.warns(tfamp.TfampWarning, match=ZERO):  # At a call of its own.
        inner()
    assert not found[-1].numpy().any()
    assert outer(tf.constant(False)).numpy().all()


def test_a_watched_step_is_saved_and_its_copy_counts_nothing(tmp_path):
    step, weights = autocast_step("float16", 2.0**-27)
    module = tf.Module()
    module.weights = [w.value for w in weights]
    module.step = tf.function(step, input_signature=[])
    expected = [g.numpy() for g in run(module.step, traced=False, count=1)]
    (counts,) = underflow._counts.values()
    # The step's optimizer has other variables, which Keras tracks.
    module.others = [v.value for v in next(iter(underflow._counts)).variables]
    tf.saved_model.save(module, tmp_path / "step")
    counts.traced.take()
    counts.traced.close()  # As in another process.
    loaded = tf.saved_model.load(tmp_path / "step")
    with no_warning():
        found = run(loaded.step, traced=False)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.numpy(), other)
    assert not counts.traced.take().numpy().any()


def test_a_step_that_xla_compiles_works_unwatched():
    step, _ = autocast_step("float16", 2.0**-40)
    with no_warning():
        gradients = run(tf.function(step, jit_compile=True), traced=False)
    assert share_of_zeros(gradients) == 1.0
    assert not underflow._counts


def whole_step(factor):
    """A step of a relu network, to be rewritten, whose gradients are about `factor`."""
    optimizer = keras.optimizers.SGD(2.0**-30, name="sgd")  # Weights keep their values.
    return autocast_step(None, factor, optimizer=optimizer)[0]


@pytest.mark.parametrize("placement", ["min_cut", "lists"])
@pytest.mark.parametrize("factor", [2.0**-27, 2.0**-40], ids=["most", "all"])
def test_a_rewritten_step_is_warned_of_once(factor, placement):
    expected = float32_gradients(factor)
    step = tfamp.rewrite(whole_step(factor), dtype="float16", placement=placement)
    with pytest.warns(tfamp.TfampWarning, match=ZERO) as caught:
        gradients = run(step, traced=False)
    assert sum("exactly zero" in str(each.message) for each in caught) == 1
    assert share_of_zeros(gradients) > 0.5 > share_of_zeros(expected)
    with no_warning():
        run(step, traced=False)


@pytest.mark.parametrize(("dtype", "factor"), [("float16", 1.0), ("bfloat16", 2.0**-40)])
def test_a_rewritten_step_whose_gradients_are_right_is_not(dtype, factor):
    expected = float32_gradients(factor)
    step = tfamp.rewrite(whole_step(factor), dtype=dtype, placement="lists")
    with no_warning():
        gradients = run(step, traced=False, count=1)
        run(step, traced=False)
    for one, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(one.numpy() / factor, other.numpy() / factor, atol=0.05)


def test_watching_changes_no_plan():
    plans = []
    for watched in (True, False):
        step = tfamp.rewrite(whole_step(1.0), dtype="float16", placement="lists")
        underflow.watch("next steps", watched)
        low = [n.op for n in step.plan().nodes if n.dtype == "float16"]
        plans.append((sorted(low), step.plan().summary.casts))
    assert plans[0] == plans[1]
    assert "MatMul" in plans[0][0]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("dtype", "factor", "scale"),
    [("float16", 1.0, 1.0), ("float16", 2.0**-40, 2.0**40), ("bfloat16", 2.0**-40, 1.0)],
    ids=["large", "scaled by hand", "bfloat16"],
)
def test_zeros_of_a_relu_and_small_gradients_that_are_right_are_not(traced, dtype, factor, scale):
    step, weights = autocast_step(dtype, factor, scale)
    before = [w.numpy() for w in weights]
    with no_warning():
        gradients = run(step, traced)
    assert np.mean(gradients[0].numpy() == 0.0) > 0.1, "relu"
    assert any((w.numpy() != b).any() for w, b in zip(weights, before, strict=True)) or factor < 1


def test_scaled_optimizers_are_not():
    inner = keras.optimizers.RMSprop(0.1)  # Applied by Keras.
    optimizer = tfamp.LossScaleOptimizer(inner)
    weight = keras.Variable(np.ones(4))
    with no_warning(), tfamp.autocast("float16"):
        for _ in range(5):
            optimizer.apply([optimizer.get_scaled_loss(tf.zeros(4))], [weight])
    scaler = tfamp.GradScaler()
    with no_warning(), tfamp.autocast("float16"):
        for _ in range(5):
            scaler.step(keras.optimizers.RMSprop(0.1), [(scaler.scale(tf.zeros(4)), weight)])
            scaler.update()


def test_zeros_that_keras_has_unscaled_are_not():
    weight = keras.Variable(np.ones(4, np.float32))
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build([weight])

    def step():
        optimizer.apply([optimizer.scale_loss(tf.zeros(4))], [weight])

    underflow.watch("next steps")
    with no_warning():
        run(step, traced=False)
        run(step, traced=True)


@pytest.mark.parametrize("traced", [False, True])
def test_a_bare_optimizer_under_a_policy(traced):
    with tfamp.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(name="sgd")
        optimizer.build(model.trainable_variables)
        x = tf.constant(np.random.default_rng(0).normal(size=(4, 8)), tf.float32)

        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x)) * 2.0**-32
            sources = [v.value for v in model.trainable_variables]
            optimizer.apply(tape.gradient(loss, sources), model.trainable_variables)

        with pytest.warns(tfamp.TfampWarning, match=ZERO):
            run(step, traced)


@pytest.mark.parametrize("traced", [False, True])
def test_a_rewritten_loss(traced):
    weight = keras.Variable(np.float32(np.random.default_rng(0).normal(size=(16, 16))))
    optimizer = keras.optimizers.SGD(name="sgd")
    optimizer.build([weight])

    @tfamp.rewrite(dtype="float16", placement="lists")
    def loss(x):
        return tf.reduce_sum(tf.cast(x @ weight.value, tf.float32)) * 2.0**-40

    def step():
        with tf.GradientTape() as tape:
            value = loss(tf.ones((2, 16)))
        gradients = tape.gradient(value, [weight.value])
        optimizer.apply(gradients, [weight])
        return gradients

    with pytest.warns(tfamp.TfampWarning, match=ZERO):
        (gradient,) = run(step, traced)
    assert not gradient.numpy().any()


@pytest.mark.parametrize("traced", [False, True])
def test_nothing_is_watched_after_the_first_steps(traced):
    owner, name = locate("keras.src.optimizers.base_optimizer:BaseOptimizer.apply")
    original = getattr(owner, name)
    step, _ = autocast_step("float16", 1.0)
    step = tf.function(step) if traced else step
    run(step, traced=False, count=1)
    assert getattr(owner, name) is not original
    run(step, traced=False)
    assert getattr(owner, name) is original
