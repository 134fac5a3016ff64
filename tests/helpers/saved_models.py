"""Small SavedModels, as people make them; each has weights enough to see a frozen one shrink."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

FLOATS = np.random.default_rng(3).uniform(-1, 1, (4, 64)).astype("float32")
IMAGES = FLOATS.reshape(4, 8, 8, 1)
WORDS = np.array(["a", "c", "unknown", "b"])


def _weight(*shape: int, seed: int = 0) -> tf.Variable:
    values = np.random.default_rng(seed).normal(0, shape[0] ** -0.5, shape)
    return tf.Variable(values.astype("float32"))


class Module(tf.Module):
    """Two signatures, a function inside a function, and functions that only objects refer to."""

    def __init__(self) -> None:
        self.first = _weight(64, 256)
        self.second = _weight(256, 64, seed=1)

    @tf.function(input_signature=[tf.TensorSpec((None, 64), name="x")])
    def inner(self, x):
        return tf.nn.relu(x @ self.first)

    @tf.function(
        input_signature=[
            tf.TensorSpec((None, 64), name="x"),
            tf.TensorSpec((), tf.int32, name="count"),
        ]
    )
    def outer(self, x, count):
        y = tf.matmul(self.inner(x), self.second, name="back")
        return {"y": y + 1.0, "count": count + 1, "norm": tf.reduce_sum(y * y, -1)}

    @tf.function
    def by_objects_only(self, x, *, negative=False):
        y = x @ self.first + 1.0
        return (-y, [x]) if negative else (y, [x])

    @tf.function(input_signature=[tf.RaggedTensorSpec((None, None), tf.float32, 1)])
    def ragged(self, x):
        return tf.math.tanh(x.to_tensor(shape=(None, 64)) @ self.first) + 0.0


def module(path: Path) -> None:
    made = Module()
    made.by_objects_only(tf.constant(FLOATS))
    made.by_objects_only(tf.constant(FLOATS), negative=True)
    signatures = {"serving_default": made.outer, "also": made.inner}
    tf.saved_model.save(made, str(path), signatures=signatures)


def keras_export(path: Path) -> None:
    _cnn().export(str(path), verbose=False)


def _cnn() -> keras.Model:
    layers = keras.layers
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1), name="image"),
            layers.Conv2D(8, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


class Table(tf.Module):
    """A lookup table that is filled from a file, which becomes an asset."""

    def __init__(self, vocabulary: Path) -> None:
        index = tf.lookup.TextFileIndex
        lines = tf.lookup.TextFileInitializer(
            str(vocabulary), tf.string, index.WHOLE_LINE, tf.int64, index.LINE_NUMBER
        )
        self.table = tf.lookup.StaticHashTable(lines, -1)
        self.rows = _weight(4, 256)
        self.weight = _weight(256, 64, seed=1)

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.string, name="words")])
    def __call__(self, words):
        number = self.table.lookup(words)
        return {"number": number, "y": tf.gather(self.rows, number + 1) @ self.weight + 0.5}


def table(path: Path) -> None:
    vocabulary = path.with_suffix(".txt")
    vocabulary.write_text("a\nb\nc\n")
    made = Table(vocabulary)
    tf.saved_model.save(made, str(path), signatures=made.__call__)
    vocabulary.unlink()


def text(path: Path) -> None:
    layers = keras.layers
    vectorize = layers.TextVectorization(max_tokens=8, output_sequence_length=4)
    vectorize.adapt(["a b c", "b c a"])
    keras.utils.set_random_seed(1)
    keras.Sequential(
        [
            keras.Input((), dtype="string", name="words"),
            vectorize,
            layers.Embedding(8, 64),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(3),
        ]
    ).export(str(path), verbose=False)


class Loop(tf.Module):
    """A weight that a loop and a conditional read."""

    def __init__(self) -> None:
        self.weight = _weight(64, 64)

    @tf.function(input_signature=[tf.TensorSpec((None, 64), name="x")])
    def __call__(self, x):
        for _ in tf.range(3):
            x = tf.nn.relu(x @ self.weight)
        if tf.reduce_sum(x) > 0:
            x = x @ self.weight
        return {"y": x + 1.0}


def loop(path: Path) -> None:
    made = Loop()
    tf.saved_model.save(made, str(path), signatures=made.__call__)


class Recurrent(tf.Module):
    """A weight that is read in a loop only, as in a recurrent layer."""

    def __init__(self) -> None:
        self.weight = _weight(128, 128)

    @tf.function(input_signature=[tf.TensorSpec((None, 128), name="x")])
    def __call__(self, x):
        for _ in tf.range(3):
            x = tf.math.tanh(x @ self.weight)
        return {"y": x}


def recurrent(path: Path) -> None:
    made = Recurrent()
    signatures = {"serving_default": made.__call__, "also": made.__call__}
    tf.saved_model.save(made, str(path), signatures=signatures)


def tensorflow_1(path: Path) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, (None, 64), name="x")
        w = tf.compat.v1.get_variable("w", (64, 256), use_resource=True)
        v = tf.compat.v1.get_variable("v", (256, 64), use_resource=True)
        y = tf.identity(tf.nn.relu(x @ w) @ v, name="y")
        session.run(tf.compat.v1.global_variables_initializer())
        info = tf.compat.v1.saved_model.build_tensor_info
        signature = tf.compat.v1.saved_model.build_signature_def(
            {"x": info(x)}, {"y": info(y)}, "tensorflow/serving/predict"
        )
        builder = tf.compat.v1.saved_model.Builder(str(path))
        builder.add_meta_graph_and_variables(session, ["serve"], {"serving_default": signature})
        builder.save()


# Name -> what writes it, and inputs of its signature serving_default by name.
MODELS = {
    "loop": (loop, {"x": FLOATS}),
    "recurrent": (recurrent, {"x": np.tile(FLOATS, (1, 2))}),
    "tensorflow_1": (tensorflow_1, {"x": FLOATS}),
    "text": (text, {"words": WORDS}),
    "module": (module, {"x": FLOATS, "count": np.int32(2)}),
    "keras_export": (keras_export, {"image": IMAGES}),
    "table": (table, {"words": WORDS}),
}


def overflowing(path):
    """A module whose first matmul gives 120000 for inputs of 3, and whose result is small again."""
    module = tf.Module()
    module.large = tf.Variable(tf.fill((4, 4), 1e4))
    module.small = tf.Variable(tf.fill((4, 4), 0.25))

    def call(x):
        return {"y": (1e-5 * (x @ module.large)) @ module.small}

    module.call = tf.function(call, [tf.TensorSpec((None, 4), name="x")])
    tf.saved_model.save(module, str(path), signatures=module.call)
    return path
