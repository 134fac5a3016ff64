"""Patches of TensorFlow and Keras: the place to port to a new release of either.

The tables below list every patched symbol, and the library code that autocast recognizes by
name. `UnsupportedVersionError` names a symbol that a release has removed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any, TypeAlias, TypeVar

from tfamp.core.errors import TfampWarning, UnsupportedVersionError
from tfamp.core.kinds import Method

# Called with the original and its arguments; or a class, whose instance replaces the original: it
# is made of a function that returns it.
Replacement: TypeAlias = Callable[..., Any]
_Result = TypeVar("_Result")

TESTED_VERSIONS = {"TensorFlow": "2.19 to 2.21", "Keras": "3.12 to 3.15"}

# ---- Patched symbols -------------------------------------------------------------------------

# Name in a `Patch`, one for all symbols of a kind, and the symbol.
_KERAS_AND_PUBLIC = (
    ("layer_init", "keras.layers:Layer.__init__"),
    ("layer_call", "keras.layers:Layer.__call__"),
    ("functional_init", "keras.src.models.functional:Functional.__init__"),
    ("variable_init", "keras.src.backend.common.variables:Variable.__init__"),
    ("assign", "keras.src.backend.common.variables:Variable.assign"),
    ("assign_in_place", "keras.src.backend.common.variables:Variable.assign_add"),
    ("assign_in_place", "keras.src.backend.common.variables:Variable.assign_sub"),
    ("batch_normalization", "keras.layers:BatchNormalization.call"),
    # Called by a layer once it has chosen the dtype in which it reads its variables.
    ("operation_call", "keras:Operation.__call__"),
    ("paused", "keras.src.optimizers.base_optimizer:BaseOptimizer.apply"),
    ("step", "keras.src.optimizers.base_optimizer:BaseOptimizer.apply"),
    ("scaled_step", "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer.apply"),
    ("keras_scale_loss", "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer.scale_loss"),
    ("keras_scaling_init", "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer.__init__"),
    ("load_optimizer", "keras.src.optimizers.base_optimizer:BaseOptimizer.load_own_variables"),
    ("slot", "keras.src.optimizers.base_optimizer:BaseOptimizer.add_variable_from_reference"),
    ("fit", "keras.src.backend.tensorflow.trainer:TensorFlowTrainer.fit"),
    # Makes tensors of the numbers that an op combines with a tensor, in that tensor's dtype.
    ("number", "keras.src.backend.tensorflow.numpy:convert_to_tensor"),
    # Reads the dtype's eps, which NumPy does not have for bfloat16.
    ("in_float32", "keras.src.backend.tensorflow.linalg:lstsq"),
    # Powers of the matrix, and a solver that multiplies their rounding errors.
    ("in_float32", "tensorflow:linalg.expm"),
    # Know the complex dtype of float32 and float64 only.
    ("in_float32", "tensorflow:linalg.eig"),
    ("in_float32", "tensorflow:linalg.eigvals"),
    ("in_float32", "tensorflow:eig"),
    ("in_float32", "tensorflow:eigvals"),
    # Losses are computed in float32.
    ("loss_ops", "keras.src.losses.loss:ops"),
    ("loss_ops", "keras.src.losses.losses:ops"),
    # Only `keras.config.dtype_policy` and `set_dtype_policy` look the module up here.
    ("policy_module", "keras.src.dtype_policies.dtype_policy:global_state"),
    ("public_cast", "tensorflow:cast"),
    ("public_cast", "tensorflow:dtypes.cast"),
    ("gradient", "tensorflow:GradientTape.gradient"),
)
# Below `tensorflow.python`.
_PRIVATE_TENSORFLOW = (
    # Every op that generated wrappers and `tf.raw_ops` run goes through the first in eager
    # mode, and through the second while a graph is built, however the wrapper was imported.
    ("eager_op", "pywrap_tfe:TFE_Py_FastPathExecute"),
    ("graph_op", "framework.op_def_library:_apply_op_helper"),
    # Called for an op of a graph that a tape is to record, once the op exists.
    ("record_gradient", "eager.execute:record_gradient"),
    ("cast", "ops.gen_math_ops:cast"),
    ("constant", "framework.ops:_create_graph_constant"),
    ("paused", "eager.imperative_grad:imperative_grad"),
    ("paused", "eager.backprop:GradientTape.jacobian"),
    ("paused", "eager.backprop:GradientTape.batch_jacobian"),
    ("paused", "ops.gradients_util:_GradientsHelper"),
    ("paused", "ops.parallel_for.pfor:PFor.convert"),
    ("recording", "eager.backprop:GradientTape._push_tape"),
    ("recording", "eager.backprop:GradientTape.watch"),
    ("recording", "eager.forwardprop:ForwardAccumulator._push_accumulator"),
    ("recording", "eager.forwardprop:ForwardAccumulator._watch"),
    ("custom_gradient", "ops.custom_gradient:_eager_mode_decorator"),
    ("custom_gradient", "ops.custom_gradient:_graph_mode_decorator"),
    ("python_function", "ops.script_ops:_internal_py_func"),
    # NumPy's functions, which eager mode runs without an op.
    ("python_function", "ops.script_ops:py_func_common"),
    ("function_context", "eager.polymorphic_function.function_context:make_function_context"),
    ("finished_graph", "eager.polymorphic_function.concrete_function:ConcreteFunction.__call__"),
    ("finished_graph", "saved_model.function_deserialization:_call_concrete_function"),
    ("while_loop", "ops.while_loop:while_loop"),
    ("loop_check", "autograph.operators.control_flow:_verify_single_loop_var"),
    ("branch_check", "autograph.operators.control_flow:verify_single_cond_var"),
    ("branches", "ops.cond_v2:_make_indexed_slices_indices_types_match"),
    ("convert", "framework.ops:convert_to_tensor"),
    ("convert", "ops.ragged.ragged_tensor:convert_to_tensor_or_ragged_tensor"),
    ("stacked", "ops.array_ops:_autopacking_helper"),
    ("stacked", "framework.indexed_slices:convert_n_to_tensor_or_indexed_slices"),
    ("folded", "ops.functional_ops:foldl"),
    ("folded", "ops.functional_ops:foldr"),
    ("folded", "ops.functional_ops:scan"),
    ("mapped", "ops.map_fn:_result_value_flat_to_batchable"),
    ("signature_cast", "framework.tensor:TensorSpec.cast"),
    ("true_division", "ops.math_ops:_truediv_python3"),
    ("sparse_matmul", "ops.math_ops:sparse_matmul"),
    ("dropout", "ops.nn_ops:_dropout"),
    ("cross_entropy", "ops.nn_ops:softmax_cross_entropy_with_logits_v2_helper"),
    ("cross_entropy", "ops.nn_ops:sparse_softmax_cross_entropy_with_logits"),
    ("array_method", "ops.tensor_array_ops:TensorArray.write"),
    ("array_method", "ops.tensor_array_ops:TensorArray.scatter"),
    ("array_method", "ops.tensor_array_ops:TensorArray.unstack"),
    ("array_method", "ops.tensor_array_ops:TensorArray.split"),
)
_private = tuple((name, f"tensorflow.python.{symbol}") for name, symbol in _PRIVATE_TENSORFLOW)
SYMBOLS = (*_KERAS_AND_PUBLIC, *_private)

# ---- Code that checks dtypes itself, by the names of its modules -----------------------------

# Autocast decides by the code that requests a cast or a conversion. `check_recognized` warns of
# what a release has renamed.

# Keras casts inputs to a layer's dtype, and inputs and results of its ops to a common dtype.
# For a float32 layer inside autocast that would undo every cast, so these casts are skipped,
# and each op decides.
_KERAS_OPS = (
    "keras.src.backend.tensorflow.numpy",
    "keras.src.backend.tensorflow.nn",
    "keras.src.backend.tensorflow.linalg",
)
KERAS_UPCASTS = ("keras.src.dtype_policies.dtype_policy", *_KERAS_OPS)
NEEDS_KERAS_UPCAST = frozenset({"argmax", "argmin", "signbit"})
# Functions that cast a float32 result back to the dtype of their input. It stays float32, like
# the result of the underlying op.
RESULTS_CAST_BACK = {
    ("keras.src.backend.tensorflow.numpy", "mean"),
    ("keras.src.backend.tensorflow.numpy", "var"),
    ("keras.src.backend.tensorflow.nn", "moments"),
    ("tensorflow.python.ops.ctc_ops", "_ctc_loss_impl"),
    ("tensorflow.python.ops.ctc_ops", "ctc_loss_dense"),
    # What rules out accidental hits is float32's smallest number, and infinite in low
    # precision.
    ("tensorflow.python.ops.nn_impl", "_compute_sampled_logits"),
    ("tensorflow.python.ops.nn_impl", "moments"),
}
# Functions that check dtypes before they run an op. The first reject low precision, sum squares,
# which overflow float16 from 256 on, or are losses, whose gradients may cancel. The second reject
# mixed dtypes. The third declare an op's result to have the dtype of its inputs, which they
# therefore get in the op's dtype.
FLOAT32_FUNCTIONS = {
    ("tensorflow.python.ops.check_ops", "assert_near"),
    ("tensorflow.python.ops.clip_ops", "clip_by_norm"),
    ("tensorflow.python.ops.linalg.linalg_impl", "matrix_rank"),
    ("tensorflow.python.ops.linalg.linalg_impl", "pinv"),
    ("tensorflow.python.ops.linalg_ops", "norm"),
    ("tensorflow.python.ops.math_ops", "complex"),
    ("tensorflow.python.ops.nn_impl", "l2_normalize"),
    ("tensorflow.python.ops.nn_impl", "log_poisson_loss"),
    ("tensorflow.python.ops.nn_impl", "sigmoid_cross_entropy_with_logits"),
    ("tensorflow.python.ops.nn_impl", "weighted_cross_entropy_with_logits_v2"),
    ("tensorflow.python.ops.ragged.ragged_math_ops", "range"),
    ("tensorflow.python.ops.signal.fft_ops", "_irfft"),
    ("tensorflow.python.ops.signal.fft_ops", "_rfft"),
}
SAME_DTYPE_FUNCTIONS = {
    ("tensorflow.python.ops.array_ops", "one_hot"),
    ("tensorflow.python.ops.math_ops", "div_no_nan"),
    ("tensorflow.python.ops.math_ops", "multiply_no_nan"),
    ("tensorflow.python.ops.nn_ops", "_dropout"),
}
FUNCTIONS_OF_OPS = {("tensorflow.python.ops.ragged.ragged_math_ops", "matmul"): "MatMul"}
# The module whose conversions are for variables, which have a fixed dtype.
FIXED_DTYPES = "tensorflow.python.ops.resource_variable_ops"
# Modules between the code that requests a cast and TensorFlow's cast op.
IN_BETWEEN = (
    "tensorflow.python.autograph.",
    "tensorflow.python.ops.math_ops",
    "tensorflow.python.ops.weak_tensor_ops",
    "tensorflow.python.util.",
    "keras.src.backend.tensorflow.core",
    "keras.src.ops.",
    "keras.src.utils.traceback_utils",
    "tfamp.",
)
# Modules that read all attributes of an object to find what to save.
SAVING = ("keras.src.saving.", "tensorflow.python.trackable.")
LIBRARIES = ("tensorflow.", "keras.", "tf_keras.")


@functools.cache
def check_recognized() -> None:
    """Warns once of code in the tables that the installed releases do not have."""
    functions = RESULTS_CAST_BACK | FLOAT32_FUNCTIONS | SAME_DTYPE_FUNCTIONS | set(FUNCTIONS_OF_OPS)
    for module, name in sorted(functions):
        _check_name(module, name)
    ours = {name for name in IN_BETWEEN if name.startswith("tfamp.")}
    for module in sorted({*KERAS_UPCASTS, FIXED_DTYPES, *IN_BETWEEN} - ours):
        _check_name(module.rstrip("."))


@functools.cache
def check_saving() -> None:
    """Warns once if a module that saving is recognized by does not exist."""
    for module in SAVING:
        _check_name(module.rstrip("."))


def _check_name(module: str, name: str = "") -> None:
    symbol = f"{module}.{name}" if name else module
    try:
        owner = importlib.import_module(module)
        is_there = not name or name in vars(owner) or name in _inner_functions(owner)
    except ImportError:
        is_there = False
    if not is_there:
        lost = "what it calls is not recognized, and dtypes that it requests count as a user's."
        report(missing_symbol(symbol, _library_of(module)), lost)


def _inner_functions(module: ModuleType) -> set[str]:
    """Names of the functions that functions of a module define."""
    codes = [value.__code__ for value in vars(module).values() if inspect.isfunction(value)]
    inner = [const for code in codes for const in code.co_consts if inspect.iscode(const)]
    return {code.co_name for code in inner}


def level_of_user() -> int:
    """Stack level, seen from the caller, of the first frame outside of libraries."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_of_library(frame):
        level, frame = level + 1, frame.f_back
    return level


def _is_of_library(frame: FrameType) -> bool:
    # AutoGraph writes converted functions of a user to a temporary file.
    if "__autograph_generated_file" in frame.f_code.co_filename:
        return True
    return frame.f_globals.get("__name__", "").startswith(("tfamp.", *LIBRARIES))


# ---- Finding symbols -------------------------------------------------------------------------


def foreign_symbol(owner: Any, name: str, library: str) -> Any:
    """Returns an attribute of a module, class or object; an error names a missing one."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        where = getattr(owner, "__name__", type(owner).__name__)
        raise missing_symbol(f"{where}.{name}", library) from error


def missing_symbol(symbol: str, library: str) -> UnsupportedVersionError:
    """Returns the error to raise for a symbol that the installed release does not have."""
    version = importlib.import_module(library.lower()).__version__
    return UnsupportedVersionError(
        f"{symbol} is not in {library} {version}; tfamp was tested with {library} "
        f"{TESTED_VERSIONS[library]}. Install one of these, or a newer tfamp."
    )


def foreign(symbol: str) -> Any:
    """Returns a symbol, e.g. "keras.src.models.functional:Functional".

    `UnsupportedVersionError` names one that is missing. Symbols of packages that TensorFlow
    depends on, such as protobuf, count as TensorFlow's.
    """
    return getattr(*locate(symbol))


def locate(symbol: str) -> tuple[Any, str]:
    """Returns the module or class that holds a symbol, and the name it has there."""
    module, _, path = symbol.partition(":")
    library = _library_of(module)
    *classes, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError as error:
        raise missing_symbol(module, library) from error
    for class_name in classes:
        owner = foreign_symbol(owner, class_name, library)
    # getattr would find a method that was removed from a class in its parents.
    if name not in vars(owner):
        raise missing_symbol(symbol.replace(":", "."), library)
    return owner, name


def _library_of(module: str) -> str:
    return "Keras" if module.startswith("keras") else "TensorFlow"


def require_attribute(function: str, name: str) -> None:
    """Raises `UnsupportedVersionError` unless a function of a library still sets an attribute.

    For attributes that objects have only after a call of it.

    Args:
        function: A symbol, as of `foreign`.
        name: The attribute.
    """
    code = getattr(inspect.unwrap(foreign(function)), "__code__", None)
    if code is None or name not in code.co_names:
        library = _library_of(function)
        raise missing_symbol(f"{name}, as set by {function.replace(':', '.')},", library)


# ---- Patches of symbols ----------------------------------------------------------------------


class _Changes:
    """Serializes the changes of all symbols and methods, as several patches may replace one.

    A user may end at any time, as garbage collection closes a generator that holds a patch: while
    another change is under way in this thread, its symbols are put back after that.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._ended: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *exception: object) -> None:
        try:
            while self._depth == 1 and self._ended:
                self._ended.popleft()()
        finally:
            self._depth -= 1
            self._lock.release()

    def end(self, put_back: Callable[[], None]) -> None:
        with self:
            self._ended.append(put_back)


_changes = _Changes()
_reported: set[str] = set()


class Patch:
    """Replaces symbols while at least one user holds it.

    A replacement that another library has made on top stays, and our function below it only
    calls the original from then on.

    Args:
        optional: What is lost without symbols, by their name in the tables, as a sentence for a
            warning. A release may lack these; each is reported once.
        replacements: By name in the tables.

    Raises:
        ValueError: The tables do not have a name.
    """

    def __init__(
        self, optional: Mapping[str, str] | None = None, **replacements: Replacement
    ) -> None:
        names = {name for name, _ in SYMBOLS}
        for name in replacements:
            if name not in names:
                raise ValueError(
                    f"No symbol is listed under {name!r}: a patch replaces those under "
                    f"{', '.join(sorted(names))}. Add the symbol to the tables of patching.py."
                )
        self._optional = dict(optional or {})
        self._replacements = replacements
        self.users = 0
        self._replaced: list[_Replaced] = []

    def acquire(self) -> None:
        """Replaces the symbols for the first user; raises where a required one is missing."""
        # Outside of the lock: another thread may import a module, and need the lock to end a user.
        places = [] if self.users else self._places()
        with _changes:
            if not self.users:
                self._replaced = [_Replaced(*place) for place in places or self._places()]
            self.users += 1

    def _places(self) -> list[tuple[Any, str, Replacement]]:
        """Where the symbols are, with their replacements: all are found before one is replaced."""
        places = []
        for name, symbol in SYMBOLS:
            if name not in self._replacements:
                continue
            try:
                places.append((*locate(symbol), self._replacements[name]))
            except UnsupportedVersionError as error:
                if name not in self._optional:
                    raise
                report(error, self._optional[name])
        return places

    def release(self) -> None:
        """Restores the originals after the last user."""
        _changes.end(self._release)

    def _release(self) -> None:
        self.users -= 1
        if not self.users:
            for replaced in reversed(self._replaced):
                replaced.take_out()
            self._replaced = []

    def keep(self, wanted: bool) -> None:
        """Acquires or releases it for a single user; a repeated call changes nothing."""
        with _changes:
            if wanted != bool(self.users):
                (self.acquire if wanted else self.release)()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Returns a context that holds it."""
        self.acquire()
        try:
            yield
        finally:
            self.release()


def report(missing: UnsupportedVersionError, lost: str) -> None:
    """Warns once in a process of an optional symbol that is missing, and of what is lost."""
    text = f"{missing} Until then: {lost}"
    if text not in _reported:
        _reported.add(text)
        warnings.warn(text, TfampWarning, stacklevel=level_of_user())


def attempt(function: Callable[[], _Result], otherwise: _Result, lost: str) -> _Result:
    """The result of a function; if a symbol that it needs is missing another one, with a report."""
    try:
        return function()
    except UnsupportedVersionError as error:
        report(error, lost)
        return otherwise


def patched_here(**replacements: Replacement) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which functions replace symbols, for this thread only."""
    thread = threading.get_ident()

    def here(around: Replacement, original: Method, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(*args, **kwargs)
        return around(original, *args, **kwargs)

    ours = {name: functools.partial(here, around) for name, around in replacements.items()}
    return Patch(None, **ours).held()


class _Replaced:
    """A symbol or a method of one object, with the replacement.

    Attributes:
        before: What stood there, None where an object inherits the method. It changes when a
            replacement below is put back.
        original: What the replacement calls.
        ours: What stands there now.
        active: Whether it still does more than call the original.
    """

    def __init__(self, owner: Any, name: str, around: Replacement) -> None:
        self.owner, self.name, self.around, self.active = owner, name, around, True
        # Not getattr, which searches parent classes.
        self.before = _in_use(vars(owner).get(name))
        self.original = getattr(owner, name) if self.before is None else self.before
        self.ours = (
            around(lambda: self.original) if isinstance(around, type) else self._wrapper(around)
        )
        vars(self.ours)[_MARK] = self
        _put(owner, name, self.ours)

    def _wrapper(self, around: Replacement) -> Method:
        @functools.wraps(self.original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return self.original(*args, **kwargs)
            return around(self.original, *args, **kwargs)

        if self.name == "__init__":
            # Keras reads constructors with getfullargspec, which looks at this, not at
            # __wrapped__.
            wrapper.__signature__ = inspect.signature(self.original)  # type: ignore[attr-defined]
        return wrapper

    def put_back(self) -> None:
        """Takes the replacement out as soon as no other change is under way."""
        _changes.end(self.take_out)

    def take_out(self) -> None:
        """Takes the replacement out, below others of ours too; below foreign ones it goes quiet."""
        self.active = False
        above: _Replaced | None = None
        value = vars(self.owner).get(self.name)
        while (replaced := _replaced_by(value)) is not None:
            if replaced is self:
                break
            above, value = replaced, replaced.before
        else:
            return
        before = _in_use(self.before)
        if above is None:
            _put(self.owner, self.name, before)
            return
        above.before, above.original = before, self.original if before is None else before
        if hasattr(above.ours, "__wrapped__"):  # What `inspect` follows.
            above.ours.__wrapped__ = above.original


_MARK = "_tfamp_replaced"


def _replaced_by(value: Any) -> _Replaced | None:
    """Returns the replacement that a function or object belongs to; None for foreign ones."""
    replaced = getattr(value, _MARK, None)
    # A wrapper of another library may have copied our attributes.
    is_ours = isinstance(replaced, _Replaced) and replaced.ours is value
    return replaced if is_ours else None


def _in_use(value: Any) -> Any:
    """Returns the value below replacements that ended while another one was on top of them."""
    while (replaced := _replaced_by(value)) is not None and not replaced.active:
        value = replaced.before
    return value


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, (type, ModuleType)):
        setattr(owner, name, value)
    elif value is None:
        del vars(owner)[name]
    else:
        # Bypasses Layer.__setattr__: a replacement is not state to track or to save.
        vars(owner)[name] = value


# ---- Patches of single objects ---------------------------------------------------------------


def wrap_method(obj: Any, name: str, around: Replacement) -> Callable[[], None]:
    """Replaces a method of one object by `around(method, *args, **kwargs)`.

    Returns a function that undoes it; `unwrap_methods` does so for all methods of the object.
    """
    with _changes:
        return _Replaced(obj, name, around).put_back


def is_wrapped_by(obj: Any, name: str, function: Replacement) -> bool:
    """Whether `functools.partial(function, ...)` is around a method of one object."""
    replaced = _replaced_by(vars(obj).get(name))
    while replaced is not None:
        if replaced.active and getattr(replaced.around, "func", None) is function:
            return True
        replaced = _replaced_by(replaced.before)
    return False


def is_own_class_method(obj: Any, name: str) -> bool:
    """Whether a method of one object is its class's, but for our replacements."""
    method = getattr(obj, name)
    while (replaced := _replaced_by(method)) is not None:
        method = replaced.original
    return getattr(method, "__func__", method) is getattr(type(obj), name)


def wrapped_methods(obj: Any) -> dict[str, Method]:
    """Returns the replacements that an object has now, by name of the method."""
    return {name: value for name, value in vars(obj).items() if _replaced_by(value) is not None}


def unwrap_methods(obj: Any) -> None:
    """Restores the methods of an object, except where another replacement is on top of ours."""
    with _changes:
        for name, method in wrapped_methods(obj).items():
            while (replaced := _replaced_by(method)) is not None:
                method = replaced.before
            _put(obj, name, method)


def rewrap_methods(obj: Any, methods: dict[str, Method]) -> None:
    """Restores replacements that `wrapped_methods` returned."""
    with _changes:
        unwrap_methods(obj)
        vars(obj).update(methods)
