"""Runs KerasHub backbones through every way of tfamp and compares them with Keras's own policy.

    python -m benchmarks.kerashub                         # all, in both dtypes
    python -m benchmarks.kerashub --models Bert ResNet
    python -m benchmarks.kerashub --page docs/kerashub.md # writes the table into the page

An outcome is how far predictions are from float32's (norm of the difference over the norm), or the
error.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.kerashub_models import MODELS, inputs_of
from benchmarks.outputs import difference, floats, keras_policy
from benchmarks.progress import reporting
from benchmarks.tables import Table, show, to_markdown

DTYPES = ("float16", "bfloat16")
# Differences from float32 under Keras's policy, by each way of tfamp's, and back at O0; steps until
# one is applied; the difference that saving makes.
CHECKS = ("Keras", "policy", "autocast", "rewrite", "O1", "O2", "O0", "train", "reload")
# Those that are compared with Keras's policy.
_COMPARED = ("Keras", "policy", "autocast", "rewrite", "O1", "O2")
# A small model's error comes from a few roundings: half as much again is not worse.
_TOLERANCE = 1.5
_SEED = 7
# A model that picks experts jumps where a rounding changes the choice, under Keras's policy too:
# one set of weights decides by chance. How many others a suspect gets.
_OTHER_WEIGHTS = 12
_MAX_STEPS = 12
_SHOWN = 240  # characters of an error
_ALSO = "under Keras's policy too: "

# A number, or what went wrong.
Outcome = float | str
Outcomes = dict[str, Outcome]


def run_model(name: str, dtype: str, folder: Path) -> Outcomes:
    """Every check of one model in one dtype but reloading, for which its file is left in `folder`.

    Args:
        name: A key of `MODELS`.
        dtype: "float16" or "bfloat16".
        folder: Where the model is saved, with its inputs and predictions.

    Returns:
        A difference, or an error, for each check. Where one is worse than Keras's, all that are
        compared with it are medians over other weights.
    """
    outcomes = _run_seed(name, dtype, folder, _SEED, CHECKS)
    suspects = {check for check in worse_than_keras(outcomes) if check in _COMPARED}
    if not any(isinstance(outcomes[check], float) for check in suspects):
        return outcomes
    with tempfile.TemporaryDirectory() as unused:
        seeds = range(_SEED + 1, _SEED + 1 + _OTHER_WEIGHTS)
        draws = [_run_seed(name, dtype, Path(unused), seed, _COMPARED) for seed in seeds]
    return outcomes | {check: over_draws([each[check] for each in draws]) for check in _COMPARED}


def over_draws(outcomes: Sequence[Outcome]) -> Outcome:
    """The median of differences; the first error, if there is one."""
    errors = [each for each in outcomes if isinstance(each, str)]
    differences = [each for each in outcomes if not isinstance(each, str)]
    return errors[0] if errors else statistics.median(differences)


def _run_seed(name: str, dtype: str, folder: Path, seed: int, wanted: Sequence[str]) -> Outcomes:
    import keras

    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    model = MODELS[name]()
    checks = _checks(name, dtype, model, inputs_of(model), folder)
    return {check: _outcome(of) for check, of in checks.items() if check in wanted}


def _outcome(check: Callable[[], Outcome]) -> Outcome:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - a cell of the table
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"


def _checks(
    name: str, dtype: str, model: Any, x: Any, folder: Path
) -> dict[str, Callable[[], Outcome]]:
    import tensorflow as tf

    import tfamp

    weights, expected = model.get_weights(), predict(model, x)

    def copy() -> Any:
        other = MODELS[name]()
        other.set_weights(weights)
        return other

    def of(other: Any) -> float:
        return difference(predict(other, x), expected)

    def under_keras(check: Callable[[Any], float]) -> float:
        with keras_policy(f"mixed_{dtype}"):
            return check(copy())

    def policy() -> float:
        with tfamp.policy_scope(f"mixed_{dtype}"):
            other = copy()
            outputs = predict(other, x)
            other.save(folder / f"{name}-{dtype}.keras")
        arrays = tf.nest.map_structure(lambda tensor: tensor.numpy(), x)
        (folder / f"{name}-{dtype}.pickle").write_bytes(pickle.dumps((arrays, outputs)))
        return difference(outputs, expected)

    def autocast() -> float:
        with tfamp.autocast(dtype):
            return of(model)

    def rewrite() -> float:
        function = tf.function(lambda x: model(x, training=False))
        return of(tfamp.rewrite(function, dtype=dtype, placement="lists"))

    def o1() -> float:
        # O1 rewrites the graphs of Keras's own steps.
        prepared, _ = tfamp.prepare(model, level="O1", dtype=dtype)
        return difference(floats(prepared.predict_on_batch(x)), expected)

    def at_level(level: str) -> float:
        return of(tfamp.prepare(model, level=level, dtype=dtype)[0])

    def train() -> Outcome:
        with tfamp.policy_scope(f"mixed_{dtype}"):
            found = _outcome(lambda: _steps_until_trained(copy(), x))
        if isinstance(found, str):  # Is the error KerasHub's?
            other = _outcome(lambda: under_keras(lambda model: _steps_until_trained(model, x)))
            return f"{_ALSO if isinstance(other, str) else ''}{found}"
        return found

    return {
        "Keras": lambda: under_keras(of),
        "policy": policy,
        "autocast": autocast,
        "rewrite": rewrite,
        "O1": o1,
        "O2": lambda: at_level("O2"),
        "O0": lambda: at_level("O0"),
        "train": train,
    }


def predict(model: Callable[..., Any], x: Any) -> list[Any]:
    """The float outputs of a model, or of a function made of one."""
    import keras

    return floats(model(x, training=False) if isinstance(model, keras.Model) else model(x))


def _steps_until_trained(model: Any, x: Any) -> float:
    """How many steps it takes until one is applied: the scale may back off in the first ones."""
    import keras
    import tensorflow as tf

    import tfamp

    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(1e-3))
    optimizer.build(model.trainable_variables)

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            outputs = [y for y in tf.nest.flatten(model(x, training=True)) if y.dtype.is_floating]
            loss = tf.add_n([tf.reduce_mean(tf.square(tf.cast(y, "float32"))) for y in outputs])
            scaled = optimizer.get_scaled_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        pairs = zip(gradients, model.trainable_variables, strict=True)
        optimizer.apply_gradients([(g, v) for g, v in pairs if g is not None])
        return loss

    for count in range(1, _MAX_STEPS + 1):
        loss = float(step())
        if bool(optimizer.last_step_finite):
            return float(count)
    raise ArithmeticError(f"no step of {_MAX_STEPS} was applied; the loss is {loss}")


_RELOAD = """
import json, pathlib, pickle, sys
import keras, keras_hub
from benchmarks.outputs import difference, floats
found = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.keras")):
    try:
        model = keras.saving.load_model(path)
        x, expected = pickle.loads(path.with_suffix(".pickle").read_bytes())
        found[path.stem] = difference(floats(model(x, training=False)), expected)
    except Exception as error:
        found[path.stem] = f"{type(error).__name__}: {error}"[:200].replace("\\n", " ")
assert "tfamp" not in sys.modules
print(json.dumps(found))
"""


def reload_without_tfamp(folder: Path) -> dict[str, Outcome]:
    """Loads what was saved in a process that never imports tfamp.

    Returns:
        "model-dtype" -> the difference from the predictions before saving, or the error.
    """
    command = [sys.executable, "-c", _RELOAD, str(folder)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    return json.loads(done.stdout.splitlines()[-1])


def run(models: Sequence[str], dtypes: Sequence[str]) -> dict[str, Outcomes]:
    """The checks of some models.

    Args:
        models: Keys of `MODELS`.
        dtypes: Low dtypes.

    Returns:
        "model-dtype" -> its outcomes.
    """
    keys = {f"{name}-{dtype}": (name, dtype) for name in models for dtype in dtypes}
    found = {}
    with (
        reporting("KerasHub", len(keys) + 1) as progress,
        tempfile.TemporaryDirectory() as folder,
    ):
        for key in keys:
            progress(key)
            found[key] = run_model(*keys[key], Path(folder))
        progress("reload")
        for key, outcome in reload_without_tfamp(Path(folder)).items():
            found[key]["reload"] = outcome
    return found


def worse_than_keras(outcomes: Mapping[str, Outcome]) -> list[str]:
    """The checks that fail, or are further from float32 than Keras's policy is."""
    keras = outcomes["Keras"]
    limit = _TOLERANCE * keras if isinstance(keras, float) and math.isfinite(keras) else math.inf
    no_number = isinstance(keras, float) and math.isnan(keras)
    faults = []
    for check, outcome in outcomes.items():
        if check == "Keras":
            continue
        bound = {"O0": 1e-6, "train": math.inf}.get(check, max(limit, 1e-5))
        if isinstance(outcome, str):
            if not isinstance(keras, str) and not outcome.startswith(_ALSO):
                faults.append(check)
        elif not outcome <= bound and not (no_number and math.isnan(outcome)):
            faults.append(check)
    return faults


def table(found: Mapping[str, Outcomes]) -> Table:
    """One row a model and dtype, and a note for each error that Keras's policy does not have."""
    rows, notes = [], []
    for key, outcomes in found.items():
        name, _, dtype = key.rpartition("-")
        faults = worse_than_keras(outcomes)
        rows.append((name, dtype, *(_cell(outcomes.get(c)) for c in CHECKS), ", ".join(faults)))
        errors = [check for check in faults if isinstance(outcomes[check], str)]
        notes += [f"{name}, {dtype}, {check}: {outcomes[check]}" for check in errors]
    headers = ("backbone", "dtype", *CHECKS, "worse than Keras's")
    return Table("Difference from float32", headers, tuple(rows), left=2, notes=tuple(notes))


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "-"
    return "error" if isinstance(outcome, str) else f"{outcome:.2g}"


def main() -> int:
    """Runs, prints the table and says whether anything is worse than under Keras's policy."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="M")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--page", type=Path, help="a page with the two marks of a benchmark")
    options = parser.parse_args()
    found = run(options.models, options.dtypes)
    result = table(found)
    show([result])
    if options.page:
        report.put_section(options.page, to_markdown(result))
    return 1 if any(map(worse_than_keras, found.values())) else 0


if __name__ == "__main__":
    sys.exit(main())
