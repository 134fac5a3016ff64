"""Measures SavedModels in bfloat16 where they are served: size, throughput, latency, error.

    python -m benchmarks.serving [--models bert resnet50] [--rounds N] [--seconds S] [--small]
    python -m benchmarks.serving --page docs/guides/saved_models.md   # writes the tables there

A BERT of KerasHub and Keras's ResNet-50, with random weights, are exported, rewritten by
`tfamp.rewrite_saved_model`, and loaded by `tf.saved_model.load`. Clients, each in a thread of its
own, call the signature one request after the other; the ways to serve take turns.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

import tfamp
from benchmarks import accuracy, report, results
from benchmarks.outputs import difference
from benchmarks.progress import reporting
from benchmarks.rounds import rotated
from benchmarks.tables import Table, show, to_markdown

BASE = "float32"
# How each way to serve is written; the base is what `model.export` wrote.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "float32, frozen": {"freeze": True, "keep_float32": [".*"]},
    "bfloat16": {},
    "bfloat16, frozen": {"freeze": True},
}
CLIENTS = (1, 2, 4)
# BERT-small: 4 layers of width 512, the vocabulary of BERT, one text of 128 tokens a request.
_BERT = {"layers": 4, "width": 512, "heads": 8, "tokens": 128, "vocabulary": 30522, "batch": 1}
_SMALL_BERT = _BERT | {"layers": 1, "width": 32, "heads": 2, "tokens": 8, "vocabulary": 100}

Request = Mapping[str, Any]


def _resnet50(small: bool) -> keras.Model:
    side = 32 if small else 224
    # Scores: probabilities of random weights are all alike.
    return keras.applications.ResNet50(
        weights=None, input_shape=(side, side, 3), classifier_activation=None
    )


MODELS: Mapping[str, Callable[[bool], keras.Model]] = {
    "bert": lambda small: accuracy.MODELS["bert"](_SMALL_BERT if small else _BERT),
    "resnet50": _resnet50,
}


# ---- The models on disk --------------------------------------------------------------------------


def export(name: str, small: bool, path: Path) -> Request:
    """Writes a model with random weights; returns a request for it."""
    keras.utils.set_random_seed(0)
    model, size = MODELS[name](small), _SMALL_BERT if small else _BERT
    initial = [(each.path, each.numpy()) for each in model.weights]
    model.set_weights(accuracy.weights_of(initial, 0))
    model.export(str(path), verbose=False)
    inputs = accuracy.inputs_of(model, size, 0)
    return inputs if isinstance(inputs, Mapping) else {model.input.name: inputs}


def write_ways(path: Path) -> dict[str, Path]:
    """Writes the other ways next to an exported model; returns where each is."""
    found = {BASE: path}
    for way, options in WAYS.items():
        found[way] = path.with_name(way)
        with warnings.catch_warnings():
            # Freezing float32 is meant to convert nothing.
            warnings.simplefilter("ignore", tfamp.NothingConvertedWarning)
            tfamp.rewrite_saved_model(path, found[way], dtype="bfloat16", **options)
    return found


def bytes_of(directory: Path) -> int:
    """The bytes of all files."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


# ---- Load ----------------------------------------------------------------------------------------


@dataclass
class Load:
    """The results of one way under the load of some clients.

    Attributes:
        latencies: Seconds of each request, of all rounds.
        rates: Requests a second, by round.
    """

    latencies: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def put_under_load(
    call: Callable[[], Any], clients: int, seconds: float
) -> tuple[list[float], float]:
    """Calls in a loop from several threads.

    Args:
        call: Sends a request and waits for what comes back.
        clients: How many threads.
        seconds: No request begins later.

    Returns:
        Seconds of each request, and requests a second.
    """
    start = time.perf_counter()

    def client() -> list[float]:
        taken, now = [], time.perf_counter()
        while now < start + seconds or not taken:
            call()
            before, now = now, time.perf_counter()
            taken.append(now - before)
        return taken

    with ThreadPoolExecutor(clients) as pool:
        each = [pool.submit(client) for _ in range(clients)]
        latencies = [taken for one in each for taken in one.result()]
    return latencies, len(latencies) / (time.perf_counter() - start)


@dataclass(frozen=True)
class Served:
    """The results of a model.

    Attributes:
        name: The model.
        sizes: Bytes on disk, by way.
        errors: The norm of the difference from the base's outputs over their norm, by way.
        loads: By way and number of clients.
    """

    name: str
    sizes: Mapping[str, int]
    errors: Mapping[str, float]
    loads: Mapping[tuple[str, int], Load]


def measure(
    name: str, small: bool, rounds: int, seconds: float, progress: Callable[[str], None]
) -> Served:
    """Writes a model in all ways and serves them alternately."""
    with tempfile.TemporaryDirectory() as folder:
        progress(f"{name}, writing")
        request = export(name, small, Path(folder) / "exported")
        paths = write_ways(Path(folder) / "exported")
        sizes = {way: bytes_of(path) for way, path in paths.items()}
        # They are kept: functions do not keep the variables that they read.
        models = {way: tf.saved_model.load(str(path)) for way, path in paths.items()}
    functions = {way: model.signatures["serving_default"] for way, model in models.items()}
    outputs = {way: _answer(function, request) for way, function in functions.items()}
    loads = {(way, clients): Load() for clients in CLIENTS for way in functions}
    for number in range(rounds):
        progress(f"{name}, round {number + 1}")
        for clients in CLIENTS:
            for way in rotated(list(functions), number):
                call = functools.partial(_answer, functions[way], request)
                latencies, rate = put_under_load(call, clients, seconds)
                loads[way, clients].latencies.extend(latencies)
                loads[way, clients].rates.append(rate)
    errors = {way: difference(each, outputs[BASE]) for way, each in outputs.items()}
    return Served(name, sizes, errors, loads)


def _answer(function: Any, request: Request) -> list[Any]:
    answer = function(**request)
    return [answer[name].numpy() for name in sorted(answer)]


# ---- The tables ----------------------------------------------------------------------------------


def files_table(found: Sequence[Served]) -> Table:
    """Sizes on disk and errors."""
    rows = [
        (
            each.name,
            way,
            f"{size / 1e6:.2f}",
            f"{each.errors[way]:.1e}" if each.errors[way] else "0",
        )
        for each in found
        for way, size in each.sizes.items()
    ]
    headers = ("model", "SavedModel", "MB on disk", "error")
    return Table("On disk", headers, tuple(rows), left=2)


def load_table(each: Served) -> Table:
    """Throughput and latency of a model; throughput is compared round by round."""
    rows = []
    for (way, clients), load in each.loads.items():
        faster = results.ratio(load.rates, each.loads[BASE, clients].rates)
        rows.append(
            (
                str(clients),
                way,
                f"{results.spread(load.rates).median:.1f}",
                f"{faster.median:.2f}",
                f"{faster.low:.2f} to {faster.high:.2f}",
                f"{1e3 * statistics.median(load.latencies):.1f}",
                f"{1e3 * percentile_95(load.latencies):.1f}",
                str(len(load.latencies)),
            )
        )
    headers = ("threads", "SavedModel", "requests a second", "x float32", "quartiles")
    headers += ("median, ms", "p95, ms", "requests")
    return Table(f"Serving {each.name}", headers, tuple(rows), left=2)


def percentile_95(values: Sequence[float]) -> float:
    """The 95th percentile."""
    return sorted(values)[-(-95 * len(values) // 100) - 1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and shows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    add("--rounds", type=int, default=6, help="how often each way has its turn")
    add("--seconds", type=float, default=1.0, help="how long a turn is")
    add("--small", action="store_true", help="tiny models, to see that everything runs")
    add("--page", type=Path, help="a page with the two marks of a benchmark")
    args = parser.parse_args(arguments)
    with reporting("serving", len(args.models) * (1 + args.rounds)) as progress:
        found = [measure(m, args.small, args.rounds, args.seconds, progress) for m in args.models]
    tables = [files_table(found), *map(load_table, found)]
    show(tables)
    if args.page:
        report.put_section(args.page, "\n".join(map(to_markdown, tables)))


if __name__ == "__main__":
    main()
