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
    from tfamp.autocasting.context import autocast as autocast
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
    from tfamp.training.grad_scaler import GradScaler as GradScaler

__version__ = "0.1.0"

# Public name -> module that defines it. No function shares its module's name: importing the module
# would put the module in the function's place.
_HOMES = {
    "DynamicLossScale": "tfamp.core.options",
    "FixedLossScale": "tfamp.core.options",
    "GradClip": "tfamp.core.options",
    "GradScaler": "tfamp.training.grad_scaler",
    "GradientAccumulator": "tfamp.gradient_accumulator",
    "LossScaleOptimizer": "tfamp.optimizer",
    "NothingConvertedWarning": "tfamp.core.errors",
    "OpLists": "tfamp.graph.op_lists",
    "Policy": "tfamp.policy",
    "PrecisionConfig": "tfamp.levels.precision_config",
    "RewriteError": "tfamp.core.errors",
    "SavedModelError": "tfamp.core.errors",
    "SkippedStepsError": "tfamp.core.errors",
    "TfampDeprecationWarning": "tfamp.core.errors",
    "TfampError": "tfamp.core.errors",
    "TfampWarning": "tfamp.core.errors",
    "UnsupportedBackendError": "tfamp.core.errors",
    "UnsupportedVersionError": "tfamp.core.errors",
    "autocast": "tfamp.autocasting.context",
    "diagnostics": "tfamp.diagnostics",
    "global_policy": "tfamp.layers.policy_state",
    "graph": "tfamp.graph",
    "mixed_precision": "tfamp.mixed_precision",
    "policy_scope": "tfamp.layers.policy_state",
    "precision_settings": "tfamp.levels.preparation",
    "prepare": "tfamp.levels.preparation",
    "rewrite": "tfamp.rewriting.function",
    "rewrite_saved_model": "tfamp.rewriting.saved_model",
    "set_global_policy": "tfamp.layers.policy_state",
    "set_layer_dtype": "tfamp.levels.layer_policies",
}

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
    module = importlib.import_module(_HOMES[name])
    value = module if _HOMES[name] == f"tfamp.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
