"""Checks that a wheel holds the package with its types and licence, and nothing else."""

import sys
import zipfile

names = zipfile.ZipFile(sys.argv[1]).namelist()
strays = [name for name in names if not name.startswith(("tfamp/", "tfamp-"))]
missing = [
    ending
    for ending in ("tfamp/__init__.py", "tfamp/py.typed", "/licenses/LICENSE", "/entry_points.txt")
    if not any(name.endswith(ending) for name in names)
]
if strays or missing:
    sys.exit(f"{sys.argv[1]}: strays {strays}, missing {missing}")
print(f"{sys.argv[1].rpartition('/')[2]}: {len(names)} files")
