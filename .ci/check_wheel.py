"""Checks that a wheel is small and holds only the package with its types and licence."""

import sys
import zipfile
from pathlib import Path

# Bytes; nearly all of them are code.
LARGEST = 600_000

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
        f"{wheel}: {size} bytes; expected less than {LARGEST}. Move data and pages out of the "
        "package."
    )
print(f"{wheel.name}: {len(names)} files, {size / 1000:.0f} kB")
