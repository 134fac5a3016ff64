"""The machine that was measured, named."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")
_FEATURES += ("asimdhp", "bf16", "sve")
_CPUINFO = Path("/proc/cpuinfo")


def describe(torch_version: str | None) -> dict[str, str]:
    """Facts about this machine, by name, in the order in which to show them."""
    import keras
    import numpy
    import tensorflow as tf

    import tfamp
    from tfamp.machine import hardware

    found = hardware.detect()
    flags = _flags()
    facts = {
        "CPU": found.cpu_model or platform.processor() or "unknown model",
        "features": ", ".join(each for each in _FEATURES if each in flags) or "none of note",
        "cores": str(_cores()),
        "memory": _memory(),
        "GPU": ", ".join(gpu.name for gpu in found.gpus) or "none",
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "NumPy": numpy.__version__,
        "tfamp": tfamp.__version__,
        "PyTorch": torch_version or "not installed",
    }
    set_here = [f"{name}={value}" for name, value in sorted(os.environ.items()) if _matters(name)]
    return facts | ({"environment": " ".join(set_here)} if set_here else {})


def low_dtype() -> str:
    """The low dtype that this machine multiplies fast; bfloat16 where it has none."""
    from tfamp import Policy

    found = Policy("auto").compute_dtype
    return "bfloat16" if found == "float32" else found


def _flags() -> frozenset[str]:
    from tfamp.machine import hardware

    if not _CPUINFO.exists():
        return frozenset()
    return hardware.parse_cpuinfo(_CPUINFO.read_text(encoding="utf-8", errors="replace"))[1]


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> str:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return "unknown"
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"


def _matters(name: str) -> bool:
    # What changes which kernels run; a path says nothing to others.
    return name.startswith(("ONEDNN_", "DNNL_", "TF_ENABLE_ONEDNN", "TF_SET_ONEDNN", "OMP_NUM"))
