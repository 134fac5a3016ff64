"""Which machine profile holds here: built-in, given in a file, cached, or measured now.

The cache is one small JSON file for each machine and TensorFlow version. A file is replaced as a
whole, so that processes can read and write at once. What cannot be read, or was written for
something else, counts as not there.

Importing this file does not import TensorFlow, so that the cache is read and written without it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import TfampWarning
from tfamp.core.profile import MachineProfile, builtin_profile
from tfamp.machine import hardware
from tfamp.machine.file_replacing import replace_text

VARIABLE = "TFAMP_PROFILE"
_CHOICES = (
    f'{VARIABLE} must be "builtin" for the built-in table, "measure" to measure and leave the '
    "cache alone, or the path of a JSON file that MachineProfile.to_json() wrote; unset it for the "
    "cached measurement"
)
# What oneDNN and cuBLAS are told from outside about the instructions they may use.
_FLAGS = (
    "TF_ENABLE_ONEDNN_OPTS",
    "TF_SET_ONEDNN_FPMATH_MODE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_CPU_ISA_HINTS",
    "DNNL_CPU_ISA_HINTS",
    "NVIDIA_TF32_OVERRIDE",
)
# Raised when what a profile holds, or how it is measured, changes: older files are then not used.
_FORMAT = 4
# Two measurements at once would slow each other.
MEASURING = threading.Lock()


@dataclass(frozen=True, slots=True)
class FoundProfile:
    """A machine profile and where it comes from.

    Attributes:
        profile: The profile.
        source: Where it comes from, in words.
    """

    profile: MachineProfile
    source: str


def device_kind(device: str) -> str:
    """Returns the kind of device of nodes that are pinned to none; "auto" is this machine's."""
    from tfamp.interop import tf_private

    if device != "auto":
        return device
    return tf_private.default_device_kind()


def profile_of(kind: str) -> MachineProfile:
    """Returns the built-in profile of a kind of device, as far as this machine has one."""
    found = hardware.detect()
    if kind == "cpu":
        return builtin_profile(kind, bfloat16=found.cpu_bfloat16, float16=found.cpu_float16)
    gpu = found.weakest_gpu
    if kind != "gpu" or gpu is None:
        return builtin_profile(kind)
    native = {dtype: dtype in gpu.native for dtype in LOW_PRECISION}
    return builtin_profile(kind, **native, name=gpu.name, tf32=_multiplies_in_tf32())


def _multiplies_in_tf32() -> bool:
    import tensorflow as tf

    return (
        tf.config.experimental.tensor_float_32_execution_enabled()
        and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"
    )


def find_profile() -> FoundProfile:
    """Returns the profile of this machine, as the environment variable TFAMP_PROFILE says.

    Unset, it is the cached one; where there is none, what is measured now, which takes about three
    seconds. In a process a machine is measured once. A machine that cannot be measured gets the
    built-in profile and a `TfampWarning`. A cache that cannot be written is a `TfampWarning` too.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked == "builtin":
        return _built_in(f"the built-in table, as {VARIABLE} says")
    if asked not in ("", "measure"):
        return FoundProfile(_read(asked), f"{asked}, as {VARIABLE} says")
    folder = None if asked else cache_folder()
    with MEASURING:
        return _of_machine(tuple(machine_key().items()), folder)


def machine_key() -> dict[str, str]:
    """Returns what the speed of this machine depends on, by name: the key of its cached profile."""
    import tensorflow as tf

    found = hardware.detect()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "tensorflow": tf.__version__,
        "cpu": found.cpu_model,
        "cpu native": f"bfloat16 {found.cpu_bfloat16}, float16 {found.cpu_float16}",
        "cores": str(cores),
        "threads": str(tf.config.threading.get_intra_op_parallelism_threads()),
        "gpus": ", ".join(gpu.name for gpu in found.gpus),
    }
    if found.gpus:
        facts["tf32"] = str(_multiplies_in_tf32())
    return facts | {name: os.environ[name] for name in _FLAGS if name in os.environ}


def _read(path: str) -> MachineProfile:
    try:
        return MachineProfile.from_json(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{_CHOICES}. Got {path!r}: {error}") from error


def _built_in(source: str) -> FoundProfile:
    from tfamp.interop.tf_private import visible_devices

    profile = _profile_here(device_kind("auto"), visible_devices("GPU"), _multiplies_in_tf32())
    return FoundProfile(profile, source)


@functools.cache
def _profile_here(kind: str, gpus: tuple[Any, ...], tf32: bool) -> MachineProfile:
    """The built-in profile, made once for all that it depends on."""
    return profile_of(kind)


@functools.cache
def _of_machine(key: tuple[tuple[str, str], ...], folder: Path | None) -> FoundProfile:
    """Looks up or measures; once for each key and folder, so that a process has one profile."""
    import tensorflow as tf

    from tfamp.machine import profile_measure

    facts = dict(key)
    if folder is not None and (found := _cached(folder, facts)):
        return found
    try:
        profile = profile_measure.measure_profile()
    except tf.errors.OpError as error:
        text = f"This machine cannot be measured, tfamp's built-in figures are used: {error}"
        warnings.warn(text, TfampWarning, stacklevel=3)
        return _built_in("the built-in table, as this machine cannot be measured")
    if folder is None:
        return FoundProfile(profile, f"measured now, as {VARIABLE} says")
    # Processes that started together go by one measurement.
    if found := _cached(folder, facts):
        return found
    try:
        path = put_profile(folder, facts, profile)
    except OSError as error:
        text = (
            "The measured machine profile cannot be kept, so every process that needs it takes two "
            f"seconds to measure it again: {error}. Make {folder} writable, or set {VARIABLE} to "
            '"builtin" or to a file.'
        )
        warnings.warn(text, TfampWarning, stacklevel=3)
        return FoundProfile(profile, "measured now; it cannot be kept")
    return FoundProfile(profile, f"measured now, kept in {path}")


def _cached(folder: Path, key: dict[str, str]) -> FoundProfile | None:
    profile = get_profile(folder, key)
    source = f"measured before, kept in {profile_path(folder, key)}"
    return None if profile is None else FoundProfile(profile, source)


def cache_folder() -> Path:
    """Returns the folder for tfamp's files in the user's cache folder; it may not exist yet."""
    return Path(platformdirs.user_cache_dir("tfamp", appauthor=False))


def profile_path(folder: Path, key: Mapping[str, str]) -> Path:
    """Returns the file for the profile of a machine, by what the profile depends on."""
    return file_of_machine(folder, "machine", key)


def file_of_machine(folder: Path, what: str, key: Mapping[str, str]) -> Path:
    """Returns the file for something that depends on the machine, by what it depends on."""
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
    return folder / f"{what}-{digest[:20]}.json"


def check_folder(folder: Path) -> None:
    """Raises a FileNotFoundError where the user's cache folder is no place to leave files at."""
    if not folder.is_absolute():  # Without a home folder the path is "~/..." as it stands.
        raise FileNotFoundError(f"there is no home folder for {folder}")


def get_profile(folder: Path, key: Mapping[str, str]) -> MachineProfile | None:
    """Returns the profile that was kept for a machine; None if there is none that can be read."""
    try:
        found = json.loads(profile_path(folder, key).read_text(encoding="utf-8"))
        if (found["format"], found["key"]) != (_FORMAT, dict(key)):
            return None
        return MachineProfile.from_json(json.dumps(found["profile"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def put_profile(folder: Path, key: Mapping[str, str], profile: MachineProfile) -> Path:
    """Writes the profile of a machine in the place of one that is there; returns the file."""
    check_folder(folder)
    path = profile_path(folder, key)
    fields = {"format": _FORMAT, "key": dict(key), "profile": json.loads(profile.to_json())}
    replace_text(path, json.dumps(fields, indent=1))
    return path
