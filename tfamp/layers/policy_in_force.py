"""The policy in force, per process and per thread; Keras's own policy follows it.

There are two levels. `set_global_policy` sets the policy of the process, in every thread,
running ones included. `policy_scope` sets one for a block of code in one thread and coroutine,
and hides the process's there. Keras's own setter overrides the level it is called at, in its
thread, until tfamp's next call: inside a scope the scope stores what it sets, and outside of
all Keras does.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import keras

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import NothingConvertedWarning, UnsupportedVersionError
from tfamp.core.kinds import Functional, KerasPolicy, Layer, Method, Model
from tfamp.core.messages import described
from tfamp.core.names import NamedPolicy, PolicyName
from tfamp.core.scopes import Scope, ScopeStack, decorated
from tfamp.interop import keras_hooks, keras_saving
from tfamp.interop.patching import Patch, level_of_user, wrapped_methods
from tfamp.layers import model_calls
from tfamp.layers.layer_record import assignment_of, note, record_of
from tfamp.machine import hardware
from tfamp.policy import POLICY_NAMES, Policy, policy_named
from tfamp.training import scaling_warnings, underflow

# Attribute of a policy of Keras's that a layer got as no dtype was chosen for it.
_IN_FORCE = "_tfamp_in_force"
_FLOAT_POLICIES = (keras.DTypePolicy, keras.FloatDTypePolicy)


@dataclass(eq=False)
class _Level(Scope):
    """A policy in force: the process's, or a scope's.

    Attributes:
        policy: The policy.
        outer: The scope around a scope, if any.
        keras_before: Keras's policy of the thread when the scope was entered.
        keras_policy: The policy that Keras's setter set in the scope since; None for none.
        session: The session of Keras that it was set in. `clear_session` ends it, and with it
            Keras's policy, but only at the innermost level.
    """

    policy: Policy
    outer: _Level | None = None
    keras_before: KerasPolicy = None
    keras_policy: KerasPolicy = None
    session: Any = None


class _Thread(threading.local):
    # The level of the process at which this thread called Keras's setter last.
    keras_set_over: _Level | None = None


_Callable = TypeVar("_Callable", bound=Callable[..., Any])
_lock = threading.RLock()
_thread = _Thread()
_process: _Level | None = None
_scopes: ScopeStack[_Level] = ScopeStack("tfamp_policy")
# Scopes of all threads. Weak: a thread that dies inside a scope must not keep the hooks alive.
_open_scopes: weakref.WeakSet[_Level] = weakref.WeakSet()


def set_global_policy(policy: Policy | NamedPolicy | PolicyName) -> None:
    """Sets the policy of every thread of the process.

    Inside a `policy_scope` it sets the policy of that scope only, until the scope ends.
    Existing layers keep their dtypes. `keras.config.dtype_policy()` agrees then, in any thread.

    Args:
        policy: A `Policy`, its name, or a `keras.DTypePolicy` of the same name.

    Raises:
        TypeError: `policy` has another type.
        ValueError: No policy has that name, or a `Policy` cannot express the Keras policy: a
            quantized one, or a map of policies. Nothing has changed.

    Example:
        >>> set_global_policy("mixed_bfloat16")
        >>> keras.layers.Dense(4).compute_dtype
        'bfloat16'
        >>> set_global_policy("float32")
    """
    global _process
    hardware.warn_of_variables()
    level, scope = _Level(_as_policy(policy)), _scopes.innermost
    with _lock:
        _patch(level.policy)
        if scope is not None:
            scope.policy, scope.keras_policy = level.policy, None
        else:
            _process = level
        _follow()


def global_policy() -> Policy:
    """Returns the policy in force here: the innermost scope's, else the process's.

    After a later call of Keras's own setter in this thread, the policy describes what Keras
    does: no float32 layers, no float32 outputs.

    Returns:
        The policy; `Policy("float32")` where nothing was set.

    Raises:
        ValueError: A `Policy` cannot express Keras's own policy, for example a quantized one.

    Example:
        >>> with policy_scope("mixed_float16"):
        ...     global_policy().compute_dtype
        'float16'
    """
    level = _level_in_force()
    if level is not None:
        return level.policy
    policy = _from_keras(keras.config.dtype_policy())
    if policy.is_mixed:
        return Policy(policy.name, float32_layers=(), float32_outputs=False)
    return policy


class policy_scope:  # noqa: N801 - reads as a function
    """Sets the policy of this thread and coroutine for a block of code.

    A context manager and a decorator. Restores the former policy, and Keras's own, on exit,
    also after an exception. Scopes nest; one object can be entered again inside itself, and by
    several threads and coroutines. Scopes may be left in any order and in any thread. Other
    threads and coroutines keep their policy. Build a model inside the scope that creates its
    layers; it can be called outside.

    Args:
        policy: As for `set_global_policy`.

    Raises:
        TypeError, ValueError: As for `set_global_policy`.

    Example:
        >>> with policy_scope("mixed_float16") as policy:
        ...     policy.output_dtype, keras.layers.Dense(4).compute_dtype
        ('float32', 'float16')
    """

    def __init__(self, policy: Policy | NamedPolicy | PolicyName):
        self._policy = _as_policy(policy)
        self._entered: list[_Level] = []  # in all contexts and threads

    def __enter__(self) -> Policy:
        outer = _scopes.innermost
        if outer is not None:
            _set_by_keras(outer)  # Drops what `clear_session` ended before.
        scope = _Level(self._policy, outer, keras_hooks.thread_policy())
        with _lock:
            _patch(self._policy)
            self._entered.append(scope)
            _scopes.enter(scope)
            _open_scopes.add(scope)
            _follow()
        return self._policy

    def __exit__(self, *exception: object) -> None:
        with _lock:
            scope = _scopes.leave_one(self._entered, "policy_scope")
            _open_scopes.discard(scope)
            _follow()
        _undo_clearing(scope)

    def __call__(self, function: _Callable) -> _Callable:
        """Decorates a function, to run under this policy."""
        return decorated(self, "policy_scope", function)


def _as_policy(policy: object) -> Policy:
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return policy_named(policy)
    if isinstance(policy, keras.DTypePolicy):
        return _from_keras(policy)
    raise TypeError(
        "policy must be a tfamp.Policy, a keras.DTypePolicy or the name of one, one of "
        f"{', '.join(POLICY_NAMES)}; got {described(policy)}"
    )


def _from_keras(policy: KerasPolicy) -> Policy:
    """Returns the policy with the dtypes of one of Keras's."""
    if type(policy) in _FLOAT_POLICIES and policy.name in POLICY_NAMES:
        return Policy(policy.name)
    raise ValueError(
        f"policy must be one of {', '.join(POLICY_NAMES)}, or a keras.DTypePolicy of that "
        f"name; Keras's is {policy!r} of type {type(policy).__name__}, which a tfamp.Policy "
        "cannot express. Layers are quantized by model.quantize; single ones get another "
        "policy by their dtype=, or by tfamp.set_layer_dtype(model, dtype, pattern=...)."
    )


def _level_here() -> _Level | None:
    """Returns the level that this code is at; None where tfamp has set no policy."""
    return _scopes.innermost or _process


def _level_in_force() -> _Level | None:
    """Returns the level whose policy holds in this thread; None where Keras's holds."""
    level = _level_here()
    return None if level is None or _set_by_keras(level) is not None else level


def _set_by_keras(level: _Level) -> KerasPolicy:
    """Returns the policy that Keras's setter has set at the level of this code, or None.

    `clear_session()` drops it, and the level's policy holds again.
    """
    if level is _process:
        return keras_hooks.thread_policy() if _thread.keras_set_over is level else None
    if level.session is not keras_hooks.session():
        level.keras_policy = None
    return level.keras_policy


def _undo_clearing(scope: _Level) -> None:
    """Restores Keras's policy around a left scope, if `clear_session` in it dropped it."""
    if scope.outer is not None:
        scope.outer.session = keras_hooks.session()
    elif scope.thread == threading.get_ident() and keras_hooks.thread_policy() is None:
        keras_hooks.set_thread_policy(scope.keras_before)


def _keras_policy_in_force() -> KerasPolicy:
    """Returns the policy that Keras gets; None where it keeps what it has.

    A new object each time: a policy is mutable, and layers must not share one for ever.
    """
    level = _level_here()
    if level is None:
        return None
    set_by_keras = _set_by_keras(level)
    if set_by_keras is not None:
        return set_by_keras
    policy = keras.DTypePolicy(level.policy.name)
    setattr(policy, _IN_FORCE, True)
    return policy


def _keras_was_set(policy: KerasPolicy) -> bool:
    """Stores a policy that Keras's setter sets in a scope; returns whether it did."""
    scope = _scopes.innermost
    if scope is None:
        _thread.keras_set_over = _process
        return False
    scope.keras_policy, scope.session = policy, keras_hooks.session()
    return True


def _follow() -> None:
    """Patches Keras exactly while a level needs it."""
    levels = [*_open_scopes, *([] if _process is None else [_process])]
    constructors.keep(any(level.policy.is_mixed for level in levels))
    policy_source.keep(bool(levels))
    in_float16 = any(level.policy.compute_dtype == "float16" for level in levels)
    underflow.watch("policy", in_float16)
    scaling_warnings.watch_keras(in_float16)
    keras_saving.restore_bare_optimizers(in_float16)


def _patch(policy: Policy) -> None:
    """Patches Keras for a policy that is to come; raises, and changes nothing, where it cannot."""
    try:
        if policy.is_mixed:
            constructors.keep(wanted=True)
        policy_source.keep(wanted=True)
    except UnsupportedVersionError:
        _follow()
        raise


def _layer_init(original: Method, layer: Layer, *args: Any, **kwargs: Any) -> None:
    """Constructs a layer with the dtype of its policy; a dtype that the user chose wins."""
    dtype, level = kwargs.get("dtype"), _level_in_force()
    policy = None if level is None else level.policy
    if dtype is None and model_calls.runs_float32_layer():
        dtype = kwargs["dtype"] = "float32"
    if isinstance(dtype, Policy):
        kwargs["dtype"] = keras.DTypePolicy(dtype.name)
    elif dtype is None and policy is not None and policy.keeps_float32(type(layer)):
        kwargs["dtype"] = "float32"
    original(layer, *args, **kwargs)
    if policy is not None and policy.is_mixed:
        model_calls.protect_values(layer)
        if dtype is None:
            assignment = model_calls.assignment_under(layer, policy, "policy")
            model_calls.manage(layer, policy, assignment)
        elif getattr(dtype, _IN_FORCE, False) and dtype.name == policy.name:
            # Nobody chose it: a layer or a library hands its own on.
            note(layer, handed_down=policy)
        else:
            model_calls.manage_once_loaded(layer, policy)


def _functional_init(original: Method, model: Functional, *args: Any, **kwargs: Any) -> None:
    original(model, *args, **kwargs)
    model_calls.manage_functional(model)


def _fit(original: Method, model: Model, *args: Any, **kwargs: Any) -> Any:
    """Calls `fit`; warns once of a model that was made before the policy was set."""
    level = _level_in_force()
    if level is not None and level.policy.is_mixed and not record_of(model).warned:
        layers = keras_hooks.layers_of(model)
        is_touched = any(wrapped_methods(layer) or assignment_of(layer) for layer in layers)
        is_low = any(layer.compute_dtype in LOW_PRECISION for layer in layers)
        # `fit` builds a model that has only its layers. Without any it makes them under the policy.
        has_layers = model.built or len(layers) > 1
        if has_layers and not is_touched and not is_low:
            note(model, warned=True)
            was, trains = ("built", "it trains") if model.built else ("made", "its layers train")
            warnings.warn(
                f"{model.name} was {was} before the policy {level.policy.name!r} was set, so "
                f"{trains} in float32: a policy is for layers that are made later. Set the policy "
                "first, or convert the built model with tfamp.prepare(model).",
                NothingConvertedWarning,
                stacklevel=level_of_user(),
            )
    return original(model, *args, **kwargs)


policy_source = keras_hooks.policy_source(_keras_policy_in_force, _keras_was_set)
constructors = Patch(
    optional={"fit": "a model that was made before its policy was set trains in silence."},
    layer_init=_layer_init,
    functional_init=_functional_init,
    fit=_fit,
)
