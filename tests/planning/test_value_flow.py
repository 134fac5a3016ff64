"""Values that only structure shows: angles, indices, losses, states of loops, tolerances."""

import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of, one_of_each, tiers

DTYPES = ("bfloat16", "float16")
PLACEMENTS = ("lists", "min_cut", "fused")
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
RANDOM = np.random.default_rng(0)
W = [tf.Variable(RANDOM.normal(size=(16, 16)) / 4, dtype=tf.float32) for _ in range(3)]
X = tf.constant(RANDOM.normal(size=(64, 16)), tf.float32)


def rewritten(function, dtype, placement="min_cut"):
    return tfamp.rewrite(function, dtype=dtype, placement=placement, profile="builtin")


def error_of(actual, expected):
    actual, expected = np.float64(actual), np.float64(expected)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def dtypes(fast, op, *args):
    return [node.dtype for node in fast.plan(*args).nodes if node.op == op]


# ---- Angles and indices --------------------------------------------------------------------------

POSITIONS = tf.range(1024, dtype=tf.float32)
RATES = 10000.0 ** (-tf.range(0, 64, 2, dtype=tf.float32) / 64)


def in_a_branch(angles):
    return tf.cond(angles[0, 0] < 1.0, lambda: tf.sin(angles), lambda: tf.cos(angles))


TURNED = {
    "einsum": lambda x: tf.cos(tf.einsum("i,j->ij", x, RATES)),
    "matmul": lambda x: tf.sin(tf.matmul(x[:, None], RATES[None])),
    "cumsum": lambda x: tf.sin(tf.cumsum(tf.matmul(x[:, None], RATES[None]) / 512.0)),
    "moved": lambda x: tf.cos(tf.concat([tf.einsum("i,j->ij", x, RATES)] * 2, -1)),
    "Fourier features": lambda x: tf.sin(
        tf.matmul(tf.reshape(x, (512, 2)), [[0.5, 1.5, 30.0], [0.25, 8.0, 2.0]]) * np.pi
    ),
    "complex": lambda x: tf.math.real(
        tf.exp(1j * tf.cast(tf.einsum("i,j->ij", x, RATES), tf.complex64))
    ),
    "of a branch": lambda x: tf.sin(
        tf.cond(x[1] > 0.0, lambda: tf.einsum("i,j->ij", x, RATES), lambda: x[:, None] * RATES)
    ),
    "in a branch": lambda x: in_a_branch(tf.einsum("i,j->ij", x, RATES)),
    "compiled": lambda x: tf.function(tf.sin, jit_compile=True)(tf.einsum("i,j->ij", x, RATES)),
}


@pytest.mark.parametrize("placement", tiers(["min_cut"], ["lists", "fused"]))
@pytest.mark.parametrize(("name", "dtype"), one_of_each(TURNED, DTYPES, quick=9))
def test_angles_are_float32(name, dtype, placement):
    fast = rewritten(
        lambda x: TURNED[name](x) @ tf.ones((TURNED[name](x).shape[-1], 4)), dtype, placement
    )
    exact = TURNED[name](POSITIONS) @ tf.ones((TURNED[name](POSITIONS).shape[-1], 4))
    assert error_of(fast(POSITIONS), exact) < EPS[dtype]


@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
def test_angles_of_learned_rates_and_their_gradients_are_exact(dtype):
    rates = tf.Variable(RATES[:16])

    def step(x, y):
        with tf.GradientTape() as tape:
            # The gradient of the product takes the rounded rates.
            angles = tf.einsum("i,j->ij", 20.0 * POSITIONS[:64], tf.abs(rates))
            loss = tf.reduce_mean(tf.square((x * tf.sin(angles)) @ W[0] - y))
        return tape.gradient(loss, [W[0], rates])

    y = tf.reverse(X, [0])
    for actual, expected in zip(rewritten(step, dtype, "lists")(X, y), step(X, y), strict=True):
        assert error_of(actual, expected) < 4 * EPS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sine_behind_another_product_leaves_the_first_one_low(dtype):
    def network(x):
        return tf.sin(tf.nn.relu(x @ W[0]) @ W[1]) @ W[2]

    assert dtypes(rewritten(network, dtype), "MatMul", X) == [dtype, "float32", dtype]


INDEXES = {
    "floor": lambda v: tf.cast(tf.floor(v), tf.int32),
    "cast": lambda v: tf.cast(v, tf.int32),
    "round": lambda v: tf.cast(tf.round(v), tf.int32),
    "ceil": lambda v: tf.cast(tf.math.ceil(v), tf.int32),
    "remainder": lambda v: tf.cast(tf.math.floormod(v, 100.0), tf.int32),
    "search": lambda v: tf.searchsorted(tf.range(500.0), tf.reshape(v, [-1]))[:, None],
}


@pytest.mark.parametrize(("name", "dtype"), one_of_each(INDEXES, DTYPES, quick=2))
def test_rows_found_by_products_are_the_right_ones(name, dtype):
    table = tf.constant(RANDOM.normal(size=(500, 16)), tf.float32)
    x = tf.constant(RANDOM.uniform(0, 1, (500, 8)), tf.float32)
    w = tf.constant(RANDOM.uniform(0, 120, (8, 1)), tf.float32)

    def found(x):
        return tf.gather(table, tf.clip_by_value(INDEXES[name](x @ w)[:, 0], 0, 499)) @ W[0]

    same = np.isclose(rewritten(found, dtype)(x), found(x), atol=0.2).all(-1)
    assert same.mean() > 0.99


# ---- Losses --------------------------------------------------------------------------------------


def gram(x, y):
    difference = tf.matmul(x, x, transpose_a=True) - tf.matmul(y, y, transpose_a=True)
    return tf.reduce_mean(tf.square(difference))


def similarity(x, y):
    """Smoothed variances, whose terms cancel."""
    window = tf.nn.softmax(-tf.square(tf.range(5, dtype=tf.float32) - 2.0))
    kernel = (window[:, None] * window[None])[:, :, None, None]
    smooth = lambda v: tf.nn.conv2d(v[None, ..., None], kernel, 1, "SAME")  # noqa: E731
    x, y = 8.0 + x, 8.0 + y
    variance = smooth(x * x) - smooth(x) ** 2
    return tf.reduce_mean(variance / (variance + smooth(y * y) - smooth(y) ** 2 + 0.01))


def distances(x, y):
    squares = tf.reduce_sum(x * x, -1)[:, None] + tf.reduce_sum(y * y, -1)[None]
    return tf.reduce_mean(tf.nn.relu(squares - 2.0 * tf.matmul(x, y, transpose_b=True)))


def discrepancy(x, y):
    def kernel(a, b):
        squares = tf.reduce_sum(a * a, -1)[:, None] + tf.reduce_sum(b * b, -1)[None]
        return tf.reduce_mean(tf.exp(-(squares - 2 * tf.einsum("ik,jk->ij", a, b)) / 32))

    return kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)


LOSSES = {
    "gram": gram,
    "similarity": similarity,
    "distances": distances,
    "discrepancy": discrepancy,
}


def training_step(loss_of, scale=1.0):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(tf.tanh(x @ W[0]) @ W[1], y)
            scaled = loss * scale
        return loss, [each / scale for each in tape.gradient(scaled, W[:2])]

    return step


@pytest.mark.parametrize(("name", "dtype"), one_of_each(LOSSES, DTYPES, quick=2))
def test_a_loss_begins_behind_the_last_product_with_a_weight(name, dtype):
    y = tf.constant(RANDOM.normal(size=(64, 16)), tf.float32)
    step = training_step(LOSSES[name])
    fast = rewritten(step, dtype)
    products = [node for node in fast.plan(X, y).nodes if node.op in ("MatMul", "Conv2D", "Einsum")]
    assert dtype in {node.dtype for node in products}
    (loss, gradients), (exact_loss, exact) = fast(X, y), step(X, y)
    # What rounding the outputs of the model alone does.
    outputs = tf.tanh(X @ W[0]) @ W[1]
    rounded = LOSSES[name](tf.cast(tf.cast(outputs, dtype), tf.float32), y)
    by_rounding = abs(float(rounded / exact_loss - 1))
    assert abs(float(loss / exact_loss - 1)) < 4 * by_rounding + EPS[dtype]
    for actual, expected in zip(gradients, exact, strict=True):
        assert error_of(actual, expected) < 4 * by_rounding + 8 * EPS[dtype]


def test_a_style_loss_of_large_features_is_finite_in_float16():
    def step(x):
        with tf.GradientTape() as tape:
            features = tf.nn.relu(x @ W[0]) * 100.0
            loss = tf.reduce_mean(tf.square(tf.matmul(features, features, transpose_a=True) - 1.0))
        return loss, tape.gradient(loss, W[0])

    loss, gradient = rewritten(step, "float16")(X)
    exact_loss, _ = step(X)
    assert abs(float(loss / exact_loss - 1)) < 0.01
    del gradient  # It exceeds float16's range without a loss scale.


def penalized(loss_of, scale=1.0):
    """A training step with a penalty of the slope of the loss, as in WGAN-GP and R1."""

    def step(x, y):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = loss_of(tf.tanh(x @ W[0]) @ W[1], y)
            total = loss + tf.reduce_sum(tf.square(inner.gradient(loss, x)))
            scaled = total * scale
        return total, [each / scale for each in tape.gradient(scaled, W[:2])]

    return step


@pytest.mark.parametrize(("name", "dtype"), one_of_each(LOSSES, DTYPES, quick=1))
def test_a_loss_beside_a_penalty_of_its_gradient_begins_there_too(name, dtype):
    y = tf.constant(RANDOM.normal(size=(64, 16)), tf.float32)
    step, plain = penalized(LOSSES[name]), training_step(LOSSES[name])
    fast = rewritten(step, dtype)
    of_loss = {n.name for n in rewritten(plain, dtype).plan(X, y).nodes if "behind" in n.reason}
    exact_nodes = {node.name for node in fast.plan(X, y).nodes if node.dtype == "float32"}
    assert of_loss
    assert of_loss <= exact_nodes
    (total, gradients), (exact_total, exact) = fast(X, y), step(X, y)
    # Gram matrices are squared: a rounding of their activations counts four times.
    assert abs(float(total / exact_total - 1)) < 8 * EPS[dtype]
    for actual, expected in zip(gradients, exact, strict=True):
        assert error_of(actual, expected) < 8 * EPS[dtype]


def test_data_beyond_float16s_range_stays_finite_in_second_derivatives():
    y = tf.constant(1e5 * RANDOM.normal(size=(64, 16)), tf.float32)

    def step(x, y, scale):
        return penalized(lambda x, y: tf.sqrt(distances(x, y)), scale)(x, y)

    exact_total, exact = step(X, y, 1.0)
    total, gradients = rewritten(step, "float16")(X, y, tf.constant(2.0**10))
    assert abs(float(total / exact_total - 1)) < 0.001
    for actual, expected in zip(gradients, exact, strict=True):
        assert error_of(actual, expected) < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_inside_of_a_model_stays_low(dtype):
    def model(x):
        q, k, v = (x @ each for each in W)
        attended = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / 4.0) @ v
        return tf.nn.softmax(attended @ W[0])

    found = dtypes(rewritten(model, dtype), "MatMul", X)
    assert found == [dtype] * 6


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_variables_arguments_and_constants_are_weights(dtype):
    w = tf.constant(RANDOM.normal(size=(16, 16)) / 4, tf.float32)

    def function(x, given):
        return tf.nn.softmax(tf.tanh(tf.tanh(x @ given) @ w))

    assert dtypes(rewritten(function, dtype), "MatMul", X, w) == [dtype, dtype]


@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
def test_gradients_of_products_inside_of_a_model_that_take_the_same_stay_low(dtype):
    """Those of an adjacency matrix that the last product takes, too, and of layers with a ReLU."""
    near = tf.nn.softmax(X @ tf.transpose(X))

    def step(x):
        with tf.GradientTape() as tape:
            outputs = near @ (tf.nn.relu(near @ tf.nn.relu(x @ W[0])) @ W[1])
            loss = tf.reduce_mean(tf.square(outputs))
        return loss, tape.gradient(loss, W[:2])

    # Of four products and five of gradients the last one and its own.
    assert dtypes(rewritten(step, dtype, "lists"), "MatMul", X).count("float32") == 2

    def mixture(x):
        with tf.GradientTape() as tape:
            experts = tf.stack([tf.nn.relu(x @ each) for each in W[:2]], 1)
            outputs = tf.einsum("be,bed->bd", tf.nn.softmax(x[:, :2]), experts)
            loss = tf.reduce_mean(tf.square(outputs))
        return loss, tape.gradient(loss, W[:2])

    assert set(dtypes(rewritten(mixture, dtype, "lists"), "MatMul", X)) == {dtype}


CALLS = {
    "branch": lambda f, *args: tf.cond(tf.reduce_sum(args[0]) > -1e9, lambda: f(*args), lambda: X),
    "compiled": lambda f, *args: tf.function(f, jit_compile=True)(*args),
}
BLOCKS = {
    "dense": lambda x: x + tf.nn.relu(x @ W[0]) @ W[1],
    "attention": lambda x: tf.nn.softmax(tf.matmul(x, x, transpose_b=True)) @ x,
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
def test_products_of_a_function_inside_of_a_model_are_low(dtype, call, block):
    def step(x):
        with tf.GradientTape() as tape:
            h = CALLS[call](BLOCKS[block], x @ W[2])
            loss = tf.reduce_mean(tf.square(tf.tanh(h @ W[2])))
        return loss, tape.gradient(loss, W)

    assert set(dtypes(rewritten(step, dtype, "lists"), "MatMul", X)) == {dtype}


# ---- Gradients -----------------------------------------------------------------------------------


def test_gradients_beyond_float16s_range_are_finite_with_a_small_loss_scale():
    variables = [tf.Variable(RANDOM.normal(size=(16, 16)) / 4, dtype=tf.float32) for _ in range(2)]

    def step(x, y, scale):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ variables[0]) @ variables[1] - y)) * 4e4
            scaled = loss * scale
        gradients = [each / scale for each in tape.gradient(scaled, variables)]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in gradients])
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(tf.where(finite, 0.0, 0.0) * gradient)
        return gradients, finite

    y = 100.0 * X
    exact, _ = step(X, y, 1.0)
    assert np.abs(exact[1]).max() > 65504
    for placement in PLACEMENTS:
        gradients, finite = rewritten(step, "float16", placement)(X, y, tf.constant(2.0**-6))
        assert finite
        for actual, expected in zip(gradients, exact, strict=True):
            assert error_of(actual, expected) < 0.01


# ---- Loops ---------------------------------------------------------------------------------------

STATES = {
    "decay": lambda h, u: 0.999 * h + 0.001 * (u @ W[0]),
    "difference": lambda h, u: h + 0.001 * (u @ W[0] - h),
    "gated": lambda h, u: (1 - 0.002 * tf.sigmoid(u)) * h + 0.002 * tf.sigmoid(u) * (u @ W[0]),
    "masked": lambda h, u: tf.where(u > -9.0, 0.999 * h + 0.001 * (u @ W[0]), h),
    "clipped": lambda h, u: tf.clip_by_value(h + 0.001 * (u @ W[0] - h), -9.0, 9.0),
    "largest": lambda h, u: tf.maximum(h + 0.001 * (u @ W[0]), -9.0),
    "transposed": lambda h, u: tf.transpose(tf.transpose(h) + 0.001 * tf.transpose(u @ W[0] - h)),
    "packed": lambda h, u: tf.stack(
        [a + 0.001 * (b - a) for a, b in zip(tf.unstack(h), tf.unstack(u @ W[0]), strict=True)]
    ),
    "scattered": lambda h, u: tf.tensor_scatter_nd_add(h, [[0]], 0.001 * (u @ W[0])[:1]),
}


@pytest.mark.parametrize(("name", "dtype"), one_of_each(STATES, DTYPES, quick=1))
def test_a_state_that_is_scaled_and_added_to_is_a_sum(name, dtype):
    u = tf.constant(RANDOM.uniform(0.5, 1.5, (8, 16)), tf.float32)

    def scan(u):
        body = lambda i, h: (i + 1, STATES[name](h, u))  # noqa: E731
        # A product behind it, so that the state does not lead to the result by itself.
        return tf.while_loop(lambda i, _: i < 1000, body, (0, tf.zeros((8, 16))))[1] @ W[1]

    fast = rewritten(scan, dtype, "lists")
    assert dtypes(fast, "MatMul", u) == [dtype, dtype]
    assert error_of(fast(u), scan(u)) < 2 * EPS[dtype]


@pytest.mark.parametrize("dtype", first_of(DTYPES))
def test_a_rate_that_a_loop_hands_on_as_it_is_counts_as_a_constant(dtype):
    u = tf.constant(RANDOM.uniform(0.5, 1.5, (8, 16)), tf.float32)
    decay = tf.Variable(0.999)

    def scan(u):
        def body(i, h, rate):
            return i + 1, rate * h + 0.001 * tf.tanh(h @ W[1] + u @ W[0]), rate

        start = (0, tf.zeros((8, 16)), tf.convert_to_tensor(decay))
        return tf.while_loop(lambda i, *_: i < 1000, body, start)[1] @ W[1]

    fast = rewritten(scan, dtype, "lists")
    assert set(dtypes(fast, "MatMul", u)) == {dtype}
    assert error_of(fast(u), scan(u)) < 2 * EPS[dtype]


def _next(h, u):
    return 0.999 * h + 0.001 * (u @ W[0])


# What computes the next state in another function.
NEXT_STATES = {
    "branch": lambda i, h, u: tf.cond(i % 4 < 3, lambda: _next(h, u), lambda: h),
    "part": lambda i, h, u: tf.cond(i % 4 < 3, lambda: 0.999 * h, lambda: h) + 0.001 * (u @ W[0]),
    "case": lambda i, h, u: tf.switch_case(i % 2, [lambda: _next(h, u), lambda: h]),
    "compiled": lambda i, h, u: tf.function(_next, jit_compile=True)(h, u),
}


@pytest.mark.parametrize("placement", ["lists", "min_cut"])
@pytest.mark.parametrize(("name", "dtype"), one_of_each(NEXT_STATES, DTYPES, quick=1))
def test_a_state_that_goes_through_a_called_function_stays_float32(name, dtype, placement):
    u = tf.constant(RANDOM.uniform(0.5, 1.5, (8, 16)), tf.float32)

    def step(u):
        with tf.GradientTape() as tape:
            tape.watch(u)
            body = lambda i, h: (i + 1, NEXT_STATES[name](i, h, u))  # noqa: E731
            h = tf.while_loop(lambda i, _: i < 1000, body, (0, tf.zeros((8, 16))))[1] @ W[1]
            total = tf.reduce_sum(tf.square(h))
        return h, tape.gradient(total, u)

    fast = rewritten(step, dtype, placement)
    assert dtype in dtypes(fast, "MatMul", u)
    exact = tf.function(step)(u)
    for actual, expected in zip(fast(u), exact, strict=True):
        assert error_of(actual, expected) < 3 * EPS[dtype]


def _repeated(counts, step, state):
    """Loops in loops around a step, which takes the number of the innermost iteration."""
    if not counts:
        return state

    def body(i, state):
        return i + 1, _repeated(counts[1:], step, state) if counts[1:] else step(i, state)

    return tf.while_loop(lambda i, _: i < counts[0], body, (0, state))[1]


def _twice(step):
    """A loop that another one runs twice: as it has two callers, it is not joined with these."""
    return tf.function(lambda state: _repeated([1], step, state), autograph=False)


def _handed_on(step, state):
    """A loop that adds to one variable and gives back another one as it was."""
    variables = (0, tf.zeros_like(state), state)
    added = tf.while_loop(lambda i, *_: i < 2, lambda i, s, m: (i + 1, step(i, s), m), variables)
    return added[2] + added[1]


# What happens to the state of a loop in loops inside of it, given a step that adds to it.
NESTED = {
    "4096 x 1": lambda step, m: _repeated([4096, 1], step, m),
    "64 x 64": lambda step, m: _repeated([64, 64], step, m),
    "three": lambda step, m: _repeated([16, 16, 16], step, m),
    "scaled": lambda step, m: _repeated([1024], lambda _, m: 0.999 * _repeated([1], step, m), m),
    "branch inside": lambda step, m: _repeated(
        [64, 64], lambda i, m: tf.cond(i % 4 < 3, lambda: step(i, m), lambda: m), m
    ),
    "in a branch": lambda step, m: _repeated(
        [2048], lambda i, m: tf.cond(i % 4 < 3, lambda: _repeated([1], step, m), lambda: m), m
    ),
    "shared": lambda step, m: (lambda inner: _repeated([1024], lambda _, m: inner(inner(m)), m))(
        _twice(step)
    ),
    "handed on": lambda step, m: _repeated([1024], lambda _, m: _handed_on(step, m), m),
}


@pytest.mark.parametrize(("name", "dtype"), one_of_each(NESTED, DTYPES, quick=2))
def test_a_state_that_loops_inside_add_to_is_a_sum(name, dtype):
    u = tf.constant(RANDOM.uniform(0.5, 1.5, (8, 16)), tf.float32)

    def step(u):
        with tf.GradientTape() as tape:
            tape.watch(u)
            sums = NESTED[name](lambda _, m: m + u @ W[0], tf.zeros((8, 16))) / 4096
            h = sums @ W[1]
            total = 64 * tf.reduce_sum(tf.square(h))
        return h, tape.gradient(total, u)

    fast = rewritten(step, dtype, "lists")
    assert set(dtypes(fast, "MatMul", u)) == {dtype}
    for actual, expected in zip(fast(u), tf.function(step)(u), strict=True):
        assert error_of(actual, expected) < 3 * EPS[dtype]


def test_the_state_of_a_recurrent_layer_in_another_loop_is_low():
    fast = rewritten(
        lambda x: _repeated([3, 4], lambda _, h: tf.tanh(h @ W[0] + x @ W[1]), x) @ W[2],
        "bfloat16",
        "lists",
    )
    assert {node.dtype for node in fast.plan(X).nodes if "While" in node.op} == {"bfloat16"}


@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
def test_the_gradient_of_a_state_that_is_only_scaled_is_not_rounded_over_and_over(dtype):
    u = tf.constant(RANDOM.uniform(0.5, 1.5, (8, 16)), tf.float32)

    def step(u):
        with tf.GradientTape() as tape:
            tape.watch(u)
            h = _repeated([1000], lambda _, h: _next(h, u), tf.zeros((8, 16))) @ W[1]
            total = tf.reduce_sum(tf.square(h))
        return tape.gradient(total, u)

    fast = rewritten(step, dtype, "lists")
    assert set(dtypes(fast, "MatMul", u)) == {dtype}
    assert error_of(fast(u), tf.function(step)(u)) < 3 * EPS[dtype]


@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
def test_elements_of_an_array_that_are_computed_from_each_other_are_a_state(dtype):
    u = tf.constant(RANDOM.uniform(0.5, 1.5, (8, 16)), tf.float32)

    def step(u):
        with tf.GradientTape() as tape:
            tape.watch(u)
            array = tf.TensorArray(
                tf.float32, 1001, clear_after_read=False, element_shape=(8, 16)
            ).write(0, tf.zeros((8, 16)))
            body = lambda i, a: (i + 1, a.write(i + 1, _next(a.read(i), u)))  # noqa: E731
            h = tf.while_loop(lambda i, _: i < 1000, body, (0, array))[1].read(1000) @ W[1]
            total = tf.reduce_sum(tf.square(h))
        return h, tape.gradient(total, u)

    fast = rewritten(step, dtype, "lists")
    assert dtype in dtypes(fast, "MatMul", u)
    for actual, expected in zip(fast(u), tf.function(step)(u), strict=True):
        # Eigen adds the 16 products of bfloat16 up low: rounding alone makes 2 of these here.
        assert error_of(actual, expected) < 3 * EPS[dtype]


@pytest.mark.parametrize("compute", ["residual", "in the body"])
@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
def test_a_loop_with_a_tolerance_takes_as_many_iterations(dtype, compute):
    def solve(x):
        def new_of(z):
            return 0.5 * tf.tanh(z @ W[0]) + x

        def body(i, z, _):
            new = new_of(z)
            return i + 1, new, tf.reduce_max(tf.abs(new - z))

        def more(i, z, delta):
            measured = tf.reduce_max(tf.abs(new_of(z) - z)) if compute == "residual" else delta
            return measured > 1e-5

        start = (0, tf.zeros_like(x), tf.constant(1.0))
        return tf.while_loop(more, body, start, maximum_iterations=500)[:2]

    (found, z), (wanted, exact) = rewritten(solve, dtype)(X), solve(X)
    assert abs(int(found) - int(wanted)) <= 1
    assert error_of(z, exact) < EPS[dtype]


@tf.function
def until_converged(x):
    """TensorFlow makes conditionals of `and` and `break`."""
    z, i, first = tf.zeros_like(x), 0, 0
    delta = tf.constant(1.0)
    while delta > 1e-5 and i < 300:
        new = 0.5 * tf.tanh(z @ W[0]) + x
        delta = tf.reduce_max(tf.abs(new - z))
        z, i = new, i + 1
    for k in tf.range(300):
        new = 0.5 * tf.tanh(z @ W[1]) + x
        change = tf.reduce_max(tf.abs(new - z))
        z, first = new, k
        if change < 1e-5:
            break
    return i, first, z


@tf.function(autograph=False)
def until_converged_in_a_branch(x):
    def body(i, z, _):
        new = tf.cond(i >= 0, lambda: 0.5 * tf.tanh(z @ W[0]) + x, lambda: z)
        return i + 1, new, tf.reduce_max(tf.abs(new - z))

    start = (0, tf.zeros_like(x), tf.constant(1.0))
    i, z, _ = tf.while_loop(lambda i, z, delta: delta > 1e-5, body, start, maximum_iterations=300)
    return i, i, z


@pytest.mark.parametrize("solve", [until_converged, until_converged_in_a_branch])
@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
def test_branches_lead_to_the_condition_of_a_loop(dtype, solve):
    *found, z = rewritten(solve, dtype)(X)
    *wanted, exact = solve(X)
    assert np.abs(np.subtract(found, wanted)).max() <= 1
    assert error_of(z, exact) < EPS[dtype]


@pytest.mark.parametrize("choose", ["argmax", "top_k"])
def test_choosing_a_token_that_ends_a_text_is_no_tolerance(choose):
    def write(x):
        def body(i, h, done):
            h = tf.tanh(h @ W[0])
            scores = h @ W[1]
            best = tf.argmax(scores, -1, tf.int32)
            token = best if choose == "argmax" else tf.math.top_k(scores, 2).indices[:, 1]
            return i + 1, h, done | (token == 3)

        start = (0, x, tf.zeros(64, tf.bool))
        more = lambda i, h, done: tf.logical_not(tf.reduce_all(done))  # noqa: E731
        return tf.while_loop(more, body, start, maximum_iterations=20)[1] @ W[2]

    assert set(dtypes(rewritten(write, "bfloat16", "lists"), "MatMul", X)) == {"bfloat16"}


def test_loops_that_count_are_as_before():
    def scan(u):
        body = lambda i, h: (i + 1, tf.tanh(h @ W[0] + u))  # noqa: E731
        return tf.while_loop(lambda i, _: i < 10, body, (0, u))[1] @ W[1]

    assert dtypes(rewritten(scan, "bfloat16", "lists"), "MatMul", X) == ["bfloat16"] * 2


# ---- Numbers that a low dtype loses --------------------------------------------------------------


@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
def test_numbers_next_to_one_stay_apart_from_it(dtype):
    def angle(x):
        cosines = tf.matmul(tf.math.l2_normalize(x @ W[0], -1), tf.eye(16))
        return tf.acos(tf.clip_by_value(cosines * 1.5, -1 + 1e-6, 1 - 1e-6))

    def gradient(x):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(angle(x))
        return tape.gradient(total, W[0])

    assert np.isfinite(rewritten(gradient, dtype)(X)).all()


# ---- Derivatives ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", first_of(DTYPES))
def test_second_derivatives_through_nested_loops(dtype):
    def nested(x):
        def inner(_, x):
            steps = lambda j, x: (j + 1, tf.tanh(x @ W[0]))  # noqa: E731
            return tf.while_loop(lambda j, _: j < 2, steps, (0, x))[1]

        return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, inner(i, x)), (0, x))[1]

    def second(function):
        @tf.function(autograph=False)
        def run(x):
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    loss = tf.reduce_sum(tf.square(function(x)))
                slope = tf.reduce_sum(tf.square(tape.gradient(loss, x)))
            return outer.gradient(slope, [x, W[0]])

        return run(X)

    fast = rewritten(nested, dtype, "lists")
    assert set(dtypes(fast, "MatMul", X)) == {dtype}
    for actual, expected in zip(second(fast), second(nested), strict=True):
        assert error_of(actual, expected) < 16 * EPS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_linear_loss_are_low(dtype):
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ W[0]) @ W[1])
        return loss, tape.gradient(loss, W[:2])

    assert set(dtypes(rewritten(step, dtype, "lists"), "MatMul", X)) == {dtype}
