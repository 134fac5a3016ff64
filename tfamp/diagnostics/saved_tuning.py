"""Tuning of a SavedModel's signature, on inputs that are given or made up of what it takes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.core.options import checked_count
from tfamp.diagnostics.model_files import signature_of
from tfamp.rewriting import saved_files
from tfamp.rewriting.tune_report import TuneReport
from tfamp.rewriting.tuned_function import tune
from tfamp.rewriting.tuning import CANDIDATES, ROUNDS

BATCH_SIZE = 32


def tune_saved_model(
    src: str | os.PathLike[str],
    *,
    dtype: Any = None,
    signature: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    candidates: Sequence[str] = CANDIDATES,
    max_error: float | None = None,
    rounds: int = ROUNDS,
) -> TuneReport:
    """Tells which placement is the fastest here for a signature of a SavedModel, as `tfamp.tune`.

    Loading a SavedModel runs what initialises it: as with any program, only load what you trust.

    Args:
        src: Directory of a SavedModel; nothing is written there.
        dtype: "float16" or "bfloat16"; None is what this machine multiplies natively, and bfloat16
            where that is neither.
        signature: Which signature; None is "serving_default", or the first.
        inputs: A dict of arrays by input name. None makes them of the signature: normal random
            numbers for floats, 0 and 1 for integers.
        batch_size: Size of the batch where the signature leaves it open; 32 if None.
        candidates: As for `tfamp.tune`.
        max_error: As for `tfamp.tune`.
        rounds: As for `tfamp.tune`.

    Returns:
        The report.

    Raises:
        TypeError, ValueError: An argument is wrong, or inputs cannot be made of the signature.
        SavedModelError: The SavedModel cannot be read.
        RewriteError: Its graph cannot be rewritten.

    Example:
        >>> import tempfile, tensorflow as tf
        >>> module, here = tf.Module(), tempfile.mkdtemp()
        >>> module.call = tf.function(lambda x: x @ x, [tf.TensorSpec((8, 8))])
        >>> tf.saved_model.save(module, here, signatures=module.call)
        >>> tune_saved_model(here, dtype="bfloat16", rounds=2).function
        'serving_default'
    """
    size = BATCH_SIZE if batch_size is None else checked_count("batch_size", batch_size)
    saved_files.read_saved_model(Path(src))  # It says what is missing or broken.
    model = tf.saved_model.load(os.fspath(src))
    name, function = signature_of(model, signature, src)
    specs = function.structured_input_signature[1]
    if inputs is None:
        given = {each: _made_up(each, spec, size) for each, spec in specs.items()}
    else:
        given = _read(inputs, specs)

    def call(*tensors: Any) -> Any:
        # By way of the model, which keeps the variables for as long as this lives.
        return model.signatures[name](**dict(zip(specs, tensors, strict=True)))

    call.__name__ = name
    values = [given[each] for each in specs]
    return tune(
        call, *values, dtype=dtype, candidates=candidates, max_error=max_error, rounds=rounds
    )


def _read(inputs: Mapping[str, Any], specs: Mapping[str, Any]) -> dict[str, Any]:
    if sorted(inputs) != sorted(specs):
        raise ValueError(
            f"inputs must hold the arrays {sorted(specs)}, which the signature takes; they hold "
            f"{sorted(inputs)}."
        )
    return {name: tf.cast(np.asarray(inputs[name]), spec.dtype) for name, spec in specs.items()}


def _made_up(name: str, spec: Any, batch_size: int) -> Any:
    sizes = None if spec.shape.rank is None else spec.shape.as_list()
    if sizes and sizes[0] is None:
        sizes[0] = batch_size
    is_number = spec.dtype.is_floating or spec.dtype.is_integer
    if sizes is None or None in sizes or not is_number:
        raise ValueError(
            f"The input {name!r} is {spec.dtype.name} of shape {spec.shape}, of which no values "
            "can be made up: give inputs, by name."
        )
    if spec.dtype.is_floating:
        return tf.cast(tf.random.stateless_normal(sizes, (1, 2)), spec.dtype)
    return tf.cast(tf.random.stateless_uniform(sizes, (1, 2), 0, 2, tf.int32), spec.dtype)
