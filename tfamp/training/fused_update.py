"""Updates of Keras's SGD, Adam, AdamW, Lion and Adafactor, each in one pass over memory.

Keras writes an update as a dozen ops that each read and write whole tensors. For SGD
TensorFlow has fused ops with the same roundings. The other updates are compiled by XLA,
together for all variables of a device: TensorFlow's ResourceApplyAdam computes 1 - beta_2 in
float32, which for 0.999 is off by 1e-5. Each replica of a strategy updates its own copies.
Adafactor's means over rows, columns and whole variables are separate passes.

Variables that are not stored in float32 are read, updated in float32 and rounded in one
compiled pass, by every optimizer. XLA may contract a product and a sum into an FMA; here every
product is rounded by itself, so that a result does not depend on how its variables are stored.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.interop import keras_hooks
from tfamp.interop.keras_hooks import native, runs_tensorflow, slot
from tfamp.interop.tf_private import device_kind_of, xla_works
from tfamp.training.gradients import Gradients, dtype_name, is_next_value
from tfamp.training.rounding import FLOAT32, Chance, Form, form_of, widened

# Settings that no rule supports.
_UNRULED = ("amsgrad", "use_ema", "gradient_accumulation_steps")
# Strategies in which every replica updates its own copy of each variable.
_MIRRORS = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
)


def why_unruled(optimizer: keras.optimizers.Optimizer) -> str | None:
    """The name of an optimizer without a rule and its unsupported settings; None with a rule."""
    words = f"{optimizer.name} ({type(optimizer).__name__})"
    if _rule_of(optimizer) is None:
        return words
    given = [f"{name}={value!r}" for name in _UNRULED if (value := getattr(optimizer, name, None))]
    return f"{words} with {', '.join(given)}" if given else None


def fused_update(
    optimizer: keras.optimizers.Optimizer, gradients: Gradients, chance: Chance
) -> Gradients | None:
    """Applies dense gradients to float32 variables, and any to low-precision ones, in one pass.

    `chance` seeds the stochastic rounding. Returns the gradients that Keras has to apply to end
    the step, None if there are none; without a rule for the optimizer these are all. Without
    XLA only SGD updates float32 variables here.
    """
    rule = _rule_of(optimizer)
    copies = not tf.distribute.has_strategy() or isinstance(tf.distribute.get_strategy(), _MIRRORS)
    if rule is None or not copies or not runs_tensorflow() or why_unruled(optimizer):
        return gradients
    gradients = gradients.without_missing(optimizer)
    fits = [_fits(rule, *pair) for pair in gradients.pairs()]
    if optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm:
        if not (all(fits) or any(map(_is_low, gradients.variables))):
            return gradients  # The norm may be global.
        # Keras clips the rest a second time, without effect. It clips on each
        # replica, then sums.
        gradients = gradients.clipped_by(optimizer)
    fused, others = gradients.split(fits)
    if fused.values:
        _update_in_one_pass(optimizer, rule, fused.summed_over_replicas(), chance)
    if others.values:
        return others
    iterations = native(optimizer._iterations)
    # In the replica's own copy, like every other assignment here.
    one = tf.constant(1, iterations.dtype)
    tf.raw_ops.AssignAddVariableOp(resource=iterations.handle, value=one)
    return None


def _fits(rule: _Rule, gradient: Any, variable: Any) -> bool:
    target = native(variable)
    return _is_low(target) or (
        tf.is_tensor(gradient)
        and not isinstance(gradient, tf.IndexedSlices)
        and gradient.dtype != tf.float64
        and gradient.shape.is_fully_defined()
        and 0 not in gradient.shape
        and isinstance(target, tf.Variable)
        and target.dtype == tf.float32
        and getattr(variable, "constraint", None) is None
        and not is_next_value(variable)
        and (rule.run is not None or xla_works(target.device))
    )


def _is_low(target: Any) -> bool:
    """Whether a variable is not stored in float32."""
    return hasattr(target, "form")


def _update_in_one_pass(
    optimizer: keras.optimizers.Optimizer, rule: _Rule, gradients: Gradients, chance: Chance
) -> None:
    with tf.name_scope(optimizer.name):
        step = _step_of(optimizer, rule, gradients.divisor, chance)
        # A variable that is given twice is updated twice, in sequence.
        times: Counter[int] = Counter()
        updates: dict[tuple[str, bool, int], list[_Update]] = defaultdict(list)
        for gradient, variable in gradients.pairs():
            update = _update_of(optimizer, rule, gradient, variable)
            place = native(variable).device, _is_low(variable), times[update.number]
            times[update.number] += 1
            updates[place].append(update)
        for (device, low, _), its_own in updates.items():
            with tf.device(device):
                if rule.run is not None and not low:
                    rule.run(optimizer, step, its_own)
                    continue
                for group in _grouped(its_own, device):
                    _run_compiled(rule, step, group, device)
        for variable in gradients.variables:  # Only low-precision ones may have a constraint.
            if getattr(variable, "constraint", None) is not None:
                last = NUMBERS_OF_ONE * (keras_hooks.index_of(optimizer, variable) + 1) - 1
                cell = _Cell(variable.form, variable.handles, tf.constant(last))
                cell.store(variable.constraint(cell.load()), chance)


def _step_of(optimizer: Any, rule: _Rule, divisor: Any, chance: Chance) -> _Step:
    rate = tf.cast(optimizer.learning_rate, tf.float32)
    decay = _number(optimizer.weight_decay or 0.0) * rate
    divisor = _number(1.0 if divisor is None else divisor)
    if rule.run is not None:
        # SGD uses the gradient only times the rate: divide that scalar.
        rate, divisor = rate / divisor, _number(1.0)
    # Multiplying by the inverse is faster than dividing, and exact for powers of two. The
    # inverse of the largest ones is subnormal, hence two factors.
    first = tf.where(divisor > 2.0**64, _number(2.0**-64), 1.0)
    factors = first, 1.0 / (divisor * first)
    return _Step(factors, decay, rule.numbers(optimizer, rate), chance)


def _update_of(optimizer: Any, rule: _Rule, gradient: Any, variable: Any) -> _Update:
    target, index = native(variable), keras_hooks.index_of(optimizer, variable)
    slots = rule.slots(optimizer, index)
    low = _is_low(target)
    forms = (target.form if low else FLOAT32, *(form_of(dtype_name(each)) for each in slots))
    handles = [target.handles if low else [target.handle]]
    handles += [[native(each).handle] for each in slots]
    if isinstance(gradient, tf.IndexedSlices):
        # Keras sums the squares of repeated rows, not only the gradients.
        values = tf.cast(gradient.values, tf.float32)
        given = [
            tf.math.unsorted_segment_sum(each, gradient.indices, variable.shape[0])
            for each in (values, tf.square(values))
        ]
    else:
        gradient = tf.ensure_shape(gradient, variable.shape)
        # The compiled update casts low-precision gradients itself.
        wide = gradient.dtype == tf.float64 or (rule.run is not None and not low)
        given = [tf.cast(gradient, tf.float32) if wide else gradient]
    return _Update(given, keras_hooks.decays(optimizer, target), forms, handles, index)


# ---- Stored numbers --------------------------------------------------------------------

# Random streams reserved for each variable and its slots.
NUMBERS_OF_ONE = 16


class _Cell(NamedTuple):
    """A float32 tensor that is stored in resources; `number` selects its random stream."""

    form: Form
    handles: Sequence[Any]
    number: Any

    def load(self) -> Any:
        pairs = zip(self.handles, self.form.dtypes, strict=True)
        parts = (tf.raw_ops.ReadVariableOp(resource=h, dtype=dtype) for h, dtype in pairs)
        return self.form.decode(*parts)

    def store(self, value: Any, chance: Chance) -> None:
        parts = self.form.encode(value, lambda: chance.words(self.number, value))
        for handle, part in zip(self.handles, parts, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=part)


# ---- The rules -------------------------------------------------------------------------


class _Step(NamedTuple):
    """Scalars shared by the updates of one step, in float32 except the last."""

    factors: tuple[Any, Any]  # Both multiply the gradients.
    decay: Any  # The weight decay times the learning rate.
    numbers: Sequence[Any]  # The rule's own, from the optimizer and its learning rate.
    chance: Chance


class _Update(NamedTuple):
    """Arguments of the update of one variable."""

    gradient: Sequence[Any]  # If it was sparse, also its squares.
    decays: bool
    forms: tuple[Form, ...]  # The variable's and its slots'.
    handles: Sequence[Sequence[Any]]  # By form, then by stored part.
    number: int  # The variable's index in the optimizer.

    @property
    def layout(self) -> Any:
        """Key of updates that share a trace."""
        return tuple(each.dtype for each in self.gradient), self.decays, self.forms

    @property
    def kind(self) -> Any:
        """Key of updates that share a compiled program."""
        return self.gradient[0].shape, self.layout

    @property
    def bytes(self) -> int:
        """Bytes it reads and writes, with the float32 value of a variable stored in two parts."""
        stored = [dtype for form in self.forms for dtype in form.dtypes]
        sizes = [tf.as_dtype(each).size for each in (self.gradient[0].dtype, *stored)]
        parted = len(self.forms[0].dtypes) > 1
        return int(self.gradient[0].shape.num_elements()) * (sum(sizes) + 4 * parted)


def _sgd(optimizer: Any, step: _Step, updates: list[_Update]) -> None:
    """Updates float32 variables by TensorFlow's own ops."""
    rate, momentum = step.numbers
    for (gradient,), decays, _, handles, _ in updates:
        ((variable,), *slots) = handles
        if decays:
            value = tf.raw_ops.ReadVariableOp(resource=variable, dtype=tf.float32)
            tf.raw_ops.AssignSubVariableOp(resource=variable, value=value * step.decay)
        if not slots:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable, alpha=rate, delta=gradient)
            continue
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable,
            accum=slots[0][0],
            lr=rate,
            grad=gradient,
            momentum=momentum,
            use_nesterov=optimizer.nesterov,
        )


# The rules multiply with `times`, which rounds every product by itself.


def _momentum_slots(times: Any, numbers: Any, gradient: Any, squares: Any, mean: Any) -> Any:
    rate, momentum = numbers
    return (times(mean, momentum) - times(gradient, rate),)


def _nesterov_value(times: Any, numbers: Any, gradient: Any, value: Any, mean: Any) -> Any:
    rate, momentum = numbers
    return value + (times(mean, momentum) - times(gradient, rate))


def _adam_numbers(optimizer: Any, rate: Any) -> tuple[Any, ...]:
    step = tf.cast(optimizer.iterations + 1, tf.float32)
    bias_1 = 1 - tf.pow(_number(optimizer.beta_1), step)
    bias_2 = 1 - tf.pow(_number(optimizer.beta_2), step)
    # 1 - beta in Python's float64, rounded once, as Keras does.
    rests = _number(1 - optimizer.beta_1), _number(1 - optimizer.beta_2)
    return (rate * tf.sqrt(bias_2) / bias_1, *rests, _number(optimizer.epsilon))


def _adam_slots(
    times: Any, numbers: Any, gradient: Any, squares: Any, mean: Any, square: Any
) -> Any:
    _, rest_1, rest_2, _ = numbers
    mean = mean + times(gradient - mean, rest_1)
    return mean, square + times(squares - square, rest_2)


def _adam_value(times: Any, numbers: Any, gradient: Any, value: Any, mean: Any, square: Any) -> Any:
    rate, _, _, epsilon = numbers
    return value - times(mean, rate) / (tf.sqrt(square) + epsilon)


def _lion_numbers(optimizer: Any, rate: Any) -> tuple[Any, ...]:
    betas = _number(optimizer.beta_1), _number(optimizer.beta_2)
    return (rate, *betas, *(1.0 - beta for beta in betas))


def _lion_value(times: Any, numbers: Any, gradient: Any, value: Any, mean: Any) -> Any:
    rate, beta_1, _, rest_1, _ = numbers
    return value - times(rate, tf.sign(times(mean, beta_1) + times(gradient, rest_1)))


def _lion_slots(times: Any, numbers: Any, gradient: Any, squares: Any, mean: Any) -> Any:
    _, _, beta_2, _, rest_2 = numbers
    return (times(mean, beta_2) + times(gradient, rest_2),)


def _adafactor_numbers(optimizer: Any, rate: Any) -> tuple[Any, ...]:
    step = tf.cast(optimizer.iterations + 1, tf.float32)
    if not keras_hooks.rate_is_called(optimizer) and optimizer.relative_step:
        rate = tf.minimum(rate, 1.0 / tf.sqrt(step))
    beta_2 = 1.0 - tf.pow(step, _number(optimizer.beta_2_decay))
    settings = optimizer.epsilon_1, optimizer.epsilon_2, optimizer.clip_threshold
    return (tf.minimum(rate, 1.0 / tf.sqrt(step)), beta_2, 1.0 - beta_2, *map(_number, settings))


def _adafactor_own_slots(optimizer: Any, index: int) -> list[Any]:
    """Averages of rows, columns and their product; for a vector of its squares only."""
    rows, columns = (slot(optimizer, name, index) for name in ("r", "c"))
    factors = [rows, columns] if len(rows.shape) else []
    return [*factors, slot(optimizer, "v", index)]


def _adafactor_slots(times: Any, numbers: Any, gradient: Any, squares: Any, *slots: Any) -> Any:
    _, beta_2, rest, epsilon, *_ = numbers
    squares = squares + epsilon

    def averaged(old: Any, new: Any) -> Any:
        return times(beta_2, old) + times(rest, new)

    if len(slots) == 1:
        return (averaged(slots[0], squares),)
    rows = averaged(slots[0], tf.reduce_mean(squares, -1))
    columns = averaged(slots[1], tf.reduce_mean(squares, -2))
    return rows, columns, _of_factors(rows, columns)


def _adafactor_value(times: Any, numbers: Any, gradient: Any, value: Any, *slots: Any) -> Any:
    rate, _, _, _, least, threshold = numbers
    # Not read from the slot, where it may be rounded.
    update = gradient / tf.sqrt(slots[0] if len(slots) == 1 else _of_factors(*slots[:2]))
    size = tf.maximum(least, _root_mean_square(times, value))
    update = update / tf.maximum(1.0, _root_mean_square(times, update) / threshold)
    return value - times(times(size, rate), update)


def _of_factors(rows: Any, columns: Any) -> Any:
    shares = rows / tf.reduce_mean(rows, -1, keepdims=True)
    return shares[..., None] * columns[..., None, :]


def _root_mean_square(times: Any, value: Any) -> Any:
    return tf.sqrt(tf.reduce_mean(times(value, value)))


class _Rule(NamedTuple):
    """The update of one class of optimizers."""

    # Returns the optimizer's slots for the variable of an index.
    slots: Callable[[Any, int], list[Any]]
    # Returns the scalars that the updates of a step share, from the optimizer and its rate.
    numbers: Callable[[Any, Any], tuple[Any, ...]]
    # Return the next values of a variable and of its slots; the first one uses the old other.
    next_value: Callable[..., Any]
    next_slots: Callable[..., tuple[Any, ...]] | None = None
    value_first: bool = False
    # Runs TensorFlow's own op for float32 variables, for all updates on a device.
    run: Callable[[Any, _Step, list[_Update]], None] | None = None


def _slots(*names: str) -> Callable[[Any, int], list[Any]]:
    return lambda optimizer, index: [slot(optimizer, name, index) for name in names]


_DESCENT = _Rule(
    slots=_slots(),
    numbers=lambda optimizer, rate: (rate, _number(optimizer.momentum)),
    next_value=lambda times, numbers, gradient, value: value - times(gradient, numbers[0]),
    run=_sgd,
)
_MOMENTUM = _DESCENT._replace(
    slots=lambda optimizer, index: [optimizer.momentums[index]],
    next_value=lambda times, numbers, gradient, value, mean: value + mean,
    next_slots=_momentum_slots,
)
_NESTEROV = _MOMENTUM._replace(next_value=_nesterov_value)
_ADAM = _Rule(_slots("momentums", "velocities"), _adam_numbers, _adam_value, _adam_slots)
_LION = _Rule(_slots("momentums"), _lion_numbers, _lion_value, _lion_slots, value_first=True)
_ADAFACTOR = _Rule(_adafactor_own_slots, _adafactor_numbers, _adafactor_value, _adafactor_slots)
# By name, for messages.
RULED = ("SGD", "Adam", "AdamW", "Lion", "Adafactor")
_RULES = {
    keras.optimizers.Adam: _ADAM,
    keras.optimizers.AdamW: _ADAM,
    keras.optimizers.Lion: _LION,
    keras.optimizers.Adafactor: _ADAFACTOR,
}


# Methods of Keras's optimizers that compute an update.
_UPDATES = ("update_step", "apply", "apply_gradients", "stateless_apply")


def _rule_of(optimizer: keras.optimizers.Optimizer) -> _Rule | None:
    # Exact classes only: a subclass may compute something else, as may a method that was
    # replaced on the object.
    if not vars(optimizer).keys().isdisjoint(_UPDATES):
        return None
    if type(optimizer) is not keras.optimizers.SGD:
        return _RULES.get(type(optimizer))
    if optimizer.momentum == 0:
        return _DESCENT
    return _NESTEROV if optimizer.nesterov else _MOMENTUM


# ---- Compiled --------------------------------------------------------------------------

# Bytes of one call. On CPUs two calls that run at once fit into a shared cache.
_ROOM = 8 << 20
# Variables of one call. XLA's time grows faster than their number; one each makes more calls
# than small updates can pay for.
_MOST = 2


def _grouped(updates: list[_Update], device: str) -> list[list[_Update]]:
    """Updates by compiled call: all in one on GPUs.

    On CPUs the size of a call keeps values that were just written in a cache. A call is of one
    kind: the many of a kind in repeated layers are then compiled once.
    """
    if device_kind_of(device) != "cpu":
        return [updates]
    kinds: dict[Any, list[_Update]] = defaultdict(list)
    for each in updates:
        kinds[each.kind].append(each)
    groups: list[list[_Update]] = []
    for own in kinds.values():
        count = _MOST if own[0].bytes * _MOST <= _ROOM else 1
        groups += (own[i : i + count] for i in range(0, len(own), count))
    return groups


def _run_compiled(rule: _Rule, step: _Step, updates: list[_Update], device: str) -> None:
    parts = (_update_value, _update_slots) if rule.value_first else (_update_slots, _update_value)
    # The second part reads float32 slots back from memory that was just written. Low-precision
    # slots XLA would compute twice, so there each part is compiled by itself.
    wide = all(form is FLOAT32 for update in updates for form in update.forms[1:])
    layouts = tuple(update.layout for update in updates)
    on_cpu, compiles = device_kind_of(device) == "cpu", xla_works(device)
    gradients = [list(update.gradient) for update in updates]
    handles = [[list(each) for each in update.handles] for update in updates]
    numbers = tf.constant([update.number for update in updates], tf.int32)
    for each in [parts] if wide else [(part,) for part in parts]:
        compiled = _compiled(rule, each, layouts, len(step.numbers), on_cpu, compiles)
        compiled(step, gradients, handles, numbers)


# Traced once per layouts and compiled once per set of shapes. It takes handles, since a
# function of variables is traced again for each of their shapes.
@functools.lru_cache(maxsize=64)
def _compiled(
    rule: _Rule,
    parts: tuple[Callable[..., list[Any]], ...],
    layouts: tuple[Any, ...],
    scalars: int,
    on_cpu: bool,
    compiles: bool,
) -> Any:
    def update_all(step: _Step, gradients: Any, handles: Any, numbers: Any) -> list[Any]:
        results = []
        for i, (_, decays, forms) in enumerate(layouts):
            first = numbers[i] * NUMBERS_OF_ONE
            pairs = enumerate(zip(forms, handles[i], strict=True))
            cells = [_Cell(*pair, first + j) for j, pair in pairs]
            for part in parts:
                results += part(rule, step, gradients[i], decays, cells)
        # XLA on CPUs has a loop for each result, and recomputes intermediate values in it.
        return results if on_cpu else []

    scalar, count = tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.int64)
    step = _Step((scalar, scalar), scalar, (scalar,) * scalars, Chance(count, count))
    gradients = [[tf.TensorSpec(None, dtype) for dtype in dtypes] for dtypes, _, _ in layouts]
    resource = tf.TensorSpec([], tf.resource)
    handles = [[[resource] * len(form.dtypes) for form in forms] for _, _, forms in layouts]
    signature = [step, gradients, handles, tf.TensorSpec([len(layouts)], tf.int32)]
    return tf.function(update_all, signature, jit_compile=compiles, autograph=False)


def _update_value(rule: _Rule, step: _Step, given: Any, decays: bool, cells: Any) -> list[Any]:
    """Updates a variable; returns its next value if it is stored in several parts."""
    times = functools.partial(_product, step.chance.step)
    value, *slots = (cell.load() for cell in cells)
    if decays:
        # A weight may be infinite, as in a mask: do not multiply it by 0.
        value = tf.where(tf.equal(step.decay, 0.0), value, value - times(value, step.decay))
    new = rule.next_value(times, step.numbers, _unscaled(times, step, given[0]), value, *slots)
    cells[0].store(new, step.chance)
    return [new] if len(cells[0].form.dtypes) > 1 else []


def _update_slots(rule: _Rule, step: _Step, given: Any, decays: bool, cells: Any) -> list[Any]:
    if rule.next_slots is None:
        return []
    times = functools.partial(_product, step.chance.step)
    slots = [cell.load() for cell in cells[1:]]
    gradient = _unscaled(times, step, given[0])
    squares = times(gradient, gradient)
    if len(given) > 1:  # Scaled twice.
        squares = _unscaled(times, step, _unscaled(times, step, given[1]))
    new = rule.next_slots(times, step.numbers, gradient, squares, *slots)
    for each, cell in zip(new, cells[1:], strict=True):
        cell.store(each, step.chance)
    return []


def _unscaled(times: Any, step: _Step, gradient: Any) -> Any:
    first, second = step.factors
    return times(widened(gradient) * first, second)


def _product(step: Any, left: Any, right: Any) -> Any:
    """Multiplies without contraction into an FMA.

    The rounded product's bits are combined with the sign of the number of steps, which is zero,
    but not known to the compiler.
    """
    zero = tf.cast(tf.bitwise.right_shift(step, tf.constant(63, tf.int64)), tf.int32)
    bits = tf.bitcast(left * right, tf.int32)
    return tf.bitcast(tf.bitwise.bitwise_xor(bits, zero), tf.float32)


def _number(value: Any) -> Any:
    return tf.cast(value, tf.float32)
