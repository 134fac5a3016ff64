"""Measures the first call of a training step of transformers of 4 to 256 layers.

    python -m benchmarks.scale [--layers 4 16 64 256] [--way float32 rewrite prepare tune]
        [--rounds 1] [--json FILE]

A first call traces the step, converts and optimizes the graph, and runs it once; nothing is
large but the number of layers. Each way runs in a process of its own, once a round, and the
table has medians over the rounds, of ratios too. "float32" is a `tf.function`, "rewrite" is
`tfamp.rewrite` in bfloat16 by lists, which convert on every machine, "prepare" is `fit` at level
O1, and "tune" compares a step in float32 and by lists. Time is that of the processor, which other
programs disturb less than the clock; memory is the peak of the process over what it held before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import process_memory, tables
from benchmarks.progress import reporting

WAYS = ("float32", "rewrite", "prepare", "tune")
LAYERS = (4, 16, 64, 256)
# Small in all but the number of layers, so that the graph decides.
_SIZE = {"width": 64, "heads": 4, "tokens": 32, "vocabulary": 200}
_BATCH = 2


@dataclass(frozen=True)
class FirstCall:
    """The first call of a step.

    Attributes:
        way: How the step runs.
        layers: Number of the transformer's layers.
        nodes: Nodes of the float32 step's graph; 0 where another way was measured.
        seconds: Processor time of the first call.
        memory: Bytes at its peak, over those held before.
        build: Processor time in which the model was built.
    """

    way: str
    layers: int
    nodes: int
    seconds: float
    memory: int
    build: float


def measure(way: str, layers: int) -> FirstCall:
    """Measures one way in this process."""
    import keras
    import tensorflow as tf

    import tfamp
    from benchmarks import models

    start = time.process_time()
    model = models.transformer({**_SIZE, "layers": layers})
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer.build(model.trainable_variables)
    build = time.process_time() - start
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x = y = tf.zeros((_BATCH, _SIZE["tokens"]), tf.int32)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    call: Callable[[], Any]
    if way == "float32":
        compiled = tf.function(step)
        call = lambda: compiled(x, y)  # noqa: E731 - one of four
    elif way == "rewrite":
        rewritten = tfamp.rewrite(step, dtype="bfloat16", placement="lists")
        call = lambda: rewritten(x, y)  # noqa: E731
    elif way == "prepare":
        model.compile(optimizer, loss, jit_compile=False)
        prepared = tfamp.prepare(model, level="O1", dtype="bfloat16", placement="lists")
        call = lambda: prepared.model.fit(x, y, batch_size=_BATCH, verbose=0)  # noqa: E731
    else:
        candidates = ("float32", "lists")
        call = lambda: tfamp.tune(step, x, y, candidates=candidates, seconds=0.1)  # noqa: E731
    process_memory.reset_peak()
    held, start = process_memory.resident(), time.process_time()
    call()
    seconds = time.process_time() - start
    memory = process_memory.peak() - held
    nodes = 0
    if way == "float32":
        nodes = len(compiled.get_concrete_function(x, y).graph.as_graph_def().node)
    return FirstCall(way, layers, nodes, seconds, memory, build)


def table(calls: Sequence[FirstCall]) -> tables.Table:
    """The medians of first calls, beside float32's of as many layers in the same round."""
    by_kind: defaultdict[tuple[int, str], list[FirstCall]] = defaultdict(list)
    for call in calls:
        by_kind[call.layers, call.way].append(call)
    rows = []
    for (layers, way), found in by_kind.items():
        exact = by_kind.get((layers, "float32"), [])
        pairs = list(zip(found, exact, strict=False))
        times = [call.seconds / base.seconds for call, base in pairs]
        more = [call.memory / max(base.memory, 1) for call, base in pairs]
        rows.append(
            (
                str(layers),
                way,
                f"{statistics.median(call.seconds for call in found):.1f}",
                f"{statistics.median(times):.2f}" if times else "-",
                f"{statistics.median(call.memory for call in found) / 1e6:.0f}",
                f"{statistics.median(more):.2f}" if more else "-",
                f"{exact[0].nodes:,}" if exact else "",
            )
        )
    return tables.Table(
        "First call of a training step, by the number of layers",
        ("layers", "way", "seconds", "x float32", "MB", "x float32", "nodes in float32"),
        tuple(rows),
    )


def _in_a_process(way: str, layers: int) -> FirstCall:
    command = [sys.executable, "-m", "benchmarks.scale", "--one", way, "--layers", str(layers)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TFAMP_CACHE": "off"}
    environment.setdefault("TFAMP_PROFILE", "builtin")  # a machine is measured once
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way} of {layers} layers ended with {done.returncode}")
    return FirstCall(**json.loads(done.stdout.splitlines()[-1]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=1, help="calls of each way (default: 1)")
    parser.add_argument("--json", type=Path, help="a file for what was measured")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one is not None:
        print(json.dumps(asdict(measure(options.one, options.layers[0]))))
        return
    calls: list[FirstCall] = []
    runs = list(itertools.product(options.layers, range(options.rounds), options.way))
    with reporting("first calls", len(runs)) as progress:
        for layers, _, way in runs:
            progress(f"{way}, {layers} layers")
            calls.append(_in_a_process(way, layers))
            if options.json is not None:
                listed = json.dumps([asdict(call) for call in calls], indent=1)
                options.json.write_text(listed + "\n", encoding="utf-8")
    tables.show([table(calls)])


if __name__ == "__main__":
    main()
