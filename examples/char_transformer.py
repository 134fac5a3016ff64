"""Trains a small transformer to predict the next character of Python source code.

The text is Python's own standard library, so nothing is downloaded. The script prints bits per
character on held-out files, for float32 and mixed precision, and a sample of the mixed model's
text.

With --levels the model trains at levels of `tfamp.prepare` instead, each compared with the first.

    python examples/char_transformer.py [--dtype float16|bfloat16] [--epochs 2] [--small]
        [--levels [LEVEL ...]]
"""

from __future__ import annotations

import math
import os
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # log lines break the progress bar

import keras
import numpy as np
import tensorflow as tf
from _common import ProgressBar, make_parser, parse, policies, progress
from rich.console import Console
from rich.progress import Progress

import tfamp

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
CONTEXT = 64
BATCH = 32


def standard_library(max_bytes: int) -> np.ndarray:
    """Returns the standard library's top-level files, in order of name, as character numbers."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    # Characters outside ASCII are rare here and become question marks.
    numbers: np.ndarray = np.full(256, ALPHABET.index("?"), "int32")
    numbers[[ord(c) for c in ALPHABET]] = range(len(ALPHABET))
    return numbers[np.frombuffer(bytes(text[:max_bytes]), "uint8")]


def windows(text: np.ndarray) -> tf.data.Dataset:
    """Returns batches of (CONTEXT characters, the same moved on by one)."""
    rows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].reshape(-1, CONTEXT + 1)
    rows = tf.data.Dataset.from_tensor_slices(rows).shuffle(len(rows), seed=0)
    return rows.map(lambda row: (row[:-1], row[1:])).batch(BATCH, drop_remainder=True)


class Embed(keras.layers.Layer):
    """The sum of a character's and its position's vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.character = keras.layers.Embedding(len(ALPHABET), width)
        self.position = keras.layers.Embedding(CONTEXT, width)

    def call(self, x: Any) -> Any:
        """Returns vectors of shape (batch, CONTEXT, width)."""
        return self.character(x) + self.position(keras.ops.arange(CONTEXT))


def build_model(depth: int, width: int = 128, heads: int = 4) -> keras.Model:
    """Returns a decoder-only transformer, normalised before each block."""
    layers = keras.layers
    inputs = keras.Input((CONTEXT,), dtype="int32")
    x = Embed(width)(inputs)
    for _ in range(depth):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(y))
    return keras.Model(inputs, layers.Dense(len(ALPHABET))(layers.LayerNormalization()(x)))


# Arguments of `prepare` by level. O3 gives AdamW master weights automatically; "pure" does not.
LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"level": "O0"},
    "O1": {"level": "O1"},
    "O2": {"level": "O2"},
    "O2+masters": {"level": "O2", "master_weights": True},
    "O3+scale": {"level": "O3", "loss_scale": "dynamic"},
    "O3": {"level": "O3"},
    "O3 pure": {"level": "O3", "master_weights": False},
}


def prepared(name: str, args: Any, optimizer: Any) -> tuple[keras.Model, Any]:
    """Returns a new model and its optimizer: of a level, or built under a policy."""
    depth = 1 if args.small else 2
    if name in LEVELS:
        return tfamp.prepare(build_model(depth), optimizer, dtype=args.dtype, **LEVELS[name])
    with tfamp.policy_scope(name):
        model = build_model(depth)
    return model, tfamp.LossScaleOptimizer(optimizer) if name == "mixed_float16" else optimizer


def train(name: str, text: np.ndarray, args: Any, display: Progress) -> keras.Model:
    """Returns a model of a level or policy, trained on `text`."""
    keras.utils.set_random_seed(args.seed)
    batches = windows(text)
    steps = args.epochs * int(batches.cardinality())
    optimizer = keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(3e-3, steps))
    model, optimizer = prepared(name, args, optimizer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # On CPUs XLA's float16 is faster, if the run is long enough to make up for the compilation.
    model.compile(optimizer, loss, jit_compile=not args.small)
    bar = ProgressBar(display, name)
    model.fit(batches, epochs=args.epochs, shuffle=False, verbose=0, callbacks=[bar])
    return model


def write(model: keras.Model, beginning: str, count: int, seed: int) -> str:
    """Returns `beginning` and `count` characters drawn from the model, one after another."""
    random = np.random.default_rng(seed)
    predict = tf.function(model)
    text = [ALPHABET.index(c) for c in beginning]
    for _ in range(count):
        last = text[-CONTEXT:]
        row = np.array([last + [0] * (CONTEXT - len(last))], "int32")
        logits = predict(row)[0, len(last) - 1].numpy() / 0.7  # cooler than the model's own odds
        odds = np.exp(logits - logits.max())
        text.append(int(random.choice(len(ALPHABET), p=odds / odds.sum())))
    return "".join(ALPHABET[number] for number in text)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains once per policy, prints bits per character and a sample."""
    parser = make_parser(__doc__, epochs=2, small_epochs=1)
    parser.add_argument(
        "--levels", nargs="*", choices=LEVELS, help="levels of tfamp.prepare; all if none is named"
    )
    args = parse(parser, argv)
    by_level = args.levels is not None
    text = standard_library(40_000 if args.small else 1_000_000)
    held_out = len(text) // 10
    console = Console(highlight=False)
    results: list[str] = []
    reference = None
    with progress(console) as display:
        for name in (args.levels or LEVELS) if by_level else policies(args.dtype):
            start = time.perf_counter()
            model = train(name, text[:-held_out], args, display)
            bits = model.evaluate(windows(text[-held_out:]), verbose=0) / math.log(2)
            reference = bits if reference is None else reference
            seconds = time.perf_counter() - start
            results.append(
                f"{name:<15} {bits:.3f} bits per character  {bits / reference - 1:+.2%}"
                f"  {seconds:.0f} s"
            )
    for line in results:
        console.print(line)
    if by_level:
        return 0  # the last model is the one of pure O3, which has learnt nothing
    sample = write(model, "def ", 20 if args.small else 300, args.seed)
    console.print(
        f"\nA sample of the {name} model:", sample, sep="\n", markup=False, soft_wrap=True
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
