"""Every private symbol of Keras that tfamp calls, and the backend that Keras runs on.

Each has one small function and one test. If a release removed a symbol, its function raises
`UnsupportedVersionError` with the symbol and the installed version.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import UnsupportedBackendError
from tfamp.core.kinds import (
    Functional,
    KerasNode,
    KerasPolicy,
    Layer,
    Method,
    Model,
    Nest,
    Operation,
    Optimizer,
    Tensor,
    Variable,
)
from tfamp.interop.patching import (
    Patch,
    attempt,
    foreign,
    foreign_symbol,
    patched_here,
    require_attribute,
    wrap_method,
)

_POLICY = "dtype_policy"
# The attribute in which a layer holds its policy.
_POLICY_OF_LAYER = "_dtype_policy"
_SEEDS = "global_seed_generator"
_STATE = "keras.src.backend.common.global_state"
_VARIABLES = "keras.src.backend.common.variables"
_EXCLUDE = "keras.src.optimizers.base_optimizer:BaseOptimizer.exclude_from_weight_decay"

# A generator of Keras's for random numbers.
Generator: TypeAlias = Any
# A context that sets the dtype in which variables are read.
Reading: TypeAlias = contextlib.AbstractContextManager[None]


def policy_source(
    read: Callable[[], KerasPolicy],
    store: Callable[[KerasPolicy], bool],
) -> Patch:
    """Returns a patch: Keras gets its policy from `read`, and gives one that is set to `store`.

    Keras keeps its policy in a thread-local, which cannot be set for another thread. `read`
    returns None where Keras's holds; `store` is called in the thread that set it, and
    returns whether it stored the policy instead of Keras.
    """

    class GlobalState:
        """Replaces Keras's global-state module, also for functions imported from it before."""

        def __init__(self, module: Callable[[], ModuleType]) -> None:
            self._module = module

        def get_global_attribute(self, name: str, *args: Any, **kwargs: Any) -> Any:
            policy = read() if name == _POLICY else None
            if policy is not None:
                return policy
            return self._module().get_global_attribute(name, *args, **kwargs)

        def set_global_attribute(self, name: str, value: Any) -> None:
            if name != _POLICY or not store(value):
                self._module().set_global_attribute(name, value)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._module(), name)

    return Patch(policy_module=GlobalState)


def thread_policy() -> KerasPolicy:
    """Keras's policy of this thread as Keras stores it, None if none is stored yet.

    Symbol: `keras.src.backend.common.global_state.get_global_attribute`.
    """
    return foreign(f"{_STATE}:get_global_attribute")(_POLICY)


def set_thread_policy(policy: KerasPolicy) -> None:
    """Stores Keras's policy of this thread; None as if it had never been set.

    Symbol: `keras.src.backend.common.global_state.set_global_attribute`.

    Args:
        policy: What `thread_policy` returned.
    """
    foreign(f"{_STATE}:set_global_attribute")(_POLICY, policy)


def logits_of(probabilities: Tensor) -> Tensor | None:
    """The logits that Keras's sigmoid or softmax made a tensor of, None for other tensors.

    Symbol: `_keras_logits` of tensors, which Keras's cross-entropies read.
    """
    _check_logits()
    return getattr(probabilities, "_keras_logits", None)


@functools.cache
def _check_logits() -> None:
    lost = "cross-entropies are computed from probabilities, where Keras takes logits."
    for name in ("sigmoid", "softmax"):
        function = f"keras.src.activations.activations:{name}"
        attempt(functools.partial(require_attribute, function, "_keras_logits"), None, lost)


def set_logits(probabilities: Tensor, logits: Tensor) -> None:
    """Makes Keras's cross-entropies compute with logits instead of a tensor.

    Symbol: as of `logits_of`.
    """
    probabilities._keras_logits = logits


def session() -> Any:
    """An object that identifies Keras's session; `keras.utils.clear_session` begins a new one.

    Symbol: `keras.src.backend.common.global_state.GLOBAL_STATE_TRACKER`.
    """
    return foreign(f"{_STATE}:GLOBAL_STATE_TRACKER")


def global_seed_generator() -> Generator | None:
    """Keras's generator for unseeded random numbers in this thread; None before its first use.

    Symbol: "global_seed_generator" in `keras.src.backend.common.global_state`.
    """
    return foreign(f"{_STATE}:get_global_attribute")(_SEEDS)


def set_global_seed_generator(generator: Generator | None) -> None:
    """Restores this thread's generator that `global_seed_generator` returned."""
    foreign(f"{_STATE}:set_global_attribute")(_SEEDS, generator)


def averages_activity_losses() -> bool:
    """Whether Keras divides activity regularization losses by the batch size: since 3.14."""
    release = keras.__version__.split(".")[:2]
    return tuple(int(part) for part in release) >= (3, 14)


def calling_layers() -> list[Layer]:
    """The layers that this thread is calling, building or tracing, the outermost first.

    Symbol: "name_scope_stack" in `keras.src.backend.common.global_state`, whose entries have a
    `.caller`. Keras's call context is missing while a layer traces its sublayers to build them.
    """
    stack = foreign(f"{_STATE}:get_global_attribute")("name_scope_stack") or ()
    callers = [keras_symbol(scope, "caller") for scope in stack]
    return [caller for caller in callers if isinstance(caller, keras.Layer)]


def calls_symbolically() -> bool:
    """Whether Keras traces a call for the shapes and dtypes of its outputs only.

    Symbol: "symbolic_scope" in `keras.src.backend.common.global_state`, set meanwhile.
    """
    return foreign(f"{_STATE}:get_global_attribute")("symbolic_scope") is not None


def functional_class() -> type[Functional]:
    """The class of Functional models. Symbol: `keras.src.models.functional.Functional`."""
    return foreign("keras.src.models.functional:Functional")


def exported_inputs(model: Model) -> Nest:
    """Input specs that `export` uses; None for a model that was never called.

    Symbol: `keras.src.export.export_utils.get_input_signature`.
    """
    try:
        return foreign("keras.src.export.export_utils:get_input_signature")(model)
    except ValueError:  # It was never called.
        return None


def functional_of(model: Model) -> Functional | None:
    """The Functional behind a Sequential, None before it is built.

    Symbol: `Sequential._functional`.
    """
    return keras_symbol(model, "_functional")


def first_method_of_call(layer: Layer) -> str:
    """Name of the first method in a call, before casts of inputs: `_check_super_called`."""
    keras_symbol(layer, "_check_super_called")
    return "_check_super_called"


def methods_of_call(layer: Layer) -> tuple[str, str]:
    """Names of the methods that compute a layer's results; the second once it is quantized."""
    keras_symbol(layer, "quantized_call")
    return "call", "quantized_call"


def sublayers(layer: Layer) -> tuple[Layer, ...]:
    """The layers a layer holds. Symbol: `Layer._layers`; public only on models."""
    return tuple(keras_symbol(layer, "_layers"))


def layers_of(*roots: Layer) -> list[Layer]:
    """Layers and all their sublayers, each once, a layer before its sublayers."""
    seen: set[int] = set()
    holders_last: list[Layer] = []

    def visit(layer: Layer) -> None:
        if id(layer) not in seen:
            seen.add(id(layer))
            for sub in reversed(sublayers(layer)):
                visit(sub)
            holders_last.append(layer)

    for root in reversed(roots):
        visit(root)
    return holders_last[::-1]


def seed_generators(layer: Layer) -> tuple[Generator, ...]:
    """The random generators of a layer, without its sublayers'. Symbol: `_seed_generators`."""
    return tuple(keras_symbol(layer, "_seed_generators"))


def replace_generator(layer: Layer, generator: Generator, other: Generator) -> None:
    """Gives a layer another random generator in its attributes. Symbol: `_seed_generators`.

    A layer that is built accepts no new state in a public way.
    """
    tracked = keras_symbol(layer, "_seed_generators")
    names = [name for name, value in vars(layer).items() if value is generator]
    for name in names:
        object.__setattr__(layer, name, other)
    if names:
        tracked[:] = [other if item is generator else item for item in tracked]


def own_metrics(layer: Layer) -> tuple[Any, ...]:
    """The metrics in a layer's attributes, without its sublayers'. Symbol: `Layer._metrics`."""
    return tuple(keras_symbol(layer, "_metrics"))


def place_like(owner: Layer | Variable, other: Layer | Variable) -> None:
    """Gives another layer or variable the path of one. Symbol: `_path`.

    The path ends with the name, and Keras derives it from the names of the layers being built.
    """
    keras_symbol(other, "_path")
    object.__setattr__(other, "_path", keras_symbol(owner, "_path"))


def rematerializes(layer: Layer) -> bool:
    """Whether a layer recomputes activations in the backward pass. Symbol: `_remat_mode`."""
    return keras_symbol(layer, "_remat_mode") is not None


def rematerialize_like(layer: Layer, other: Layer) -> None:
    """Makes another layer recompute activations as a layer does. Symbol: `_remat_mode`.

    Publicly only the `keras.RematScope` in which a layer is made decides.
    """
    # Bypasses Layer.__setattr__: the mode is not state to track.
    object.__setattr__(other, "_remat_mode", keras_symbol(layer, "_remat_mode"))


def inbound_nodes(operation: Operation) -> tuple[KerasNode, ...]:
    """One node per symbolic call of a layer or op. Symbol: `Operation._inbound_nodes`.

    A node has `.operation`, `.outputs`, `.input_tensors` and `.arguments` (`.args`, `.kwargs`).
    """
    return tuple(keras_symbol(operation, "_inbound_nodes"))


def outbound_nodes(operation: Operation) -> tuple[KerasNode, ...]:
    """The nodes that consume a layer's or op's outputs. Symbol: `Operation._outbound_nodes`."""
    return tuple(keras_symbol(operation, "_outbound_nodes"))


def producer(tensor: Tensor) -> tuple[Operation, KerasNode]:
    """The layer or op that made a symbolic tensor, and the node of that call.

    Symbol: `KerasTensor._keras_history`.

    Returns:
        (operation, node), or (None, None) for a tensor without a producer.
    """
    history = keras_symbol(tensor, "_keras_history")
    if history.operation is None:
        return None, None
    return history.operation, inbound_nodes(history.operation)[history.node_index]


def set_symbolic_dtype(tensor: Tensor, dtype: str) -> None:
    """Changes the dtype of a symbolic tensor. Symbol: `KerasTensor._dtype`.

    Public tensors are immutable: a model's outputs would keep the dtype that they had before
    its output layer was changed.
    """
    keras_symbol(tensor, "_dtype")
    tensor._dtype = dtype


def set_fed_dtype(input_layer: Layer, dtype: str) -> None:
    """Changes the dtype that an InputLayer is fed in. Symbol: `InputLayer._dtype`."""
    for owner in (input_layer, input_layer.output):
        set_symbolic_dtype(owner, dtype)


def outputs_of(functional: Functional) -> list[Tensor]:
    """Outputs of a Functional, flat. Symbol: `Function._outputs_struct`.

    `functional.outputs` may hold more: callers can extend that list.
    """
    return list(keras.tree.flatten(keras_symbol(functional, "_outputs_struct")))


def set_outputs(functional: Functional, outputs: Sequence[Tensor]) -> None:
    """Gives a Functional other outputs, computed from the same inputs.

    Symbols: `keras.src.ops.function.map_graph`, `Function._outputs_struct`, the five attributes
    that `Function.__init__` sets from these, and `Layer._layers`, its second list of layers.

    Args:
        functional: The model; its `output_names` stay.
        outputs: Flat list of as many symbolic tensors as it has outputs.
    """
    map_graph = foreign("keras.src.ops.function:map_graph")
    attributes = ("_nodes", "_nodes_by_depth", "_operations", "_operations_by_depth")
    values = dict(zip(attributes, map_graph(functional.inputs, outputs), strict=True))
    structure = keras_symbol(functional, "_outputs_struct")
    values["_outputs_struct"] = keras.tree.pack_sequence_as(structure, list(outputs))
    values["_outputs"] = list(outputs)
    ids_before = set(map(id, functional.layers))
    for name, value in values.items():
        keras_symbol(functional, name)
        # Bypasses Layer.__setattr__, which would wrap lists and dicts into trackable ones.
        object.__setattr__(functional, name, value)
    tracked, layers = keras_symbol(functional, "_layers"), functional.layers
    gone = ids_before - set(map(id, layers))
    tracked_ids = set(map(id, tracked))
    kept = [layer for layer in tracked if id(layer) not in gone]
    tracked[:] = kept + [layer for layer in layers if id(layer) not in tracked_ids]


def wrap_operations(
    functional: Functional,
    around: Callable[[Operation, Method], Method],
) -> None:
    """Makes a Functional run `around(operation, function)` instead of each of its functions.

    Symbol: `Function._run_through_graph`.

    Args:
        functional: The model; others that share its operations are not affected.
        around: Gets a layer or op and the function that calls it; returns a function.
    """

    def run(
        original: Method, inputs: Nest, operation_fn: Method = lambda x: x, **kwargs: Any
    ) -> Nest:
        def wrapped(operation: Operation) -> Method:
            return around(operation, operation_fn(operation))

        return original(inputs, operation_fn=wrapped, **kwargs)

    keras_symbol(functional, "_run_through_graph")
    wrap_method(functional, "_run_through_graph", run)


def replace_policy(layer: Layer, policy: KerasPolicy) -> Callable[[], None]:
    """Replaces a layer's policy temporarily, whether it is built or not.

    Symbols: `Layer._dtype_policy`, as the public setter changes an entry of a `DTypePolicyMap`
    that other layers share; `DTypePolicy._variable_dtype`, as Keras casts variables only for a
    layer whose two dtypes differ, and a float32 policy for float16 variables has no name.

    Args:
        layer: The layer; its sublayers are not affected.
        policy: A policy with the wanted compute dtype; it gets the layer's variable dtype.

    Returns:
        A function that restores the layer's policy.
    """
    before = keras_symbol(layer, _POLICY_OF_LAYER)
    keras_symbol(policy, "_variable_dtype")
    policy._variable_dtype = layer.variable_dtype
    setattr(layer, _POLICY_OF_LAYER, policy)
    return functools.partial(setattr, layer, _POLICY_OF_LAYER, before)


def replace_losses(layer: Layer) -> Callable[[], None]:
    """Notes a layer's collected losses before a call whose loss tensors must not remain.

    Symbols: `Layer._losses`, the list that `add_loss` appends to, and `Layer._loss_ids`.

    Args:
        layer: The layer, without its sublayers.

    Returns:
        A function that restores the collected losses.
    """
    losses = list(keras_symbol(layer, "_losses"))
    ids = set(keras_symbol(layer, "_loss_ids"))

    def restore() -> None:
        layer._losses[:] = losses
        layer._loss_ids.clear()
        layer._loss_ids.update(ids)

    return restore


def compile_arguments(model: Model) -> dict[str, Any]:
    """The arguments that a model was compiled with. Symbol: `Trainer._compile_config`.

    Only their serialized form is public, which not every loss has.
    """
    return dict(keras_symbol(keras_symbol(model, "_compile_config"), "config"))


def automatic_jit_compile(model: Model) -> bool:
    """Returns what `jit_compile="auto"` means for a model, which stays compiled as it is.

    Symbol: `Trainer._resolve_auto_jit_compile`. A compiled model stores the meaning only, so
    another value is the user's.
    """
    return bool(keras_symbol(model, "_resolve_auto_jit_compile")())


def set_jit_compile(model: Model, value: bool) -> None:
    """Makes XLA compile the steps of a compiled model, or not, also in its saved configuration.

    Symbol: `Trainer._compile_config`. Compiling again would reset the metrics.
    """
    keras_symbol(keras_symbol(model, "_compile_config"), "config")["jit_compile"] = value
    model.jit_compile = value


def set_compiled_optimizer(model: Model, optimizer: Optimizer) -> None:
    """Gives a compiled model another optimizer, also in its saved configuration.

    Symbol: `Trainer._compile_config`. Compiling again would reset the metrics.
    """
    keras_symbol(keras_symbol(model, "_compile_config"), "config")["optimizer"] = optimizer
    # Bypasses Layer.__setattr__, as in `compile`: an optimizer is not a state to track.
    object.__setattr__(model, "optimizer", optimizer)


def add_to_epoch_logs(
    model: Model,
    figures: Callable[[], dict[str, float]],
) -> Callable[[], None]:
    """Adds figures to the logs of each epoch of `fit`; returns a function that ends this.

    Symbol: `Trainer._get_metrics_result_or_logs`. The public `on_epoch_end` would be too late
    for callbacks that come before. The results of `evaluate` are not changed.
    """
    evaluations: list[None] = []

    def evaluate(original: Method, *args: Any, **kwargs: Any) -> Any:
        evaluations.append(None)
        try:
            return original(*args, **kwargs)
        finally:
            evaluations.pop()

    def read_logs(original: Method, logs: dict[str, Any]) -> dict[str, Any]:
        results: dict[str, Any] = original(logs)
        return results if evaluations else {**figures(), **results}

    keras_symbol(model, "_get_metrics_result_or_logs")
    with contextlib.ExitStack() as undo:
        undo.callback(wrap_method(model, "evaluate", evaluate))
        undo.callback(wrap_method(model, "_get_metrics_result_or_logs", read_logs))
        return undo.pop_all().close


def copy_annotations(source: Tensor, target: Tensor) -> None:
    """Copies a tensor's Keras mask, and its logits, cast to the target's dtype.

    Keras computes crossentropies from the logits of a softmax or sigmoid.

    Symbols: `keras.src.backend.get_keras_mask`, `set_keras_mask`, `_keras_logits` on tensors.
    """
    mask = foreign("keras.src.backend:get_keras_mask")(source)
    if mask is not None:
        foreign("keras.src.backend:set_keras_mask")(target, mask)
    logits = logits_of(source)
    if logits is not None:
        target._keras_logits = keras.ops.cast(logits, target.dtype)


# ---- Calls of layers -------------------------------------------------------------------------

# Layers of KerasHub that compute sines of positions.
_ANGLES = re.compile(
    r"(AudioRelative|Frequency|Roformr?|Rope|Rotary|Sine|Sinusoidal)\w*(Embedding|Encoding)s?$"
)
# Adding n low tensors one after the other is off by at most n / 2 roundings.
_FEW_INPUTS = 8


def turns_positions(layer: Layer) -> bool:
    """Whether a layer of KerasHub computes angles of positions, which low precision turns."""
    package = type(layer).__module__.partition(".")[0]
    is_of_keras_hub = package in ("keras_hub", "keras_nlp")
    return is_of_keras_hub and bool(_ANGLES.search(type(layer).__name__))


def adds_many(layer: Layer, inputs: Nest) -> bool:
    """Whether a layer adds so many inputs, one after the other, that a low sum is inexact."""
    adds = isinstance(layer, keras.layers.Add | keras.layers.Average)
    return adds and isinstance(inputs, list | tuple) and len(inputs) > _FEW_INPUTS


def call_in_float32(layer: Layer, method: Method, *args: Any, **kwargs: Any) -> Any:
    """Calls a bound method of a layer that casts by its `compute_dtype`, with that of float32.

    The method gets a view: an object of the same class and with the same attributes, except for
    the policy. The layer, which other threads may call meanwhile, keeps its own; what the method
    assigns to attributes of the view becomes the layer's.

    Symbol: `Layer._dtype_policy`, a plain attribute.
    """
    keras_symbol(layer, _POLICY_OF_LAYER)
    before = {**vars(layer), _POLICY_OF_LAYER: keras.DTypePolicy("float32")}
    view = object.__new__(type(layer))  # `Layer.__new__` would wrap methods, for a new layer.
    attributes: dict[str, Any] = view.__dict__
    attributes.update(before)
    try:
        return method.__func__(view, *args, **kwargs)  # type: ignore[attr-defined]
    finally:
        missing = object()
        changed = {k: v for k, v in attributes.items() if before.get(k, missing) is not v}
        layer.__dict__.update(changed)


def reading_by(read: Callable[[Any], Any], layer: Layer, low: str) -> Reading:
    """Returns a context in which a call of a float32 layer reads its variables by a function.

    Variables that opted out, such as BatchNormalization's and the optimizer's, are not affected;
    nor are layers that read another dtype, or that read float32 because a layer around them does.

    Symbols: `keras.src.backend.common.variables.AutocastScope`, whose `original_scope` is the
    scope around it, its method `maybe_cast`, and `get_autocast_scope`.

    Args:
        read: Returns what a read of a variable's value returns.
        layer: The layer.
        low: The low dtype in which ops may use what is read.
    """
    if layer.autocast and layer.compute_dtype == "float32":
        scope = _scope_in_force()()
        # Inside a layer's scope of another dtype, a layer opens a scope first.
        if scope is None or isinstance(scope.original_scope, _scope_of_ours()):
            reading: Reading = _scope_of_ours()(read, low)
            return reading
    return contextlib.nullcontext()


def reads_float32() -> bool:
    """Whether variables are read by a function of `reading_by` here. Symbols: as of that."""
    return isinstance(_scope_in_force()(), _scope_of_ours())


def reading_again() -> Callable[[], Reading]:
    """Returns what makes contexts in which variables are read as here by `reading_by`.

    A layer's call may run again, to be differentiated, after its scope was left.

    Symbols: as of `reading_by`.
    """
    if reads_float32():
        scope: Any = _scope_in_force()()
        make: Callable[..., Reading] = _scope_of_ours()
        return functools.partial(make, scope.maybe_cast, scope.low)
    return contextlib.nullcontext


@functools.cache
def _scope_of_ours() -> type[Any]:
    """A class of scopes, to distinguish tfamp's from those that layers open."""
    of_keras = foreign(f"{_VARIABLES}:AutocastScope")
    keras_symbol(of_keras, "maybe_cast")

    class Scope(of_keras):  # type: ignore[misc, valid-type]
        """Variables have their own dtype in it."""

        def __init__(self, read: Callable[[Any], Any], low: str) -> None:
            super().__init__(None)
            self.low, self.maybe_cast = low, read

    return Scope


def reading_variables_in(dtype: str | None) -> Reading:
    """Returns a context in which the layer being called reads its variables in a dtype.

    Symbol: `keras.src.backend.common.variables.AutocastScope`.

    Args:
        dtype: A float dtype; None for the dtype that a variable has.
    """
    reading: Reading = foreign(f"{_VARIABLES}:AutocastScope")(dtype)
    return reading


def reading_low_by(read: Callable[[Any], Any], low: str) -> Reading:
    """Returns a context in which the layer being called reads its variables by a function.

    Layers of the same compute dtype that it calls do so too. What the function returns has the
    low dtype.

    Symbols: `keras.src.backend.common.variables.AutocastScope` and its method `maybe_cast`.
    """
    scope = foreign(f"{_VARIABLES}:AutocastScope")(low)
    keras_symbol(scope, "maybe_cast")
    scope.maybe_cast = read
    reading: Reading = scope
    return reading


def reading_dtype() -> str | None:
    """The dtype in which variables are used here; None for the dtype that each one has.

    Symbol: `keras.src.backend.common.variables.get_autocast_scope`.
    """
    scope = _scope_in_force()()
    if scope is None:
        return None
    dtype: str | None = getattr(scope, "low", scope.dtype)
    return dtype


@functools.cache
def _scope_in_force() -> Callable[[], Any]:
    """Returns the function, found once: it is called for every call of a layer."""
    found: Callable[[], Any] = foreign(f"{_VARIABLES}:get_autocast_scope")
    return found


def reads_low(variable: Variable) -> bool:
    """Whether a float32 variable is read, or used by ops, in a low dtype here.

    Symbols: `Variable._dtype`, as the public dtype is the one that it is read in, and
    `Variable._autocast`.
    """
    if not keras_symbol(variable, "_autocast") or reading_dtype() not in LOW_PRECISION:
        return False
    return bool(keras_symbol(variable, "_dtype") == "float32")


def read_as_stored(variable: Variable) -> None:
    """Makes layers read a variable in the dtype that it has. Symbol: `Variable._autocast`.

    As `add_weight(autocast=False)` does, which is public for new variables only.
    """
    keras_symbol(variable, "_autocast")
    variable._autocast = False


@contextlib.contextmanager
def read_as_stored_in(variables: Sequence[Variable]) -> Iterator[None]:
    """Returns a context in which layers read variables in the dtype that these have."""
    before = [keras_symbol(variable, "_autocast") for variable in variables]
    for variable in variables:
        read_as_stored(variable)
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable._autocast = value


def state_of(layer: Layer) -> list[Variable]:
    """The variables of a layer and its sublayers that were created not to be trained.

    Symbol: `Layer._non_trainable_variables`; the public list has frozen weights, too. Of the
    sublayers inside sublayers it has none.
    """
    holders = [layer, *sublayers(layer)]
    return [v for held in holders for v in keras_symbol(held, "_non_trainable_variables")]


def is_of_keras(layer: Layer) -> bool:
    """Whether Keras itself defines the layer's class."""
    return type(layer).__module__.partition(".")[0] == "keras"


def keras_symbol(owner: Any, name: str) -> Any:
    """Returns an attribute of a module or object; raises `UnsupportedVersionError` if missing."""
    return foreign_symbol(owner, name, "Keras")


# ---- Optimizers ------------------------------------------------------------------------------


def built_for(optimizer: Optimizer) -> list[Variable]:
    """The variables that an optimizer was built for. Symbol: `_trainable_variables`."""
    return list(keras_symbol(optimizer, "_trainable_variables"))


def key_of(optimizer: Optimizer) -> Callable[[Variable], Any]:
    """Returns the function from a variable to its key in an optimizer. Symbol: `_var_key`."""
    key: Callable[[Variable], Any] = keras_symbol(optimizer, "_var_key")
    return key


def index_of(optimizer: Optimizer, variable: Variable) -> int:
    """Index of a variable in the slots. Symbol: `_get_variable_index`."""
    return int(keras_symbol(optimizer, "_get_variable_index")(variable))


def slot(optimizer: Optimizer, name: str, index: int) -> Variable:
    """A slot of a variable: "momentums", "velocities", or "r", "c" and "v" of Adafactor.

    Symbols: `_momentums`, `_velocities`, `_r`, `_c`, `_v`.
    """
    return keras_symbol(optimizer, f"_{name}")[index]


def momentum_product(optimizer: Optimizer) -> Variable:
    """Nadam's product of the momenta of all steps. Symbol: `_u_product`."""
    return keras_symbol(optimizer, "_u_product")


def decays(optimizer: Optimizer, variable: Variable) -> bool:
    """Whether an optimizer decays a variable. Symbol: `_use_weight_decay`."""
    if not optimizer.weight_decay:
        return False
    decays_it: bool = keras_symbol(optimizer, "_use_weight_decay")(variable)
    return decays_it


def without_missing(
    optimizer: Optimizer, gradients: Sequence[Tensor], variables: Sequence[Variable]
) -> tuple[list[Tensor], list[Variable]]:
    """Drops gradients that are None, and warns like Keras.

    Symbol: `_filter_empty_gradients`.
    """
    kept, owners = keras_symbol(optimizer, "_filter_empty_gradients")(gradients, variables)
    return list(kept), list(owners)


def clipped(optimizer: Optimizer, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Gradients clipped by an optimizer's clipping options. Symbol: `_clip_gradients`."""
    return list(keras_symbol(optimizer, "_clip_gradients")(gradients))


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers of a `MultiOptimizer`; another optimizer itself.

    Symbol: `_inner_optimizers`. Keras has `MultiOptimizer` since 3.15.
    """
    kind = getattr(keras.optimizers, "MultiOptimizer", ())
    if not isinstance(optimizer, kind):
        return [optimizer]
    return list(keras_symbol(optimizer, "_inner_optimizers"))


def step_counter(optimizer: Optimizer) -> Variable:
    """The variable that counts an optimizer's steps. Symbol: `_iterations`.

    The public `iterations` is divided by the steps that the optimizer accumulates.
    """
    return keras_symbol(optimizer, "_iterations")


def applying_view(
    optimizer: Optimizer, *, summed: bool, counter: Callable[[Variable], Any] | None
) -> Optimizer:
    """Returns a view of an optimizer, which shares its variables, to call `apply` on.

    The optimizer is not modified, as replicas may run in threads.

    Symbols: `_all_reduce_sum_gradients`, `_iterations`, `_inner_optimizers`.

    Args:
        optimizer: The optimizer.
        summed: Whether gradients are summed over replicas: Keras's `apply` always does that.
        counter: What the view counts steps in, made of the step counter; None for the counter.
    """
    kind, methods = type(optimizer), {}
    if summed:
        sums = "_all_reduce_sum_gradients"
        keras_symbol(optimizer, sums)
        methods[sums] = lambda self, grads_and_vars: list(grads_and_vars)
    view: Any = object.__new__(type(kind.__name__, (kind,), methods))
    # Bypass Keras's __setattr__, which would track the variables a second time.
    state = vars(view)
    state.update(vars(optimizer))
    if counter is not None:
        state["_iterations"] = counter(step_counter(optimizer))
    inner = inner_optimizers(optimizer)
    if inner != [optimizer]:  # A MultiOptimizer, which splits the gradients.
        state["_inner_optimizers"] = [
            applying_view(each, summed=summed, counter=counter) for each in inner
        ]
    return view


def float32_gradient_sums() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which optimizers are built to sum gradients in float32 or wider.

    Keras's `gradient_accumulation_steps` sums in the dtype of the variable: a bfloat16 sum of
    ones stops at 256. Symbols: `add_variable_from_reference`, and the name that `build` gives to
    the sums.
    """
    return patched_here(slot=_gradient_sum)


def _gradient_sum(
    original: Method, optimizer: Optimizer, variable: Variable, name: str | None = None, **rest: Any
) -> Variable:
    is_sum = name == "gradient_accumulator" and not _has_next_value(variable)
    if is_sum and keras.backend.standardize_dtype(variable.dtype) in LOW_PRECISION:
        variable = _InFloat32(variable)
    return original(optimizer, variable, name=name, **rest)


def _has_next_value(variable: Variable) -> bool:
    return getattr(variable, "overwrite_with_gradient", False)


class _InFloat32:
    """A variable whose slot is to be float32; its other attributes are the variable's own."""

    dtype = "float32"

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._variable, name)


def gradient_sums(optimizer: Optimizer) -> list[tuple[Variable, Variable]]:
    """The variables of an optimizer and the sums of their gradients; none without such sums.

    Symbol: `_accumulated_gradients`.
    """
    if not optimizer.gradient_accumulation_steps or not optimizer.built:
        return []
    sums = keras_symbol(optimizer, "_accumulated_gradients")
    return list(zip(built_for(optimizer), sums, strict=True))


def excluded_from_decay(optimizer: Optimizer) -> tuple[set[Any], Any]:
    """Keys of the variables that are not decayed, and the pattern of their names.

    Symbols: `_exclude_from_weight_decay`, `_exclude_from_weight_decay_pattern`, which
    `exclude_from_weight_decay` sets.
    """
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        require_attribute(_EXCLUDE, name)
    keys: set[Any] = getattr(optimizer, "_exclude_from_weight_decay", set())
    return keys, getattr(optimizer, "_exclude_from_weight_decay_pattern", None)


def exclude_pattern(optimizer: Optimizer, pattern: Any) -> None:
    """Sets the pattern of names that are not decayed: see `excluded_from_decay`."""
    optimizer._exclude_from_weight_decay_pattern = pattern


# ---- Backends --------------------------------------------------------------------------------


HOW_TO_CHANGE = "Set KERAS_BACKEND=tensorflow before Python starts."


def runs_tensorflow() -> bool:
    """Whether Keras runs on TensorFlow."""
    return bool(keras.backend.backend() == "tensorflow")


def native(variable: Variable) -> Variable:
    """Value of a `keras.Variable`, on TensorFlow a `tf.Variable`; any other variable itself."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def as_tensor(variable: Variable) -> Tensor:
    """The value of a variable as a tensor; in cross-replica context the first replica's."""
    # keras.ops.convert_to_tensor would return the Keras variable itself.
    value = native(variable)
    return tf.convert_to_tensor(value) if runs_tensorflow() else value


def require_tensorflow(feature: str, instead: str = "a mixed policy") -> None:
    """Raises an error if Keras runs on another backend.

    Args:
        feature: The feature, as the subject of a sentence: "tfamp.rewrite".
        instead: The feature to use on other backends.

    Raises:
        UnsupportedBackendError: Keras runs on JAX or PyTorch, for example.
    """
    if not runs_tensorflow():
        raise UnsupportedBackendError(
            f"{feature} works on TensorFlow's ops, but Keras runs on the "
            f"{keras.backend.backend()} backend. {HOW_TO_CHANGE} Or use {instead}, which "
            "works on every backend."
        )
