"""Models that generate as KerasHub's tasks do: by a traced step that calls layers by itself."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of
from helpers.graph_asserts import op_dtypes

X = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")


class Generates(keras.Sequential):
    """Applies its layers several times, without a call of the model."""

    generate_function = None

    def compile(self, *args, sampler="top_k", **kwargs):
        super().compile(*args, **kwargs)
        self.sampler = sampler
        self.generate_function = None

    def generate_step(self, inputs, stop_token_ids=None):
        def body(count, x):
            for layer in self.layers:
                x = layer(x)
            return count + 1, x

        limit = 3 if stop_token_ids is None else stop_token_ids[0]
        return tf.while_loop(lambda count, _: count < limit, body, (0, inputs["x"]))[1]

    def generate(self, x, stop_token_ids=None):
        if self.generate_function is None:
            step = self.generate_step
            self.generate_function = step if self.run_eagerly else tf.function(step)
        inputs = {"x": tf.constant(x, self.layers[-1].compute_dtype)}
        return self.generate_function(inputs, stop_token_ids=stop_token_ids)


def made(**compiled):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(16, "tanh"), keras.layers.Dense(8)]
    model = Generates([keras.Input((8,)), *layers])
    model.compile("sgd", "mse", **compiled)
    return model


def dtypes_of(model):
    inputs = {"x": tf.constant(X, model.layers[-1].compute_dtype)}
    return op_dtypes(model.generate_function, inputs, stop_token_ids=None)["MatMul"]


@pytest.mark.parametrize("level", first_of(["O1", "O2", "O3"]))
@pytest.mark.parametrize("dtype", first_of(["bfloat16", "float16"]))
def test_generation_computes_at_a_level_that_is_set_after_it_was_traced(level, dtype):
    model = made()
    exact = model.generate(X).numpy()
    assert dtypes_of(model) == {"float32"}
    low, _ = tfamp.prepare(model, level=level, dtype=dtype)
    found = tf.cast(low.generate(X), tf.float32).numpy()
    assert dtype in dtypes_of(low)
    bound = {"float16": 5e-3, "bfloat16": 4e-2}[dtype]
    assert 0 < np.linalg.norm(found - exact) < bound * np.linalg.norm(exact)
    shorter = tf.cast(low.generate(X, [1]), tf.float32).numpy()
    exact_shorter = model(X).numpy() if low is not model else None
    if exact_shorter is not None:
        assert np.linalg.norm(shorter - exact_shorter) < bound * np.linalg.norm(exact_shorter)
    assert np.linalg.norm(shorter - found) > 0.1 * np.linalg.norm(found)
    back, _ = tfamp.prepare(low, level="O0")
    after = back.generate(X).numpy()
    assert dtypes_of(back) == {"float32"}
    if level != "O3":
        np.testing.assert_array_equal(after, exact)


def test_eager_generation_at_o1_runs_under_autocast():
    model = made(run_eagerly=True)
    exact = model.generate(X).numpy()
    tfamp.prepare(model, level="O1", dtype="bfloat16")
    seen = []
    model.layers[0].activation = lambda x: seen.append(x.dtype) or tf.tanh(x)
    found = tf.cast(model.generate(X), tf.float32).numpy()
    assert set(seen) == {tf.bfloat16}
    assert 0 < np.linalg.norm(found - exact) < 4e-2 * np.linalg.norm(exact)


def test_generation_at_o1_takes_the_arguments_that_its_class_has():
    class Pictures(keras.Sequential):
        def generate_step(self, latents, tokens, steps, guidance_scale=1.0):
            for _ in range(steps):
                latents = latents + guidance_scale * self.layers[0](tokens)
            return {"pictures": latents, "steps": steps}

    keras.utils.set_random_seed(0)
    model = Pictures([keras.Input((8,)), keras.layers.Dense(8)])

    @tf.function
    def run(latents, tokens):
        return model.generate_step(latents, tokens=tokens, steps=2, guidance_scale=0.5)

    tokens = tf.constant(X)
    exact = run(tf.zeros((4, 8)), tokens)
    tfamp.prepare(model, level="O1", dtype="bfloat16")
    found = tf.function(run.python_function)(tf.zeros((4, 8)), tokens)
    difference = np.linalg.norm(found["pictures"] - exact["pictures"])
    assert 0 < difference < 2e-2 * np.linalg.norm(exact["pictures"])
    assert int(found["steps"]) == 2
