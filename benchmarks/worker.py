"""One system on one workload in this process: takes a step for each line it is sent.

    python -m benchmarks.worker SYSTEM WORKLOAD DTYPE [--small]

Answers each line on stdin with a line of JSON. The first answer, to no line, is what it took to
get ready.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
WARM_UP_STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("system")
    parser.add_argument("workload")
    parser.add_argument("dtype")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()

    from benchmarks.systems import SYSTEMS
    from benchmarks.workloads import WORKLOADS

    workload = WORKLOADS[args.workload](args.small)
    step = SYSTEMS[args.system](workload, args.dtype)
    start = time.perf_counter()
    losses = [float(step(workload.x, workload.y))]
    first = time.perf_counter() - start
    losses += [float(step(workload.x, workload.y)) for _ in range(WARM_UP_STEPS - 1)]
    answer(first_step=first, loss=losses[0])
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = float(step(workload.x, workload.y))
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        answer(seconds=seconds, loss=loss, peak_kib=peak)


def answer(**values: float) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
