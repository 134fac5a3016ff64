"""Checks that a wheel is small and holds the package, its types and licence, and nothing else."""

import sys
import zipfile
from pathlib import Path

# Bytes. 300,000 was the aim; it is nearly all code, and diagnostics, levels, tuning and weights of
# 16 bits took the rest.
LARGEST = 550_000

wheel = Path(sys.argv[1])
names = zipfile.ZipFile(wheel).namelist()
strays = [name for name in names if not name.startswith(("tfamp/", "tfamp-"))]
missing = [
    ending
    for ending in ("tfamp/__init__.py", "tfamp/py.typed", "/licenses/LICENSE", "/entry_points.txt")
    if not any(name.endswith(ending) for name in names)
]
if strays or missing:
    sys.exit(f"{wheel}: strays {strays}, missing {missing}")
size = wheel.stat().st_size
if size >= LARGEST:
    sys.exit(
        f"{wheel}: {size} bytes; expected less than {LARGEST}. What is not code goes elsewhere."
    )
print(f"{wheel.name}: {len(names)} files, {size / 1000:.0f} kB")
