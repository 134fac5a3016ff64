"""tfamp: automatic mixed precision for TensorFlow and Keras 3.

Importing this module changes nothing and imports neither TensorFlow nor Keras: every public name
is loaded on first use.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfamp import diagnostics as diagnostics
    from tfamp import graph as graph
    from tfamp import mixed_precision as mixed_precision
    from tfamp.core.errors import NothingConvertedWarning as NothingConvertedWarning
    from tfamp.core.errors import RewriteError as RewriteError
    from tfamp.core.errors import SavedModelError as SavedModelError
    from tfamp.core.errors import SkippedStepsError as SkippedStepsError
    from tfamp.core.errors import TfampDeprecationWarning as TfampDeprecationWarning
    from tfamp.core.errors import TfampError as TfampError
    from tfamp.core.errors import TfampWarning as TfampWarning
    from tfamp.core.errors import UnsupportedBackendError as UnsupportedBackendError
    from tfamp.core.errors import UnsupportedVersionError as UnsupportedVersionError
    from tfamp.core.options import DynamicLossScale as DynamicLossScale
    from tfamp.core.options import FixedLossScale as FixedLossScale
    from tfamp.core.options import GradClip as GradClip
    from tfamp.gradient_accumulator import GradientAccumulator as GradientAccumulator
    from tfamp.graph.op_lists import OpLists as OpLists
    from tfamp.layers.policy_state import global_policy as global_policy
    from tfamp.layers.policy_state import policy_scope as policy_scope
    from tfamp.layers.policy_state import set_global_policy as set_global_policy
    from tfamp.levels.layer_policies import set_layer_dtype as set_layer_dtype
    from tfamp.levels.precision_config import PrecisionConfig as PrecisionConfig
    from tfamp.levels.preparation import precision_settings as precision_settings
    from tfamp.levels.preparation import prepare as prepare
    from tfamp.optimizer import LossScaleOptimizer as LossScaleOptimizer
    from tfamp.policy import Policy as Policy
    from tfamp.rewriting.function import rewrite as rewrite
    from tfamp.rewriting.saved_model import rewrite_saved_model as rewrite_saved_model
    from tfamp.rewriting.tuning import tune as tune
    from tfamp.torch_style.context import autocast as autocast
    from tfamp.torch_style.grad_scaler import GradScaler as GradScaler

__version__ = "0.1.0"

# Module -> the public names it defines. No function shares its module's name: importing the module
# would put the module in the function's place.
_NAMES = {
    "": ("diagnostics", "graph", "mixed_precision"),
    ".torch_style.context": ("autocast",),
    ".core.errors": (
        "NothingConvertedWarning", "RewriteError", "SavedModelError", "SkippedStepsError",
        "TfampDeprecationWarning", "TfampError", "TfampWarning", "UnsupportedBackendError",
        "UnsupportedVersionError",
    ),
    ".core.options": ("DynamicLossScale", "FixedLossScale", "GradClip"),
    ".gradient_accumulator": ("GradientAccumulator",),
    ".graph.op_lists": ("OpLists",),
    ".layers.policy_state": ("global_policy", "policy_scope", "set_global_policy"),
    ".levels.layer_policies": ("set_layer_dtype",),
    ".levels.precision_config": ("PrecisionConfig",),
    ".levels.preparation": ("precision_settings", "prepare"),
    ".optimizer": ("LossScaleOptimizer",),
    ".policy": ("Policy",),
    ".rewriting.function": ("rewrite",),
    ".rewriting.saved_model": ("rewrite_saved_model",),
    ".rewriting.tuning": ("tune",),
    ".torch_style.grad_scaler": ("GradScaler",),
}  # fmt: skip
_HOMES = {name: f"tfamp{module}" for module, names in _NAMES.items() for name in names}

# Names that were public -> what they are now.
_RENAMED = {"NothingToLowerWarning": "NothingConvertedWarning"}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        from tfamp.core.errors import TfampDeprecationWarning

        message = f"tfamp.{name} is tfamp.{_RENAMED[name]} now; the old name works until tfamp 1.0."
        warnings.warn(message, TfampDeprecationWarning, stacklevel=2)
        return __getattr__(_RENAMED[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'tfamp' has no attribute {name!r}")
    if name in _NAMES[""]:
        return importlib.import_module(f"tfamp.{name}")  # That makes it an attribute, too.
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
