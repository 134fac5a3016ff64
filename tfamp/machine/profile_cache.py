"""Measured machine profiles on disk: one small JSON file for each machine and TensorFlow version.

A file is replaced as a whole, so that processes can read and write at once. What cannot be read, or
was written for something else, counts as not there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from tfamp.core.profile import MachineProfile
from tfamp.machine.file_replacing import replace_text

# Raised when what a profile holds, or how it is measured, changes: older files are then not used.
_FORMAT = 2


def cache_folder() -> Path:
    """Returns the folder for tfamp's files in the user's cache folder; it may not exist yet."""
    return Path(platformdirs.user_cache_dir("tfamp", appauthor=False))


def profile_path(folder: Path, key: Mapping[str, str]) -> Path:
    """Returns the file for the profile of a machine.

    Args:
        folder: The folder of all profiles.
        key: What the profile depends on, by name.
    """
    digest = hashlib.sha256(_text(key).encode()).hexdigest()
    return folder / f"machine-{digest[:20]}.json"


def get_profile(folder: Path, key: Mapping[str, str]) -> MachineProfile | None:
    """Returns the profile that was put for a machine.

    Args:
        folder: The folder of all profiles.
        key: What the profile depends on, by name.

    Returns:
        The profile; None if there is none, or none that can be read.
    """
    try:
        found = json.loads(profile_path(folder, key).read_text(encoding="utf-8"))
        if (found["format"], found["key"]) != (_FORMAT, dict(key)):
            return None
        return MachineProfile.from_json(json.dumps(found["profile"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def put_profile(folder: Path, key: Mapping[str, str], profile: MachineProfile) -> Path:
    """Writes the profile of a machine in the place of one that is there.

    Args:
        folder: The folder of all profiles; it is made if need be.
        key: What the profile depends on, by name.
        profile: The profile.

    Returns:
        The file.

    Raises:
        OSError: It cannot be written.
    """
    if not folder.is_absolute():
        # Without a home folder the path is "~/..." as it stands: no place to leave files at.
        raise FileNotFoundError(f"there is no home folder for {folder}")
    path = profile_path(folder, key)
    fields = {"format": _FORMAT, "key": dict(key), "profile": json.loads(profile.to_json())}
    replace_text(path, json.dumps(fields, indent=1))
    return path


def _text(key: Mapping[str, str]) -> str:
    return json.dumps(dict(key), sort_keys=True)
