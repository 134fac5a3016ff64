"""Models copied with low weights: regularizers and the like are copied too."""

import random
import threading

import keras
import numpy as np
import pytest
from keras import layers

import tfamp
from helpers.cases import first_of, one_of_each
from helpers.seeds import set_random_seed
from helpers.tolerances import tolerance

MASTERS = {"level": "O2", "master_weights": True}


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    one_of_each([{"level": "O3"}, MASTERS], ["float16", "bfloat16"], quick=1),
)
def test_regularizers_of_low_weights_compute_in_float32(arguments, dtype):
    keras.utils.set_random_seed(0)
    regularized = keras.layers.Dense(8, kernel_regularizer="l2", activation="relu")
    model = keras.Sequential([keras.Input((4,)), regularized, keras.layers.Dense(2)])
    # The sum of its squares is 320,000, which float16 cannot hold.
    model.layers[0].kernel.assign(keras.ops.full((4, 8), 100.0))
    model.compile(keras.optimizers.SGD(1e-6), "mse")
    x = np.ones((8, 4), "float32") / 100
    expected = model.evaluate(x, x[:, :2], verbose=0)
    made, _ = tfamp.prepare(model, dtype=dtype, **arguments)
    assert made.layers[0].kernel.dtype == dtype
    assert made.evaluate(x, x[:, :2], verbose=0) == pytest.approx(expected, rel=tolerance(dtype))
    assert np.isfinite(made.fit(x, x[:, :2], verbose=0).history["loss"]).all()
    assert np.isfinite(np.asarray(made.layers[0].kernel, "float32")).all()
    back, _ = tfamp.prepare(made, level="O0")
    assert back.evaluate(x, x[:, :2], verbose=0) == pytest.approx(expected, rel=0.05)


class Costly(keras.initializers.Initializer):
    """An initializer that says when it is called, and runs in float32 only."""

    calls: list[str] = []

    def __call__(self, shape, dtype=None):
        self.calls.append(dtype)
        assert dtype == "float32"
        return keras.ops.convert_to_tensor(np.random.standard_normal(shape), dtype)


class Scaled(layers.Layer):
    """A layer that makes Keras variables by itself, from an initializer and from values."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        values = np.float32([1, 2, 4])
        self.factor = keras.Variable(values, dtype=self.variable_dtype, trainable=False)

    def build(self, shape):
        self.scale = keras.Variable(Costly(), shape=(3,), dtype=self.variable_dtype)

    def call(self, x):
        return x * self.scale * self.factor


class Recurrent(keras.Model):
    """A model with every kind of variable; the orthogonal ones have no kernel in bfloat16."""

    def __init__(self, by="orthogonal"):
        super().__init__()
        self.drop = layers.Dropout(0.5)
        self.lstm = layers.Bidirectional(layers.LSTM(4, kernel_initializer=by))
        self.gru = layers.RNN(layers.GRUCell(4))
        self.head = layers.Dense(3, kernel_initializer=Costly())
        self.scaled = Scaled()
        self.drawn = keras.metrics.Mean(name="drawn")

    def call(self, x, training=False):
        x = self.drop(x, training=training)
        x = keras.ops.concatenate([self.lstm(x), self.gru(x)], axis=-1)
        return self.scaled(self.head(x))


def _as_functional():
    inputs = keras.Input((5, 4))
    return keras.Model(inputs, Recurrent()(inputs))


@pytest.mark.parametrize(
    ("make", "arguments", "dtype"),
    first_of(
        [(Recurrent, {"level": "O3"}, "bfloat16"), (_as_functional, {"level": "O3"}, "float16")]
    ),
)
def test_weights_that_exist_are_not_initialized(make, arguments, dtype, monkeypatch):
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).standard_normal((8, 5, 4)).astype("float32")
    model = make()
    before = np.asarray(model(x))
    Costly.calls.clear()
    kinds = [each for each in vars(keras.initializers).values() if isinstance(each, type)]
    for kind in kinds:
        if "__call__" in vars(kind) and kind is not keras.initializers.Zeros:  # metrics' own

            def refuse(self, *args, **kwargs):
                pytest.fail(f"{type(self).__name__} was called")

            monkeypatch.setattr(kind, "__call__", refuse)
    set_random_seed(1)
    made, _ = tfamp.prepare(model, dtype=dtype, **arguments)
    drawn = random.random(), float(np.random.random()), float(keras.random.uniform(()))
    set_random_seed(1)
    assert drawn == (random.random(), float(np.random.random()), float(keras.random.uniform(())))
    assert Costly.calls == []
    assert dtype in {weight.dtype for weight in made.weights}
    after = np.asarray(made(x), "float32")
    np.testing.assert_allclose(after, before, atol=tolerance(dtype, depth=8) * np.abs(before).max())
    back, _ = tfamp.prepare(made, level="O0")
    assert Costly.calls == []
    assert {weight.dtype for weight in back.weights} == {"float32"}


def test_vocabularies_are_kept():
    lookup = layers.StringLookup(output_mode="multi_hot")
    lookup.adapt(["ripe", "raw"])
    model = keras.Sequential([keras.Input((2,), dtype="string"), lookup, layers.Dense(2)])
    made, _ = tfamp.prepare(model, level="O3", dtype="float16")
    assert made.layers[0].get_vocabulary() == lookup.get_vocabulary()


class Backbone(keras.Model):
    """Functional, but made from a few numbers, as KerasHub's backbones are."""

    def __init__(self, width, dtype=None, **kwargs):
        self.width = width
        inputs = keras.Input((8,))
        super().__init__(inputs, layers.Dense(width, dtype=dtype)(inputs), dtype=dtype, **kwargs)

    def get_config(self):
        policy = keras.dtype_policies.serialize(self.dtype_policy)
        return {"width": self.width, "dtype": policy, "name": self.name}


def test_a_backbone_with_a_configuration_of_its_own_is_copied():
    inputs, x = keras.Input((8,)), np.ones((2, 8), "float32")
    model = keras.Model(inputs, layers.Dense(3)(Backbone(4)(inputs)))
    made, _ = tfamp.prepare(model, level="O3", dtype="float16")
    assert type(made.layers[1]) is Backbone
    assert {weight.dtype for weight in made.weights} == {"float16"}
    np.testing.assert_allclose(made(x), model(x), atol=tolerance("float16", depth=8))


class Holder(keras.Model):
    """A subclassed model that holds a built one, and ends in a layer that holds others."""

    def __init__(self):
        super().__init__()
        self.body = keras.Sequential([keras.Input((8,)), layers.Dense(8, "relu"), Head()])

    def call(self, x):
        return self.body(x)


class Head(layers.Layer):
    def build(self, shape):
        self.inner = layers.Dense(4)
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)


def _functional():
    inputs = keras.Input((8,))
    return keras.Model(inputs, Head()(layers.Dense(8, "relu")(inputs)))


@pytest.mark.parametrize("make", [Holder, lambda: Holder().body, _functional])
def test_frozen_weights_and_float32_outputs_are_copied(make):
    x, model = np.ones((2, 8), "float32"), make()
    before = np.asarray(model(x))
    dense, head = getattr(model, "body", model).layers[-2:]
    dense.trainable = head.inner.bias.trainable = False
    prepared = tfamp.prepare(model, "sgd", dtype="bfloat16", **MASTERS)
    made = prepared.model
    assert "float32 copies in the optimizer" in str(prepared.settings)
    assert [w.trainable for w in made.weights] == [False, False, True, False]
    for each in (made, getattr(made, "body", made)):
        np.testing.assert_allclose(each(x), before, atol=tolerance("bfloat16", depth=64))
        assert each(x).dtype == "float32"
    back, _ = tfamp.prepare(made, level="O0")
    np.testing.assert_allclose(back(x), before, atol=tolerance("bfloat16", depth=64))


class Growing(layers.Layer):
    """A layer that gets a weight by a method of its own, which is not in its configuration."""

    def grow(self):
        self._tracker.unlock()
        self.more = self.add_weight(shape=(8,), name="more")

    def call(self, x):
        return x + self.more if hasattr(self, "more") else x


def test_a_layer_that_has_grown_in_another_way_is_named():
    model = keras.Sequential([keras.Input((8,)), Growing(name="grown"), layers.Dense(2)])
    model.layers[0].grow()
    with pytest.raises(ValueError, match=r"grown \(Growing\) has weights .*take level 'O2'"):
        tfamp.prepare(model, level="O3", dtype="bfloat16")


@keras.saving.register_keras_serializable("test_model_copy")
class Prepares(keras.Model):
    """A model whose configuration makes an inner model of low weights, by `tfamp.prepare`."""

    def __init__(self, inner=None, **kwargs):
        super().__init__(**kwargs)
        self.inner = self.new_inner() if inner is None else inner

    @staticmethod
    def new_inner():
        return keras.Sequential([keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(2)])

    def call(self, x):
        return self.inner(x)

    @classmethod
    def from_config(cls, config):
        inner, _ = tfamp.prepare(cls.new_inner(), level="O3", dtype="bfloat16")
        return cls(**{**config, "inner": inner})


def test_a_class_that_prepares_a_model_in_its_from_config_is_copied():
    keras.utils.set_random_seed(0)
    model, x = Prepares(), np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    expected = np.asarray(model(x))
    found = []

    def prepare():
        found.extend(tfamp.prepare(model, level="O3", dtype="bfloat16"))

    thread = threading.Thread(target=prepare, daemon=True)  # It may not hold up the tests.
    thread.start()
    thread.join(timeout=60)
    assert found, "prepare waits for a lock that its own thread holds, or has failed"
    assert {weight.dtype for weight in found[0].weights} == {"bfloat16"}
    error = np.abs(np.asarray(found[0](x), "float32") - expected).max()
    assert error < tolerance("bfloat16") * np.abs(expected).max()


@keras.saving.register_keras_serializable("tests.test_model_copy")
class Described(keras.Sequential):
    """A Sequential with a configuration of its own, which has no layers."""

    def __init__(self, units, **kwargs):
        super().__init__([keras.Input((4,)), layers.Dense(units), layers.Dense(1)], **kwargs)
        self.units = units

    def get_config(self):
        return {"units": self.units, "name": self.name}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


def test_a_sequential_with_a_configuration_of_its_own_is_saved_and_copied(tmp_path):
    x = np.ones((2, 4), "float32")
    with tfamp.policy_scope("mixed_bfloat16"):
        model = Described(8)
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(x), model(x))
    with pytest.raises(ValueError, match="by the constructor of Described"):
        tfamp.prepare(Described(8), **MASTERS, dtype="bfloat16")
