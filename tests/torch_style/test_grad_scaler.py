"""GradScaler: torch's rule step for step, its order of calls, one scaler for many optimizers."""

import copy
import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfamp
from helpers.cases import first_of, one_of_each, tiers
from helpers.graph_asserts import branches, op_dtypes, op_numbers
from helpers.replicas import per_replica
from helpers.training import assert_identical, assert_same_values, data, small_model, snapshot

MODES = {"eager": lambda f: f, "function": tf.function, "xla": tf.function(jit_compile=True)}
IN_EVERY_MODE = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
ORDER_ERRORS = {
    "unscale twice": r"unscale\(\) has already been called",
    "unscale after step": r"unscale\(\) is called after step\(\)",
    "step twice": r"step\(\) has already been called",
    "minimize after unscale": r"minimize\(\) is called after unscale\(\)",
    "minimize after step": r"minimize\(\) is called after step\(\)",
    "update alone": "No inf checks were recorded",
}


def sgd():
    return keras.optimizers.SGD(1.0)


def one_weight(**arguments):
    arguments = {"init_scale": 8.0} | arguments
    return keras.Variable([1.0, 1.0]), sgd(), tfamp.GradScaler(**arguments)


def scaled(*values):
    return tf.constant(values, "float32") * 8.0


# ---- The rule -------------------------------------------------------------------------------


class TorchRule:
    """PyTorch's documented state machine, written without any of tfamp's code."""

    def __init__(self, scale, growth, backoff, interval):
        self.scale, self.growth = np.float32(scale), growth
        self.backoff, self.interval, self.tracker = backoff, interval, 0

    def update(self, found):
        if found:
            self.scale, self.tracker = self.times(self.backoff), 0
        elif self.tracker + 1 == self.interval:
            grown = self.times(self.growth)
            self.scale, self.tracker = grown if np.isfinite(grown) else self.scale, 0
        else:
            self.tracker += 1

    def times(self, factor):
        with np.errstate(over="ignore"):
            return np.float32(np.float64(self.scale) * factor)


@st.composite
def iterations(draw, optimizers):
    """Per iteration and optimizer: what is called, and whether the gradient is finite."""
    calls = st.sampled_from(["step", "unscale", "both", "nothing"])
    values = st.sampled_from([0.5, -0.25, 3.0, math.inf, -math.inf, math.nan])
    one = st.lists(st.tuples(calls, values), min_size=optimizers, max_size=optimizers)
    return draw(st.lists(one.filter(lambda i: any(c != "nothing" for c, _ in i)), max_size=14))


def one_iteration(scaler, optimizers, weights, calls):
    def run(*gradients):
        applied = []
        for call, optimizer, weight, gradient in zip(
            calls, optimizers, weights, gradients, strict=True
        ):
            grads = [scaler.scale(gradient)]
            if call in ("unscale", "both"):
                grads = scaler.unscale(optimizer, grads)
            if call in ("step", "both"):
                applied.append(scaler.step(optimizer, zip(grads, [weight], strict=True)))
        scaler.update()
        return applied

    return run


@pytest.mark.parametrize(("traced", "optimizers"), one_of_each([True, False], [2, 1], quick=1))
def test_scale_tracker_and_weights_are_torchs(optimizers, traced):
    inner = [sgd() for _ in range(optimizers)]
    weights = [keras.Variable(0.0) for _ in range(optimizers)]
    scaler = tfamp.GradScaler(init_scale=128.0, growth_interval=2)
    start = scaler.state_dict()
    for optimizer, weight in zip(inner, weights, strict=True):
        optimizer.build([weight])

    @functools.cache
    def iteration_of(calls):
        run = one_iteration(scaler, inner, weights, calls)
        return tf.function(run, autograph=False) if traced else run

    @settings(max_examples=20)
    @given(iterations(optimizers))
    def check(history):
        rule = TorchRule(128.0, 2.0, 0.5, 2)
        scaler.load_state_dict(start)
        expected = np.zeros(optimizers, "float32")
        for weight in weights:
            weight.assign(0.0)
        for iteration in history:
            calls, values = zip(*iteration, strict=True)
            applied = iteration_of(calls)(*(tf.constant(v) for v in values))
            found = any(c != "nothing" and not math.isfinite(v) for c, v in iteration)
            rule.update(found)
            steps = [(i, v) for i, (c, v) in enumerate(iteration) if c in ("step", "both")]
            assert [bool(a) for a in applied] == [math.isfinite(v) for _, v in steps]
            for i, value in steps:
                expected[i] -= value if math.isfinite(value) else 0.0
            state = scaler.state_dict()
            assert (state["scale"], state["_growth_tracker"]) == (rule.scale, rule.tracker)
            assert [float(w) for w in weights] == expected.tolist()

    check()


@IN_EVERY_MODE
def test_a_scale_that_cannot_grow_keeps_its_value_and_none_becomes_zero(mode):
    weight, optimizer, scaler = one_weight(
        init_scale=1.5 * 2.0**126, growth_interval=1, backoff_factor=0.5**40
    )

    @mode
    def step(gradient):
        scaler.step(optimizer, [(gradient, weight)])
        scaler.update()

    for _ in range(3):
        step(tf.zeros(2))
    assert float(scaler.get_scale()) == 1.5 * 2.0**127
    for _ in range(10):
        step(tf.constant([math.nan, 0.0]))
    assert float(scaler.get_scale()) == 2.0**-126
    np.testing.assert_array_equal(weight.numpy(), [1.0, 1.0])


def test_a_state_that_is_loaded_holds_in_a_traced_function():
    weight, optimizer, scaler = one_weight(growth_interval=10)

    @tf.function
    def step(gradient):
        scaler.step(optimizer, [(gradient, weight)])
        scaler.update()

    for _ in range(4):
        step(tf.zeros(2))
    factors = {"growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 3}
    scaler.load_state_dict(scaler.state_dict() | factors)  # The count is larger than the interval.
    step(tf.zeros(2))
    rule = TorchRule(8.0 * 1.7, 1.7, 0.3, 3)
    for finite in (True, True, True, False, False, True, True, True, True):
        step(tf.constant([0.0 if finite else math.inf, 0.0]))
        rule.update(not finite)
        assert float(scaler.get_scale()) == float(rule.scale)


def test_setters_reach_functions_that_were_traced_before():
    weight, optimizer, scaler = one_weight(growth_interval=100)
    defaults = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    assert defaults == (2.0, 0.5, 100)

    @tf.function
    def step(gradient):
        scaler.step(optimizer, [(gradient, weight)])
        scaler.update()

    step(tf.zeros(2))
    traces = step.experimental_get_tracing_count()
    scaler.set_growth_factor(1.7)
    scaler.set_backoff_factor(0.3)
    scaler.set_growth_interval(2)
    changed = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    assert changed == (1.7, 0.3, 2)
    rule = TorchRule(8.0, 1.7, 0.3, 2)
    rule.update(False)
    for finite in (True, True, False, True, True):
        step(tf.constant([0.0 if finite else math.inf, 0.0]))
        rule.update(not finite)
        assert float(scaler.get_scale()) == float(rule.scale)
    assert step.experimental_get_tracing_count() == traces
    assert [scaler.state_dict()[name] for name in ("growth_factor", "growth_interval")] == [1.7, 2]


@pytest.mark.parametrize(
    ("setter", "value", "error"),
    [
        ("set_growth_factor", 1.0, ValueError),
        ("set_backoff_factor", 1.0, ValueError),
        ("set_growth_interval", 0, ValueError),
        ("set_growth_interval", 2.5, TypeError),
    ],
)
def test_a_bad_setting_changes_nothing(setter, value, error):
    scaler = tfamp.GradScaler()
    before = scaler.state_dict()
    with pytest.raises(error, match=f"{setter.removeprefix('set_')} must be"):
        getattr(scaler, setter)(value)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("mode", first_of(MODES.values()), ids=MODES)
def test_update_takes_a_new_scale(mode):
    weight, optimizer, scaler = one_weight(growth_interval=2)
    scaler.step(optimizer, [(tf.zeros(2), weight)])
    scaler.update()
    scaler.update(32.0)  # Needs no step, and leaves the tracker as it is.
    assert scaler.state_dict()["scale"] == 32.0
    assert scaler.state_dict()["_growth_tracker"] == 1
    set_scale = mode(lambda value: scaler.update(value))
    set_scale(tf.constant([64.0]))
    assert float(scaler.get_scale()) == 64.0
    for unusable in (0.0, -1.0, math.inf, math.nan, 1e-40):
        set_scale(tf.constant(unusable))
        assert float(scaler.get_scale()) == 64.0
        with pytest.raises(ValueError, match="new_scale must be a number in"):
            scaler.update(unusable)


# ---- Unscaling ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", first_of(MODES.values()), ids=MODES)
def test_clipping_between_unscale_and_step(mode):
    weight, optimizer, scaler = one_weight()

    @mode
    def step(gradient, divisor):
        (gradient,) = scaler.unscale(optimizer, [gradient])
        clipped = tf.clip_by_value(gradient, -0.5, 0.5) / divisor
        applied = scaler.step(optimizer, [(clipped, weight)])
        scaler.update()
        return applied

    zero, one = tf.constant([0.0, 1.0])
    assert bool(step(scaled(0.25, 2.0), one))
    assert not bool(step(tf.constant([math.inf, 2.0]), one))  # Clipping cannot hide it.
    assert float(scaler.get_scale()) == 4.0
    assert not bool(step(scaled(0.25, 2.0), zero))  # Spoilt after unscaling.
    assert float(scaler.get_scale()) == 2.0
    np.testing.assert_array_equal(weight.numpy(), [0.75, 0.5])


@pytest.mark.parametrize(
    "traced", tiers([(0, 0, 0), (1, 1, 1)], [((1, 0, 0),), ((0, 1, 0),), ((0, 0, 1),)]), ids=str
)
def test_unscale_step_and_update_in_functions_of_their_own(traced):
    weight, optimizer, scaler = one_weight()
    calls = (
        lambda g: scaler.unscale(optimizer, [g])[0],
        lambda g: scaler.step(optimizer, [(g, weight)]),
        lambda: scaler.update(),
    )
    unscale, step, update = (
        tf.function(call) if t else call for t, call in zip(traced, calls, strict=True)
    )
    step(unscale(scaled(0.25, 0.25)))
    update()
    step(scaled(0.25, 0.25))  # The same trace, this time with scaled gradients.
    update()
    assert not bool(step(tf.clip_by_value(unscale(tf.constant([math.inf, 0.0])), -1.0, 1.0)))
    update()
    np.testing.assert_array_equal(weight.numpy(), [0.5, 0.5])
    assert float(scaler.get_scale()) == 4.0


def test_scaling_in_float32_and_of_nests():
    scaler = tfamp.GradScaler(init_scale=2.0**20)
    losses = {"a": tf.constant(3.0, "float16"), "b": (tf.constant([1.0], "float64"), 2.0)}
    result = scaler.scale(losses)
    assert (result["a"].dtype, float(result["a"])) == (tf.float32, 3.0 * 2.0**20)
    assert result["b"][0].dtype == tf.float64
    assert float(result["b"][1]) == 2.0**21
    with pytest.raises(TypeError, match="must be a float tensor"):
        scaler.scale([tf.constant(1)])


@pytest.mark.parametrize("mode", first_of(MODES.values()), ids=MODES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_minimize(mode, dtype):
    weight, optimizer = keras.Variable(3.0), keras.optimizers.SGD(0.25)
    scaler = tfamp.GradScaler(init_scale=2.0**20, growth_interval=1)

    @mode
    def step(target):
        with tf.GradientTape() as tape:
            scaled_loss = scaler.scale(tf.cast(tf.square(weight - target), dtype))
        return scaler.minimize(optimizer, scaled_loss, tape, [weight])

    # 2**20 is inf in float16: scaled there, no step would ever be applied.
    finite = bool(step(tf.constant(0.0)))
    assert finite == (dtype == "float32")
    if finite:
        assert (float(weight), float(scaler.get_scale())) == (1.5, 2.0**21)
    assert not bool(step(tf.constant(math.inf)))


# ---- Order of calls -------------------------------------------------------------------------


def out_of_order(scaler, optimizer, weight, case):
    def step():
        scaler.step(optimizer, [(scaled(0.5, 0.5), weight)])

    def unscale():
        scaler.unscale(optimizer, [tf.zeros(2)])

    def minimize():
        with tf.GradientTape() as tape:
            scaled_loss = scaler.scale(tf.reduce_sum(weight))
        scaler.minimize(optimizer, scaled_loss, tape, [weight])

    return {
        "unscale twice": (unscale, unscale),
        "unscale after step": (step, unscale),
        "step twice": (step, step),
        "minimize after unscale": (unscale, minimize),
        "minimize after step": (step, minimize),
        "update alone": (lambda: None, scaler.update),
    }[case]


@pytest.mark.parametrize("case", ORDER_ERRORS)
def test_calls_out_of_order(case):
    weight, optimizer, scaler = one_weight()
    optimizer.build([weight])
    first, second = out_of_order(scaler, optimizer, weight, case)
    for call in (first, tf.function(first)):  # An update ends an iteration with an error too.
        call()
        with pytest.raises(RuntimeError, match=ORDER_ERRORS[case]):
            second()
        scaler.update(8.0)
    if case != "update alone":  # Found while tracing.
        with pytest.raises(RuntimeError, match=ORDER_ERRORS[case]):
            tf.function(lambda: (first(), second())).get_concrete_function()


def test_nothing_in_a_traced_step_makes_the_host_wait():
    """GPUs have int32 in the host's memory, and an Assert reads its condition there."""
    weight, optimizer, scaler = one_weight()
    optimizer.build([weight])

    @tf.function
    def step():
        gradients = scaler.unscale(optimizer, [scaled(0.5, 0.5)])
        scaler.step(optimizer, [(gradients[0], weight)])
        scaler.update()

    dtypes = op_dtypes(step)
    assert "int64" in dtypes["Equal"]
    assert not dtypes.keys() & {"Assert", "PyFunc", "EagerPyFunc"}
    compared = {"Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "SelectV2"}
    assert not any("int32" in dtypes.get(op, ()) for op in compared)
    assert branches(step) == op_numbers(step)["IsFinite"] == 1  # The step does not check again.


# ---- Wrong arguments ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("init_scale", "cuda", TypeError, "init_scale must be a number; got 'cuda'"),
        ("growth_factor", 1.0, ValueError, r"growth_factor must be a number in \(1, inf\)"),
        ("growth_interval", 0, ValueError, "growth_interval must be at least 1"),
        ("enabled", "no", TypeError, "enabled must be True or False"),
    ],
)
def test_bad_arguments(name, value, error, message):
    with pytest.raises(error, match=message):
        tfamp.GradScaler(**{name: value})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: tfamp.LossScaleOptimizer(sgd()), ValueError, "scaled twice.*inner_optimizer"),
        (lambda: keras.optimizers.SGD(loss_scale_factor=8.0), ValueError, "loss_scale_factor=8"),
        (lambda: keras.optimizers.SGD, TypeError, r"keras\.optimizers\.Optimizer"),
    ],
)
def test_only_bare_optimizers_are_accepted(make, error, message):
    weight, _, scaler = one_weight()
    optimizer = make()
    with pytest.raises(error, match=message):
        scaler.unscale(optimizer, [tf.zeros(2)])
    with pytest.raises(error, match=message):
        scaler.step(optimizer, [(tf.zeros(2), weight)])
    bare = sgd()
    with pytest.raises(ValueError, match="nothing to apply"):
        scaler.step(bare, [])
    assert bool(scaler.step(bare, [(scaled(0.5, 0.5), weight)]))  # Not taken as stepped.


# ---- State ----------------------------------------------------------------------------------


def test_state_dict_round_trip_with_torchs_keys():
    factors = {"growth_factor": 1.5, "backoff_factor": 0.1, "growth_interval": 7}
    state = {"scale": 1024.0, **factors, "_growth_tracker": 5}
    scaler = tfamp.GradScaler()
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state
    assert [type(v) for v in scaler.state_dict().values()] == [float, float, float, int, int]


def test_a_bad_state_dict_restores_nothing():
    scaler, before = tfamp.GradScaler(), tfamp.GradScaler().state_dict()
    for changes, error, message in [
        ({"growth_interval": 0}, ValueError, "growth_interval.*0"),
        ({"scale": math.inf}, ValueError, "scale.*inf"),
        ({"_growth_tracker": -1}, ValueError, "_growth_tracker.*-1"),
        ({"backoff_factor": None}, TypeError, "backoff_factor.*None"),
    ]:
        with pytest.raises(error, match=message):
            scaler.load_state_dict(before | {"scale": 2.0} | changes)
    with pytest.raises(KeyError, match="no 'growth_factor', .*, only .'scale'"):
        scaler.load_state_dict({"scale": 2.0})
    with pytest.raises(RuntimeError, match="of an enabled GradScaler"):
        scaler.load_state_dict(tfamp.GradScaler(enabled=False).state_dict())
    assert scaler.state_dict() == before


def test_checkpoint_resumes_bit_for_bit(tmp_path):
    x, y = (tf.constant(v) for v in data())

    def make():
        model, optimizer = small_model(), keras.optimizers.Adam(0.05)
        optimizer.build(model.trainable_variables)
        scaler = tfamp.GradScaler(growth_interval=2, growth_factor=1.7, backoff_factor=0.3)
        parts = {"scaler": scaler, "model": model, "optimizer": optimizer}
        return parts, tf.train.Checkpoint(**parts)

    def train(steps, scaler, model, optimizer):
        for i in steps:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
                scaled_loss = scaler.scale(loss * (math.inf if i % 5 == 3 else 1.0))
            scaler.minimize(optimizer, scaled_loss, tape, model.trainable_variables)
        return scaler.state_dict(), snapshot(model)

    first, checkpoint = make()
    train(range(7), **first)
    path = checkpoint.save(str(tmp_path / "checkpoint"))
    state, weights = train(range(7, 15), **first)
    resumed, checkpoint = make()
    checkpoint.restore(path).assert_consumed()
    found = train(range(7, 15), **resumed)
    assert found[0] == state
    assert state["growth_factor"] == 1.7
    assert_same_values(found[1], weights)


def test_a_copy_has_the_state_and_no_part_in_the_iteration():
    weight, optimizer, scaler = one_weight()
    scaler.step(optimizer, [(tf.constant([math.inf, 0.0]), weight)])
    copied = copy.deepcopy(scaler)
    scaler.update()
    assert (float(scaler.get_scale()), float(copied.get_scale())) == (4.0, 8.0)
    with pytest.raises(RuntimeError, match="No inf checks"):
        copied.update()


# ---- Disabled -------------------------------------------------------------------------------


@IN_EVERY_MODE
def test_disabled_passes_everything_through(mode):
    weight, optimizer, scaler = one_weight(enabled=False)
    optimizer.build([weight])

    @mode
    def step(gradient):
        loss = tf.constant(2.0, "float16")
        assert scaler.scale(loss) is loss
        assert scaler.unscale(optimizer, [gradient])[0] is gradient
        applied = scaler.step(optimizer, [(gradient, weight)])
        scaler.update()
        scaler.update(4.0)
        return applied

    assert bool(step(tf.constant([0.5, math.inf])))  # An inf is applied, as without a scaler.
    np.testing.assert_array_equal(weight.numpy(), [0.5, -math.inf])
    scaler.load_state_dict(tfamp.GradScaler().state_dict())
    assert not scaler.is_enabled()
    assert (float(scaler.get_scale()), scaler.state_dict()) == (1.0, {})


# ---- Replicas -------------------------------------------------------------------------------


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def distributed_step(strategy, scaler, model, optimizer, unscale, update_inside):
    def replica(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            scaled_loss = scaler.scale(loss)
        grads = tape.gradient(scaled_loss, model.trainable_variables)
        if unscale:
            grads = scaler.unscale(optimizer, grads)
            grads = [tf.where(tf.math.is_finite(g), g, 0.0) for g in grads]  # Hides what is bad.
        applied = scaler.step(optimizer, zip(grads, model.trainable_variables, strict=True))
        if update_inside:
            scaler.update()
        return applied

    def step(x, y):
        applied = strategy.run(replica, args=(x, y))
        if not update_inside:
            scaler.update()
        return strategy.experimental_local_results(applied)

    return step


@pytest.mark.parametrize(
    ("traced", "unscale", "update_inside"), one_of_each(*([True, False],) * 3, quick=1)
)
def test_inf_on_any_one_replica_skips_all(two_replicas, traced, unscale, update_inside):
    with two_replicas.scope():
        model, optimizer = small_model(), momentum()
        scaler = tfamp.GradScaler(init_scale=2.0**10, growth_interval=2)
    start = model.variables[0].numpy()
    step = distributed_step(two_replicas, scaler, model, optimizer, unscale, update_inside)
    step = tf.function(step) if traced else step
    x, y = data(2)
    targets = per_replica(two_replicas, y[:8], y[8:])
    for bad_replica in (None, 0, 1, None, None):
        before = snapshot(model)
        halves = [x[:8].copy(), x[8:].copy()]
        if bad_replica is not None:
            halves[bad_replica][0] = math.inf
        applied = step(per_replica(two_replicas, *halves), targets)
        assert [bool(a) for a in applied] == [bad_replica is None] * 2
        if bad_replica is not None:
            assert_identical(snapshot(model), before)
    scales = two_replicas.experimental_local_results(two_replicas.run(scaler.get_scale))
    assert [float(scale) for scale in scales] == [2.0**9, 2.0**9]
    assert not np.array_equal(model.variables[0].numpy(), start)
    for variable in model.variables:
        np.testing.assert_array_equal(*(v.numpy() for v in variable.value.values))


def test_outside_the_scope_or_a_replica_is_an_error(two_replicas):
    with two_replicas.scope():
        weight, optimizer, inside = keras.Variable([1.0]), sgd(), tfamp.GradScaler()
        optimizer.build([weight])
        with pytest.raises(ValueError, match=r"inside strategy\.run"):
            inside.step(optimizer, [(tf.zeros(1), weight)])
    outside = tfamp.GradScaler()
    with pytest.raises(ValueError, match=r"Create it under strategy\.scope"):
        two_replicas.run(lambda: outside.step(optimizer, [(tf.zeros(1), weight)]))
