"""Which policy is in force, for the whole process and per thread, and Keras's agreement with it.

Two levels. `set_global_policy` sets one policy for the process: it reaches every thread, running
ones too. `policy_scope` sets one for a block of code in one thread and hides the process's there.
Keras's own setter counts on the level it is called at, in its thread, until tfamp's next one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import keras

from tfamp.interop import keras_hooks
from tfamp.interop.keras_hooks import described
from tfamp.interop.patching import Patch, warning_at_user
from tfamp.layers import model_calls
from tfamp.policy import POLICY_NAMES, Policy

_KERAS_OWN = (keras.DTypePolicy, keras.FloatDTypePolicy)
# Arguments of a layer that Keras warns of.
_WARNED_OF = {"input_shape", "input_dim"}


@dataclass(frozen=True, eq=False)
class _Level:
    """A policy in force: the process's, or one scope's.

    A new one is made whenever tfamp sets a policy, so "Keras's own setter came after that" is
    remembered by identity.
    """

    policy: Policy


@dataclass(eq=False)
class _Scope:
    """What one `with` block needs: its level now, and Keras's own policy from before it."""

    level: _Level
    keras_before: Any
    keras_set_before: _Level | None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.scopes: list[_Scope] = []
        # The level over which this thread called Keras's own setter last.
        self.keras_set_over: _Level | None = None


_lock = threading.RLock()
_thread = _Thread()
_process: _Level | None = None
# Scopes of all threads. Weak: a thread that dies inside a scope must not keep the hooks alive.
_open_scopes: weakref.WeakSet[_Scope] = weakref.WeakSet()


def set_global_policy(policy: Policy | keras.DTypePolicy | str) -> None:
    """Puts a policy in force in every thread of the process.

    Inside a `policy_scope` it changes the policy of that scope only, and ends with it. Layers that
    exist already keep theirs. `keras.config.dtype_policy()` agrees afterwards, in every thread.

    Args:
        policy: A `Policy` or the name of one; or a `keras.DTypePolicy`, which means the `Policy` of
            its name. A `DTypePolicyMap` of one policy for all layers will do.

    Raises:
        TypeError: `policy` is none of these.
        ValueError: There is no policy of that name; or it is a Keras policy that a `Policy` cannot
            express: quantized, or with others for single paths. Nothing has changed then.

    Example:
        >>> set_global_policy("mixed_bfloat16")
        >>> keras.layers.Dense(4).compute_dtype
        'bfloat16'
        >>> set_global_policy("float32")
    """
    global _process
    level = _Level(_as_policy(policy))
    with _lock:
        if _thread.scopes:
            _thread.scopes[-1].level = level
        else:
            _process = level
        _follow()


def global_policy() -> Policy:
    """Returns the policy in force here: the innermost scope's, else the process's.

    If Keras's own setter was called in this thread after that, the policy says what Keras then
    does: no float32 layers, no float32 outputs.

    Returns:
        The policy; `Policy("float32")` where nothing was set.

    Raises:
        ValueError: Keras's own policy is one that a `Policy` cannot express, a quantized one for
            example.

    Example:
        >>> with policy_scope("mixed_float16"):
        ...     global_policy().compute_dtype
        'float16'
    """
    level = _level_in_force()
    return _from_keras(keras.config.dtype_policy()) if level is None else level.policy


class policy_scope(contextlib.ContextDecorator):  # noqa: N801 - reads as a function
    """Puts a policy in force in this thread for a block of code.

    Restores what was in force before, exceptions included, Keras's own policy too. Scopes nest; one
    object can be entered again inside itself, and by several threads. Other threads do not see it;
    other coroutines of this thread do, as they do Keras's own policy, so do not await inside.
    Build a model inside the scope that creates its layers. It can be called outside.

    Args:
        policy: As for `set_global_policy`.

    Raises:
        TypeError, ValueError: As for `set_global_policy`.

    Example:
        >>> with policy_scope("mixed_float16") as policy:
        ...     policy.output_dtype, keras.layers.Dense(4).compute_dtype
        ('float32', 'float16')
    """

    def __init__(self, policy: Policy | keras.DTypePolicy | str):
        self._policy = _as_policy(policy)
        # In all threads, with the scopes of the thread.
        self._entered: list[tuple[_Scope, list[_Scope]]] = []

    def __enter__(self) -> Policy:
        before = keras_hooks.thread_policy(), _thread.keras_set_over
        scope = _Scope(_Level(self._policy), *before)
        _thread.scopes.append(scope)
        with _lock:
            self._entered.append((scope, _thread.scopes))
            _open_scopes.add(scope)
            _follow()
        return self._policy

    def __exit__(self, *exception: object) -> None:
        with _lock:
            if not self._entered:
                raise RuntimeError("policy_scope was left more often than it was entered.")
            # This thread's last one, or the last one if other threads made them all.
            mine = [entry for entry in self._entered if entry[1] is _thread.scopes]
            entry = (mine or self._entered)[-1]
            self._entered.remove(entry)
        scope, around = entry
        if mine and around[-1] is scope:
            keras_hooks.set_thread_policy(scope.keras_before)
            _thread.keras_set_over = scope.keras_set_before
        around.remove(scope)
        with _lock:
            _open_scopes.discard(scope)
            _follow()


def _as_policy(policy: object) -> Policy:
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return Policy(policy)
    if isinstance(policy, keras.DTypePolicy):
        return _of_same_dtypes(policy)
    own = getattr(policy, "name", None)  # a policy of tf_keras has one
    raise TypeError(
        "policy must be a tfamp.Policy, a keras.DTypePolicy or the name of one, one of "
        f"{', '.join(POLICY_NAMES)}; got {described(policy)}"
        + (f" Or give the name, {own!r}." if own in POLICY_NAMES else "")
    )


def _of_same_dtypes(policy: Any) -> Policy:
    """The policy that computes and stores in the dtypes of a Keras policy."""
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        default = policy.default_policy
        others = [path for path, each in policy.items() if each != default]
        if others:
            raise ValueError(
                f"policy must be one policy for all layers; got {policy!r}, which has others for "
                f"{', '.join(map(repr, others))}. A map goes by the paths of layers, and those "
                f"exist only once a model is built. Set {default.name!r} and give these layers "
                "their dtype=, or change them in the built model with tfamp.set_layer_dtype(model, "
                f"dtype, pattern={others[0]!r}), or keep_float32= of tfamp.prepare."
            )
        return _of_same_dtypes(default)
    if policy.quantization_mode is not None:
        raise ValueError(
            f"policy must be one of {', '.join(POLICY_NAMES)}; got {policy!r}. Layers are "
            "quantized when they are built, by model.quantize: set the policy they come from."
        )
    if policy.name in POLICY_NAMES and type(policy) in _KERAS_OWN:
        return Policy(policy.name)
    raise ValueError(
        f"policy must be one of {', '.join(POLICY_NAMES)}; got {policy!r} of type "
        f"{type(policy).__name__}, which computes in {policy.compute_dtype} and has "
        f"{policy.variable_dtype} variables by rules of its own. Give single layers that policy as "
        "their dtype=, or set it with keras.config.set_dtype_policy."
    )


@functools.cache
def _plain(name: str) -> Any:
    return keras.DTypePolicy(name)


def _from_keras(policy: Any) -> Policy:
    if type(policy) not in _KERAS_OWN or policy.name not in POLICY_NAMES:
        raise ValueError(
            f"Keras's global dtype policy is {policy!r}, which a tfamp.Policy cannot express; "
            f"expected one of {', '.join(POLICY_NAMES)}. Read it with keras.config.dtype_policy(), "
            "or set one of these with tfamp.set_global_policy."
        )
    plain = Policy(policy.name)
    # What Keras does by itself under a mixed policy.
    by_itself = Policy(policy.name, float32_layers=(), float32_outputs=False)
    return by_itself if plain.is_mixed else plain


def _level_in_force() -> _Level | None:
    """The level whose policy holds in this thread, None where Keras's own does."""
    level = _thread.scopes[-1].level if _thread.scopes else _process
    if level is not None and _thread.keras_set_over is level:
        # clear_session() drops Keras's own policy: then there is none to give way to.
        return None if keras_hooks.thread_policy() is not None else level
    return level


def _keras_policy_in_force() -> Any:
    level = _level_in_force()
    return None if level is None else _plain(level.policy.name)


def _keras_was_set() -> None:
    _thread.keras_set_over = _thread.scopes[-1].level if _thread.scopes else _process


def _follow() -> None:
    """Makes Keras follow: it is patched exactly while that is needed."""
    levels = [scope.level for scope in list(_open_scopes)]
    if _process is not None:
        levels.append(_process)
    _policy_source.keep(bool(levels))
    constructors.keep(any(level.policy.is_mixed for level in levels))


def _layer_dtype(layer_class: type, dtype: Any) -> Any:
    """Decides the dtype a layer is constructed with; one given by the user wins."""
    if isinstance(dtype, Policy):
        return _plain(dtype.name)
    level = _level_in_force()
    if dtype is None and level is not None and level.policy.keeps_float32(layer_class):
        return _plain("float32")
    return dtype


def _layer_init(original: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    if kwargs.get("dtype") is None and model_calls.runs_float32_layer():
        kwargs["dtype"] = "float32"
    given = kwargs.get("dtype")
    wanted = _layer_dtype(type(layer), given)
    if wanted is not given:
        kwargs["dtype"] = wanted
    construct = functools.partial(original, layer, *args, **kwargs)
    if kwargs.keys() & _WARNED_OF:
        warning_at_user(construct)
    else:
        construct()
    level = _level_in_force()
    if level is not None and level.policy.is_mixed:
        model_calls.protect_values(layer)
        if given is None:
            model_calls.manage(layer, level.policy)


def _functional_init(original: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    original(model, *args, **kwargs)
    model_calls.manage_functional(model)


_policy_source = keras_hooks.policy_source(_keras_policy_in_force, _keras_was_set)
constructors = Patch(layer_init=_layer_init, functional_init=_functional_init)
