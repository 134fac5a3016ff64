"""Prepared models in `fit`, `predict` and custom loops: state kept, graphs rewritten."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of, tiers
from helpers.graph_asserts import op_dtypes
from helpers.level_models import compiled, data, trained
from helpers.replicas import halves
from helpers.tolerances import tolerance
from helpers.training import assert_identical, snapshot

# Said of Adam at level O3, which most models here are compiled with; its own test is about that.
pytestmark = pytest.mark.filterwarnings("ignore:adam keeps running averages")

X, Y = data()


def fit(model, **arguments):
    return model.fit(X, Y, batch_size=8, verbose=0, shuffle=False, **arguments).history["loss"]


def predict(model):
    return model.predict(X, batch_size=8, verbose=0)


def assert_computed_low(values, expected):
    """Asserts that bfloat16 products made these values: close to float32's and not equal."""
    assert (values != expected).any()
    np.testing.assert_allclose(values, expected, atol=4 * tolerance("bfloat16", depth=64))


@pytest.fixture(scope="module")
def going_on() -> dict[str, list]:
    """Predictions of float32 after two steps, and the losses of two more steps."""
    model = trained("sequential")
    return {"predicted": predict(model), "losses": fit(model)}


def test_the_first_step_is_traced_once_and_own_steps_build_what_they_train():
    calls = []

    class Counted(keras.layers.Dense):
        def call(self, inputs):
            calls.append(inputs)
            return super().call(inputs)

    class OwnStep(keras.Sequential):
        def train_step(self, data):
            weights = self.trainable_variables[:2]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(data[0]))
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    for made, expected in ((keras.Sequential, (2, 4)), (OwnStep, (4, 2))):
        model = made([keras.layers.Flatten(), Counted(4), Counted(4)])
        model.build(X.shape)
        model.compile(keras.optimizers.SGD(momentum=0.9), "sparse_categorical_crossentropy")
        model, optimizer = tfamp.prepare(model, level="O1", dtype="bfloat16")
        calls.clear()
        fit(model, steps_per_epoch=1)
        assert (len(calls), len(optimizer.inner_optimizer.variables[2:])) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "dtype"),
    tiers(
        [("masters", "bfloat16"), ("O1", "bfloat16")], [], [("O2", "float16"), ("O3", "float16")]
    ),
)
def test_training_goes_on_where_it_was(level, dtype, going_on):
    model = trained("sequential")
    inner = model.optimizer
    state = snapshot(model, inner)
    masters = {"level": "O2", "master_weights": True} if level == "masters" else {"level": level}
    made, optimizer = tfamp.prepare(model, dtype=dtype, **masters)
    # No weight, no slot and no counter moved, where they are the same variables.
    assert_identical(snapshot(model, inner), state)
    assert made.optimizer is optimizer
    assert int(optimizer.iterations) == 2
    bound = tolerance(dtype, depth=64)
    expected = going_on["predicted"]
    np.testing.assert_allclose(predict(made), expected, atol=bound * np.abs(expected).max())
    np.testing.assert_allclose(fit(made), going_on["losses"], rtol=4 * bound)
    assert int(optimizer.iterations) == 4
    names = made.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True)
    assert set(names) == {"loss", "accuracy"}


@pytest.mark.parametrize("level", first_of(["O1", "O2", "O3"]))
def test_steps_that_are_not_finite_are_skipped_and_counted_in_bfloat16(level):
    model, optimizer = tfamp.prepare(compiled("functional", "sgd"), level=level, dtype="bfloat16")
    assert "bfloat16" in op_dtypes(lambda: model.train_step((X[:8], Y[:8])))["Conv2D"]
    settings = str(tfamp.precision_settings(model))
    assert "fixed at 1, steps that are not finite are skipped" in settings
    fit(model)
    trained = [weight.numpy() for weight in model.trainable_weights]
    model.fit(np.full_like(X, np.nan), Y, batch_size=8, verbose=0)
    for before, after in zip(trained, model.trainable_weights, strict=True):
        np.testing.assert_array_equal(before, after.numpy())
    steps = int(optimizer.iterations), int(optimizer.skipped_steps), float(optimizer.loss_scale)
    assert steps == (2, 2, 1.0)
    plain, bare = tfamp.prepare(model, level="O0")
    assert type(bare) is type(plain.optimizer) is keras.optimizers.SGD


def test_o1_rewrites_what_evaluate_and_predict_run_and_is_for_a_later_compile_too():
    model = compiled("functional")
    expected = np.asarray(model(X))
    tfamp.prepare(model, level="O1", dtype="bfloat16")
    batch = (tf.constant(X[:8]), tf.constant(Y[:8]))
    for step in ("test_step", "predict_step"):
        found = op_dtypes(lambda step=step: getattr(model, step)(batch))
        assert found["Conv2D"] == {"bfloat16"}
    predicted = predict(model)
    assert predicted.dtype == "float32"
    assert_computed_low(predicted, expected)
    assert_computed_low(model.predict_on_batch(X[:8]), expected[:8])
    # It survives compiling again, with what has changed since the last step was traced.
    _, first = tfamp.prepare(model, level="O1", dtype="float16", loss_scale=64.0)
    fit(model)
    model.layers[0].trainable = False
    frozen = model.layers[0].get_weights()
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    assert float(model.optimizer.loss_scale) == 64.0
    assert op_dtypes(lambda: model.train_step(batch))["Conv2D"] == {"float16"}
    fit(model)
    assert int(model.optimizer.iterations) == int(first.iterations) == 2
    for before, after in zip(frozen, model.layers[0].get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(
    "arguments",
    tiers([{"steps_per_execution": 2}], [{"jit_compile": True}], [{"run_eagerly": True}]),
    ids=lambda each: next(iter(each)),
)
def test_o1_in_every_way_to_fit(arguments):
    model, reference = compiled("sequential", **arguments), compiled("sequential")
    _, optimizer = tfamp.prepare(model, level="O1", dtype="bfloat16")
    losses, expected = fit(model), fit(reference)
    np.testing.assert_allclose(losses, expected, rtol=4 * tolerance("bfloat16", depth=64))
    assert losses != expected
    assert int(optimizer.iterations) == 2
    assert_computed_low(predict(model), predict(reference))


@pytest.mark.slow
def test_o1_rewrites_the_graph_of_all_replicas_as_that_of_one_device(two_replicas):
    with two_replicas.scope():
        model = compiled("sequential", "sgd")
    alone, exact = compiled("sequential", "sgd"), compiled("sequential", "sgd")
    plans, losses = [], []
    for each, strategy, split in (
        (model, two_replicas, functools.partial(halves, two_replicas)),
        (alone, tf.distribute.get_strategy(), tf.constant),
    ):
        prepared = tfamp.prepare(each, level="O1", dtype="bfloat16")
        batch = split(X[:8]), split(Y[:8])
        each.layers[1].trainable = False  # Its statistics would be of half a batch.
        losses.append(fit(each))
        step = functools.partial(strategy.run, each.train_step)
        found = op_dtypes(lambda *batch, step=step: step(args=(batch,)), *batch)
        assert found["Conv2D"] == found["MatMul"] == found["FusedBatchNormV3"] == {"bfloat16"}
        assert found.get("CollectiveReduceV2", {"float32"}) == {"float32"}
        fast = prepared.settings.rewrite(lambda *batch, step=step: step(args=(batch,)))
        plans.append(fast.plan(*batch).summary)
    assert (plans[0].low_nodes, plans[0].casts) == (2 * plans[1].low_nodes, 2 * plans[1].casts)
    bound = tolerance("bfloat16", depth=64)
    np.testing.assert_allclose(*losses, rtol=4 * bound)
    np.testing.assert_allclose(predict(model), predict(alone), atol=4 * bound)
    exact.set_weights(alone.get_weights())
    assert_computed_low(predict(model), predict(exact))
    model.jit_compile = True  # Then Keras compiles the step of each replica by itself.
    model.predict_function = None
    assert_computed_low(predict(model), predict(exact))
    model.jit_compile = False
    before = [weight.numpy() for weight in model.trainable_variables]
    model.fit(np.append(X[:7], np.nan + X[:1], 0), Y[:8], batch_size=8, verbose=0, shuffle=False)
    assert (int(model.optimizer.iterations), int(model.optimizer.skipped_steps)) == (2, 1)
    for old, weight in zip(before, model.trainable_variables, strict=True):
        for copy in two_replicas.experimental_local_results(weight.value):
            np.testing.assert_array_equal(copy, old)


@pytest.mark.parametrize("level", tiers(["O2"], ["O0", "O1"]))
def test_one_custom_loop_serves_all_levels(level):
    model = compiled("subclassed", optimizer="sgd")
    own = model.optimizer
    prepared = tfamp.prepare(model, level=level, dtype="float16", loss_scale="none")
    model, optimizer = prepared
    assert optimizer is own  # Without a loss scale by choice it is left as it is.
    assert "loss scale      none" in str(prepared.settings)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @prepared.settings.rewrite
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    batch = (tf.constant(X[:8]), tf.constant(Y[:8]))
    assert float(step(*batch)) > float(step(*batch))
    dtype = "float32" if level == "O0" else "float16"
    if level == "O1":
        assert {node.dtype for node in step.plan(*batch).nodes if node.op == "Conv2D"} == {dtype}
    else:
        assert op_dtypes(step, *batch)["Conv2D"] == {dtype}


def test_clipping_is_done_after_unscaling():
    losses = []
    for level in ("O0", "O2"):
        model = compiled("sequential", optimizer="sgd")
        tfamp.prepare(
            model, level=level, dtype="bfloat16", loss_scale=1024.0, grad_clip={"max_norm": 1e-3}
        )
        before = [w.numpy() for w in model.trainable_weights]
        losses.append(fit(model))
        moved = [w.numpy() - old for w, old in zip(model.trainable_weights, before, strict=True)]
        norm = np.sqrt(sum(np.sum(np.square(each)) for each in moved))
        assert 0 < norm <= 2 * 0.01 * 1e-3 * 1.01  # two steps of learning rate 0.01
        assert float(model.optimizer.last_gradient_norm) > 1e-2


@pytest.mark.slow
def test_a_reloaded_model_that_is_prepared_again_trains_to_the_same_bits(tmp_path):
    keras.utils.set_random_seed(0)
    arguments = {"level": "O2", "dtype": "bfloat16"}
    model, _ = tfamp.prepare(compiled("sequential"), **arguments)
    x, y = data(4)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    model.save(tmp_path / "half.keras")
    again, _ = tfamp.prepare(keras.models.load_model(tmp_path / "half.keras"), **arguments)
    # BatchNormalization runs TensorFlow's fused kernel again, which is given low tensors.
    norm = next(x for x in again.layers if isinstance(x, keras.layers.BatchNormalization))
    assert not norm.autocast
    for each in (model, again):
        each.fit(x, y, batch_size=8, epochs=5, shuffle=False, verbose=0)
    for before, after in zip(model.get_weights(), again.get_weights(), strict=True):
        assert (before == after).all()
