"""Updates of Keras's SGD, Adam, AdamW, Lion and Adafactor, each in one pass over a variable.

Keras writes an update as a dozen ops, each of which reads and writes whole tensors. For SGD
TensorFlow has ops that do it in one, with the same roundings. The others are compiled by XLA
instead, for all variables of a device together: TensorFlow's ResourceApplyAdam computes 1 - beta_2
in float32, which for 0.999 is off by 1e-5. Each replica of a strategy updates its own copies.
Adafactor's means of rows, of columns and of a whole variable are passes of their own.

Variables that are stored in another form than float32 are updated so by all of them: read, updated
in float32 and rounded in one compiled pass. XLA may turn a product and a sum into one operation
with one rounding; here every product is rounded by itself, so that a result is the same to the last
bit in whatever form its variables are stored.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.interop import keras_hooks
from tfamp.interop.keras_hooks import native, runs_tensorflow, slot
from tfamp.interop.tf_private import device_kind_of, xla_works
from tfamp.training.gradients import Gradients, dtype_name, is_next_value, several_replicas
from tfamp.training.rounding import FLOAT32, Chance, Form, form_of, widened

# What no rule computes.
_UNRULED = ("amsgrad", "use_ema", "gradient_accumulation_steps")
# Strategies in which every replica has a copy of each variable, and makes the same update of it.
_MIRRORS = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
)


def why_unruled(optimizer: keras.optimizers.Optimizer) -> str | None:
    """An optimizer that no rule updates, in words; None where a rule does."""
    words = f"{optimizer.name} ({type(optimizer).__name__})"
    if _rule_of(optimizer) is None:
        return words
    given = [f"{name}={value!r}" for name in _UNRULED if (value := getattr(optimizer, name, None))]
    return f"{words} with {', '.join(given)}" if given else None


def fused_update(
    optimizer: keras.optimizers.Optimizer, gradients: Gradients, chance: Chance
) -> Gradients | None:
    """Applies dense gradients to float32 variables, and all to what is stored low, in one pass.

    `chance` decides how what is stored in fewer bits is rounded. Returns the gradients of the other
    variables, which Keras is to apply and which end the step; None where there are none. All are
    left to Keras where the optimizer has no rule. Without XLA only SGD updates float32 variables
    here.
    """
    rule = _rule_of(optimizer)
    copies = not tf.distribute.has_strategy() or isinstance(tf.distribute.get_strategy(), _MIRRORS)
    if rule is None or not copies or not runs_tensorflow() or why_unruled(optimizer):
        return gradients
    # Warns of gradients that are None, as the optimizer does.
    values, variables = keras_hooks.without_missing(
        optimizer, gradients.values, gradients.variables
    )
    gradients = replace(gradients, values=values, variables=variables, checked=None)
    fits = [_fits(rule, *pair) for pair in gradients.pairs()]
    if optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm:
        if not (all(fits) or any(map(_is_low, variables))):
            return gradients  # The norm may be that of all gradients together.
        # Keras clips what is left to it once more, which changes nothing then. It clips what each
        # replica has, and sums then.
        gradients = gradients.unscaled()
        gradients = replace(gradients, values=keras_hooks.clipped(optimizer, gradients.values))
    own = _chosen(gradients, fits, True)
    if several_replicas() and not own.summed:
        own = own.summed_over_replicas()
    if own.values:
        _update_in_one_pass(optimizer, rule, own, chance)
    if not all(fits):
        return _chosen(gradients, fits, False)
    iterations = native(optimizer._iterations)
    # In the replica's own copy, as all that is assigned here.
    tf.raw_ops.AssignAddVariableOp(
        resource=iterations.handle, value=tf.constant(1, iterations.dtype)
    )
    return None


def _chosen(gradients: Gradients, choice: Sequence[bool], chosen: bool) -> Gradients:
    pairs = [pair for pair, each in zip(gradients.pairs(), choice, strict=True) if each is chosen]
    return replace(gradients, values=[g for g, _ in pairs], variables=[v for _, v in pairs])


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
    """Whether it stands for a variable that is stored in another form."""
    return hasattr(target, "form")


def _update_in_one_pass(
    optimizer: keras.optimizers.Optimizer, rule: _Rule, gradients: Gradients, chance: Chance
) -> None:
    with tf.name_scope(optimizer.name):
        step = _step_of(optimizer, rule, gradients.divisor, chance)
        # A variable that is given twice is updated twice, one update after the other.
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
        for variable in gradients.variables:  # Only low ones may have a constraint.
            if getattr(variable, "constraint", None) is not None:
                last = NUMBERS_OF_ONE * (keras_hooks.index_of(optimizer, variable) + 1) - 1
                cell = _Cell(variable.form, variable.handles, tf.constant(last))
                cell.store(variable.constraint(cell.load()), chance)


def _step_of(optimizer: Any, rule: _Rule, divisor: Any, chance: Chance) -> _Step:
    rate = tf.cast(optimizer.learning_rate, tf.float32)
    decay = _number(optimizer.weight_decay or 0.0) * rate
    divisor = _number(1.0 if divisor is None else divisor)
    if rule.run is not None:
        # A scalar is divided instead of the gradient, which SGD uses only times the rate.
        rate, divisor = rate / divisor, _number(1.0)
    # A product with the inverse is faster than a division of each gradient, and the same for powers
    # of two. The inverse of the largest ones is not a normal number: there are two factors.
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
        # Of a row that is given more than once Keras adds up the squares, not only the gradients.
        values = tf.cast(gradient.values, tf.float32)
        given = [
            tf.math.unsorted_segment_sum(each, gradient.indices, variable.shape[0])
            for each in (values, tf.square(values))
        ]
    else:
        gradient = tf.ensure_shape(gradient, variable.shape)
        # Low gradients are cast in the compiled update where there is one, not all beforehand.
        wide = gradient.dtype == tf.float64 or (rule.run is not None and not low)
        given = [tf.cast(gradient, tf.float32) if wide else gradient]
    return _Update(given, keras_hooks.decays(optimizer, target), forms, handles, index)


# ---- Numbers that are stored ---------------------------------------------------------------------

# Every variable of an optimizer, its slots with it, has so many numbers of its own.
NUMBERS_OF_ONE = 16


class _Cell(NamedTuple):
    """A float32 number that is stored in resources.

    `chance` and its own number among all of a step decide how it is rounded.
    """

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


# ---- The rules -----------------------------------------------------------------------------------


class _Step(NamedTuple):
    """What the updates of one step have in common: scalars, in float32 but for the last."""

    factors: tuple[Any, Any]  # Of the gradients.
    decay: Any  # The weight decay times the learning rate.
    numbers: Sequence[Any]  # What the rule makes of the optimizer and its learning rate.
    chance: Chance


class _Update(NamedTuple):
    """What one variable is updated with."""

    gradient: Sequence[Any]  # And, if it was sparse, its squares.
    decays: bool
    forms: tuple[Form, ...]  # Of the variable and of its slots.
    handles: Sequence[Sequence[Any]]  # Of each, those of what is stored for it.
    number: int  # The variable's own among the optimizer's.

    @property
    def layout(self) -> Any:
        """What is traced alike."""
        return tuple(each.dtype for each in self.gradient), self.decays, self.forms

    @property
    def kind(self) -> Any:
        """What is compiled alike."""
        return self.gradient[0].shape, self.layout

    @property
    def bytes(self) -> int:
        """What it reads and writes, with the float32 number of a variable of two parts."""
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


# What follows computes with `times`, which rounds every product by itself.


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
    """The averages of rows, of columns and their product; of a vector its squares' alone."""
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
    # The product is not read: where it is stored low it is rounded.
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

    # The optimizer's slots of the variable of an index.
    slots: Callable[[Any, int], list[Any]]
    # Scalars that all updates of a step have in common, of the optimizer and its learning rate.
    numbers: Callable[[Any, Any], tuple[Any, ...]]
    # The next values of a variable and of its slots, and which is computed first, of the old other.
    next_value: Callable[..., Any]
    next_slots: Callable[..., tuple[Any, ...]] | None = None
    value_first: bool = False
    # Where TensorFlow has an op for float32 variables: called with the optimizer, the step and all
    # updates on a device.
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


def _rule_of(optimizer: keras.optimizers.Optimizer) -> _Rule | None:
    # As Keras ships them: a subclass may compute something else.
    if type(optimizer) is not keras.optimizers.SGD:
        return _RULES.get(type(optimizer))
    if optimizer.momentum == 0:
        return _DESCENT
    return _NESTEROV if optimizer.nesterov else _MOMENTUM


# ---- Compiled ------------------------------------------------------------------------------------

# Bytes that a cache which cores share holds of one call, while another one runs beside it.
_ROOM = 8 << 20


def _grouped(updates: list[_Update], device: str) -> list[list[_Update]]:
    """Updates that are computed together: on GPUs all of them, on CPUs what caches hold.

    What is computed of numbers that were just written then finds them in a cache. Groups of the
    same kinds, as layers that repeat have them, are compiled once.
    """
    if device_kind_of(device) != "cpu":
        return [updates]
    kinds: dict[Any, list[_Update]] = defaultdict(list)
    for each in updates:
        kinds[each.kind].append(each)
    groups: list[list[_Update]] = []
    room = 0
    for each in itertools.chain(*kinds.values()):
        if not groups or each.bytes > room:
            groups.append([])
            room = _ROOM
        groups[-1].append(each)
        room -= each.bytes
    return groups


def _run_compiled(rule: _Rule, step: _Step, updates: list[_Update], device: str) -> None:
    parts = (_update_value, _update_slots) if rule.value_first else (_update_slots, _update_value)
    # What is computed of float32 slots takes them from the memory they were just written to. Low
    # ones XLA would compute a second time, so what is computed of them is compiled by itself.
    wide = all(form is FLOAT32 for update in updates for form in update.forms[1:])
    layouts = tuple(update.layout for update in updates)
    on_cpu, compiles = device_kind_of(device) == "cpu", xla_works(device)
    gradients = [list(update.gradient) for update in updates]
    handles = [[list(each) for each in update.handles] for update in updates]
    numbers = tf.constant([update.number for update in updates], tf.int32)
    for each in [parts] if wide else [(part,) for part in parts]:
        compiled = _compiled(rule, each, layouts, len(step.numbers), on_cpu, compiles)
        compiled(step, gradients, handles, numbers)


# Traced once for so many variables, and compiled once per set of shapes. It takes handles: a
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
        halved = []
        for i, (_, decays, forms) in enumerate(layouts):
            first = numbers[i] * NUMBERS_OF_ONE
            pairs = enumerate(zip(forms, handles[i], strict=True))
            cells = [_Cell(*pair, first + j) for j, pair in pairs]
            for part in parts:
                halved += part(rule, step, gradients[i], decays, cells)
        # XLA on CPUs has a loop for each result, and repeats in it what has no result of its own.
        return halved if on_cpu else []

    scalar, count = tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.int64)
    step = _Step((scalar, scalar), scalar, (scalar,) * scalars, Chance(count, count))
    gradients = [[tf.TensorSpec(None, dtype) for dtype in dtypes] for dtypes, _, _ in layouts]
    resource = tf.TensorSpec([], tf.resource)
    handles = [[[resource] * len(form.dtypes) for form in forms] for _, _, forms in layouts]
    signature = [step, gradients, handles, tf.TensorSpec([len(layouts)], tf.int32)]
    return tf.function(update_all, signature, jit_compile=compiles, autograph=False)


def _update_value(rule: _Rule, step: _Step, given: Any, decays: bool, cells: Any) -> list[Any]:
    """Updates a variable; returns its next value if that is stored in more than one part."""
    times = functools.partial(_product, step.chance.step)
    value, *slots = (cell.load() for cell in cells)
    if decays:
        # Not multiplied by 0: a weight may be infinite, as in a mask.
        decayed = value - times(value, step.decay)
        value = tf.where(tf.equal(step.decay, 0.0), value, decayed)
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

    The compiler cannot know that the number of steps is not negative, so it keeps the rounded
    product, whose bits are combined with zeros.
    """
    zero = tf.cast(tf.bitwise.right_shift(step, tf.constant(63, tf.int64)), tf.int32)
    bits = tf.bitcast(left * right, tf.int32)
    return tf.bitcast(tf.bitwise.bitwise_xor(bits, zero), tf.float32)


def _number(value: Any) -> Any:
    return tf.cast(value, tf.float32)
