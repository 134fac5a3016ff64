"""Reads what `known_issues` judges: versions, settings and libraries in use."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path

import keras
import tensorflow as tf

from tfamp.diagnostics.estimating.known_issues import Environment
from tfamp.machine import hardware

_DRIVER = Path("/proc/driver/nvidia/version")
_REQUIREMENT = re.compile(r"^(nvidia-[\w-]+).*?>=\s*([\d.]+)")
_ON = ("1", "true")


def read_environment(found: hardware.Hardware) -> Environment:
    """Returns what is set up here; changes nothing.

    Args:
        found: What the machine has.
    """
    build = tf.sysconfig.get_build_info()
    wanted = _wanted_libraries()
    return Environment(
        hardware=found,
        tensorflow=tf.__version__,
        keras=keras.__version__,
        system=platform.system(),
        variables=dict(os.environ),
        cuda_build=bool(build.get("is_cuda_build")),
        kernels=tuple(build.get("cuda_compute_capabilities") or ()),
        wanted_libraries=wanted,
        libraries={name: version for name in wanted if (version := _installed(name))},
        nvidia_driver=_DRIVER.exists(),
        tensor_float_32=tf.config.experimental.tensor_float_32_execution_enabled(),
        grappler=_grappler_is_on(),
        eager=tf.config.functions_run_eagerly(),
        intel_extension=_installed("intel-extension-for-tensorflow"),
    )


def cuda_versions() -> dict[str, str]:
    """Returns the versions of CUDA and cuDNN that TensorFlow was built for; none for a CPU's."""
    build = tf.sysconfig.get_build_info()
    names = {"cuda": "cuda_version", "cudnn": "cudnn_version"}
    return {name: str(build[key]) for name, key in names.items() if build.get(key)}


def _grappler_is_on() -> bool:
    options = tf.config.optimizer.get_experimental_options()
    by_option = any(value for name, value in options.items() if "auto_mixed_precision" in name)
    return by_option or os.environ.get("TF_ENABLE_AUTO_MIXED_PRECISION", "").lower() in _ON


def _wanted_libraries() -> dict[str, str]:
    try:
        requirements = importlib.metadata.requires("tensorflow") or []
    except importlib.metadata.PackageNotFoundError:  # Such as tensorflow-cpu.
        return {}
    found = (_REQUIREMENT.match(each) for each in requirements)
    return {match[1]: match[2] for match in found if match}


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
