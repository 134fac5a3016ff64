"""The compiled update: where it is used, and equality with the inner optimizer."""

import collections
import platform
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of, one_in, one_of_each
from helpers.tolerances import assert_all_equal
from tfamp.training import fused_update

# Matmul weights, a bias and a tensor with more axes.
SHAPES = [(7, 5), (5,), (2, 3, 4)]
STEPS = 50


def schedule():
    return keras.optimizers.schedules.ExponentialDecay(0.05, 10, 0.7)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "sgd_decay_schedule": lambda: keras.optimizers.SGD(schedule(), momentum=0.8, weight_decay=0.01),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adam_schedule_epsilon": lambda: keras.optimizers.Adam(
        schedule(), beta_1=0.95, beta_2=0.99, epsilon=1e-3
    ),
    "adam_clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=0.5),
    "sgd_global_clipnorm": lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=1.0),
    "adam_clipvalue": lambda: keras.optimizers.Adam(0.01, clipvalue=0.3),
    "adamw": lambda: keras.optimizers.AdamW(0.01),
    "adamw_schedule_clip": lambda: keras.optimizers.AdamW(
        schedule(), weight_decay=0.02, global_clipnorm=1.0
    ),
    "nadam": lambda: keras.optimizers.Nadam(0.01, weight_decay=0.02),
    "adafactor": lambda: keras.optimizers.Adafactor(0.05),
    "adafactor_schedule_decay": lambda: keras.optimizers.Adafactor(
        schedule(), weight_decay=0.02, clip_threshold=0.5, clipnorm=1.0
    ),
}


def variables():
    random = np.random.default_rng(3)
    return [keras.Variable(random.standard_normal(shape).astype("float32")) for shape in SHAPES]


def gradients(number):
    random = np.random.default_rng(number)
    return [tf.constant(random.standard_normal(shape), tf.float32) for shape in SHAPES]


def nodes_of(graph_def, compiled=True):
    """The nodes of a graph and its functions, with or without compiled ones."""
    functions = [
        each
        for each in graph_def.library.function
        if compiled or not each.attr["_XlaMustCompile"].b
    ]
    return [*graph_def.node, *(node for each in functions for node in each.node_def)]


def ops(function):
    """Op types of a traced function and its branches, and the number of compiled updates."""
    graph_def = function.get_concrete_function(*gradients(0)).graph.as_graph_def()
    nodes = nodes_of(graph_def, compiled=False)
    # Masters are checked in separate compiled calls.
    called = [node.attr["f"].func.name for node in nodes if node.attr["_XlaMustCompile"].b]
    return collections.Counter(node.op for node in nodes), sum("update_all" in f for f in called)


def one_pass_updates(function):
    kinds, compiled = ops(function)
    return compiled + sum(kinds[kind] for kind in kinds if kind.startswith("ResourceApply"))


def stepper(optimizer, trainable, scale):
    @tf.function
    def step(*grads):
        optimizer.apply([g * scale for g in grads], trainable)

    return step


class Pair:
    """An optimizer wrapped and bare, with variables of their own that start alike."""

    def __init__(self, make, scale=2.0**10, exclude=()):
        self.ours, self.theirs, self.scale = variables(), variables(), scale
        self.optimizer = tfamp.LossScaleOptimizer(make(), initial_scale=scale)
        self.bare = make()
        for optimizer, own in ((self.optimizer, self.ours), (self.bare, self.theirs)):
            optimizer.exclude_from_weight_decay(var_list=[own[place] for place in exclude])
        self.optimizer.build(self.ours)
        self.bare.build(self.theirs)
        self.optimizer.get_scale()
        self.trace()

    def trace(self):
        self.step = stepper(self.optimizer, self.ours, self.scale)
        self.bare_step = stepper(self.bare, self.theirs, 1.0)

    def run(self, numbers):
        for number in numbers:
            self.step(*gradients(number))
            self.bare_step(*gradients(number))

    def assert_same(self):
        assert_same(self.optimizer, self.ours, self.bare, self.theirs)


def assert_same(optimizer, ours, bare, theirs, rtol=1e-6):
    values = [*ours, *optimizer.inner_optimizer.variables]
    for actual, expected in zip(values, [*theirs, *bare.variables], strict=True):
        # After cancellation only the terms' rounding errors are left.
        np.testing.assert_allclose(
            actual.numpy(), expected.numpy(), rtol=rtol, atol=2e-7, err_msg=actual.path
        )


@pytest.mark.parametrize("name", first_of(OPTIMIZERS))
def test_fifty_steps_equal_the_inner_optimizers(name):
    pair = Pair(OPTIMIZERS[name])
    assert one_pass_updates(pair.step) == len(SHAPES)
    pair.run(range(STEPS))
    assert int(pair.optimizer.iterations) == STEPS
    pair.assert_same()
    if name in ("sgd", "momentum", "nesterov"):
        assert_all_equal(pair.ours, pair.theirs)


@pytest.mark.parametrize(
    ("name", "arguments"),
    one_of_each(
        ["momentum", "adam", "adamw"], [{"grad_clip": 0.5}, {"master_weights": True}], quick=1
    ),
)
def test_clipping_and_masters_keep_the_update_one_pass(name, arguments):
    low = "master_weights" in arguments
    weights = [keras.Variable(v, dtype="float16" if low else "float32") for v in variables()]
    optimizer = tfamp.LossScaleOptimizer(OPTIMIZERS[name](), **arguments)
    optimizer.build(weights)
    optimizer.get_scale()
    assert one_pass_updates(stepper(optimizer, weights, 1.0)) == len(SHAPES)


@pytest.mark.parametrize("traced", first_of([True, False]), ids=["function", "eager"])
def test_grad_scaler_steps_in_one_pass_too(traced):
    ours, theirs = variables(), variables()
    inner, bare = keras.optimizers.AdamW(0.05), keras.optimizers.AdamW(0.05)
    inner.build(ours)
    bare.build(theirs)
    scaler = tfamp.GradScaler(init_scale=2.0**10)

    def step(*grads):
        scaler.step(inner, zip([g * 2.0**10 for g in grads], ours, strict=True))
        scaler.update()

    if traced:
        step = tf.function(step)
        assert one_pass_updates(step) == len(SHAPES)
    for number in range(3):
        step(*gradients(number))
        bare.apply(gradients(number), theirs)
    for actual, expected in zip([*ours, *inner.variables], [*theirs, *bare.variables], strict=True):
        np.testing.assert_allclose(actual.numpy(), expected.numpy(), rtol=1e-6, atol=2e-7)


bit_for_bit = pytest.mark.skipif(
    platform.machine().lower() not in {"x86_64", "amd64"} or tf.config.list_physical_devices("GPU"),
    reason="compilers for other processors contract a * b + c into one rounding",
)


def updated_at_once(
    shapes=((4, 4),) * 5 + ((3,),) * 2 + ((40,),), dtype="float32", run=True, **rounding
):
    """Weights after an update, its compiled calls, and the products in what these compile."""
    keras.utils.set_random_seed(3)
    values = [np.random.standard_normal(each).astype("float32") for each in shapes]
    weights = [keras.Variable(value, dtype=dtype) for value in values]
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.AdamW(0.01), **rounding)
    optimizer.build(weights)

    @tf.function
    def step():
        slopes = [tf.cos(tf.convert_to_tensor(each)) for each in weights]
        optimizer.apply(slopes, weights, unscaled=True)

    if run:
        step()
    graph_def = step.get_concrete_function().graph.as_graph_def()
    calls = [node.attr["f"].func.name for node in nodes_of(graph_def)]
    programs = [f for f in graph_def.library.function if "update_all" in f.signature.name]
    products = sum(node.op == "Mul" for each in programs for node in each.node_def)
    return [*weights, *optimizer.variables], sum("update_all" in name for name in calls), products


@bit_for_bit
def test_many_weights_are_updated_in_groups_with_the_same_result(monkeypatch):
    grouped, calls, _ = updated_at_once()
    # Twice two of the matrices and the fifth, both vectors, and the one of another shape.
    assert calls == 5
    monkeypatch.setattr("tfamp.training.fused_update._ROOM", 511)
    single, calls, _ = updated_at_once()
    assert calls == 7  # A matrix reads and writes 256 bytes.
    assert_all_equal(single, grouped)
    monkeypatch.setattr("tfamp.training.fused_update.device_kind_of", lambda device: "gpu")
    whole, calls, _ = updated_at_once()
    assert calls == 1
    assert_all_equal(whole, grouped)


@bit_for_bit
@pytest.mark.parametrize("rounding", first_of([{}, {"weight_rounding": "stochastic"}]))
def test_the_programs_do_not_grow_with_the_number_of_small_weights(monkeypatch, rounding):
    # Programs with random numbers take XLA long to compile: these are counted only.
    how = {"dtype": "bfloat16" if rounding else "float32", "run": not rounding} | rounding
    few, many = (((20,),) * count + ((3, 17),) * count for count in (4, 12))
    _, calls, products = updated_at_once(few, **how)
    parted, more_calls, same_products = updated_at_once(many, **how)
    assert (more_calls, same_products) == (3 * calls, products)
    monkeypatch.setattr("tfamp.training.fused_update._MOST", 1000)
    whole, calls, more_products = updated_at_once(many, **how)
    assert calls == (4 if rounding else 2)  # Of each shape, of slots and of values.
    assert more_products > 2 * products
    assert_all_equal(parted, whole)


@pytest.mark.parametrize("scale", first_of([3.0, 2.0**-30, 2.0**32]))
def test_any_scale_exclusion_from_decay_eager_steps_and_settings_changed_between_traces(scale):
    pair = Pair(OPTIMIZERS["adamw"], scale, exclude=[1])
    pair.run([0])
    tf.config.run_functions_eagerly(True)
    pair.run([1])
    tf.config.run_functions_eagerly(False)
    for inner in (pair.optimizer.inner_optimizer, pair.bare):
        inner.beta_1, inner.epsilon, inner.weight_decay = 0.5, 0.1, 0.3
        inner.learning_rate = 0.02
    pair.trace()
    pair.run([2])
    pair.assert_same()


@pytest.mark.parametrize("changed", [False, True])
def test_gradients_are_checked_once(changed):
    ours = variables()
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=2.0)
    optimizer.build(ours)

    @tf.function
    def step(*grads):
        optimizer.get_scaled_loss(tf.constant(1.0))
        unscaled = optimizer.get_unscaled_gradients(grads)
        unscaled = [tf.math.log(g) for g in unscaled] if changed else unscaled
        optimizer.apply(unscaled, ours)

    assert ops(step)[0]["IsFinite"] == len(SHAPES) * (2 if changed else 1)
    before = [variable.numpy() for variable in ours]
    # Made infinite before they are unscaled, or after.
    step(*[g * 0.0 if changed else g * np.inf for g in gradients(0)])
    assert int(optimizer.skipped_steps) == 1
    assert_all_equal(ours, before)
    step(*[tf.exp(g) for g in gradients(0)])
    assert int(optimizer.iterations) == 1
    for variable, old, gradient in zip(ours, before, gradients(0), strict=True):
        expected = np.log(np.exp(gradient) / 2) if changed else np.exp(gradient) / 2
        np.testing.assert_allclose(variable.numpy(), old - 0.5 * expected, rtol=1e-5, atol=1e-6)


def test_huge_gradients_are_finite_but_not_if_they_overflow_when_unscaled():
    weight = keras.Variable([1.0, 1.0])
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(2.0**-100), initial_scale=2.0)
    small = tfamp.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=2.0**-30, min_scale=2.0**-40
    )
    step, small_step = (
        tf.function(lambda g, each=each: each.apply([g], [weight], unscaled=False))
        for each in (optimizer, small)
    )
    for each in (optimizer, small):
        each.build([weight])
    step(tf.constant([2.0**101, -(2.0**102)]))  # Whose squares overflow.
    step(tf.constant([2.0**101, np.inf]))
    small_step(tf.constant([2.0**120, 0.0]))
    assert [int(each.skipped_steps) for each in (optimizer, small)] == [1, 1]
    assert weight.numpy().tolist() == [0.0, 3.0]


def test_a_scale_whose_inverse_is_subnormal():
    """And a weight that is infinite, as in a mask, stays infinite."""
    weight, expected = (keras.Variable([1.0, -np.inf]) for _ in range(2))
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.Adam(0.5), loss_scale=2.0**127)
    optimizer.apply([tf.constant([2.0**125, 0.0])], [weight], unscaled=False)
    keras.optimizers.Adam(0.5).apply([tf.constant([2.0**-2, 0.0])], [expected])
    np.testing.assert_allclose(weight.numpy(), expected.numpy(), rtol=1e-6)


class Custom(keras.optimizers.Adam):
    """Moves twice as far."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, 2 * learning_rate)


@pytest.mark.parametrize(
    "make",
    one_in(
        4,
        [
            lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5),
            lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
            lambda: Custom(0.01),
            lambda: keras.optimizers.Adam(0.01, amsgrad=True),
            lambda: keras.optimizers.RMSprop(0.01),
        ],
    ),
    ids=["ema", "accumulation", "subclass", "amsgrad", "rmsprop"],
)
def test_other_optimizers_update_themselves(make):
    pair = Pair(make)
    kinds, _ = ops(pair.step)
    assert one_pass_updates(pair.step) == 0
    assert "AssignSubVariableOp" in kinds or "AssignAddVariableOp" in kinds
    pair.run(range(6))
    pair.assert_same()


def test_variables_that_do_not_fit_are_updated_by_the_optimizer_itself():
    def made(optimizer):
        weights = [*variables(), keras.Variable(np.ones(3), dtype="float64")]
        weights[1].constraint = keras.constraints.NonNeg()
        optimizer.build(weights)

        @tf.function
        def step(number):
            values = tf.ones((2, 5)) * tf.cast(number, tf.float32)
            slices = tf.IndexedSlices(values, tf.constant([1, 4]), tf.constant([7, 5]))
            optimizer.apply([slices, *gradients(1)[1:], tf.ones(3, tf.float64)], weights)

        return optimizer, weights, step

    bare, theirs, bare_step = made(keras.optimizers.Adam(0.1))
    optimizer, ours, step = made(
        tfamp.LossScaleOptimizer(keras.optimizers.Adam(0.1), loss_scale=1.0)
    )
    nodes = nodes_of(step.get_concrete_function(tf.constant(1)).graph.as_graph_def())
    assert sum(node.attr["_XlaMustCompile"].b for node in nodes) == 1
    for number in range(3):
        step(tf.constant(number))
        bare_step(tf.constant(number))
    assert int(optimizer.iterations) == 3
    assert_same(optimizer, ours, bare, theirs)


@pytest.mark.parametrize(
    ("name", "constrained"),
    [
        ("nesterov", True),
        ("nadam", False),
        pytest.param("adamw_schedule_clip", False, marks=pytest.mark.slow),
    ],
)
def test_each_replica_updates_its_copies_in_one_pass(two_replicas, name, constrained):
    def made(wrap, **arguments):
        weights = variables()
        # Keras updates it, with gradients that it sums itself.
        weights[1].constraint = keras.constraints.NonNeg() if constrained else None
        optimizer = wrap(OPTIMIZERS[name]())
        optimizer.build(weights)

        def apply(*grads):
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            factor = 1.0 + tf.cast(number, tf.float32)
            optimizer.apply([g * factor for g in grads], weights, **arguments)

        return optimizer, weights, tf.function(lambda *g: two_replicas.run(apply, args=g))

    with two_replicas.scope():
        optimizer, ours, step = made(tfamp.LossScaleOptimizer, unscaled=True)
        bare, theirs, bare_step = made(lambda optimizer: optimizer)
    assert one_pass_updates(step) == 2 * (len(SHAPES) - constrained)
    for number in range(3):
        step(*gradients(number))
        bare_step(*gradients(number))
    assert int(optimizer.iterations) == 3
    assert_same(optimizer, ours, bare, theirs)
    for variable in [*ours, *optimizer.inner_optimizer.variables]:
        first, second = variable.value.values
        np.testing.assert_array_equal(first.numpy(), second.numpy(), variable.path)


def test_nadam_on_two_replicas_has_the_values_of_one_device(two_replicas):
    """Its product of momenta is multiplied once a step, not once for each replica."""

    def trained(wrap, run, share):
        weights = variables()
        optimizer = wrap(OPTIMIZERS["nadam"]())
        optimizer.build(weights)

        @tf.function
        def step(*grads):
            run(lambda: optimizer.apply([share * each for each in grads], weights))

        for number in range(3):
            step(*gradients(number))
        return optimizer, weights

    with two_replicas.scope():  # Gradients are summed.
        optimizer, ours = trained(tfamp.LossScaleOptimizer, two_replicas.run, 0.5)
    bare, theirs = trained(lambda inner: inner, lambda step: step(), 1.0)
    assert_same(optimizer, ours, bare, theirs)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_values_read_before_the_update_stay(name):
    weight = keras.Variable(np.ones(SHAPES[0]))
    optimizer = tfamp.LossScaleOptimizer(OPTIMIZERS[name](), initial_scale=1.0)
    optimizer.build([weight])
    every = [weight, *optimizer.inner_optimizer.variables]
    read = [variable.value.read_value() for variable in every]  # Shares the variable's memory.
    copies = [np.array(value) for value in read]
    optimizer.apply([tf.ones(SHAPES[0])], [weight], unscaled=True)
    assert (weight.numpy() < 1).all()
    assert_all_equal(read, copies)


def test_where_xla_does_not_work_keras_updates(monkeypatch):
    assert fused_update.xla_works(tf.Variable(1.0).device)
    monkeypatch.setattr(fused_update, "xla_works", lambda device: False)
    pair = Pair(OPTIMIZERS["adam"])
    assert one_pass_updates(pair.step) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.run([0])
    pair.assert_same()


@pytest.mark.parametrize("name", ["update_step", "apply"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_method_that_was_replaced_on_the_object_is_called(kind, name):
    """As a subclass's is."""
    weight, inner = keras.Variable([1.0]), OPTIMIZERS[kind]()
    optimizer, calls = tfamp.LossScaleOptimizer(inner, loss_scale=1.0), []
    original = getattr(inner, name)

    def replaced(*args, **kwargs):
        calls.append(name)
        return original(*args, **kwargs)

    setattr(inner, name, replaced)
    optimizer.apply_gradients([(tf.constant([1.0]), weight)])
    assert calls == [name]
    assert float(weight[0]) != 1.0
