"""Trains a CNN on scikit-learn's digits with `model.fit`, in float32 and in mixed precision.

What mixed precision takes is two lines: the policy under which the model is built, and
`tfamp.LossScaleOptimizer` around the optimizer. BatchNormalization and the output layer stay in
float32 without being told.

    python examples/digits_fit.py [--dtype float16|bfloat16] [--epochs 20] [--seed 0] [--small]
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's notes would tear the progress bar

import keras
from _common import Digits, ProgressBar, load_digits, make_parser, parse, policies, progress
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import tfamp

BATCH = 64
HEADINGS = ("test\naccuracy", "loss\nscale", "skipped\nsteps", "low-precision\nlayers", "seconds")


def build_model() -> keras.Model:
    """Returns a small CNN; nothing in it mentions precision."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same"),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Conv2D(32, 3, padding="same"),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same"),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dropout(0.3),
            layers.Dense(10),
        ]
    )


def make_optimizer(policy: str, steps: int) -> keras.optimizers.Optimizer:
    """Returns Adam over a cosine schedule; of the dtypes, only float16 needs a loss scale."""
    adam = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(2e-3, steps))
    return tfamp.LossScaleOptimizer(adam) if policy == "mixed_float16" else adam


def train(policy: str, data: Digits, epochs: int, seed: int, display: Progress) -> keras.Model:
    """Returns a model built under `policy` and trained."""
    keras.utils.set_random_seed(seed)
    with tfamp.policy_scope(policy):  # a program with one policy: tfamp.set_global_policy(policy)
        model = build_model()
    model.compile(
        make_optimizer(policy, epochs * -(-len(data.x_train) // BATCH)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        data.x_train,
        data.y_train,
        batch_size=BATCH,
        epochs=epochs,
        verbose=0,
        callbacks=[ProgressBar(display, policy, "accuracy")],
    )
    return model


def low_precision_share(model: keras.Model) -> str:
    """Returns how many of the layers that have weights compute in float16 or bfloat16."""
    dtypes = [layer.compute_dtype for layer in model.layers if layer.weights]
    low = sum(dtype in ("float16", "bfloat16") for dtype in dtypes)
    return f"{low} of {len(dtypes)} ({low / len(dtypes):.0%})"


def main(argv: Sequence[str] | None = None) -> int:
    """Trains once per policy and prints the comparison."""
    args = parse(make_parser(__doc__, epochs=20, small_epochs=2), argv)
    data = load_digits()
    table = Table(
        title="CNN on scikit-learn's digits",
        caption="Low-precision layers: of the layers that have weights, those that compute in"
        " float16 or bfloat16.\nBatchNormalization and the output layer are kept in float32."
        "\nMost CPUs emulate float16, which takes longer than float32.",
    )
    table.add_column("policy", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    console = Console()
    with progress(console) as display:
        for policy in policies(args.dtype):
            start = time.perf_counter()
            model = train(policy, data, args.epochs, args.seed, display)
            seconds = time.perf_counter() - start
            accuracy = model.evaluate(data.x_test, data.y_test, verbose=0, return_dict=True)
            scale, skipped = "-", "-"
            if isinstance(model.optimizer, tfamp.LossScaleOptimizer):
                scale = f"{float(model.optimizer.loss_scale):g}"
                skipped = str(int(model.optimizer.skipped_steps))
            share = low_precision_share(model)
            row = (policy, f"{accuracy['accuracy']:.2%}", scale, skipped, share, f"{seconds:.1f}")
            table.add_row(*row)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
