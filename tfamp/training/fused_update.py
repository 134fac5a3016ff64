"""Updates of the optimizers of Keras in `FUSED_OPTIMIZERS`, each in one pass over memory.

Keras writes an update as a dozen ops that each read and write whole tensors. For SGD
TensorFlow has fused ops with the same roundings. The other updates are compiled by XLA,
together for all variables of a device: TensorFlow's ResourceApplyAdam computes 1 - beta_2 in
float32, which for 0.999 is off by 1e-5. Each replica of a strategy updates its own copies.
Adafactor's means over rows, columns and whole variables are separate passes.

Variables that are not stored in float32 are read, updated in float32 and rounded in one
compiled pass, by every optimizer. XLA may contract a product and a sum into an FMA; here every
product is rounded by itself, so that a result does not depend on how its variables are stored.

To add an update rule, write an `_UpdateRule` and enter it in `_UPDATE_RULES` under its class;
`FUSED_OPTIMIZERS`, the messages and the tests' list follow from there.

- **What it may keep.** `slots` returns the optimizer's own variables of the shape of a weight, or
  of a part of it, as Adafactor's rows: at most three, since every one has a random stream. They
  are read as float32 and stored in their dtype, which `weight_rounding` chooses. A scalar that
  all weights share, such as Nadam's product of momenta, is none of these: `advance` updates it.
- **When numbers are computed.** `numbers` runs once a step, in float32, before any variable is
  updated, and therefore with last step's scalars. It computes in the order in which Keras does;
  the numbers are arguments of the compiled programs and are not rounded again.
- **When values are rounded.** `next_value` and `next_slots` return float32. Each is stored, and
  rounded, once. Both get the same slots as far as they need: the first of the two reads the old
  ones, the second what the first stored, or computed where it is stored in 16 bits. Products go
  through `times`, so that every storage format has the same bits.
- **Who ends the step.** `fused_update`: it calls `advance` and counts the iteration, once, after
  all updates. Where Keras applies the rest of the gradients it counts, and advances, unless the
  rest is values that overwrite their variables, with which it does not.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import keras
import tensorflow as tf

from tfamp.core.device_names import device_kind_of
from tfamp.core.kinds import DType, Function, Handle, Nest, Optimizer, Tensor, Variable
from tfamp.interop import keras_hooks
from tfamp.interop.keras_hooks import as_tensor, native, runs_tensorflow, slot
from tfamp.interop.tf_private import is_compiled_by_xla, xla_works
from tfamp.training.gradients import Gradients, dtype_name, is_next_value
from tfamp.training.rounding import FLOAT32, Chance, Form, form_of, widened

# Settings that no rule supports.
_UNSUPPORTED = ("amsgrad", "use_ema", "gradient_accumulation_steps")
# Strategies in which every replica updates its own copies of variables.
_MIRRORS = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
)


def why_not_fused(optimizer: keras.optimizers.Optimizer) -> str | None:
    """The name of an optimizer without a rule, its unsupported settings; None with a rule."""
    words = f"{optimizer.name} ({type(optimizer).__name__})"
    if _rule_of(optimizer) is None:
        return words
    settings = {name: getattr(optimizer, name, None) for name in _UNSUPPORTED}
    unsupported = [f"{name}={value!r}" for name, value in settings.items() if value]
    return f"{words} with {', '.join(unsupported)}" if unsupported else None


def fused_update(
    optimizer: keras.optimizers.Optimizer, gradients: Gradients, chance: Chance
) -> Gradients | None:
    """Applies dense gradients to float32 variables, and any to low-precision ones, in one pass.

    `chance` seeds the stochastic rounding. Returns the gradients that Keras has to apply to end
    the step, None if there are none; without a rule for the optimizer these are all. Without
    XLA only SGD updates float32 variables here.
    """
    rule = _rule_of(optimizer)
    in_mirrors = isinstance(tf.distribute.get_strategy(), _MIRRORS)
    copies = not tf.distribute.has_strategy() or in_mirrors
    if rule is None or not copies or not runs_tensorflow() or why_not_fused(optimizer):
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
    # Keras does so with the rest of the weights, if there are any.
    only_next_values = fused.values and all(map(is_next_value, others.variables))
    if rule.advance is not None and (only_next_values or not others.values):
        rule.advance(optimizer)
    if others.values:
        return others
    iterations = native(keras_hooks.step_counter(optimizer))
    # In the replica's own copy, like every other assignment here.
    one = tf.constant(1, iterations.dtype)
    tf.raw_ops.AssignAddVariableOp(resource=iterations.handle, value=one)
    return None


def _fits(rule: _UpdateRule, gradient: Tensor, variable: Variable) -> bool:
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


def _is_low(target: Variable) -> bool:
    """Whether a variable is not stored in float32."""
    return hasattr(target, "form")


def _update_in_one_pass(
    optimizer: keras.optimizers.Optimizer, rule: _UpdateRule, gradients: Gradients, chance: Chance
) -> None:
    with tf.name_scope(optimizer.name):
        step = _step_of(optimizer, rule, gradients.divisor, chance)
        # A variable that comes twice is updated twice, in sequence.
        turns: Counter[int] = Counter()
        updates: dict[tuple[str, bool, int], list[_Update]] = defaultdict(list)
        for gradient, variable in gradients.pairs():
            update = _update_of(optimizer, rule, step, gradient, variable)
            place = native(variable).device, _is_low(variable), turns[update.number]
            turns[update.number] += 1
            updates[place].append(update)
        for (device, low, _), of_place in updates.items():
            with tf.device(device):
                if rule.run is not None and not low:
                    shifted = None if gradients.divisor is None else step.factors[0]
                    rule.run(optimizer, step, _shifted(of_place, shifted, device))
                    continue
                for group in _grouped(of_place, device):
                    _run_compiled(rule, step, group, device)
        for variable in gradients.variables:  # Only low-precision ones may have a constraint.
            if getattr(variable, "constraint", None) is not None:
                last = NUMBERS_OF_ONE * (keras_hooks.index_of(optimizer, variable) + 1) - 1
                cell = _Cell(variable.form, variable.handles, tf.constant(last))
                cell.store(variable.constraint(cell.load()), chance)


def _step_of(optimizer: Optimizer, rule: _UpdateRule, divisor: Tensor, chance: Chance) -> _Step:
    rate = tf.cast(optimizer.learning_rate, tf.float32)
    decay = _number(optimizer.weight_decay or 0.0) * rate
    divisor = _number(1.0 if divisor is None else divisor)
    if rule.run is not None:
        # SGD uses the gradient only times the rate: divide that scalar.
        first, rate = _shift_and_rate(rate, divisor)
        return _Step((first, _number(1.0)), decay, rule.numbers(optimizer, rate), chance)
    # Multiplying by the inverse is faster than dividing, and exact for powers of two. The
    # inverse of the largest ones is subnormal, hence two factors.
    first = tf.where(divisor > 2.0**64, _number(2.0**-64), 1.0)
    factors = first, 1.0 / (divisor * first)
    return _Step(factors, decay, rule.numbers(optimizer, rate), chance)


def _shift_and_rate(rate: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a power of two for the gradients, and the rate for gradients times it.

    Divided by a large scale, a rate is subnormal, which kernels flush to zero; by a small one it
    is infinite. Where it comes near either, 2**64 moves from the rate to the gradients or back.
    Otherwise the power is 1.
    """
    scaled = rate / divisor
    first = tf.where(scaled < 2.0**-64, _number(2.0**-64), 1.0)
    first = tf.where(scaled > 2.0**64, _number(2.0**64), first)
    return first, (rate / first) / divisor


def _update_of(
    optimizer: Optimizer, rule: _UpdateRule, step: _Step, gradient: Tensor, variable: Variable
) -> _Update:
    target, index = native(variable), keras_hooks.index_of(optimizer, variable)
    slots = rule.slots(optimizer, index)
    low = _is_low(target)
    slot_forms = [form_of(dtype_name(slot)) for slot in slots]
    forms = (target.form if low else FLOAT32, *slot_forms)
    handles = [target.handles if low else [target.handle]]
    handles += [[native(slot).handle] for slot in slots]
    if isinstance(gradient, tf.IndexedSlices):
        # Keras sums the squares of repeated rows, not only the gradients. Squares of scaled
        # ones may overflow, and differences may be subnormal.
        first, second = step.factors
        values = tf.cast(gradient.values, tf.float32) * first * second
        parts = [
            tf.math.unsorted_segment_sum(summed, gradient.indices, variable.shape[0])
            for summed in (values, tf.square(values))
        ]
    else:
        gradient = tf.ensure_shape(gradient, variable.shape)
        # The compiled update casts low-precision gradients itself.
        wide = gradient.dtype == tf.float64 or (rule.run is not None and not low)
        parts = [tf.cast(gradient, tf.float32) if wide else gradient]
    return _Update(parts, keras_hooks.decays(optimizer, target), forms, handles, index)


# ---- Stored numbers --------------------------------------------------------------------

# Random streams reserved for a variable and its slots: one for it, one for each of its at most
# three slots, the last one for its constraint. The other ones are spare.
NUMBERS_OF_ONE = 16


class _Cell(NamedTuple):
    """A float32 tensor that is stored in resources; `number` selects its random stream."""

    form: Form
    handles: Sequence[Handle]
    number: Tensor

    def load(self) -> Tensor:
        pairs = zip(self.handles, self.form.dtypes, strict=True)
        parts = (tf.raw_ops.ReadVariableOp(resource=h, dtype=dtype) for h, dtype in pairs)
        return self.form.decode(*parts)

    def store(self, value: Tensor, chance: Chance) -> None:
        parts = self.form.encode(value, lambda: chance.words(self.number, value))
        for handle, part in zip(self.handles, parts, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=part)


# ---- The rules -------------------------------------------------------------------------


class _Step(NamedTuple):
    """Scalars shared by the updates of one step, in float32 except the last."""

    factors: tuple[Tensor, Tensor]  # Both multiply the gradients, sparse ones before their sum.
    decay: Tensor  # The weight decay times the learning rate.
    numbers: Sequence[Tensor]  # Those of the rule, from the optimizer and its learning rate.
    chance: Chance


class _Layout(NamedTuple):
    """The properties that updates in one trace share."""

    dtypes: tuple[DType, ...]  # Of the gradient, and of its squares if it was sparse.
    decays: bool
    forms: tuple[Form, ...]


class _Update(NamedTuple):
    """Arguments of the update of one variable."""

    gradient: Sequence[Tensor]  # If it was sparse, also its squares; both are unscaled.
    decays: bool
    forms: tuple[Form, ...]  # The variable's and its slots'.
    handles: Sequence[Sequence[Handle]]  # By form, then by stored part.
    number: int  # The variable's index in the optimizer.

    @property
    def layout(self) -> _Layout:
        """Key of updates that share a trace."""
        return _Layout(tuple(part.dtype for part in self.gradient), self.decays, self.forms)

    @property
    def kind(self) -> tuple[tf.TensorShape, _Layout]:
        """Key of updates that share a compiled program."""
        return self.gradient[0].shape, self.layout

    @property
    def is_parted(self) -> bool:
        """Whether the variable is stored in two parts."""
        return len(self.forms[0].dtypes) > 1

    @property
    def bytes(self) -> int:
        """Bytes it reads and writes, a variable stored in two parts also as float32."""
        stored = [dtype for form in self.forms for dtype in form.dtypes]
        sizes = [tf.as_dtype(dtype).size for dtype in (self.gradient[0].dtype, *stored)]
        return int(self.gradient[0].shape.num_elements()) * (sum(sizes) + 4 * self.is_parted)


def _shifted(updates: list[_Update], factor: Tensor, device: str) -> list[_Update]:
    """Updates with their gradients times a factor, 1 but for extreme scales; None is 1.

    A CPU tests the factor, which saves a pass over the gradients. Elsewhere the host would wait
    for the test, and XLA makes the product a part of the update.
    """
    gradients = [update.gradient[0] for update in updates]
    if factor is None:
        return updates

    def products() -> list[Tensor]:
        return [gradient * factor for gradient in gradients]

    if device_kind_of(device) == "cpu" and not is_compiled_by_xla():
        gradients = tf.cond(tf.equal(factor, 1.0), lambda: gradients, products)
    else:
        gradients = products()
    pairs = zip(updates, keras.tree.flatten(gradients), strict=True)
    return [update._replace(gradient=[gradient]) for update, gradient in pairs]


def _sgd(optimizer: Optimizer, step: _Step, updates: list[_Update]) -> None:
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
_Times: TypeAlias = Callable[[Tensor, Tensor], Tensor]
# The scalars of a step, as the rule's `numbers` makes them.
_Numbers: TypeAlias = Sequence[Tensor]


def _momentum_slots(
    times: _Times, numbers: _Numbers, gradient: Tensor, squares: Tensor, mean: Tensor
) -> Tensor:
    rate, momentum = numbers
    return (times(mean, momentum) - times(gradient, rate),)


def _nesterov_value(
    times: _Times, numbers: _Numbers, gradient: Tensor, value: Tensor, mean: Tensor
) -> Tensor:
    rate, momentum = numbers
    return value + (times(mean, momentum) - times(gradient, rate))


def _adam_numbers(optimizer: Optimizer, rate: Tensor) -> tuple[Tensor, ...]:
    step = tf.cast(optimizer.iterations + 1, tf.float32)
    bias_1 = 1 - tf.pow(_number(optimizer.beta_1), step)
    bias_2 = 1 - tf.pow(_number(optimizer.beta_2), step)
    # 1 - beta in Python's float64, rounded once, as Keras does.
    rests = _number(1 - optimizer.beta_1), _number(1 - optimizer.beta_2)
    return (rate * tf.sqrt(bias_2) / bias_1, *rests, _number(optimizer.epsilon))


def _adam_slots(
    times: _Times,
    numbers: Sequence[Tensor],
    gradient: Tensor,
    squares: Tensor,
    mean: Tensor,
    square: Tensor,
) -> Tensor:
    _, rest_1, rest_2, _ = numbers
    mean = mean + times(gradient - mean, rest_1)
    return mean, square + times(squares - square, rest_2)


def _adam_value(
    times: _Times,
    numbers: Sequence[Tensor],
    gradient: Tensor,
    value: Tensor,
    mean: Tensor,
    square: Tensor,
) -> Tensor:
    rate, _, _, epsilon = numbers
    return value - times(mean, rate) / (tf.sqrt(square) + epsilon)


def _nadam_momenta(optimizer: Optimizer) -> tuple[Tensor, Tensor, Tensor]:
    """The momentum of a step and of the next one, and the product of all up to this step."""
    step = tf.cast(optimizer.iterations + 1, tf.float32)
    beta, decay, one = _number(optimizer.beta_1), _number(0.96), _number(1.0)
    momenta = [beta * (1.0 - 0.5 * tf.pow(decay, count)) for count in (step, step + one)]
    product = as_tensor(keras_hooks.momentum_product(optimizer))
    return momenta[0], momenta[1], product * beta * (1.0 - 0.5 * tf.pow(decay, step))


def _nadam_numbers(optimizer: Optimizer, rate: Tensor) -> tuple[Tensor, ...]:
    step = tf.cast(optimizer.iterations + 1, tf.float32)
    now, later, product = _nadam_momenta(optimizer)
    # In float32, as Keras does here: off by 1e-5 for 0.999, which its bias is off by, too.
    rests = 1 - _number(optimizer.beta_1), 1 - _number(optimizer.beta_2)
    bias = 1 - tf.pow(_number(optimizer.beta_2), step)
    ahead, here = later / (1 - product * later), (1 - now) / (1 - product)
    return (rate, *rests, _number(optimizer.epsilon), ahead, here, bias)


def _nadam_slots(
    times: _Times,
    numbers: _Numbers,
    gradient: Tensor,
    squares: Tensor,
    mean: Tensor,
    square: Tensor,
) -> Tensor:
    return _adam_slots(times, numbers[:4], gradient, squares, mean, square)


def _nadam_value(
    times: _Times,
    numbers: _Numbers,
    gradient: Tensor,
    value: Tensor,
    mean: Tensor,
    square: Tensor,
) -> Tensor:
    rate, _, _, epsilon, ahead, here, bias = numbers
    mean = times(mean, ahead) + times(gradient, here)
    return value - times(mean, rate) / (tf.sqrt(square / bias) + epsilon)


def _nadam_advance(optimizer: Optimizer) -> None:
    product = native(keras_hooks.momentum_product(optimizer))
    value = tf.cast(_nadam_momenta(optimizer)[2], product.dtype)
    tf.raw_ops.AssignVariableOp(resource=product.handle, value=value)


def _lion_numbers(optimizer: Optimizer, rate: Tensor) -> tuple[Tensor, ...]:
    betas = _number(optimizer.beta_1), _number(optimizer.beta_2)
    return (rate, *betas, *(1.0 - beta for beta in betas))


def _lion_value(
    times: _Times, numbers: _Numbers, gradient: Tensor, value: Tensor, mean: Tensor
) -> Tensor:
    rate, beta_1, _, rest_1, _ = numbers
    return value - times(rate, tf.sign(times(mean, beta_1) + times(gradient, rest_1)))


def _lion_slots(
    times: _Times, numbers: _Numbers, gradient: Tensor, squares: Tensor, mean: Tensor
) -> Tensor:
    _, _, beta_2, _, rest_2 = numbers
    return (times(mean, beta_2) + times(gradient, rest_2),)


def _adafactor_numbers(optimizer: Optimizer, rate: Tensor) -> tuple[Tensor, ...]:
    step = tf.cast(optimizer.iterations + 1, tf.float32)
    beta_2 = 1.0 - tf.pow(step, _number(optimizer.beta_2_decay))
    settings = optimizer.epsilon_1, optimizer.epsilon_2, optimizer.clip_threshold
    rate = tf.minimum(rate, 1.0 / tf.sqrt(step))  # Keras bounds it whatever `relative_step` is.
    return (rate, beta_2, 1.0 - beta_2, *map(_number, settings))


def _adafactor_averages(optimizer: Optimizer, index: int) -> list[Variable]:
    """Averages of rows, columns and their product; for a vector of its squares only."""
    rows, columns = (slot(optimizer, name, index) for name in ("r", "c"))
    factors = [rows, columns] if len(rows.shape) else []
    return [*factors, slot(optimizer, "v", index)]


def _adafactor_slots(
    times: _Times, numbers: _Numbers, gradient: Tensor, squares: Tensor, *slots: Tensor
) -> Tensor:
    _, beta_2, rest, epsilon, *_ = numbers
    squares = squares + epsilon

    def averaged(old: Tensor, new: Tensor) -> Tensor:
        return times(beta_2, old) + times(rest, new)

    if len(slots) == 1:
        return (averaged(slots[0], squares),)
    rows = averaged(slots[0], tf.reduce_mean(squares, -1))
    columns = averaged(slots[1], tf.reduce_mean(squares, -2))
    return rows, columns, _of_factors(rows, columns)


def _adafactor_value(
    times: _Times, numbers: _Numbers, gradient: Tensor, value: Tensor, *slots: Tensor
) -> Tensor:
    rate, _, _, _, least, threshold = numbers
    # Not read from the slot, where it may be rounded.
    update = gradient / tf.sqrt(slots[0] if len(slots) == 1 else _of_factors(*slots[:2]))
    size = tf.maximum(least, _root_mean_square(times, value))
    update = update / tf.maximum(1.0, _root_mean_square(times, update) / threshold)
    return value - times(times(size, rate), update)


def _of_factors(rows: Tensor, columns: Tensor) -> Tensor:
    shares = rows / tf.reduce_mean(rows, -1, keepdims=True)
    return shares[..., None] * columns[..., None, :]


def _root_mean_square(times: _Times, value: Tensor) -> Tensor:
    return tf.sqrt(tf.reduce_mean(times(value, value)))


_SlotsOf: TypeAlias = Callable[[Optimizer, int], list[Variable]]


class _UpdateRule(NamedTuple):
    """The update of one class of optimizers; the module says when each function runs.

    Every tensor that a function receives or returns here is float32, also of variables and slots
    that are stored in 16 bits. "Shaped as the weight" is of unknown shape in a trace, as one
    trace serves all weights: no function may read a static shape.

    Attributes:
        slots: `(optimizer, index)`: the optimizer and the weight's index in it. Returns the
            optimizer's own variables for that weight, at most three. Runs in Python at every
            trace of a step; creates nothing.
        numbers: `(optimizer, rate)`: the learning rate, a scalar, divided by the loss scale if
            there is a `run`. Returns the scalars of the step as a tuple of one length for all
            steps. `optimizer.iterations` is the number of steps before this one.
        next_value: `(times, numbers, gradient, value, *slots)`: `times(a, b)` is a rounded
            product; `numbers`, the scalars; `gradient`, clipped, dense and shaped as the weight,
            and unscaled, but for a rule with a `run`, whose rate is divided instead; `value`,
            the weight after its weight decay; `slots`, those of `slots` in its order. Returns
            the next weight, shaped as the weight.
        next_slots: `(times, numbers, gradient, squares, *slots)`: `squares`, of the gradient,
            or of sparse gradients the sum of the squares of repeated rows, which is not the
            square of their sum. Returns a tuple of the next slots, as many as `slots` has and
            each in its shape. None for a rule without slots.
        value_first: Whether `next_value` runs before `next_slots`. The first of the two receives
            the old slots; with False, `next_value` receives what `next_slots` returned, as it
            was stored.
        run: `(optimizer, step, updates)`: updates all float32 variables of one device by
            TensorFlow's own op and stores them, decay included; the other two functions then
            serve low variables only. None to compile the two.
        advance: `(optimizer)`: stores the scalars that the optimizer has for all weights, once,
            after all updates and before the iteration is counted. None if it has none.
    """

    slots: _SlotsOf
    numbers: Callable[[Optimizer, Tensor], tuple[Tensor, ...]]
    next_value: Callable[..., Tensor]
    next_slots: Callable[..., tuple[Tensor, ...]] | None = None
    value_first: bool = False
    run: Callable[[Optimizer, _Step, list[_Update]], None] | None = None
    advance: Callable[[Optimizer], None] | None = None


def _slots(*names: str) -> _SlotsOf:
    return lambda optimizer, index: [slot(optimizer, name, index) for name in names]


_DESCENT = _UpdateRule(
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
_ADAM = _UpdateRule(_slots("momentums", "velocities"), _adam_numbers, _adam_value, _adam_slots)
_NADAM = _UpdateRule(
    _slots("momentums", "velocities"),
    _nadam_numbers,
    _nadam_value,
    _nadam_slots,
    advance=_nadam_advance,
)
_LION = _UpdateRule(_slots("momentums"), _lion_numbers, _lion_value, _lion_slots, value_first=True)
_ADAFACTOR = _UpdateRule(
    _adafactor_averages, _adafactor_numbers, _adafactor_value, _adafactor_slots
)
# SGD's rule depends on its settings, see `_rule_of`.
_UPDATE_RULES: dict[type[Optimizer], _UpdateRule] = {
    keras.optimizers.SGD: _DESCENT,
    keras.optimizers.Adam: _ADAM,
    keras.optimizers.AdamW: _ADAM,
    keras.optimizers.Lion: _LION,
    keras.optimizers.Nadam: _NADAM,
    keras.optimizers.Adafactor: _ADAFACTOR,
}
# By name, for messages.
FUSED_OPTIMIZERS = tuple(kind.__name__ for kind in _UPDATE_RULES)


# Methods of Keras's optimizers that compute an update.
_UPDATES = ("update_step", "apply", "apply_gradients", "stateless_apply")


def _rule_of(optimizer: keras.optimizers.Optimizer) -> _UpdateRule | None:
    # Exact classes only: a subclass may compute something else, as may a method that was
    # replaced on the object.
    if not vars(optimizer).keys().isdisjoint(_UPDATES):
        return None
    if type(optimizer) is not keras.optimizers.SGD:
        return _UPDATE_RULES.get(type(optimizer))
    if optimizer.momentum == 0:
        return _DESCENT
    return _NESTEROV if optimizer.nesterov else _MOMENTUM


# ---- Compiled --------------------------------------------------------------------------

# Bytes of one call, so that on CPUs two calls that run at once fit into a shared cache. The
# number is a choice.
_ROOM = 8 << 20
# Variables of one call. XLA's time grows faster than their number; one each makes more calls
# than small updates can pay for.
_MOST = 2
# Calls on GPUs of variables in two parts, whose next values are in memory at once: a choice, of
# half a byte a parameter for a dozen compilations.
_PARTED_CALLS = 8


def _grouped(updates: list[_Update], device: str) -> list[list[_Update]]:
    """Updates by compiled call: on GPUs all in one, or a few for variables in two parts.

    On CPUs the size of a call keeps values that were just written in a cache. A call is of one
    kind: the many of a kind in repeated layers are then compiled once.
    """
    if device_kind_of(device) != "cpu":
        return _of_equal_bytes(updates) if updates[0].is_parted else [updates]
    kinds: dict[tuple[tf.TensorShape, _Layout], list[_Update]] = defaultdict(list)
    for update in updates:
        kinds[update.kind].append(update)
    groups: list[list[_Update]] = []
    for alike in kinds.values():
        count = _MOST if alike[0].bytes * _MOST <= _ROOM else 1
        groups += (alike[start : start + count] for start in range(0, len(alike), count))
    return groups


def _of_equal_bytes(updates: list[_Update]) -> list[list[_Update]]:
    """Updates in at most `_PARTED_CALLS` groups of about equal bytes, in order."""
    room = max(_ROOM, sum(update.bytes for update in updates) / _PARTED_CALLS)
    groups: dict[int, list[_Update]] = defaultdict(list)
    before = 0
    for update in updates:
        groups[int(before // room)].append(update)
        before += update.bytes
    return list(groups.values())


_Part: TypeAlias = Callable[..., list[Tensor]]


@dataclass(frozen=True)
class _ProgramKey:
    """Everything that the trace of a compiled update depends on.

    Attributes:
        rule: The optimizer's rule.
        parts: The parts of the update that it runs, one after the other.
        layouts: The layouts of its updates.
        scalars: How many numbers the rule shares in a step.
        on_cpu: Whether it runs on a CPU.
        compiles: Whether XLA compiles it.
    """

    rule: _UpdateRule
    parts: tuple[_Part, ...]
    layouts: tuple[_Layout, ...]
    scalars: int
    on_cpu: bool
    compiles: bool


def _run_compiled(rule: _UpdateRule, step: _Step, updates: list[_Update], device: str) -> None:
    both = (_update_slots, _update_value)
    if rule.value_first:
        both = (_update_value, _update_slots)
    # The second part reads float32 slots back from memory that was just written. Low-precision
    # slots XLA would compute twice, so there each part is compiled by itself.
    wide = all(form is FLOAT32 for update in updates for form in update.forms[1:])
    gradients = [list(update.gradient) for update in updates]
    handles = [[list(parts) for parts in update.handles] for update in updates]
    numbers = tf.constant([update.number for update in updates], tf.int32)
    for parts in [both] if wide else [(part,) for part in both]:
        key = _ProgramKey(
            rule=rule,
            parts=parts,
            layouts=tuple(update.layout for update in updates),
            scalars=len(step.numbers),
            on_cpu=device_kind_of(device) == "cpu",
            compiles=xla_works(device),
        )
        values = _compiled(key)(step, gradients, handles, numbers)
        if values and not key.on_cpu:
            parted = [update for update in updates if update.is_parted]
            _store_parts(parted, values, compiles=key.compiles)


def _store_parts(updates: list[_Update], values: list[Tensor], *, compiles: bool) -> None:
    """Stores the next values of variables in two parts, in a call of its own.

    On an H100 (TensorFlow 2.21) weights differed from float32 masters by up to three units in
    the last place where one XLA program read both parts and wrote them in place, and by nothing
    where that program was a part of a larger one. The cause is not known; here no program reads
    what it writes, and that has not run on a GPU yet.
    """
    for update, value in zip(updates, values, strict=True):
        parts = _encoder(update.forms[0], compiles)(value)
        for handle, part in zip(update.handles[0], parts, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=part)


@functools.cache
def _encoder(form: Form, compiles: bool) -> Function:
    """The function that makes the stored parts of a float32 tensor, which draws no numbers."""

    def encode(value: Tensor) -> tuple[Tensor, ...]:
        return form.encode(value, lambda: value)

    specs = [tf.TensorSpec(None, tf.float32)]
    return tf.function(encode, specs, jit_compile=compiles, autograph=False)


# Traced once per key and compiled once per set of shapes. 64 traces are a choice: a model needs
# one for each kind of its updates, a few.
@functools.lru_cache(maxsize=64)
def _compiled(key: _ProgramKey) -> Function:
    """The function that runs some updates, as `_run_compiled` calls it."""

    def update_all(
        step: _Step,
        gradients: Nest,
        handles: Nest,
        numbers: Tensor,
    ) -> list[Tensor]:
        results = []
        for i, layout in enumerate(key.layouts):
            stream = numbers[i] * NUMBERS_OF_ONE
            stored = enumerate(zip(layout.forms, handles[i], strict=True))
            cells = [_Cell(form, resources, stream + j) for j, (form, resources) in stored]
            for part in key.parts:
                results += part(key, step, gradients[i], layout.decays, cells)
        return results

    return tf.function(update_all, _signature(key), jit_compile=key.compiles, autograph=False)


def _signature(key: _ProgramKey) -> list[Nest]:
    """The arguments of a compiled update, as specs.

    It takes handles, since a function of variables is traced again for each of their shapes.
    """
    scalar, count = tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.int64)
    resource = tf.TensorSpec([], tf.resource)
    step = _Step((scalar, scalar), scalar, (scalar,) * key.scalars, Chance(count, count))
    gradients, handles = [], []
    for layout in key.layouts:
        gradients.append([tf.TensorSpec(None, dtype) for dtype in layout.dtypes])
        handles.append([[resource] * len(form.dtypes) for form in layout.forms])
    return [step, gradients, handles, tf.TensorSpec([len(key.layouts)], tf.int32)]


def _update_value(
    key: _ProgramKey, step: _Step, gradient: Sequence[Tensor], decays: bool, cells: Sequence[_Cell]
) -> list[Tensor]:
    """Updates a variable; returns its next value if it is stored in two parts.

    On GPUs it is stored by `_store_parts`. XLA on CPUs has a loop for each result: a returned
    value keeps it from being computed in both parts' loops.
    """
    times = functools.partial(_product, step.chance.step)
    value, *slots = (cell.load() for cell in cells)
    if decays:
        # A weight may be infinite, as in a mask: do not multiply it by 0.
        value = tf.where(tf.equal(step.decay, 0.0), value, value - times(value, step.decay))
    unscaled = _unscaled(times, step, gradient)
    new = key.rule.next_value(times, step.numbers, unscaled, value, *slots)
    is_parted = len(cells[0].form.dtypes) > 1
    if key.on_cpu or not is_parted:
        cells[0].store(new, step.chance)
    return [new] if is_parted else []


def _update_slots(
    key: _ProgramKey, step: _Step, gradient: Sequence[Tensor], decays: bool, cells: Sequence[_Cell]
) -> list[Tensor]:
    next_slots = key.rule.next_slots
    if next_slots is None:
        return []
    times = functools.partial(_product, step.chance.step)
    slots = [cell.load() for cell in cells[1:]]
    unscaled = _unscaled(times, step, gradient)
    squares = gradient[1] if len(gradient) > 1 else times(unscaled, unscaled)
    new = next_slots(times, step.numbers, unscaled, squares, *slots)
    for cell, value in zip(cells[1:], new, strict=True):
        cell.store(value, step.chance)
    return []


def _unscaled(times: _Times, step: _Step, gradient: Sequence[Tensor]) -> Tensor:
    """Returns the unscaled gradient, which the sum of sparse rows is already."""
    if len(gradient) > 1:
        return gradient[0]
    first, second = step.factors
    return times(widened(gradient[0]) * first, second)


def _product(step: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Multiplies without contraction into an FMA.

    The rounded product's bits are combined with the sign of the number of steps, which is zero,
    but not known to the compiler.
    """
    zero = tf.cast(tf.bitwise.right_shift(step, tf.constant(63, tf.int64)), tf.int32)
    bits = tf.bitcast(left * right, tf.int32)
    return tf.bitcast(tf.bitwise.bitwise_xor(bits, zero), tf.float32)


def _number(value: Tensor) -> Tensor:
    return tf.cast(value, tf.float32)
