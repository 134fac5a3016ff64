"""Prints what imports cost, in new processes that alternate: medians of 7, in seconds.

The time of the CPU hardly depends on what else runs on the machine; the elapsed time does.
"""

import resource
import statistics
import subprocess
import sys
import time

STATEMENTS = (
    "pass",
    "import tfamp",
    "import keras",
    "import keras, tfamp; tfamp.set_global_policy('float32')",
)
RUNS = 7


def _cpu_time() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


times: dict[str, list[tuple[float, float]]] = {statement: [] for statement in STATEMENTS}
for run in range(RUNS + 1):
    for statement in STATEMENTS:
        start, cpu_start = time.perf_counter(), _cpu_time()
        subprocess.run([sys.executable, "-c", statement], check=True, stderr=subprocess.DEVNULL)
        if run:  # The first one compiles bytecode, and reads files that are not in memory.
            elapsed, cpu = time.perf_counter() - start, _cpu_time() - cpu_start
            times[statement].append((elapsed, cpu))
print(f"{'':56} elapsed     CPU")
for statement, pairs in times.items():
    elapsed, cpu = map(statistics.median, zip(*pairs, strict=True))
    print(f"{statement:56} {elapsed:7.2f} {cpu:7.2f}")
