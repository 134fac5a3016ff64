"""Measures what `float32_outputs` of a policy costs: errors of loss and gradients, and times.

    python -m benchmarks.output_layers [--times]

Errors are relative, from float32's with the same weights after some steps of training, for each
of True, "sums" and False: of the loss, and of all gradients together.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfamp

OUTPUTS = (True, "sums", False)
SCALE = {"mixed_bfloat16": 1.0, "mixed_float16": 1024.0}
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return (data.data[:512] / 16).astype("float32"), data.target[:512].astype("int32")


def dense() -> keras.Model:
    return keras.Sequential(
        [keras.Input((64,)), layers.Dense(128, "relu"), layers.Dense(64, "relu"), layers.Dense(10)]
    )


def convolutional() -> keras.Model:
    convolutions = [
        layers.Conv2D(16, 3, activation="relu"),
        layers.Conv2D(32, 3, activation="relu"),
    ]
    reshape = layers.Reshape((8, 8, 1))
    return keras.Sequential(
        [keras.Input((64,)), reshape, *convolutions, layers.Flatten(), layers.Dense(10)]
    )


def transformer(words: int = 2000, width: int = 128, blocks: int = 2) -> keras.Model:
    tokens = keras.Input((64,), dtype="int32")
    x = layers.Embedding(words, width)(tokens)
    for _ in range(blocks):
        hidden = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, width // 4)(hidden, hidden, use_causal_mask=True)
        hidden = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(hidden)
    return keras.Model(tokens, layers.Dense(words)(layers.LayerNormalization()(x)))


def kerashub(backbone: str, words: int = 2000) -> keras.Model:
    """A decoder of KerasHub, without dropout, and an output layer of the user's."""
    import keras_hub

    sizes: dict[str, Any] = {"vocabulary_size": words, "num_layers": 2, "hidden_dim": 128}
    sizes |= {"intermediate_dim": 512, "dropout": 0.0}
    if backbone == "GPT2":
        sizes |= {"num_heads": 4, "max_sequence_length": 64}
    else:
        sizes |= {"num_query_heads": 4, "num_key_value_heads": 2}
    tokens = keras.Input((64,), dtype="int32")
    decoder = getattr(keras_hub.models, f"{backbone}Backbone")(**sizes)
    hidden = decoder({"token_ids": tokens, "padding_mask": keras.ops.ones_like(tokens)})
    return keras.Model(tokens, layers.Dense(words)(hidden))


def sentences(words: int = 2000) -> tuple[Any, Any]:
    drawn = np.random.default_rng(0).zipf(1.3, (32, 65)) - 1
    tokens = np.minimum(drawn, words - 1).astype("int32")
    return tokens[:, :-1], tokens[:, 1:]


MODELS: dict[str, tuple[Callable[[], keras.Model], Callable[[], tuple[Any, Any]]]] = {
    "digits, dense": (dense, digits),
    "digits, convolutional": (convolutional, digits),
    "transformer, 2,000 words": (transformer, sentences),
    "KerasHub's GPT-2, 2,000 words": (lambda: kerashub("GPT2"), sentences),
    "KerasHub's Llama, 2,000 words": (lambda: kerashub("Llama"), sentences),
}


def step_of(model: keras.Model, scale: float, *, xla: bool) -> Callable[..., Any]:
    @tf.function(jit_compile=xla)
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, tf.cast(model(x), "float32"))
            scaled = loss * scale
        gradients = tape.gradient(scaled, model.trainable_variables)
        # The words' table that KerasHub's Llama has for its own outputs has no gradient.
        gradients = [gradient for gradient in gradients if gradient is not None]
        return loss, [tf.convert_to_tensor(gradient) / scale for gradient in gradients]

    return step


def distance(some: Sequence[Any], others: Sequence[Any]) -> float:
    pairs = [(np.float64(a), np.float64(b)) for a, b in zip(some, others, strict=True)]
    error = sum(np.square(a - b).sum() for a, b in pairs)
    return float(np.sqrt(error / sum(np.square(b).sum() for _, b in pairs)))


def errors() -> Iterator[Sequence[str]]:
    for name, (make, data) in MODELS.items():
        x, y = data()
        keras.utils.set_random_seed(1)
        exact = make()
        exact.compile(keras.optimizers.Adam(1e-3), loss_fn)
        exact.fit(x, y, batch_size=8, epochs=2, verbose=0)
        for policy, scale in SCALE.items():
            for xla in (False, True):
                exact_loss, wanted = step_of(exact, 1.0, xla=xla)(x, y)
                row = [name, policy, "XLA" if xla else "ops"]
                for outputs in OUTPUTS:
                    with tfamp.policy_scope(tfamp.Policy(policy, float32_outputs=outputs)):
                        model = make()
                    model.set_weights(exact.get_weights())
                    loss, found = step_of(model, scale, xla=xla)(x, y)
                    of_loss = abs(float(loss / exact_loss) - 1)
                    row += [f"{of_loss:.1e}", f"{distance(found, wanted):.1e}"]
                yield row


def times() -> Iterator[Sequence[str]]:
    x, y = map(tf.constant, (part[:8] for part in sentences(8000)))
    for policy, scale in SCALE.items():
        for xla in (False, True):
            steps = []
            for outputs in OUTPUTS:
                with tfamp.policy_scope(tfamp.Policy(policy, float32_outputs=outputs)):
                    steps.append(step_of(transformer(8000, 512), scale, xla=xla))
            best = [float("inf")] * len(steps)
            for _ in range(6):
                for i, step in enumerate(steps):
                    start = time.perf_counter()
                    float(step(x, y)[0])
                    best[i] = min(best[i], time.perf_counter() - start)
            yield [
                policy,
                "XLA" if xla else "ops",
                *(f"{1e3 * seconds:.0f} ms" for seconds in best),
            ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", action="store_true", help="measure times instead of errors")
    for row in times() if parser.parse_args().times else errors():
        print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
