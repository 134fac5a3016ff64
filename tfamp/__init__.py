"""tfamp: automatic mixed precision for TensorFlow and Keras 3.

Importing this module changes nothing and imports neither TensorFlow nor Keras: every public
name is loaded on first use.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from tfamp import diagnostics as diagnostics
    from tfamp import graph as graph
    from tfamp import mixed_precision as mixed_precision
    from tfamp.core.errors import *  # noqa: F403 - type checkers take these as public
    from tfamp.core.loss_scale import DynamicLossScale as DynamicLossScale
    from tfamp.core.loss_scale import FixedLossScale as FixedLossScale
    from tfamp.core.options import GradClip as GradClip
    from tfamp.gradient_accumulator import GradientAccumulator as GradientAccumulator
    from tfamp.graph.op_lists import OpLists as OpLists
    from tfamp.layers.policy_in_force import global_policy as global_policy
    from tfamp.layers.policy_in_force import policy_scope as policy_scope
    from tfamp.layers.policy_in_force import set_global_policy as set_global_policy
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

__version__ = "1.0.0"

# `__all__`, `__getattr__` and `__dir__` of a package.
_Lazy: TypeAlias = tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]


def lazy_names(package: str, modules: Mapping[str, Sequence[str]]) -> _Lazy:
    """Returns what loads the public names of a package on first use.

    Args:
        package: Its `__name__`.
        modules: By module, which may be relative, the names it defines. The name of a module in
            the package is the module itself.

    Example:
        >>> names, load, _ = lazy_names("tfamp", {".policy": ["Policy"]})
        >>> names, load("Policy").__module__
        (['Policy'], 'tfamp.policy')
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(homes[name], package)
        value = module if homes[name] == f".{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return sorted(homes), load, lambda: sorted({*vars(sys.modules[package]), *homes})


# No function shares its module's name: importing the module would put the module in its place.
_names, __getattr__, __dir__ = lazy_names(
    "tfamp",
    {
        ".core.errors": (
            "NothingConvertedWarning", "RewriteError", "SavedModelError", "SkippedStepsError",
            "TfampDeprecationWarning", "TfampError", "TfampWarning", "UnsupportedBackendError",
            "UnsupportedVersionError",
        ),
        ".core.loss_scale": ("DynamicLossScale", "FixedLossScale"),
        ".core.options": ("GradClip",),
        ".diagnostics": ("diagnostics",),
        ".gradient_accumulator": ("GradientAccumulator",),
        ".graph": ("graph",),
        ".graph.op_lists": ("OpLists",),
        ".layers.policy_in_force": ("global_policy", "policy_scope", "set_global_policy"),
        ".levels.layer_policies": ("set_layer_dtype",),
        ".levels.precision_config": ("PrecisionConfig",),
        ".levels.preparation": ("precision_settings", "prepare"),
        ".mixed_precision": ("mixed_precision",),
        ".optimizer": ("LossScaleOptimizer",),
        ".policy": ("Policy",),
        ".rewriting.function": ("rewrite",),
        ".rewriting.saved_model": ("rewrite_saved_model",),
        ".rewriting.tuning": ("tune",),
        ".torch_style.context": ("autocast",),
        ".torch_style.grad_scaler": ("GradScaler",),
    },
)  # fmt: skip
__all__ = ["__version__", *_names]
