"""Checks that a source distribution, and the wheel built from it, hold what git would commit.

The links of the description that the wheel carries must be absolute.

python .ci/check_sdist.py SDIST WHEEL, in the checkout.
"""

import re
import subprocess
import sys
import tarfile
import zipfile

# A link or picture that is not absolute: a package index shows README without the checkout.
RELATIVE = re.compile(r'\]\((?!https?://|#)[^)]*\)|src="(?!https?://)[^"]*"')
# What only a checkout needs; Hatchling adds .gitignore, which it obeys, and PKG-INFO.
CHECKOUT_ONLY = (".github/", ".gitignore", ".pre-commit-config.yaml")
ADDED = {".gitignore", "PKG-INFO"}


def _committed() -> set[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name for name in listed.split("\0") if name and not name.startswith(CHECKOUT_ONLY)}


def _check(what: str, found: set[str], expected: set[str]) -> None:
    if found != expected:
        missing, strays = sorted(expected - found), sorted(found - expected)
        sys.exit(f"{what}: missing {missing[:9]}, strays {strays[:9]}")
    print(f"{what}: {len(found)} files")


if __name__ == "__main__":
    sdist, wheel = sys.argv[1:]
    with tarfile.open(sdist) as archive:
        names = [entry.name for entry in archive.getmembers() if not entry.isdir()]
    committed = _committed()
    _check(sdist, {name.partition("/")[2] for name in names} - ADDED, committed)
    package = {name for name in committed if name.startswith("tfamp/")}
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        metadata = next(name for name in inside if name.endswith(".dist-info/METADATA"))
        if relative := RELATIVE.findall(archive.read(metadata).decode()):
            sys.exit(f"{metadata}: not absolute {relative[:9]}")
    _check(wheel, {name for name in inside if name.startswith("tfamp/")}, package)
