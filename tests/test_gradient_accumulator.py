"""`GradientAccumulator`: an exact mean, one step per window, nothing sent before its end."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers import training
from helpers.cases import first_of, tiers
from helpers.collectives import bytes_sent
from helpers.graph_asserts import branches
from helpers.replicas import halves
from helpers.tolerances import assert_close

WINDOW = 4


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def make(inner=momentum, steps=WINDOW, **arguments):
    arguments.setdefault("initial_scale", 2.0**10)
    optimizer = tfamp.LossScaleOptimizer(inner(), **arguments)
    return optimizer, tfamp.GradientAccumulator(optimizer, steps)


def make_step(model, optimizer, accumulator, unscale=False):
    def step(x, y):
        gradients = training.scaled_gradients(model, optimizer, x, y)
        if unscale:
            gradients = optimizer.get_unscaled_gradients(gradients)
        pairs = zip(gradients, model.trainable_variables, strict=True)
        return accumulator.apply_gradients(pairs)

    return step


def batches(count):
    x, y = training.data(count)
    return list(zip(np.split(x, count), np.split(y, count), strict=True))


@pytest.mark.parametrize(
    ("inner", "unscale", "traced"),
    first_of(
        [
            (momentum, False, True),
            (momentum, True, False),
            (lambda: keras.optimizers.Adam(0.01), True, True),
        ]
    ),
)
def test_a_window_is_a_step_with_the_mean_of_its_batches(inner, unscale, traced):
    model, reference, bare = training.small_model(), training.small_model(), inner()
    optimizer, accumulator = make(inner)
    step = make_step(model, optimizer, accumulator, unscale)
    step = tf.function(step) if traced else step
    # Micro-batches branch once; the one that ends the window does it again in the optimizer's step.
    assert not traced or branches(step, *batches(1)[0]) == 2
    ended = [bool(step(tf.constant(x), tf.constant(y))) for x, y in batches(2 * WINDOW)]
    assert ended == [False] * 3 + [True] + [False] * 3 + [True]
    assert int(optimizer.iterations) == 2
    x, y = training.data(2 * WINDOW)
    variables = reference.trainable_variables
    for half in (slice(0, 32), slice(32, 64)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(reference(x[half]) - y[half]))
        grads = tape.gradient(loss, [v.value for v in variables])
        bare.apply_gradients(zip(grads, variables, strict=True))
    for actual, expected in zip(model.variables, reference.variables, strict=True):
        assert_close(actual.numpy(), expected.numpy(), "float32", depth=64)


def test_the_mean_is_exact():
    weight = keras.Variable(np.zeros(1), dtype="float16")
    optimizer, accumulator = make(lambda: keras.optimizers.SGD(1.0), master_weights=True)
    # 2048 and 1 add up to 2048 in float16.
    for gradient in (2048.0, 1.0, 1.0, 2.0):
        optimizer.get_scaled_loss(0.0)
        pairs = [(tf.constant([gradient], tf.float16), weight)]
        accumulator.apply_gradients(pairs)
    expected = -(2052 / 4) / 2.0**10
    np.testing.assert_array_equal(optimizer.master_variables[0].numpy(), [expected])


@pytest.mark.parametrize(("bad", "unscale"), first_of([(0, False), (2, True), (3, False)]))
def test_a_bad_batch_drops_the_window_and_no_other(bad, unscale):
    model = training.small_model()
    optimizer, accumulator = make(dynamic_growth_steps=1)
    step = tf.function(make_step(model, optimizer, accumulator, unscale))
    scales = []
    for i, (x, y) in enumerate(batches(3 * WINDOW)):
        if i == WINDOW:
            before = training.snapshot(model, optimizer.inner_optimizer)
        step(np.full_like(x, np.nan) if i == WINDOW + bad else x, y)
        scales.append(float(optimizer.loss_scale))
        if i == 2 * WINDOW - 1:
            training.assert_identical(training.snapshot(model, optimizer.inner_optimizer), before)
    assert int(optimizer.iterations) == 2
    assert int(optimizer.skipped_steps) == 1
    # The scale changes where a window ends and nowhere else.
    assert scales == [2.0**10] * 3 + [2.0**11] * 4 + [2.0**10] * 4 + [2.0**11]
    assert step.experimental_get_tracing_count() <= 2


def test_flush_needs_a_micro_batch_before_it_is_traced_or_ends_a_restored_window(tmp_path):
    def made():
        optimizer, accumulator = make(lambda: keras.optimizers.SGD(1.0))
        return keras.Variable(0.0), optimizer, accumulator

    weight, optimizer, accumulator = made()
    with pytest.raises(ValueError, match="before the first micro-batch of this Grad"):
        tf.function(accumulator.flush)()
    accumulator.apply_gradients([(optimizer.get_scaled_loss(tf.constant(2.0)), weight)])
    path = tf.train.Checkpoint(window=accumulator).write(str(tmp_path / "checkpoint"))
    again, optimizer, restored = made()
    tf.train.Checkpoint(window=restored).read(path)
    assert int(restored.count) == 1
    with pytest.raises(ValueError, match="before the first micro-batch of this Grad"):
        restored.flush()
    assert int(restored.count) == 1
    restored.apply_gradients([(optimizer.get_scaled_loss(tf.constant(4.0)), again)])
    assert restored.flush()
    assert float(again) == -3.0


@pytest.mark.parametrize("traced", first_of([False, True]), ids=["eager", "function"])
def test_flush_ends_a_window_early_and_knows_what_was_unscaled_in_each_batch(traced):
    weight = keras.Variable(0.0)
    optimizer, accumulator = make(lambda: keras.optimizers.SGD(1.0))

    def step(gradient, unscale):
        gradients = [optimizer.get_scaled_loss(gradient)]
        if unscale:
            gradients = optimizer.get_unscaled_gradients(gradients)
        return accumulator.apply_gradients(zip(gradients, [weight], strict=True))

    flush = tf.function(accumulator.flush) if traced else accumulator.flush
    step = tf.function(step) if traced else step
    assert not accumulator.flush(), "nothing to apply"
    for gradient, unscale in ((1.0, False), (3.0, True), (5.0, False)):
        assert not step(tf.constant(gradient), unscale)
    assert flush()
    assert float(weight) == -3.0
    assert int(accumulator.count) == 0
    assert not flush()
    assert int(optimizer.iterations) == 1


def test_clipping_is_of_the_mean():
    weight = keras.Variable(0.0)
    optimizer, accumulator = make(lambda: keras.optimizers.SGD(1.0), steps=2, grad_clip=3.0)
    for gradient in (2.0, 6.0):
        accumulator.apply_gradients([(optimizer.get_scaled_loss(gradient), weight)])
    assert (float(optimizer.last_gradient_norm), float(weight)) == (4.0, -3.0)


def test_sparse_and_missing_gradients():
    table, unused = keras.Variable(np.zeros((4, 2), "float32")), keras.Variable([1.0])
    optimizer, accumulator = make(lambda: keras.optimizers.SGD(1.0), steps=2)

    @tf.function
    def step(row):
        values = optimizer.get_scaled_loss(tf.ones((2, 2)))
        slices = tf.IndexedSlices(values, tf.stack([1, row]), tf.constant([4, 2]))
        accumulator.apply_gradients([(slices, table), (None, unused)])

    step(1)
    step(3)
    np.testing.assert_array_equal(table.numpy()[:, 0], [0.0, -1.5, 0.0, -0.5])
    np.testing.assert_array_equal(unused.numpy(), [1.0])

    @tf.function
    def other():
        accumulator.apply_gradients([(None, table), (optimizer.get_scaled_loss([0.5]), unused)])

    # A window that ends in the function of before leaves the new sum for the next one.
    for part in (other, lambda: step(1), lambda: step(1), other):
        part()
    np.testing.assert_array_equal(unused.numpy(), [0.5])


@pytest.mark.parametrize("done", first_of([WINDOW + 2, WINDOW]))
def test_checkpoint_resumes_bit_identically(tmp_path, done):
    def start():
        model = training.small_model()
        optimizer, accumulator = make(lambda: keras.optimizers.Adam(0.01))
        step = tf.function(make_step(model, optimizer, accumulator))
        saved = tf.train.Checkpoint(model=model, optimizer=optimizer, accumulator=accumulator)
        return model, optimizer, step, saved

    model, optimizer, step, checkpoint = start()
    given = batches(4 * WINDOW)
    for x, y in given[:done]:
        step(x, y)
    path = checkpoint.save(tmp_path / "checkpoint")
    other, resumed, other_step, checkpoint = start()
    checkpoint.restore(path)
    for x, y in given[done:]:
        step(x, y)
        other_step(x, y)
    assert int(resumed.iterations) == 4
    training.assert_same_values(
        training.snapshot(other, resumed), training.snapshot(model, optimizer)
    )


# ---- Replicas ----------------------------------------------------------------------------------


def spread(strategy, **arguments):
    with strategy.scope():
        model = training.small_model()
        optimizer, accumulator = make(**arguments)
        optimizer.build(model.trainable_variables)
    step = make_step(model, optimizer, accumulator)
    return model, optimizer, accumulator, lambda x, y: strategy.run(step, args=(x, y))


@pytest.mark.parametrize(
    "arguments", [*tiers([], [{}]), {"aggregate_in_float16": True, "grad_clip": 1.0}]
)
def test_nothing_is_sent_before_the_window_ends(two_replicas, arguments):
    model, _, accumulator, run = spread(two_replicas, **arguments)
    concrete = tf.function(run).get_concrete_function(tf.zeros((4, 4)), tf.zeros((4, 1)))
    assert bytes_sent(concrete, branches=False) == {}
    assert sum(bytes_sent(concrete).values()) > 90, "in the branch that ends it"
    pairs = [(tf.zeros(v.shape), v) for v in model.trainable_variables]
    with two_replicas.scope(), pytest.raises(ValueError, match=r"inside strategy\.run"):
        accumulator.apply_gradients(pairs)


@pytest.mark.parametrize(
    ("arguments", "traced"), first_of([({}, True), ({"aggregate_in_float16": True}, False)])
)
def test_replicas_take_the_steps_of_one(two_replicas, arguments, traced):
    model, optimizer, accumulator, run = spread(two_replicas, **arguments)
    run = tf.function(run) if traced else run
    reference = training.small_model()
    one, alone = make()
    for i, (x, y) in enumerate(batches(3 * WINDOW + 1)):
        if i == 6:  # The second replica's half of one batch is bad.
            x[4:] = np.inf
        run(halves(two_replicas, x), halves(two_replicas, y))
        # The replicas' mean losses are added up: twice the loss of the whole batch.
        gradients = [2 * g for g in training.scaled_gradients(reference, one, x, y)]
        alone.apply_gradients(zip(gradients, reference.trainable_variables, strict=True))
        assert int(accumulator.count) == int(alone.count) == (i + 1) % WINDOW
    # The end of an epoch: a window of one batch.
    two_replicas.run(accumulator.flush)
    alone.flush()
    assert int(optimizer.iterations) == 3
    assert int(optimizer.skipped_steps) == 1
    assert int(accumulator.count) == 0
    dtype = "float16" if arguments else "float32"
    for actual in model.variables:
        first, second = actual.value.values
        np.testing.assert_array_equal(first.numpy(), second.numpy())
    flat = [np.concatenate([w.ravel() for w in m.get_weights()]) for m in (model, reference)]
    assert_close(*flat, dtype, depth=64)


# ---- What is refused ---------------------------------------------------------------------------


def test_wrong_arguments_and_other_variables_are_refused():
    first, second = keras.Variable(0.0), keras.Variable(0.0)
    optimizer, accumulator = make()
    optimizer.build([first, second])
    accumulator.apply_gradients([(tf.constant(1.0), first)])
    with pytest.raises(ValueError, match="Give the same variables"):
        accumulator.apply_gradients([(tf.constant(1.0), second)])
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(TypeError, match=r"takes a tfamp\.LossScaleOptimizer; got .*\.SGD\."):
        tfamp.GradientAccumulator(keras.optimizers.SGD(), 2)
    with pytest.raises(ValueError, match="steps must be at least 1; got 0"):
        tfamp.GradientAccumulator(optimizer, 0)
    with pytest.raises(TypeError, match="steps must be a whole number"):
        tfamp.GradientAccumulator(optimizer, 2.0)
    accumulating = keras.optimizers.SGD(gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="accumulates itself"):
        tfamp.GradientAccumulator(tfamp.LossScaleOptimizer(accumulating), 2)


def test_an_accumulator_made_outside_the_scope_is_refused(two_replicas):
    with two_replicas.scope():
        weight = keras.Variable([1.0])
        optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(1.0), loss_scale=1.0)
        optimizer.build([weight])
        inside = tfamp.GradientAccumulator(optimizer, 1)
    outside = tfamp.GradientAccumulator(optimizer, 1)
    with pytest.raises(ValueError, match=r"Create it under strategy\.scope"):
        two_replicas.run(lambda: outside.apply_gradients([(tf.ones(1), weight)]))
    run = tf.function(two_replicas.run)
    run(lambda: inside.apply_gradients([(tf.ones(1), weight)]))
    assert weight.numpy().tolist() == [-1.0]  # The sum of two replicas.


def test_gradients_unscaled_in_another_function_are_not_unscaled_again():
    weight, optimizer = keras.Variable(1.0), tfamp.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    accumulator = tfamp.GradientAccumulator(optimizer, 2)

    @tf.function
    def unscaled():
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(0.25 * tf.square(weight))
        return optimizer.get_unscaled_gradients(tape.gradient(scaled, [weight]))

    for _ in range(2):
        accumulator.apply_gradients(zip(unscaled(), [weight], strict=True))
    assert float(weight) == 0.5
