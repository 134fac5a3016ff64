"""One training run to its end, which goes on where it was stopped; in a process of its own.

A run has two files in a folder. `NAME.npz` has all that the next step depends on (weights, slots,
the loss scale and the number of steps, from which the data follow) together with the curve so far:
being one file, they agree whenever the process ends. `NAME.json` is the curve for readers, written
after it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks import curve_results, data, environment, models
from benchmarks.curve_results import Curve, Evaluation, Setup
from benchmarks.keras_side import Trainer
from benchmarks.workloads import Sizes
from tfamp.machine.file_replacing import replace_text

_STARTED_BY = os.getppid()
# Seeds begin so many batches apart; held-out data are others, so their numbers may be the same.
_BATCHES_OF_A_SEED = 10**6


@dataclass(frozen=True)
class Task:
    """A model, its optimizer and its data.

    Attributes:
        model: Makes the model in some dimensions.
        optimizer: Makes the optimizer for a schedule of rates.
        rate: The highest rate; the schedule rises to it for a twentieth of the steps.
        batch: Makes the batch of a number in some dimensions, of held-out data or of others.
    """

    model: Callable[[Sizes], keras.Model]
    optimizer: Callable[[Any], keras.optimizers.Optimizer]
    rate: float
    batch: Callable[[Sizes, int, bool], data.Batch]


def _characters(size: Sizes, number: int, held_out: bool) -> data.Batch:
    return data.characters(size["batch"], size["tokens"], number, held_out)


def _digits(size: Sizes, number: int, held_out: bool) -> data.Batch:
    return data.digit_images(size["batch"], size["pixels"], number, held_out)


TASKS: Mapping[str, Task] = {
    "transformer": Task(
        lambda size: models.transformer({**size, "vocabulary": data.CHARACTERS}),
        *(keras.optimizers.AdamW, 2e-3, _characters),
    ),
    "resnet": Task(
        models.resnet, lambda rate: keras.optimizers.SGD(rate, momentum=0.9), 0.05, _digits
    ),
}


def train(setup: Setup, folder: Path, end: float | None = None) -> Curve:
    """Trains from the last saved step on, to the last step.

    Args:
        setup: What to train.
        folder: Where the files of the run are, or will be.
        end: The `time.time()` after which to stop at the next evaluation.

    Returns:
        The curve as far as it is.

    Raises:
        ValueError: The files are of a run of the same name that trains something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{setup.name}.json"
    known = _known(setup, path)
    if known is not None and known.done:
        return known
    task, trainer = TASKS[setup.task], Trainer(setup.system, setup.dtype)
    model, variables = _build(task, trainer, setup)
    evaluate = _evaluation(model, [task.batch(setup.size, n, True) for n in range(setup.batches)])
    state = path.with_suffix(".npz")
    curve = _restored(variables, setup, state)
    if curve is None:
        curve = Curve(setup, model.count_params(), environment.describe(None))
        curve.held_out.append(Evaluation(0, *evaluate()))
    while not curve.done and not _is_over(end):
        for step in range(curve.step, min(curve.step + setup.every, setup.steps)):
            batch = task.batch(setup.size, setup.seed * _BATCHES_OF_A_SEED + step, False)
            curve.losses.append(trainer.step(trainer.put(batch)))
        curve.held_out.append(Evaluation(curve.step, *evaluate()))
        _save(variables, curve, state)
        replace_text(path, curve_results.to_json([curve]))
    # A process that ended between the two files left the second behind.
    replace_text(path, curve_results.to_json([curve]))
    if curve.done:
        state.unlink(missing_ok=True)
    return curve


def _is_over(end: float | None) -> bool:
    """Whether the time is up, or whoever started this process is gone and may start it again."""
    return (end is not None and time.time() >= end) or os.getppid() != _STARTED_BY


def _known(setup: Setup, path: Path) -> Curve | None:
    if not path.exists():
        return None
    (curve,) = curve_results.from_json(path.read_text(encoding="utf-8"))
    _check_same(curve.setup, setup, path)
    return curve


def _check_same(found: Setup, wanted: Setup, path: Path) -> None:
    if found != wanted:
        raise ValueError(
            f"{path} is of a run of other dimensions: it has {asdict(found)}, wanted are"
            f" {asdict(wanted)}. Choose another folder, or the options that it was made with."
        )


def _build(task: Task, trainer: Trainer, setup: Setup) -> tuple[keras.Model, list[Any]]:
    """The model, whose step the trainer has, and all variables of model and optimizer."""
    keras.utils.set_random_seed(setup.seed)
    rise = max(1, setup.steps // 20)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, max(1, setup.steps - rise), warmup_target=task.rate, warmup_steps=rise
    )
    model = task.model(setup.size)
    optimizer = trainer.with_loss_scale(task.optimizer(rate))
    optimizer.build(model.trainable_variables)
    trainer.use(model, optimizer)
    return model, [*model.variables, *optimizer.variables]


def _evaluation(
    model: keras.Model, batches: Sequence[data.Batch]
) -> Callable[[], tuple[float, float]]:
    """A function that returns the mean loss and the share of right answers on batches."""
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float32")

    @tf.function
    def of_batch(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        logits = tf.cast(model(x, training=False), "float32")
        right = tf.equal(tf.argmax(logits, -1, tf.int32), tf.cast(y, tf.int32))
        return loss_fn(y, logits), tf.reduce_mean(tf.cast(right, tf.float32))

    def evaluate() -> tuple[float, float]:
        found = [of_batch(*map(tf.constant, batch)) for batch in batches]
        loss, accuracy = np.mean(np.array(found, "float64"), axis=0)
        return float(loss), float(accuracy)

    return evaluate


def _save(variables: Sequence[Any], curve: Curve, path: Path) -> None:
    arrays = {str(number): each.numpy() for number, each in enumerate(variables)}
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        np.savez(file, curve=json.dumps(asdict(curve)), **arrays)
    new.replace(path)


def _restored(variables: Sequence[Any], setup: Setup, path: Path) -> Curve | None:
    """Gives the variables their saved values and returns the saved curve; None if none is saved."""
    if not path.exists():
        return None
    with np.load(path) as saved:
        curve = curve_results.curve_of(json.loads(str(saved["curve"])))
        _check_same(curve.setup, setup, path)
        for number, each in enumerate(variables):
            each.assign(saved[str(number)])
    return curve


def main() -> None:
    """Trains what is on stdin, as JSON: a setup, a folder and when to stop."""
    setup, folder, end = json.load(sys.stdin)
    train(Setup(**setup), Path(folder), end)


if __name__ == "__main__":
    main()
