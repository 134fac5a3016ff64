"""What this machine computes per second in each dtype: the source of tfamp's built-in CPU profiles.

    python -m benchmarks.machine [--device D] [--seconds S] [--json]

The measurement that tfamp makes by itself, for longer. What `--json` prints can be used as it is:

    python -m benchmarks.machine --seconds 30 --json > machine.json
    TFAMP_PROFILE=machine.json python train.py
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tfamp.core.profile import DTYPES, KINDS
from tfamp.machine.profile_measure import measure_profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to measure")
    parser.add_argument("--json", action="store_true", help="print a profile as JSON")
    args = parser.parse_args()
    profile = measure_profile(args.device, seconds=args.seconds)
    if args.json:
        print(profile.to_json())
        return
    print(profile.name)
    print(f"{'':44}" + "".join(f"{dtype:>12}" for dtype in DTYPES) + "   bf16/f32  f16/f32")
    for kind, peaks in [*((kind, profile.peaks[kind]) for kind in KINDS), *profile.ops.items()]:
        row = "".join(f"{peaks[dtype] / 1e9:12.1f}" for dtype in DTYPES)
        ratios = [peaks[dtype] / peaks["float32"] for dtype in DTYPES[1:]]
        print(f"{kind:44}{row}{ratios[0]:11.2f}{ratios[1]:9.2f}   10^9 per second")
    print(f"bandwidth {profile.bandwidth / 1e9:.1f} GB/s, Casts {profile.cast_bandwidth / 1e9:.1f}")
    print(f"overhead of an op {profile.op_overhead * 1e6:.1f} us")


if __name__ == "__main__":
    main()
