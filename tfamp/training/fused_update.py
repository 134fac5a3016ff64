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
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.interop import keras_optimizers
from tfamp.interop.keras_hooks import native, runs_tensorflow
from tfamp.interop.keras_optimizers import slot
from tfamp.interop.tf_private import device_kind_of, xla_works
from tfamp.training.gradients import Gradients, dtype_name, grouped, is_next_value, several_replicas
from tfamp.training.rounding import FLOAT32, Chance, Form, form_of, wide_form, widened

# What `Optimizer.apply` consists of: an optimizer with one of its own does something else.
_REPLACED = (
    "apply",
    "update_step",
    "_apply_weight_decay",
    "_backend_apply_gradients",
    "_backend_update_step",
)
# What no rule computes.
_UNRULED = ("amsgrad", "use_ema", "gradient_accumulation_steps")
# Strategies in which every replica has a copy of each variable, and makes the same update of it.
_MIRRORS = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
)


def has_fused_update(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether some variables of an optimizer can be updated in one pass, with Keras's result."""
    return (
        runs_tensorflow()
        and unruled(optimizer) is None
        and (not tf.distribute.has_strategy() or isinstance(tf.distribute.get_strategy(), _MIRRORS))
        and tf.compat.v1.executing_eagerly_outside_functions()
    )


def unruled(optimizer: keras.optimizers.Optimizer) -> str | None:
    """An optimizer of which there is no rule, in words; None where there is one."""
    rule = _rule_of(optimizer)
    words = f"{optimizer.name} ({type(optimizer).__name__})"
    if rule is None:
        return words
    numbers = {name: getattr(optimizer, name) for name in rule.settings}
    other = {name: value for name, value in numbers.items() if not isinstance(value, (int, float))}
    features = {name: getattr(optimizer, name, None) for name in _UNRULED}
    other |= {name: value for name, value in features.items() if value}
    own = [f"a method {name} of its own" for name in _REPLACED if name in vars(optimizer)]
    given = [*(f"{name}={value!r}" for name, value in other.items()), *own]
    return f"{words} with {', '.join(given)}" if given else None


def fused_update(
    optimizer: keras.optimizers.Optimizer, gradients: Gradients, chance: Chance | None = None
) -> Gradients | None:
    """Applies dense gradients to float32 variables, and all to what is stored low, in one pass.

    `chance` decides how what is stored in fewer bits is rounded. Returns the gradients of the other
    variables, which are to be applied as Keras does and end the step; None where there are none.
    Without XLA only SGD has float32 variables that are updated here.
    """
    # Warns of gradients that are None, as the optimizer does.
    values, variables = keras_optimizers.without_missing(
        optimizer, gradients.values, gradients.variables
    )
    gradients = replace(gradients, values=values, variables=variables, checked=None)
    rule = _rule_of(optimizer)
    fits = [_fits(rule, *pair) for pair in gradients.pairs()]
    if optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm:
        if not (all(fits) or any(map(_is_low, variables))):
            return gradients  # The norm may be that of all gradients together.
        # Keras clips what is left to it once more, which changes nothing then.
        gradients = gradients.unscaled()
        # Keras clips what each replica has, and sums then.
        gradients = replace(gradients, values=keras_optimizers.clipped(optimizer, gradients.values))
    if rule is not None and any(fits):
        own = _chosen(gradients, fits, True)
        if several_replicas() and not own.summed:
            own = own.summed_over_replicas()
        sparse = [isinstance(value, tf.IndexedSlices) for value in own.values]
        if not all(sparse):
            _update_in_one_pass(optimizer, rule, _chosen(own, sparse, False), chance)
        if any(sparse):
            _update_in_one_pass(optimizer, rule, _chosen(own, sparse, True).unscaled(), chance)
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
    values, variables = (list(each) for each in zip(*pairs, strict=True))
    return replace(gradients, values=values, variables=variables)


def _fits(rule: _Rule | None, gradient: Any, variable: Any) -> bool:
    target = native(variable)
    return rule is not None and (
        _is_low(target)
        or (
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
    )


def _dense(gradient: Any, variable: Any) -> tuple[Any, Any]:
    """A gradient as a compiled update of a variable takes it, and its squares if they are not its.

    Of a row that is given more than once Keras adds up the squares, not only the gradients.
    """
    if isinstance(gradient, tf.IndexedSlices):
        values, rows = tf.cast(gradient.values, tf.float32), variable.shape[0]
        both = (values, tf.square(values))
        gradient, squares = (
            tf.math.unsorted_segment_sum(each, gradient.indices, rows) for each in both
        )
        return gradient, squares
    gradient = tf.ensure_shape(gradient, variable.shape)
    return tf.cast(gradient, tf.float32) if gradient.dtype == tf.float64 else gradient, None


def _is_low(target: Any) -> bool:
    """Whether it stands for a variable that is stored in another form."""
    return getattr(target, "form", FLOAT32) is not FLOAT32


def _update_in_one_pass(
    optimizer: keras.optimizers.Optimizer, rule: _Rule, gradients: Gradients, chance: Chance | None
) -> None:
    with tf.name_scope(optimizer.name):
        factors, rate = _factors(gradients.divisor), tf.cast(optimizer.learning_rate, tf.float32)
        weight_decay = optimizer.weight_decay or 0.0
        decay = _number(weight_decay) * rate
        if rule.run is not None and factors:
            # A scalar is divided instead of the gradient, which SGD uses only times the rate.
            rate, factors = rate / tf.cast(gradients.divisor, tf.float32), ()
        if chance is None:  # Nothing is rounded; but the number of steps is needed.
            steps = tf.convert_to_tensor(native(optimizer._iterations))
            chance = Chance(tf.zeros_like(steps), steps)
        step = _Step(factors, decay, rule.numbers(optimizer, rate), chance)
        # A variable that is given twice is updated twice, one update after the other.
        times: Counter[int] = Counter()
        updates: dict[tuple[str, bool, int], list[_Update]] = defaultdict(list)
        for gradient, variable in gradients.pairs():
            # Low gradients are cast in the compiled update where there is one, not all beforehand.
            squares = None
            if _is_low(variable):
                gradient, squares = _dense(gradient, variable)
            elif rule.run is not None:
                gradient = tf.cast(gradient, tf.float32)
            update = _update_of(optimizer, rule, gradient, squares, variable)
            place = native(variable).device, _is_low(variable), times[update.number]
            times[update.number] += 1
            updates[place].append(update)
        for (device, low, _), its_own in updates.items():
            with tf.device(device):
                if rule.run is not None and not low:
                    rule.run(optimizer, step, its_own)
                    continue
                for group in grouped(its_own, device, lambda u: u.kind, lambda u: u.bytes):
                    _run_compiled(rule, step, group, device)
        for variable in gradients.variables:
            if getattr(variable, "constraint", None) is not None:
                _constrain(variable, keras_optimizers.index_of(optimizer, variable), chance)


def _constrain(target: Any, index: int, chance: Chance) -> None:
    """Applies the constraint of a variable that is stored low, behind its update."""
    value = target.constraint(load(target.form, target.handles))
    number = tf.constant(index * NUMBERS_OF_ONE + NUMBERS_OF_ONE - 1)
    store(target.form, target.handles, value, chance, number)


def _factors(divisor: Any) -> tuple[Any, ...]:
    """What gradients are multiplied by, which is faster than a division of each.

    The result is the same for powers of two. The inverse of the largest ones is not a normal
    number: there are two factors.
    """
    if divisor is None:
        return ()
    divisor = tf.cast(divisor, tf.float32)
    first = tf.where(divisor > 2.0**64, _number(2.0**-64), 1.0)
    return first, 1.0 / (divisor * first)


def _update_of(optimizer: Any, rule: _Rule, gradient: Any, squares: Any, variable: Any) -> _Update:
    target, index = native(variable), keras_optimizers.index_of(optimizer, variable)
    decays = keras_optimizers.decays(optimizer, target)
    slots = rule.slots(optimizer, index)
    forms = (getattr(target, "form", FLOAT32), *map(form_of_slot, slots))
    own = target.handles if _is_low(target) else [target.handle]
    handles = [own, *([native(slot).handle] for slot in slots)]
    return _Update(gradient, squares, decays, forms, handles, index)


def form_of_slot(slot: Any) -> Form:
    """How a slot of an optimizer is stored: low ones are rounded stochastically."""
    dtype = dtype_name(slot)
    return form_of("stochastic", dtype) if dtype in LOW_PRECISION else wide_form(dtype)


# ---- Numbers that are stored ---------------------------------------------------------------------

# Every variable of an optimizer, its slots with it, has so many numbers of its own.
NUMBERS_OF_ONE = 16


def load(form: Form, handles: Sequence[Any]) -> Any:
    """The float32 number that is stored in resources."""
    pairs = zip(handles, form.dtypes, strict=True)
    return form.decode(*(tf.raw_ops.ReadVariableOp(resource=h, dtype=dtype) for h, dtype in pairs))


def store(form: Form, handles: Sequence[Any], value: Any, chance: Chance, number: Any) -> list[Any]:
    """Stores a float32 number in resources and returns the ops that do.

    `chance` and its own `number` among all of a step decide how it is rounded.
    """
    parts = zip(handles, form.encode(value, lambda: chance.words(number, value)), strict=True)
    return [tf.raw_ops.AssignVariableOp(resource=handle, value=part) for handle, part in parts]


# ---- The rules -----------------------------------------------------------------------------------


class _Step(NamedTuple):
    """What the updates of one step have in common: scalars, in float32 but for the last."""

    factors: tuple[Any, ...]  # Of the gradients; none if they are not scaled.
    decay: Any  # The weight decay times the learning rate.
    numbers: Sequence[Any]  # What the rule makes of the optimizer and its learning rate.
    chance: Chance


class _Update(NamedTuple):
    """What one variable is updated with."""

    gradient: Any
    squares: Any  # Of a sparse gradient; None: those of the gradient.
    decays: bool
    forms: tuple[Form, ...]  # Of the variable and of its slots.
    handles: Sequence[Sequence[Any]]  # Of each, those of what is stored for it.
    number: int  # The variable's own among the optimizer's.

    @property
    def kind(self) -> Any:
        """What is the same for all that are compiled alike."""
        is_sparse = self.squares is not None
        return self.gradient.shape, self.gradient.dtype, is_sparse, self.decays, self.forms

    @property
    def bytes(self) -> int:
        """What it reads and writes, with the float32 number of a variable of two parts."""
        dtypes = [self.gradient.dtype, *(dtype for form in self.forms for dtype in form.dtypes)]
        each = sum(tf.as_dtype(dtype).size for dtype in dtypes) + 4 * _is_parted(self.forms[0])
        return int(self.gradient.shape.num_elements()) * each


def _is_parted(form: Form) -> bool:
    return len(form.dtypes) > 1


def _sgd(optimizer: Any, step: _Step, updates: list[_Update]) -> None:
    """Updates float32 variables by TensorFlow's own ops."""
    rate, momentum = step.numbers
    for gradient, _, decays, _, handles, _ in updates:
        variable = handles[0][0]
        if decays:
            decayed = load(FLOAT32, handles[0]) * step.decay
            tf.raw_ops.AssignSubVariableOp(resource=variable, value=decayed)
        if optimizer.momentum == 0:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable, alpha=rate, delta=gradient)
            continue
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable,
            accum=handles[1][0],
            lr=rate,
            grad=gradient,
            momentum=momentum,
            use_nesterov=optimizer.nesterov,
        )


# What follows computes with `times`, which rounds every product by itself.


def _descent_value(times: Any, numbers: Any, gradient: Any, value: Any) -> Any:
    return value - times(gradient, numbers[0])


def _momentum_slots(times: Any, numbers: Any, gradient: Any, squares: Any, mean: Any) -> Any:
    rate, momentum = numbers
    return (times(mean, momentum) - times(gradient, rate),)


def _momentum_value(times: Any, numbers: Any, gradient: Any, value: Any, mean: Any) -> Any:
    return value + mean


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
    if not keras_optimizers.rate_is_called(optimizer) and optimizer.relative_step:
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

    settings: tuple[str, ...]  # What has to be a number of the optimizer's.
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


_DESCENT = _Rule(
    settings=("momentum",),
    slots=lambda optimizer, index: [],
    numbers=lambda optimizer, rate: (rate, _number(optimizer.momentum)),
    next_value=_descent_value,
    run=_sgd,
)
_MOMENTUM = _DESCENT._replace(
    slots=lambda optimizer, index: [optimizer.momentums[index]],
    next_value=_momentum_value,
    next_slots=_momentum_slots,
)
_NESTEROV = _MOMENTUM._replace(next_value=_nesterov_value)
_ADAM = _Rule(
    settings=("beta_1", "beta_2", "epsilon"),
    slots=lambda optimizer, index: [
        slot(optimizer, name, index) for name in ("momentums", "velocities")
    ],
    numbers=_adam_numbers,
    next_value=_adam_value,
    next_slots=_adam_slots,
)
_LION = _Rule(
    settings=("beta_1", "beta_2"),
    slots=lambda optimizer, index: [slot(optimizer, "momentums", index)],
    numbers=_lion_numbers,
    next_value=_lion_value,
    next_slots=_lion_slots,
    value_first=True,
)
_ADAFACTOR = _Rule(
    settings=("beta_2_decay", "epsilon_1", "epsilon_2", "clip_threshold"),
    slots=_adafactor_own_slots,
    numbers=_adafactor_numbers,
    next_value=_adafactor_value,
    next_slots=_adafactor_slots,
)
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


def _run_compiled(rule: _Rule, step: _Step, updates: list[_Update], device: str) -> None:
    parts = (_update_slots, _update_value) if rule.next_slots is not None else (_update_value,)
    parts = parts[::-1] if rule.value_first else parts
    gradients, squares, decays, forms, handles, numbers = zip(*updates, strict=True)
    dtypes = tuple((g.dtype, own is not None) for g, own in zip(gradients, squares, strict=True))
    given = [own for own in squares if own is not None]
    # What is computed of float32 slots takes them from the memory they were just written to. Low
    # ones XLA would compute a second time, so what is computed of them is compiled by itself.
    wide = all(form.dtypes == FLOAT32.dtypes for own in forms for form in own[1:])
    scalars, on_cpu = (len(step.factors), len(step.numbers)), device_kind_of(device) == "cpu"
    compiles = xla_works(device)
    for each in [parts] if wide else [(part,) for part in parts]:
        compiled = _compiled(rule, each, decays, forms, dtypes, scalars, on_cpu, compiles)
        compiled(step, list(gradients), given, list(handles), tf.constant(numbers, tf.int32))


# Traced once for so many variables, and compiled once per set of shapes. It takes handles: a
# function of variables is traced again for each of their shapes.
@functools.lru_cache(maxsize=64)
def _compiled(
    rule: _Rule,
    parts: tuple[Callable[..., list[Any]], ...],
    decays: tuple[bool, ...],
    forms: tuple[tuple[Form, ...], ...],
    dtypes: tuple[tuple[tf.DType, bool], ...],
    scalars: tuple[int, int],
    on_cpu: bool,
    compiles: bool,
) -> Any:
    def update_all(
        step: _Step, gradients: Any, squares: Any, handles: Any, numbers: Any
    ) -> list[Any]:
        halved = []
        given = iter(squares)
        for i, (gradient, own) in enumerate(zip(gradients, handles, strict=True)):
            first = numbers[i] * NUMBERS_OF_ONE
            pairs = enumerate(zip(forms[i], own, strict=True))
            cells = [_Cell(*pair, first + j) for j, pair in pairs]
            dtype, is_sparse = dtypes[i]
            wide = gradient if dtype == tf.float32 else widened(gradient)
            own_squares = next(given) if is_sparse else None
            for part in parts:
                halved += part(rule, step, (wide, own_squares), decays[i], cells)
        # XLA on CPUs has a loop for each result, and repeats in it what has no result of its own.
        return halved if on_cpu else []

    factors, numbers = ((_SCALAR,) * count for count in scalars)
    step = _Step(factors, _SCALAR, numbers, Chance(_COUNT, _COUNT))
    resources = [[[_RESOURCE] * len(form.dtypes) for form in own] for own in forms]
    gradients = [tf.TensorSpec(None, dtype) for dtype, _ in dtypes]
    squares = [tf.TensorSpec(None, tf.float32) for _, is_sparse in dtypes if is_sparse]
    signature = [step, gradients, squares, resources, tf.TensorSpec([len(forms)], tf.int32)]
    return tf.function(update_all, signature, jit_compile=compiles, autograph=False)


class _Cell(NamedTuple):
    """A number that is stored."""

    form: Form
    handles: Sequence[Any]
    number: Any

    def load(self) -> Any:
        return load(self.form, self.handles)

    def store(self, value: Any, chance: Chance) -> None:
        store(self.form, self.handles, value, chance, self.number)


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
    return [new] if _is_parted(cells[0].form) else []


def _update_slots(rule: _Rule, step: _Step, given: Any, decays: bool, cells: Any) -> list[Any]:
    if rule.next_slots is None:
        return []
    times = functools.partial(_product, step.chance.step)
    slots = [cell.load() for cell in cells[1:]]
    gradient, squares = _unscaled(times, step, given[0]), given[1]
    squares = times(gradient, gradient) if squares is None else squares
    new = rule.next_slots(times, step.numbers, gradient, squares, *slots)
    for each, cell in zip(new, cells[1:], strict=True):
        cell.store(each, step.chance)
    return []


def _unscaled(times: Any, step: _Step, gradient: Any) -> Any:
    if not step.factors:
        return gradient
    first, second = step.factors
    return times(gradient * first, second)


def _product(step: Any, left: Any, right: Any) -> Any:
    """A product that is rounded by itself, and not together with a sum that it is a part of."""
    return _disguised(step, left * right)


def _disguised(step: Any, value: Any) -> Any:
    """The same value, but not for the compiler.

    It does not know that the number of steps is not negative.
    """
    zero = tf.cast(tf.bitwise.right_shift(step, tf.constant(63, tf.int64)), tf.int32)
    return tf.bitcast(tf.bitwise.bitwise_xor(tf.bitcast(value, tf.int32), zero), tf.float32)


_SCALAR = tf.TensorSpec([], tf.float32)
_COUNT = tf.TensorSpec([], tf.int64)
_RESOURCE = tf.TensorSpec([], tf.resource)


def _number(value: float) -> Any:
    return tf.constant(value, tf.float32)
