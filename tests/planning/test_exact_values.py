"""Results, losses and given data keep float32's digits, and masks stay finite."""

import ast
import inspect
import itertools
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of, one_of_each
from helpers.tolerances import assert_close
from tfamp.planning import exact_values
from tfamp.planning.structures import op_types

DTYPES = ("bfloat16", "float16")
PLACEMENTS = ("lists", "min_cut", "fused")
RANDOM = np.random.default_rng(0)
W = [tf.Variable(RANDOM.normal(size=(16, 16)) / 4, dtype=tf.float32) for _ in range(3)]
X = tf.constant(RANDOM.normal(size=(8, 16)), tf.float32)


def hidden(x):
    return tf.tanh(x @ W[0]) @ W[1]


def plan_of(function, *args, dtype="bfloat16", **arguments):
    arguments = {"placement": "lists", "profile": "builtin", **arguments}
    return tfamp.rewrite(tf.function(function), dtype=dtype, **arguments).plan(*args)


def dtypes(plan, *ops):
    return {node.dtype for node in plan.nodes if node.op in ops}


def squared_error(x, y):
    return tf.reduce_mean(tf.square(hidden(x) - y))


def divergence(x, y):
    p = tf.nn.softmax(hidden(x))
    return tf.reduce_sum(y * tf.math.log(y / p))


def with_penalty(x, y):
    """As `add_loss`: a sum of losses, one of them a quotient by an op that is on no list."""
    penalty = tf.math.divide_no_nan(tf.reduce_sum(W[0] ** 2), tf.cast(tf.size(y), tf.float32))
    return squared_error(x, y) + penalty


LOSSES = {"squared error": squared_error, "divergence": divergence, "penalty": with_penalty}
ARITHMETIC = op_types("Sub Square Mean Sum Softmax Log RealDiv DivNoNan Mul AddV2")


@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_float32_from_the_last_product_on(name, dtype):
    y = tf.nn.softmax(X * 2)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = LOSSES[name](x, y)
        for weight, gradient in zip(W[:2], tape.gradient(loss, W[:2]), strict=True):
            weight.assign_sub(0.0 * gradient)
        return loss

    plan = plan_of(step, X, y, dtype=dtype)
    assert dtype in dtypes(plan, "MatMul")
    forward = [node for node in plan.nodes if not node.name.startswith(("gradient_tape", "mul"))]
    assert {node.dtype for node in forward if node.op in ARITHMETIC} == {"float32"}
    assert not [cast for cast in plan.casts if cast.tensor == "y:0"]
    reported = tfamp.rewrite(tf.function(step), dtype=dtype, placement="lists")(X, y)
    assert float(reported) != float(tf.cast(reported, dtype))


CANCELLING = {
    "softplus": lambda y: tf.reduce_mean(tf.math.softplus(y) + tf.math.softplus(-y)),
    "log cosh": lambda y: tf.reduce_mean(keras.losses.log_cosh(tf.zeros_like(y), y)),
    "cross-entropy": lambda y: tf.reduce_mean(
        tf.nn.sigmoid_cross_entropy_with_logits(0.5 * tf.ones_like(y), y)
    ),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["graph", "compiled"])
@pytest.mark.parametrize(("placement", "dtype"), one_of_each(PLACEMENTS[:2], DTYPES))
@pytest.mark.parametrize("name", CANCELLING)
def test_the_gradient_of_a_loss_that_cancels_is_as_exact_as_the_product(
    name, placement, dtype, compiled
):
    kernel = tf.constant(RANDOM.normal(size=(16, 4)) / 1000, tf.float32)

    def step(x, kernel):
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            loss = CANCELLING[name](x @ kernel)
        return loss, tape.gradient(loss, kernel)

    loss, gradient = step(X, kernel)
    rewritten = tfamp.rewrite(step, dtype=dtype, placement=placement)
    found, low_gradient = (tf.function(rewritten, jit_compile=compiled))(X, kernel)
    assert_close(found, loss, dtype)
    assert_close(low_gradient, gradient, dtype, depth=2)


def test_a_loss_that_is_not_returned_is_float32_too():
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = squared_error(x, y)
        W[0].assign_sub(0.0 * tape.gradient(loss, W[0]))

    assert dtypes(plan_of(step, X, X), "Sub", "Square", "Mean") == {"float32"}


def test_a_product_compared_with_data_is_float32_and_others_are_not():
    plan = plan_of(squared_error, X, X + 2000.0)
    assert [node.dtype for node in plan.nodes if node.op == "MatMul"] == ["bfloat16", "float32"]
    assert dtypes(plan_of(hidden, X), "MatMul") == {"bfloat16"}


def test_what_is_before_the_last_product_may_be_low_though_a_residual_leads_past_it():
    def residual(x):
        h = x @ W[0]
        for w in W:
            h = h + tf.nn.relu(h @ w)
        return tf.nn.softmax(h)

    added = [node for node in plan_of(residual, X).nodes if node.op == "AddV2"]
    assert [node.dtype for node in added] == ["bfloat16", "bfloat16", "float32"]


@pytest.mark.parametrize(("placement", "dtype"), one_of_each(PLACEMENTS, DTYPES))
def test_probabilities_add_up_to_one(placement, dtype):
    fast = tfamp.rewrite(
        tf.function(lambda x: tf.nn.softmax(hidden(x) * 4)), dtype=dtype, placement=placement
    )
    assert dtype in dtypes(fast.plan(X), "MatMul")
    np.testing.assert_allclose(np.sum(fast(X), -1), 1.0, atol=1e-6)


def _iterated(step, *state, times=3):
    """The last state of a loop."""
    body = lambda i, *state: (i + 1, *step(*state))  # noqa: E731
    return tf.while_loop(lambda i, *_: i < times, body, (0, *state))[1:]


def _attended(p):
    return tf.nn.softmax(p @ W[0] * 4)


# Loops whose last state is a result.
LAST_STATES = {
    "state": lambda x: _iterated(lambda p: (_attended(p),), x)[0],
    "loop inside": lambda x: _iterated(lambda p: _iterated(lambda p: (_attended(p),), p), x)[0],
    "after a loop": lambda x: _iterated(
        lambda p: (_attended(_iterated(lambda p: (_attended(p),), p)[0]),), x
    )[0],
    "of the iteration before": lambda x: _iterated(lambda p, q: (_attended(p), p), x, x)[1],
    "in a branch": lambda x: tf.cond(
        x[0, 0] < 99, lambda: _iterated(lambda p: (_attended(p),), x)[0], lambda: x
    ),
    "moved": lambda x: tf.reshape(_iterated(lambda p: (_attended(p),), x)[0], (4, -1, 16)),
}


@pytest.mark.parametrize(
    ("name", "placement", "dtype"), one_of_each(LAST_STATES, PLACEMENTS, DTYPES, quick=3)
)
def test_probabilities_that_are_the_state_of_a_loop_add_up_to_one(name, placement, dtype):
    function = tf.function(LAST_STATES[name], autograph=False)
    fast = tfamp.rewrite(function, dtype=dtype, placement=placement, profile="builtin")
    if placement == "lists":  # The others may find that Casts cost more.
        assert dtypes(fast.plan(X), "MatMul") == {dtype}
    found = fast(X)
    np.testing.assert_allclose(np.sum(found, -1), 1.0, atol=1e-6)
    assert_close(found, function(X), dtype, depth=8)


def test_a_state_before_other_products_and_values_within_an_iteration_are_low():
    def residual(h):
        h = tf.nn.relu(h @ W[0])
        return (h + tf.nn.relu(h @ W[1]),)

    plan = plan_of(lambda x: _iterated(lambda p: (_attended(p),), x)[0] @ W[1], X)
    assert dtypes(plan, "While", "StatelessWhile", "Softmax", "MatMul") == {"bfloat16"}
    plan = plan_of(lambda x: _iterated(residual, x)[0], X)
    inside = [(node.op, node.dtype) for node in plan.nodes if node.op in ("Relu", "AddV2")]
    assert inside == [("Relu", "bfloat16"), ("Relu", "float32"), ("AddV2", "float32")]


def test_given_data_is_rounded_for_products_only():
    def mixed(x, ids):
        shown = tf.reshape(x, (16, 8)) + tf.cast(ids, tf.float32)
        h = tf.reshape(shown, (8, 16)) @ W[0]
        return ((h - tf.reshape(x, (8, 16))) * tf.concat([x, h], 0)[:8]) @ W[1]

    ids = tf.range(16 * 8)[:, None][:16]
    plan = plan_of(mixed, X, ids)
    assert dtypes(plan, "MatMul") == {"bfloat16"}
    assert dtypes(plan, "Sub", "AddV2", "Mul") == {"float32"}


def in_a_loop(row, *args):
    results = [tf.TensorArray(tf.float32, 8), 0.0]
    for i in tf.range(8):
        result = row(*(each[i] for each in args))
        results = [results[0].write(i, result), results[1] + tf.reduce_mean(result) / 8]
    return results[0].stack(), results[1]


# Ways to compute the rows of a result in a function of their own.
INSIDE = {
    "branch": lambda row, *args: (
        tf.cond(args[0][0, 0, 0] < 9, lambda: row(*args), lambda: args[1]),
    ),
    "map": lambda row, *args: (
        tf.map_fn(lambda each: row(*each), args, fn_output_signature=tf.float32),
    ),
    "loop": in_a_loop,
    "compiled": lambda row, *args: (tf.function(row, jit_compile=True)(*args),),
}


@pytest.mark.parametrize(("name", "dtype"), one_of_each(INSIDE, DTYPES, quick=1))
def test_losses_and_masks_in_functions_are_as_in_the_graph(name, dtype):
    large = tf.where(tf.range(8) == 1, -1e9, 0.0)[:, None] + tf.zeros_like(X)

    def losses(x, y):
        return INSIDE[name](lambda x, y: tf.square(hidden(x) - y), x[:, None], y[:, None])

    def masked(x, mask):
        def row(x, mask):
            return tf.nn.softmax(x @ W[0] + mask) @ W[1]

        results = INSIDE[name](row, x[:, None], mask[:, None])
        captured = INSIDE[name](lambda x, _: row(x, mask[1:2]), x[:, None], mask[:, None])
        return [each @ W[2] for each in (results[0], captured[0])]

    low_only, both = {dtype}, {dtype, "float32"}
    for function, given, products in ((losses, X + 2000.0, both), (masked, large, low_only)):
        fast = tfamp.rewrite(tf.function(function), dtype=dtype, placement="lists")
        inside = {n.dtype for n in fast.plan(X, given).nodes if n.scope and "MatMul" in n.op}
        assert inside == products
        for found, wanted in zip(fast(X, given), tf.function(function)(X, given), strict=True):
            assert_close(found, wanted, dtype, depth=64)
            if products == both:
                np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_sizes_of_tensors_are_no_data():
    def scaled(x):
        return (hidden(x) / tf.sqrt(tf.cast(tf.shape(x)[-1], tf.float32))) @ W[2]

    assert dtypes(plan_of(scaled, X), "RealDiv") == {"bfloat16"}


@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
def test_gradients_of_biases_do_not_make_those_of_activations_float32(dtype):
    bias = tf.Variable(tf.zeros(16))

    def step(x):
        with tf.GradientTape() as tape:
            h = tf.nn.relu(tf.nn.bias_add(x @ W[0], bias))
            loss = tf.reduce_sum(tf.nn.softmax(h @ W[1]) * x)
        gradients = tape.gradient(loss, [W[0], bias])
        norm = tf.linalg.global_norm(gradients)
        for variable, gradient in zip([W[0], bias], gradients, strict=True):
            variable.assign_sub(0.0 * gradient)
        return loss, norm

    assert dtypes(plan_of(step, X, dtype=dtype), "ReluGrad") == {dtype}


def test_returned_gradients_are_low_and_their_norm_is_float32():
    bias = tf.Variable(tf.zeros(16))

    def step(x):
        with tf.GradientTape() as tape:
            h = tf.nn.relu(x @ W[0] + bias)
            loss = tf.reduce_mean(tf.square(h @ W[1]))
        gradients = tape.gradient(loss, [W[0], W[1], bias])
        return loss, gradients, tf.linalg.global_norm(gradients)

    plan = plan_of(step, X)
    assert dtypes(plan, "ReluGrad") == {"bfloat16"}
    assert dtypes(plan, "Square", "Sqrt", "L2Loss") == {"float32"}


def test_a_gradient_that_nothing_uses_is_no_result():
    embedding = tf.Variable(tf.ones((8, 16)))

    def step(x):
        with tf.GradientTape() as tape:
            h = embedding + x
            for w in W[:2]:
                # The constant has a gradient too, a scalar.
                h += tf.nn.softmax(tf.where(x > 0.0, h @ w, tf.constant(-1e4))) @ W[2]
            loss = tf.reduce_mean(tf.square(h @ W[2]))
        embedding.assign_sub(tape.gradient(loss, embedding))

    assert dtypes(plan_of(step, X), "Softmax") == {"bfloat16"}


# ---- Masks ---------------------------------------------------------------------------------------

KEPT = np.ones((4, 1, 16), np.float32)
KEPT[:, :, 9:] = 0.0
KEPT[1] = 0.0  # A row that is masked as a whole.
SCORES = tf.constant(RANDOM.normal(size=(4, 8, 16)) * 4, tf.float32)
LARGE = {
    "float16": [-1e9, float(tf.float32.min), float(tf.float16.min)],
    "bfloat16": [float(tf.float32.min), float(tf.bfloat16.min)],
}


def chosen(s, kept, large):
    return tf.where(kept > 0, s, large)


MASKED = {
    "constant": lambda s, kept, large: s + np.where(KEPT > 0, 0, large).astype(np.float32),
    "subtracted": lambda s, kept, large: s - (1 - kept) * -large,
    "added twice": lambda s, kept, large: s + ((1 - kept) * large) / 4 + (1 - kept) * (large / 2),
    "of booleans": lambda s, kept, large: s + tf.cast(kept < 0.5, tf.float32) * large,
    "given": lambda s, kept, large: s + tf.math.log(kept + 1e-30) * 1e8,
    "reshaped": lambda s, kept, large: tf.reshape(
        tf.reshape(s, (4, 128))
        + tf.reshape(tf.broadcast_to((1 - kept) * large, s.shape), (4, 128)),
        s.shape,
    ),
    "chosen": chosen,
    "of a broadcast": lambda s, kept, large: tf.where(kept > 0, s, tf.fill(tf.shape(s), large)),
    "chosen and added to": lambda s, kept, large: chosen(s, kept, large) + s / 10,
    "largest": lambda s, kept, large: tf.maximum(chosen(s, kept, large), large),
    "of low values": lambda s, kept, large: (
        s + tf.cast(tf.equal(tf.sign(s) * 0 + kept, 0), tf.float32) * large
    ),
}


@pytest.mark.parametrize(
    ("name", "placement", "dtype"), one_of_each(MASKED, PLACEMENTS, DTYPES, quick=2)
)
def test_masks_stay_finite_forwards_and_backwards(name, placement, dtype):
    def attend(s, kept):
        results = []
        for large in LARGE[dtype]:
            with tf.GradientTape() as tape:
                tape.watch(s)
                weights = tf.nn.softmax(MASKED[name](s @ W[0], kept, large))
                loss = tf.reduce_sum(tf.tanh(weights @ W[1]))
            results += [loss, *tape.gradient(loss, [s, W[0], W[1]])]
        return results

    fast = tfamp.rewrite(tf.function(attend), dtype=dtype, placement=placement, profile="builtin")
    assert dtype in dtypes(fast.plan(SCORES, KEPT), "BatchMatMulV2", "MatMul")
    for found, wanted in zip(fast(SCORES, KEPT), attend(SCORES, tf.constant(KEPT)), strict=True):
        assert np.isfinite(wanted).all()
        assert_close(found, wanted, dtype, depth=256)


@pytest.mark.parametrize("dtype", first_of(DTYPES))
def test_masks_stay_finite_under_autocast(dtype):
    def attend(s, kept):
        for masked in MASKED.values():
            for large in LARGE[dtype]:
                with tf.GradientTape() as tape, tfamp.autocast(dtype):
                    tape.watch(s)
                    products.append(s @ W[0])
                    weights = tf.nn.softmax(masked(products[-1], kept, large))
                    loss = tf.reduce_sum(tf.tanh(weights @ W[1]))
                yield from (loss, *tape.gradient(loss, [s, W[0], W[1]]))

    products: list = []
    for run in (lambda *args: list(attend(*args)), tf.function(lambda *args: list(attend(*args)))):
        for found in run(SCORES, tf.constant(KEPT)):
            assert np.isfinite(found).all()
    assert {product.dtype.name for product in products} == {dtype}


@pytest.mark.parametrize("dtype", first_of(DTYPES))
def test_a_softmax_behind_a_choice_of_constants_stays_low(dtype):
    plan = plan_of(
        lambda s, kept: tf.nn.softmax(chosen(s @ W[0], kept, LARGE[dtype][0])) @ W[1],
        SCORES,
        KEPT,
        dtype=dtype,
    )
    assert dtypes(plan, "SelectV2", "Softmax") == {dtype}


@pytest.mark.parametrize(
    ("last", "ops"),
    [(tf.nn.softmax, {"AddV2", "Relu", "RealDiv", "Softmax"}), (tf.tanh, {"AddV2"})],
    ids=["softmax", "tanh"],
)
def test_given_values_that_are_added_make_what_follows_float32_up_to_a_softmax(last, ops):
    plan = plan_of(lambda x, given: last(tf.nn.relu(x @ W[0] + given) / 2.0) @ W[1], X, X)
    found = [node for node in plan.nodes if node.reason.rule == "data"]
    assert {node.op for node in found} == ops
    assert {node.dtype for node in found} == {"float32"}
    assert dtypes(plan, "MatMul") == {"bfloat16"}


DISTANCES, BIAS = tf.Variable(tf.ones((8, 16))), tf.Variable(tf.ones(16))


@pytest.mark.parametrize(
    ("scores", "dtype"),
    [
        (lambda h: h + DISTANCES, "float32"),
        (lambda h: h - DISTANCES, "float32"),
        (lambda h: h * DISTANCES, "bfloat16"),
        (lambda h: h + BIAS, "bfloat16"),
        (lambda h: h + 1.5, "bfloat16"),
    ],
    ids=["added", "subtracted", "multiplied", "bias", "number"],
)
def test_stored_distances_that_are_added_make_a_softmax_float32(scores, dtype):
    plan = plan_of(lambda x: tf.nn.softmax(scores(x @ W[0])) @ W[1], X)
    assert dtypes(plan, "Softmax") == {dtype}
    assert dtypes(plan, "MatMul") == {"bfloat16"}


@pytest.mark.parametrize(("number", "dtype"), [(3e4, "float16"), (4e4, "float32")])
def test_a_number_of_which_two_add_up_within_float16_may_be_low(number, dtype):
    plan = plan_of(lambda x: tf.nn.relu(x @ W[0] - number) @ W[1], X, dtype="float16")
    assert dtypes(plan, "Sub") == {dtype}


def test_an_epsilon_that_float16_does_not_have_is_not_zero():
    def guarded(x):
        h = tf.nn.relu(x @ W[0])
        parts = h / (h + 1e-12), tf.math.log(h + 1e-8), tf.math.log(tf.maximum(h, 1e-9))
        return [part @ W[1] for part in parts]

    fast = tfamp.rewrite(tf.function(guarded), dtype="float16", placement="lists")
    assert dtypes(fast.plan(X), "MatMul") == {"float16"}
    assert dtypes(fast.plan(X), "Log", "RealDiv", "Maximum") == {"float32"}
    assert all(np.isfinite(found).all() for found in fast(X))


# The first with a condition number of 100.
COLUMNS = np.linalg.qr(RANDOM.normal(size=(16, 4)))[0] * np.logspace(0, -2, 4)
V, U = (tf.Variable(x, dtype=tf.float32) for x in (COLUMNS, RANDOM.normal(size=(4, 4))))


def squared(x):
    return tf.matmul(x, x, transpose_a=True)


DECOMPOSED = {
    "Qr": lambda x: tf.linalg.qr(x @ V)[0],
    "Svd": lambda x: tf.linalg.svd(x @ V, compute_uv=False),
    "Cholesky": lambda x: tf.linalg.lstsq(tf.transpose(tf.transpose(x @ V)), x[:, :1]),
    "MatrixSolveLs": lambda x: tf.linalg.lstsq(x @ V, x[:, :1], fast=False),
    "MatrixInverse": lambda x: tf.linalg.inv(squared(x @ V)),
}


@pytest.mark.parametrize("dtype", first_of(reversed(DTYPES)))
@pytest.mark.parametrize("op", DECOMPOSED)
def test_a_matrix_that_is_decomposed_is_float32_from_the_last_product_on(op, dtype):
    def function(x):
        return DECOMPOSED[op](x), tf.tanh(x @ V @ U) @ U

    plan = plan_of(function, X, dtype=dtype)
    assert op in {node.op for node in plan.nodes}
    assert dtypes(plan, "MatMul", "BatchMatMulV2") == {dtype, "float32"}
    found = tfamp.rewrite(function, dtype=dtype, placement="lists")(X)
    for one, other, tolerance in zip(found, function(X), (1e-3, 5e-2), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max())


def test_the_gradient_of_a_least_squares_solution_is_finite():
    # Of 5000 matrices some have a condition number that makes a low product indefinite.
    matrices = tf.constant(np.random.default_rng(0).normal(size=(5000, 8, 4)), tf.float32)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.linalg.lstsq(x @ U, x[..., :1])))
        return loss, tape.gradient(loss, U)

    found = tfamp.rewrite(step, dtype="bfloat16", placement="lists")(matrices)
    for one, other in zip(found, step(matrices), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=0.05 * np.abs(other).max())


@pytest.mark.parametrize("dtype", first_of(DTYPES))
def test_products_in_complex_numbers_whose_angle_nobody_takes_are_low(dtype):
    def power(x):
        y = hidden(x)
        z = tf.complex(y, y)
        return tf.tanh(tf.abs(z * z) @ W[2])

    def turned(x):
        return tf.math.real(tf.exp(tf.complex(y := hidden(x), y)))

    assert dtypes(plan_of(power, X, dtype=dtype), "MatMul") == {dtype}
    assert dtypes(plan_of(turned, X, dtype=dtype), "MatMul") == {dtype, "float32"}


# ---- The tables of the rules -----------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
# Rows of a table whose rules are in `loop_states` and `scalings`, or part of the rule before.
ELSEWHERE = {"states of loops", "compilers, in float16", "their gradients"}


def rules_of_table(page):
    """The rules that the first column of a page's table names, as functions."""
    lines = iter((ROOT / page).read_text(encoding="utf-8").splitlines())
    rows = itertools.dropwhile(lambda line: not line.startswith("| rule |"), lines)
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), rows))[2:]
    names = [row.split("|")[1].strip() for row in rows]
    kept = [name for name in names if name not in ELSEWHERE]
    return ["_" + name.split(",")[0].replace("-", "_") for name in kept]


@pytest.mark.parametrize("page", ["docs/explanation/rewrite.md", "tfamp/graph/README.md"])
def test_each_rule_is_a_function_in_the_order_of_the_table(page):
    rules = rules_of_table(page)
    tree = ast.parse(inspect.getsource(exact_values))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    takes_values = [
        function.name
        for function in functions
        if [ast.unparse(argument.annotation) for argument in function.args.args] == ["_Values"]
        and ast.unparse(function.returns) == "dict[int, Reason]"
    ]
    assert rules
    assert takes_values == rules
