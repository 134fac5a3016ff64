"""Compares what models with weights in 16 bits learn with float32.

    python -m benchmarks.learning [--models M ...] [--ways W ...] [--seeds N] [--small] [--markdown]
    python -m benchmarks.learning --optimizers [all | O ...] [--seeds N] [--small] [--markdown]

A character transformer learns with AdamW, LeNet-5 with Adam and with SGD and momentum, on data that
are never used up: the standard library's source and scikit-learn's digits, shifted and with noise.
Each way starts from the same weights and sees the same batches. Shown is the loss on batches that
none has seen.

With `--optimizers` a small network learns a regression under the pure policies "bfloat16" and
"float16", with every optimizer of Keras in `tfamp.LossScaleOptimizer`, without and with masters.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers

import tfamp
from benchmarks import data
from benchmarks.models import transformer
from benchmarks.progress import reporting
from benchmarks.tables import Table, show, to_markdown

# ---- Models, and how they are stored -------------------------------------------------------------

# Arguments of `prepare`.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "to nearest": {"master_weights": False},
    "stochastic": {"weight_rounding": "stochastic"},
    "split": {"weight_rounding": "split"},
    "split, low slots": {"weight_rounding": "split", "slots": "bfloat16"},
}
FLOAT32 = "float32"
RUNS = (
    FLOAT32,
    *(f"bfloat16, {way}" for way in WAYS),
    *(f"float16, {way}" for way in WAYS if "split" not in way),
)


def lenet5() -> keras.Model:
    """LeNet-5 for 32 x 32 pixels, as LeCun et al. (1998) drew it, with ReLU and maxima."""
    return keras.Sequential(
        [
            keras.Input((32, 32, 1)),
            layers.Conv2D(6, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(16, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(120, activation="relu"),
            layers.Dense(84, activation="relu"),
            layers.Dense(data.DIGITS),
        ]
    )


def characters() -> keras.Model:
    """A transformer that predicts the next character."""
    size = {"vocabulary": data.CHARACTERS, "tokens": 32, "width": 64, "heads": 4, "layers": 2}
    return transformer(size)


def _digit(batch: int, number: int) -> data.Batch:
    images, digits = data.digit_images(batch, 32, number)
    return images[..., :1], digits


@dataclass(frozen=True)
class Task:
    """A model, its optimizer and its data.

    Attributes:
        model: Makes the model.
        optimizer: Makes the optimizer for a schedule of rates.
        rate: The rate that the schedule starts with.
        batch: Makes a batch of a size, by number.
        size: Of a batch.
        steps: How many it learns from.
    """

    model: Callable[[], keras.Model]
    optimizer: Callable[[Any], keras.optimizers.Optimizer]
    rate: float
    batch: Callable[[int, int], data.Batch]
    size: int
    steps: int


TASKS: Mapping[str, Task] = {
    "transformer, AdamW": Task(
        *(characters, keras.optimizers.AdamW, 3e-3),
        *(lambda batch, number: data.characters(batch, 32, number), 32, 400),
    ),
    "LeNet-5, Adam": Task(lenet5, keras.optimizers.Adam, 1e-3, _digit, 32, 600),
    "LeNet-5, SGD with momentum": Task(
        *(lenet5, lambda rate: keras.optimizers.SGD(rate, momentum=0.9), 1e-2, _digit, 32, 600)
    ),
}
# Batches that no seed comes to.
_UNSEEN = range(10**9, 10**9 + 64)
_SMALL_STEPS = 4


# ---- A run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Learnt:
    """The outcome of a run.

    Attributes:
        task: The name of the task.
        way: The dtype and the way of rounding.
        seed: Seed of weights and data.
        loss: The mean loss on unseen batches.
        accuracy: The share of right answers there.
        size: Bytes of weights, gradients and optimizer for each parameter.
    """

    task: str
    way: str
    seed: int
    loss: float
    accuracy: float
    size: float


def _batches(task: Task, numbers: Sequence[int]) -> data.Batch:
    inputs, answers = zip(*(task.batch(task.size, number) for number in numbers), strict=True)
    return np.concatenate(inputs), np.concatenate(answers)


def learn(name: str, way: str, seed: int, steps: int | None = None) -> Learnt:
    """Trains the model of a task in one way."""
    task = TASKS[name]
    steps = task.steps if steps is None else steps
    keras.utils.set_random_seed(seed)
    rate = keras.optimizers.schedules.CosineDecay(task.rate, steps)
    model, optimizer = _prepared(way, task.model(), task.optimizer(rate))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], auto_scale_loss=False)
    first = seed * 10**6
    x, y = _batches(task, range(first, first + steps))
    model.fit(x, y, batch_size=task.size, shuffle=False, verbose=0)
    unseen = _batches(task, _UNSEEN)
    found = model.evaluate(*unseen, batch_size=task.size, verbose=0, return_dict=True)
    kept = [*model.trainable_variables, *model.trainable_variables, *optimizer.variables]
    size = sum(variable.numpy().nbytes for variable in kept) / model.count_params()
    return Learnt(name, way, seed, found["loss"], found["accuracy"], size)


def _prepared(way: str, model: keras.Model, optimizer: Any) -> Any:
    if way == FLOAT32:
        return tfamp.prepare(model, optimizer, level="O0")
    dtype, _, rounding = way.partition(", ")
    scale = {"loss_scale": "dynamic"} if dtype == "float16" else {}
    return tfamp.prepare(model, optimizer, level="O3", dtype=dtype, **WAYS[rounding], **scale)


def learn_all(
    tasks: Sequence[str], ways: Sequence[str], seeds: int, steps: int | None
) -> list[Learnt]:
    """Trains every task in every way, from each seed."""
    wanted = list(itertools.product(tasks, ways, range(seeds)))
    found = []
    with reporting("runs", len(wanted)) as progress:
        for task, way, seed in wanted:
            progress(f"{task}, {way}, seed {seed}")
            found.append(learn(task, way, seed, steps))
            keras.backend.clear_session()
    return found


# ---- Every optimizer, under a pure policy --------------------------------------------------------

# Rates at which the regression is learnt in float32; 0.01 for the others.
RATES = {
    **{"Adadelta": 1.0, "Adafactor": 0.05, "Adagrad": 0.1, "Ftrl": 0.1, "SGD": 0.05},
    **{"Adamax": 0.02, "Lion": 0.005},
}
_WRAPPERS = ("LossScaleOptimizer", "MultiOptimizer", "Optimizer")
OPTIMIZERS = {
    name: kind
    for name, kind in sorted(vars(keras.optimizers).items())
    if isinstance(kind, type)
    and issubclass(kind, keras.optimizers.Optimizer)
    and name not in _WRAPPERS
}
# Policy, and `master_weights` of the wrapper.
PURE: tuple[tuple[str, bool | None], ...] = (
    (FLOAT32, None),
    *(("bfloat16", masters) for masters in (False, None)),
    *(("float16", masters) for masters in (False, None)),
)
_REGRESSION_STEPS = 150


def regression_loss(
    name: str, policy: str, masters: bool | None, seed: int, steps: int = _REGRESSION_STEPS
) -> float:
    """The float32 mean squared error after training with an optimizer under a policy."""
    keras.utils.set_random_seed(seed)
    with tfamp.policy_scope(policy):
        hidden = layers.Dense(16, "relu")
        model = keras.Sequential([keras.Input((8,)), hidden, layers.Dense(1)])
    random = np.random.default_rng(seed)
    x = random.standard_normal((64, 8)).astype("float32")
    y = (x @ random.standard_normal((8, 1)) / 3).astype("float32")
    inner = OPTIMIZERS[name](RATES.get(name, 0.01))
    optimizer = tfamp.LossScaleOptimizer(inner, master_weights=masters)
    model.compile(optimizer, "mse", auto_scale_loss=False, jit_compile=False)
    # One epoch of equal batches: epochs of one batch each take longer than their steps.
    repeated = (np.tile(each, (steps, 1)) for each in (x, y))
    model.fit(*repeated, batch_size=len(x), shuffle=False, verbose=0)
    return float(np.mean(np.square(keras.ops.convert_to_numpy(model(x)).astype("float32") - y)))


def optimizers_table(names: Sequence[str], seeds: int, steps: int) -> Table:
    """The losses of optimizers: a row for each, the means over all seeds."""
    rows = []
    with reporting("runs", len(names) * len(PURE) * seeds) as progress:
        for name in names:
            cells = []
            for policy, masters in PURE:
                progress(f"{name}, {policy}, masters {masters}")
                losses = (regression_loss(name, policy, masters, s, steps) for s in range(seeds))
                cells.append(f"{statistics.fmean(losses):.4f}")
                keras.backend.clear_session()
            rows.append((name, *cells))
    heads = ["bfloat16, no masters", "bfloat16", "float16, no masters", "float16"]
    return Table("Every optimizer, pure 16-bit policies", ("loss", FLOAT32, *heads), tuple(rows))


# ---- Tables --------------------------------------------------------------------------------------


def table(task: str, runs: Sequence[Learnt]) -> Table:
    """The runs of a task: a row for each way, over all seeds."""
    rows = []
    for way in dict.fromkeys(run.way for run in runs):
        own = [run for run in runs if run.way == way]
        loss = statistics.fmean(run.loss for run in own)
        accuracy = statistics.fmean(run.accuracy for run in own)
        apart = [_range(ratios_of(way, runs, figure)) for figure in ("loss", "accuracy")]
        figures = f"{loss:.4f}", apart[0], f"{accuracy:.2%}", apart[1]
        rows.append((way, str(len(own)), *figures, f"{own[0].size:.1f}"))
    return Table(
        task,
        ("stored in", "seeds", "loss", "of float32", "accuracy", "of float32", "bytes a parameter"),
        tuple(rows),
    )


def _range(ratios: Sequence[float]) -> str:
    if any(map(math.isnan, ratios)):
        return "nan"
    least, most = (f"{each - 1:+.2%}" for each in (min(ratios), max(ratios)))
    return least if least == most else f"{least} to {most}"


def ratios_of(way: str, runs: Sequence[Learnt], name: str) -> list[float]:
    """The loss or accuracy of a way over float32's, for each seed."""
    exact = {run.seed: getattr(run, name) for run in runs if run.way == FLOAT32}
    return [getattr(run, name) / exact[run.seed] for run in runs if run.way == way]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--ways", nargs="+", choices=RUNS, default=[*RUNS])
    parser.add_argument("--optimizers", nargs="+", choices=["all", *OPTIMIZERS], help="of Keras")
    parser.add_argument("--seeds", type=int, default=3, help="how many weights and data")
    parser.add_argument("--small", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    args = parser.parse_args()
    if args.optimizers:
        names = [*OPTIMIZERS] if "all" in args.optimizers else args.optimizers
        steps = _SMALL_STEPS if args.small else _REGRESSION_STEPS
        one = optimizers_table(names, args.seeds, steps)
        print(to_markdown(one)) if args.markdown else show([one])
        return
    # All others are compared with float32.
    args.ways = [FLOAT32, *(way for way in args.ways if way != FLOAT32)]
    steps = _SMALL_STEPS if args.small else None
    runs = learn_all(args.models, args.ways, args.seeds, steps)
    tables = [table(task, [run for run in runs if run.task == task]) for task in args.models]
    if args.markdown:
        print("\n".join(map(to_markdown, tables)))
    else:
        show(tables)


if __name__ == "__main__":
    main()
