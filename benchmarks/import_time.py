"""What importing tfamp costs on top of TensorFlow's and Keras's own import.

    python -m benchmarks.import_time [--rounds N]

Each round is a fresh process that imports TensorFlow and Keras, then tfamp, then loads every public
name of it. Printed are the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

_PROGRAM = """
import json, sys, time
start = time.perf_counter()
import tensorflow, keras
keras.layers, tensorflow.function  # TensorFlow loads Keras on first use
frameworks = time.perf_counter()
import tfamp
bare = time.perf_counter()
for name in tfamp.__all__:
    getattr(tfamp, name)
names = time.perf_counter()
print(json.dumps({
    "TensorFlow and Keras": frameworks - start,
    "import tfamp": bare - frameworks,
    "and every public name": names - bare,
}))
"""


def measure(rounds: int) -> dict[str, float]:
    """Returns the median seconds of each part over some fresh processes."""
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    found = []
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return {part: statistics.median(each[part] for each in found) for part in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="processes to measure in")
    args = parser.parse_args()
    for part, seconds in measure(args.rounds).items():
        print(f"{part:24}{seconds * 1e3:9.1f} ms")


if __name__ == "__main__":
    main()
