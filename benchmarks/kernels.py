"""Adds up the kernels that a GPU runs in one training step.

    python -m benchmarks.kernels --workload mlp --system float32 tfamp_policy tfamp_policy_xla

Each system is a process of its own. First calls, which compile, are made at once. Then one process
at a time takes steps: some for their time, and some under TensorFlow's profiler, for their kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# The systems share the GPU.
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

from benchmarks import environment, report
from benchmarks.progress import reporting
from benchmarks.systems import BASE, SYSTEMS
from benchmarks.tables import Table, show, to_markdown
from benchmarks.workloads import WORKLOADS

_SYSTEMS = tuple(name for name, each in SYSTEMS.items() if not each.torch)
_WARM_UP, _TIMED, _PROFILED, _LARGEST = 2, 12, 2, 40
_HEADERS = (
    "workload",
    "system",
    "step, ms",
    "x float32",
    "GPU busy, ms",
    "kernels",
    "first call, s",
)


@dataclass(frozen=True)
class Kernels:
    """Kernels of a step on a GPU.

    Attributes:
        busy: Seconds in which at least one kernel ran.
        launched: How many ran.
        largest: Those with most time: seconds, how often, name, and its op or XLA's computation.
    """

    busy: float
    launched: float
    largest: Sequence[tuple[float, float, str, str]] = ()


@dataclass(frozen=True)
class Found:
    """A system, measured: seconds of a step and of the first call, and its kernels."""

    workload: str
    system: str
    step: float
    first_call: float
    kernels: Kernels


def kernels_of(planes: Iterable[Any], steps: int) -> Kernels:
    """Kernels of a step, from the planes of a profile of several steps."""
    seconds, count = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    spans: list[tuple[int, int]] = []
    for plane in planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):  # Others repeat the events by step or by op.
                continue
            for event in line.events:
                key = plane.event_metadata[event.metadata_id].name, _op_of(plane, event)
                seconds[key] += event.duration_ps / 1e12
                count[key] += 1
                start = line.timestamp_ns * 1000 + event.offset_ps
                spans.append((start, start + event.duration_ps))
    largest = [
        (total / steps, count[key] / steps, *key) for key, total in seconds.most_common(_LARGEST)
    ]
    return Kernels(_covered(spans) / 1e12 / steps, len(spans) / steps, largest)


def _op_of(plane: Any, event: Any) -> str:
    for stat in event.stats:
        if plane.stat_metadata[stat.metadata_id].name == "tf_op":
            kind = stat.WhichOneof("value")
            value = getattr(stat, kind)
            text = plane.stat_metadata[value].name if kind == "ref_value" else str(value)
            return text.rpartition(":")[2]
    return ""


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """The length of the union of intervals."""
    total, end = 0, 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def table(found: Sequence[Found], machine: Mapping[str, str] | None = None) -> Table:
    """A row for each workload and system; ratios to float32's step of the same workload."""
    base = {each.workload: each.step for each in found if each.system == BASE}
    rows = [
        (
            each.workload,
            SYSTEMS[each.system].title,
            f"{1e3 * each.step:.1f}",
            f"{base[each.workload] / each.step:.2f}" if each.workload in base else "-",
            f"{1e3 * each.kernels.busy:.1f}",
            f"{each.kernels.launched:.0f}",
            f"{each.first_call:.0f}",
        )
        for each in found
    ]
    facts = ", ".join(f"{name} {value}" for name, value in (machine or {}).items())
    notes = (f"Machine: {facts}.",) if facts else ()
    return Table("Kernels of a step on a GPU", _HEADERS, tuple(rows), left=2, notes=notes)


def measure(workload: str, system: str, dtype: str, size: str) -> Found:
    """Takes steps in this process: the first when others do too, the timed ones alone."""
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    from benchmarks.keras_side import Trainer

    about = WORKLOADS[workload]
    trainer = Trainer(system, dtype)
    batch = trainer.put(about.batch(about.size(size), 0))
    trainer.build(about, about.size(size))
    start = time.perf_counter()
    trainer.first_step(batch)
    first_call = time.perf_counter() - start
    for _ in range(_WARM_UP):
        trainer.step(batch)
    _wait_for_others()
    with _shared["alone"], tempfile.TemporaryDirectory() as folder:
        seconds = []
        for _ in range(_TIMED):
            start = time.perf_counter()
            trainer.step(batch)
            seconds.append(time.perf_counter() - start)
        tf.profiler.experimental.start(folder)
        for _ in range(_PROFILED):
            trainer.step(batch)
        tf.profiler.experimental.stop()
        files = [path.read_bytes() for path in Path(folder).rglob("*.xplane.pb")]
    planes = [plane for file in files for plane in xplane_pb2.XSpace.FromString(file).planes]
    step = statistics.median(seconds)
    return Found(workload, system, step, first_call, kernels_of(planes, _PROFILED))


_shared: dict[str, Any] = {}


def _share(barrier: Any, alone: Any) -> None:
    """Gives a new process what it waits for others with."""
    _shared.update(barrier=barrier, alone=alone)


def _wait_for_others() -> None:
    try:
        _shared["barrier"].wait()
    except threading.BrokenBarrierError:  # The time is up: whoever is ready goes on.
        print("some first calls are not done: they may disturb the times of others", flush=True)


def measure_all(
    workload: str, systems: Sequence[str], dtype: str, size: str, minutes: float
) -> list[Found]:
    """Measures systems, each in a process of its own; first calls may take some minutes."""
    context = multiprocessing.get_context("spawn")
    barrier, alone = context.Barrier(len(systems), timeout=60 * minutes), context.Lock()
    tasks = [(workload, system, dtype, size) for system in systems]
    with context.Pool(len(systems), _share, (barrier, alone), maxtasksperchild=1) as pool:
        return pool.starmap(measure, tasks, chunksize=1)


def from_json(text: str) -> tuple[dict[str, str], list[Found]]:
    """The machine and what was measured on it, as `--json` wrote them."""
    read = json.loads(text)
    found = [Found(**{**each, "kernels": Kernels(**each["kernels"])}) for each in read["found"]]
    return read["machine"], found


def main() -> None:
    args = _parser().parse_args()
    found: list[Found] = []
    machine: dict[str, str] = {}
    if args.read:
        for path in args.read:
            machine, more = from_json(path.read_text(encoding="utf-8"))
            found += more
    else:
        machine = environment.describe(None)
        size = "small" if args.small else "gpu"
        with reporting("kernels", len(args.workload)) as progress:
            for name in args.workload:
                progress(name)
                found += measure_all(name, args.system, args.dtype, size, args.minutes)
    show([table(found, machine)])
    if args.json:
        facts = {"machine": machine, "found": [dataclasses.asdict(each) for each in found]}
        args.json.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    if args.page:
        report.put_section(args.page, to_markdown(table(found, machine), heading=False))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--workload", nargs="+", choices=WORKLOADS, default=["transformer"], metavar="W")
    systems = [BASE, "tfamp_policy", "tfamp_policy_xla"]
    add("--system", nargs="+", choices=_SYSTEMS, default=systems, metavar="S")
    add("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    add("--minutes", type=float, default=5.0, help="how long to wait for first calls")
    add("--small", action="store_true", help="a small model")
    add("--json", type=Path, help="write what was measured")
    add("--read", type=Path, nargs="+", help="measure nothing: show what --json wrote")
    add("--page", type=Path, help="put the table between the page's marks")
    return parser


if __name__ == "__main__":
    main()
