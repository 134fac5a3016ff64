"""Runs every backbone of KerasHub through what tfamp does with a model, beside Keras's own policy.

    python -m benchmarks.kerashub                         # all, in both dtypes: about an hour
    python -m benchmarks.kerashub --models Bert ResNet
    python -m benchmarks.kerashub --page docs/kerashub.md # writes the table into the page

An outcome is how far predictions are from float32's (norm of the difference over the norm), or the
error. Finished models stay in the JSON file: an interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kerashub_models import MODELS, inputs_of
from benchmarks.progress import reporting
from benchmarks.tables import Table, show, to_markdown

DTYPES = ("float16", "bfloat16")
# The slice for CI: text and image, encoders and decoders.
SLICE = (
    "Albert", "Bart", "Bert", "Bloom", "DINOV2", "DeiT", "DenseNet", "GPT2", "Llama", "OPT",
)  # fmt: skip
# Differences from float32 under Keras's policy, by each way of tfamp's, and back at O0; steps until
# one is applied; the difference that saving makes.
CHECKS = ("Keras", "policy", "autocast", "rewrite", "O1", "O2", "O0", "train", "reload")
# Those that are compared with Keras's policy.
_COMPARED = ("Keras", "policy", "autocast", "rewrite", "O1", "O2")
# A small model's error is that of a few roundings: half as much again is not worse.
_TOLERANCE = 1.5
_SEED = 7
# And where it has a few outputs only, as CLIP has, one set of weights decides by chance. How many
# others a suspect gets.
_OTHER_WEIGHTS = 12
_MAX_STEPS = 12
_UNMADE = "float32"  # in the place of the checks, where there is no model to check
_SHOWN = 240  # characters of an error
_ALSO = "under Keras's policy too: "
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# How errors begin that tell the way to the fault, files of this machine included, before the fault.
_ON_THE_WAY = ("in user code:", "Exception encountered when calling")
# How many are reloaded by one process, and recorded together.
_BATCH = 10
START, END = "<!-- table: begin -->", "<!-- table: end -->"

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
        compared with it are root mean squares over other weights.
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
    """The root mean square of differences; the first error, if there is one."""
    errors = [each for each in outcomes if isinstance(each, str)]
    squares = [each**2 for each in outcomes if not isinstance(each, str)]
    return errors[0] if errors else math.sqrt(sum(squares) / len(squares))


def _run_seed(
    name: str, dtype: str, folder: Path, seed: int, wanted: Sequence[str]
) -> dict[str, Outcome]:
    import keras

    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    try:
        model = MODELS[name]()
        x = inputs_of(model)
        expected = predict(model, x)
    except Exception as error:  # noqa: BLE001 - a row of the table
        return {_UNMADE: _said(error)}
    checks = _checks(name, dtype, model, x, expected, folder)
    return {check: _outcome(checks[check]) for check in wanted if check in checks}


def _outcome(check: Callable[[], Outcome]) -> Outcome:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - a cell of the table
        return _said(error)


def _said(error: Exception) -> str:
    text = _COLOURS.sub("", str(error)).partition("Arguments received by")[0].strip()
    if any(begin in text for begin in _ON_THE_WAY):
        text = text.rsplit("\n\n", 1)[-1]
    text = " ".join(f"{type(error).__name__}: {text}".replace("|", "/").split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"


def _checks(
    name: str, dtype: str, model: Any, x: Any, expected: list[Any], folder: Path
) -> dict[str, Callable[[], Outcome]]:
    import keras
    import tensorflow as tf

    import tfamp

    weights = model.get_weights()

    def of(other: Any) -> float:
        return difference(predict(other, x), expected)

    def under_keras(check: Callable[[Any], float]) -> float:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(f"mixed_{dtype}")
        try:
            return check(_copy(name, weights))
        finally:
            keras.config.set_dtype_policy(before)

    def policy() -> float:
        with tfamp.policy_scope(f"mixed_{dtype}"):
            other = _copy(name, weights)
            outputs = predict(other, x)
            _save(other, x, outputs, folder / f"{name}-{dtype}")
        return difference(outputs, expected)

    def autocast() -> float:
        with tfamp.autocast(dtype):
            outputs = predict(model, x)
        return difference(outputs, expected)

    def rewrite() -> float:
        function = tf.function(lambda x: model(x, training=False))
        return of(tfamp.rewrite(function, dtype=dtype, placement="lists"))

    def o1() -> float:
        # What it rewrites are the graphs of Keras's own steps.
        prepared, _ = tfamp.prepare(model, level="O1", dtype=dtype)
        return difference(_floats(prepared.predict_on_batch(x)), expected)

    def at_level(level: str) -> float:
        return of(tfamp.prepare(model, level=level, dtype=dtype)[0])

    def train() -> Outcome:
        try:
            with tfamp.policy_scope(f"mixed_{dtype}"):
                return _steps_until_trained(_copy(name, weights), x)
        except Exception as error:  # noqa: BLE001 - is it of KerasHub's?
            other = _outcome(lambda: under_keras(lambda model: _steps_until_trained(model, x)))
            return f"{_ALSO if isinstance(other, str) else ''}{_said(error)}"

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


def _copy(name: str, weights: list[Any]) -> Any:
    model = MODELS[name]()
    model.set_weights(weights)
    return model


def predict(model: Callable[..., Any], x: Any) -> list[Any]:
    """What a model, or a function made of one, gives for inputs: the float outputs."""
    import keras

    return _floats(model(x, training=False) if isinstance(model, keras.Model) else model(x))


def _floats(outputs: Any) -> list[Any]:
    import tensorflow as tf

    tensors = [tf.convert_to_tensor(y) for y in tf.nest.flatten(outputs)]
    return [tf.cast(y, "float32").numpy() for y in tensors if y.dtype.is_floating]


def difference(actual: list[Any], expected: list[Any]) -> float:
    """The norm of the difference over the norm, of all outputs together."""
    import numpy as np

    pairs = zip(actual, expected, strict=True)
    squares = sum(float(np.square(a - e, dtype="float64").sum()) for a, e in pairs)
    return math.sqrt(squares / sum(float(np.square(e, dtype="float64").sum()) for e in expected))


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
            floats = [y for y in tf.nest.flatten(model(x, training=True)) if y.dtype.is_floating]
            loss = tf.add_n([tf.reduce_mean(tf.square(tf.cast(y, "float32"))) for y in floats])
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


def _save(model: Any, x: Any, outputs: list[Any], path: Path) -> None:
    import pickle

    import tensorflow as tf

    model.save(path.with_suffix(".keras"))
    arrays = tf.nest.map_structure(lambda tensor: tensor.numpy(), x)
    path.with_suffix(".pickle").write_bytes(pickle.dumps((arrays, outputs)))


_RELOAD = """
import json, pathlib, pickle, sys
import keras, keras_hub, numpy as np, tensorflow as tf
found = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.keras")):
    try:
        model = keras.saving.load_model(path)
        x, expected = pickle.loads(path.with_suffix(".pickle").read_bytes())
        outputs = [y for y in tf.nest.flatten(model(x, training=False)) if y.dtype.is_floating]
        outputs = [tf.cast(y, "float32").numpy() for y in outputs]
        squares = sum(np.square(a - e, dtype="float64").sum() for a, e in zip(outputs, expected))
        norm = sum(np.square(e, dtype="float64").sum() for e in expected)
        found[path.stem] = float(np.sqrt(squares / norm))
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
    done = subprocess.run(
        [sys.executable, "-c", _RELOAD, str(folder)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def run(models: Sequence[str], dtypes: Sequence[str], file: Path | None) -> dict[str, Outcomes]:
    """The checks of some models.

    Args:
        models: Keys of `MODELS`.
        dtypes: Low dtypes.
        file: Holds what earlier runs found, and gets what this one finds; None keeps nothing.

    Returns:
        "model-dtype" -> its outcomes.
    """
    found = json.loads(file.read_text("utf-8")) if file and file.exists() else {}
    keys = {f"{name}-{dtype}": (name, dtype) for name in models for dtype in dtypes}
    missing = [key for key in keys if key not in found]
    with reporting("KerasHub", len(missing) + 1) as tell:
        for first in range(0, len(missing), _BATCH):
            with tempfile.TemporaryDirectory() as folder:
                for key in missing[first : first + _BATCH]:
                    tell(key)
                    found[key] = run_model(*keys[key], Path(folder))
                for key, outcome in reload_without_tfamp(Path(folder)).items():
                    found[key]["reload"] = outcome
            if file:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(found, indent=1), "utf-8")
        tell("done")
    return {key: found[key] for key in keys}


def worse_than_keras(outcomes: Mapping[str, Outcome]) -> list[str]:
    """The checks that fail, or are further from float32 than Keras's policy is."""
    if _UNMADE in outcomes:
        return [_UNMADE]
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
    """One row a model and dtype, and a note for each error."""
    notes = []
    rows = []
    for key, outcomes in found.items():
        name, _, dtype = key.rpartition("-")
        faults = worse_than_keras(outcomes)
        rows.append((name, dtype, *(_cell(outcomes.get(c)) for c in CHECKS), ", ".join(faults)))
        texts = {c: text for c, text in outcomes.items() if isinstance(text, str)}
        notes += [f"{name}, {dtype}, {check}: {text}" for check, text in texts.items()]
    headers = ("backbone", "dtype", *CHECKS, "worse than Keras's")
    return Table("Difference from float32", headers, tuple(rows), left=2, notes=tuple(notes))


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "-"
    return "error" if isinstance(outcome, str) else f"{outcome:.2g}"


def write_page(page: Path, result: Table) -> None:
    """Puts the table between the two marks of a page."""
    text = page.read_text("utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{START}\n\n{to_markdown(result)}\n{END}{after}", "utf-8")


def main() -> int:
    """Runs, prints the table and says whether anything is worse than under Keras's policy."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="M")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--file", type=Path, default=Path("benchmark_results/kerashub.json"))
    parser.add_argument("--page", type=Path, help="a page with the two marks of the table")
    options = parser.parse_args()
    found = run(options.models, options.dtypes, options.file)
    result = table(found)
    show([result])
    if options.page:
        write_page(options.page, result)
    return 1 if any(worse_than_keras(outcomes) for outcomes in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
