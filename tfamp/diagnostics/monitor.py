"""`NumericsMonitor`: records loss scale and gradients during training."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfamp.core.errors import SkippedStepsError
from tfamp.core.kinds import Optimizer, Tensor, Variable
from tfamp.core.messages import described
from tfamp.core.options import checked_count
from tfamp.diagnostics.step_statistics import SHARES, Record, Sample, StepStatistics, make_record
from tfamp.gradient_accumulator import GradientAccumulator
from tfamp.interop.keras_hooks import add_to_epoch_logs, as_tensor, built_for
from tfamp.interop.patching import wrap_method
from tfamp.interop.tf_private import as_written
from tfamp.optimizer import LossScaleOptimizer
from tfamp.reports.tables import table_lines
from tfamp.torch_style.grad_scaler import GradScaler
from tfamp.training import gradients as gradient_lib
from tfamp.training.gradients import Gradients, on_every_replica, outside_the_graph

# The shares that show whether a scale is too low or too high.
_LOGGED_SHARES = ("under_2**-14", "over_65504")
# Number of steps before a record whose loss scales are kept, at 16 bytes each on the device:
# 1.6 MB, a choice.
_MOST_REMEMBERED = 100_000
_HEADS = (
    "gradients of",
    "zeros",
    "<2^-24",
    "<2^-14",
    ">65504",
    "unscaled <2^-24",
    "unscaled size",
)
# Rows of the text of a record, so that it fits a screen, a choice; the worst come first.
_MOST_ROWS = 12

# Called with gradients, variables, the divisor that the gradients still have to be divided by,
# and whether all are finite; None where the optimizer does not skip steps.
Observer: TypeAlias = Callable[[list[Tensor], list[Variable], Tensor, Tensor], None]


class NumericsMonitor(keras.callbacks.Callback):
    """Records loss scale, skipped steps and sizes of gradients; shows if float16's range suffices.

    As a callback of `model.fit` it observes the gradients that the optimizer applies, with any
    Keras optimizer, also under a `MirroredStrategy`, with `jit_compile`, `run_eagerly` and
    several steps per execution. In a custom loop call `record` in the step and `advance` after
    it.

    Every `every` steps the gradients of one step are counted by binary exponent, on the device.
    Between records the host does not wait for the device, except to read one number every
    `max_consecutive_skips` steps.

    `history` is a list with one dict per record:

    - "step": the step whose gradients were counted, from 1. "loss_scale": its loss scale, 1.0
      without. "suggested_scale": the power of two that would have put the most gradient values
      in float16's normal range and none over 65504; None if all are zero.
    - "skipped_steps", "consecutive_skipped_steps": their numbers when the record was made.
      "skipped": the steps skipped since the last record. "loss_scales": pairs of a step since
      the last record and the loss scale from this step on.
    - "first_nonfinite": the first variable with an inf or NaN in its gradient, or None.
    - "variables": for each variable, "exponents" (e -> number of gradient values with
      2**e <= |value| < 2**(e + 1), without loss scale), "values" (number of them), "zeros"
      (share of them), "nonfinite" (number), "largest" (without loss scale), and as shares of
      the nonzero values "under_2**-24", "under_2**-14" and "over_65504", with loss scale as in
      the backward pass. "unscaled" has the same three without it. Values that float16 flushed
      are zeros.
    - "gradients": the same for all variables together.

    In `model.fit` each epoch's logs get "loss_scale" and "skipped_steps" as they are at its
    end, and from the last record "suggested_scale" and the shares "gradients_under_2**-14" and
    "gradients_over_65504", NaN before the first: `History`, `CSVLogger`, `TensorBoard` and
    others record them. A metric of one of these names takes precedence.

    Source: the exponents of gradients are Figure 3 of Micikevicius et al., "Mixed Precision
    Training", ICLR 2018.

    Args:
        every: Steps between records.
        jsonl: File that each record is appended to, as one line of JSON.
        tensorboard: Folder for an event file with scalars and histograms.
        max_consecutive_skips: Training stops with a `SkippedStepsError` after this many skipped
            steps in a row; None never stops it.

    Raises:
        ValueError: `every` or `max_consecutive_skips` is less than 1, or `jsonl` is a
            directory.
        TypeError: One of them is not an integer.
        OSError: The folder of `jsonl` cannot be created.
        tf.errors.OpError: No event file can be created in the folder `tensorboard`.

    Example:
        >>> import keras, numpy, tfamp
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(tfamp.LossScaleOptimizer(keras.optimizers.SGD()), "mse")
        >>> monitor = tfamp.diagnostics.NumericsMonitor(every=2)
        >>> x = numpy.ones((8, 4), "float32")
        >>> _ = model.fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=[monitor])
        >>> [(record["step"], record["loss_scale"]) for record in monitor.history]
        [(2, 32768.0), (4, 32768.0)]
    """

    def __init__(
        self,
        every: int = 100,
        *,
        jsonl: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        max_consecutive_skips: int | None = 50,
    ) -> None:
        super().__init__()
        if max_consecutive_skips is not None:
            checked_count("max_consecutive_skips", max_consecutive_skips)
        self.every = checked_count("every", every)
        self.max_consecutive_skips = max_consecutive_skips
        self.history: list[dict[str, Any]] = []
        self._again: Callable[[], NumericsMonitor] = lambda: type(self)(
            every,
            jsonl=jsonl,
            tensorboard=tensorboard,
            max_consecutive_skips=max_consecutive_skips,
        )
        # fspath refuses numbers, which `open` would take for file descriptors.
        self._jsonl = None if jsonl is None else Path(os.fspath(jsonl))
        if self._jsonl is not None and self._jsonl.is_dir():
            raise ValueError(f"jsonl must be a file to append to; {self._jsonl} is a directory.")
        if self._jsonl is not None:
            self._jsonl.parent.mkdir(parents=True, exist_ok=True)
        self._events = None
        if tensorboard is not None:
            self._events = tf.summary.create_file_writer(os.fspath(tensorboard))
        self._statistics: StepStatistics | None = None
        self._scaling: Scaling = scaling_of(None)
        self._watching = contextlib.ExitStack()
        self._taken = 0  # Upper bound of the steps taken; exact after each look.
        self._next_look = 0.0
        self._reported = 0  # The last step whose loss scale is in a record.
        self._pending = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> NumericsMonitor:
        """Returns a monitor with the same arguments: tuners copy callbacks for each model."""
        return self._again()

    # Training with model.fit.

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts to observe the model's optimizer; its train function is traced again."""
        self.detach()
        model = self.model
        self._scaling = scaling_of(model.optimizer)
        with model.distribute_strategy.scope():
            self._start(int(model.steps_per_execution))
        undo = self._watching.callback
        undo(model.make_train_function, force=True)  # Done last.
        undo(add_to_epoch_logs(model, self._figures))
        undo(watch_optimizer(model.optimizer, as_written(self._observe)))
        model.make_train_function(force=True)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Reads from the device what the steps before left, if it is time."""
        # Not on_train_batch_end: Keras waits for every step's loss if a callback has it.
        self.advance(self._pending)
        self._pending = int(self.model.steps_per_execution)

    def on_train_end(self, logs: Any = None) -> None:
        """Stops observing."""
        self.advance(self._pending)
        self._pending = 0
        self.detach()

    def detach(self) -> None:
        """Stops observing; needed only to continue without it after an interrupted `fit`."""
        self._watching.close()

    # Custom loops.

    @as_written
    def record(
        self,
        gradients: Iterable[Any],
        variables: Sequence[Any] | None = None,
        *,
        optimizer: Any = None,
        loss_scale: Any = None,
        unscaled: bool = False,
        finite: Any = None,
        step: Any = None,
    ) -> None:
        """Observes the gradients of one step of a custom loop, before they are applied.

        Call it once a step, in eager mode or in a `tf.function`, also in `strategy.run`, and
        call `advance` from plain Python after each step; in eager mode `record` calls it.

        Args:
            gradients: Float tensors, `tf.IndexedSlices` or None, as `tape.gradient` returns
                them; or, without `variables`, pairs of gradient and variable.
            variables: The variables they belong to, in the same order.
            optimizer: The `tfamp.LossScaleOptimizer`, `tfamp.GradScaler` or
                `tfamp.GradientAccumulator` the loss was scaled with, or any Keras optimizer.
                None: the only loss scale is `loss_scale`.
            loss_scale: The scale of this step's loss, scalar. None: the optimizer's.
            unscaled: Whether the gradients have been divided by the loss scale already.
            finite: Whether this step is applied, scalar bool, such as `GradScaler.step`
                returns. Needed only if the optimizer does not count skipped steps itself, as a
                `tfamp.LossScaleOptimizer` does; None: it is applied.
            step: Number of this step, from 1, scalar. None: one more than the last.

        Raises:
            ValueError: The gradients do not fit the variables, or the variables differ from
                those of the first call.
            TypeError: A gradient is not a float tensor, or `optimizer` is of another class.
        """
        if variables is None:
            grads, owners = gradient_lib.split_pairs(gradients, "record")
        else:
            grads, owners = gradient_lib.listed(gradients, "record"), list(variables)
        gradient_lib.check_gradients(grads, owners)
        self._scaling = scaling_of(optimizer)
        if self._statistics is None:
            outside_the_graph(lambda: self._start(1))
        if step is not None and self._statistics is not None:
            self._statistics.set_step(step)
        scale = self._scaling.scale() if loss_scale is None else loss_scale
        self._observe(grads, owners, None if unscaled else scale, finite, scale)
        if tf.executing_eagerly() and not tf.distribute.has_strategy():
            self.advance()

    def advance(self, steps: int = 1) -> None:
        """Counts steps; if it is time, reads from the device, makes a record, may stop a loop.

        Call it outside any `tf.function`.

        Args:
            steps: Number of steps since the last call, or more.

        Raises:
            SkippedStepsError: `max_consecutive_skips` steps in a row were skipped.
        """
        self._taken += steps
        if self._taken >= self._next_look and self._statistics is not None:
            self._look(self._statistics)

    # Results.

    def to_text(self) -> str:
        """Returns a summary of the last record: the run, and a table of variables."""
        if not self.history:
            return "no record yet"
        record = self.history[-1]
        # The variables with the largest share below the normal range come first.
        variables = sorted(record["variables"].items(), key=lambda item: -item[1][SHARES[1]])
        rows = [_row("all variables", record["gradients"])]
        rows += [_row(name, described) for name, described in variables[:_MOST_ROWS]]
        if rest := variables[_MOST_ROWS:]:
            rows.append((f"and {len(rest)} others", *[""] * (len(_HEADS) - 1)))
        lines = [
            f"step {record['step']}: loss scale {_scale_text(record['loss_scale'])}, skipped "
            f"{record['skipped_steps']} steps, {record['consecutive_skipped_steps']} in a row",
            f"suggested loss scale: {_scale_text(record['suggested_scale'])}",
        ]
        if record["first_nonfinite"] is not None:
            lines.append(f"first variable with an inf or NaN: {record['first_nonfinite']}")
        return "\n".join([*lines, *table_lines([_HEADS, *rows], left=1)])

    # What runs on the device.

    def _start(self, steps_at_once: int) -> None:
        if self._statistics is not None:
            return
        skipped = int(self._scaling.skips()[0]) if self._scaling.skips else 0
        start = self._scaling.steps()
        # The host reads after as many steps at once as Keras takes.
        remembered = min(self.every, _MOST_REMEMBERED) + steps_at_once
        self._statistics = StepStatistics(self.every, remembered, start, skipped)
        self._taken = self._reported = start
        self._plan_next_look(0)

    def _observe(
        self,
        grads: list[Tensor],
        variables: list[Variable],
        divisor: Tensor | None,
        finite: Tensor | None,
        scale: Tensor | None = None,
    ) -> None:
        statistics = self._statistics
        if statistics is None:
            return
        skips = self._scaling.skips
        if skips is None:
            finite = tf.constant(True) if finite is None else tf.convert_to_tensor(finite)
            before, faulty = statistics.count_skip(finite), tf.logical_not(finite)
        else:
            before, in_a_row = skips()
            # Whether this step will be skipped is not known yet: the gradients of a step after
            # a skipped one are sampled.
            faulty = in_a_row > 0 if finite is None else tf.logical_not(finite)
            if finite is None and self.max_consecutive_skips == 1:
                faulty = tf.logical_not(gradient_lib.Gradients.of_any(grads).all_finite())
        statistics.observe(
            grads,
            variables,
            scale=self._scaling.scale() if scale is None else scale,
            divisor=1.0 if divisor is None else divisor,
            skipped_before=before,
            faulty=faulty,
        )

    # What runs on the host.

    def _look(self, statistics: StepStatistics) -> None:
        self._taken = statistics.step()
        skipped, consecutive = map(int, (self._scaling.skips or statistics.skips)())
        last = self.history[-1]["step"] if self.history else 0
        stops = consecutive >= self._limit
        if statistics.samples:
            sample = statistics.samples[stops].read()
            if sample.step > last:
                self._add_record(statistics, sample, (skipped, consecutive))
        if stops:
            self.detach()
            raise SkippedStepsError(self._why_stopped(consecutive))
        self._plan_next_look(consecutive)

    def _figures(self) -> dict[str, float]:
        """Returns the logs of an epoch, always with the same keys: loggers keep the first ones.

        Reads from the device what the last steps of the epoch left, if it is time.
        """
        self.advance(self._pending)
        self._pending = 0
        if self._statistics is None:
            return {}
        skips = self._scaling.skips or self._statistics.skips
        last = self.history[-1] if self.history else None
        suggested = last["suggested_scale"] if last else None
        shares = last["gradients"] if last else dict.fromkeys(SHARES, math.nan)
        return {
            "loss_scale": float(self._scaling.scale()),
            "skipped_steps": int(skips()[0]),
            "suggested_scale": math.nan if suggested is None else float(suggested),
            **{f"gradients_{name}": float(shares[name]) for name in _LOGGED_SHARES},
        }

    def _plan_next_look(self, consecutive: int) -> None:
        regular = self._taken - self._taken % self.every + self.every
        # The earliest step that can complete so many skipped steps in a row.
        self._next_look = min(regular, self._taken + self._limit - consecutive)

    @property
    def _limit(self) -> float:
        return math.inf if self.max_consecutive_skips is None else self.max_consecutive_skips

    def _add_record(self, statistics: StepStatistics, sample: Sample, skips: Sequence[int]) -> None:
        variables = map(gradient_lib.variable_name, statistics.variables)
        names = _distinct(list(variables))
        past = statistics.past(self._reported + 1, self._taken)
        record = make_record(sample, names, past, skips)
        self._reported = self._taken
        self.history.append(record)
        if self._jsonl is not None:
            # JSON has no infinity, which the scale of Keras's own optimizer may become.
            plain = json.loads(json.dumps(record), parse_constant=lambda name: None)
            # Opened for each record, so that the file ends with a complete line at any time.
            with self._jsonl.open("a", encoding="utf-8") as file:
                file.write(json.dumps(plain, separators=(",", ":")) + "\n")
        if self._events is not None:
            _write_events(self._events, record)

    def _why_stopped(self, consecutive: int) -> str:
        record = self.history[-1] if self.history else {"variables": {}}
        variables = record["variables"].items()
        bad = [name for name, described in variables if described["nonfinite"]]
        where = "no record of them names a variable: every=1 records each step"
        if bad:
            where = (
                f"at step {record['step']} the first bad variable was {bad[0]}, of {len(bad)} "
                f"in all; the backward pass comes to {bad[-1]} first"
            )
        return (
            f"{consecutive} steps in a row were skipped because gradients were not finite; "
            f"{where}. No weight has changed in these steps, and lowering the loss scale has "
            "not helped: find the cause with tfamp.diagnostics.find_nonfinite, lower the "
            "learning rate, or use bfloat16."
        )


# ---- Records ------------------------------------------------------------------------------------


def _scale_text(scale: float | None) -> str:
    """Returns a loss scale as text: "2^15", "1000", "none"."""
    if scale is None:
        return "none"
    mantissa, exponent = math.frexp(scale)
    return f"{scale:g}" if mantissa != 0.5 else f"2^{exponent - 1}"


def _row(name: str, described: Record) -> tuple[str, ...]:
    exponents = described["exponents"]
    span = f"2^{min(exponents)}..2^{max(exponents) + 1}" if exponents else "-"
    shares = [described[key] for key in ("zeros", *SHARES)]
    shares.append(described["unscaled"][SHARES[0]])
    return (name, *(f"{share:.1%}" for share in shares), span)


def _distinct(names: Sequence[str]) -> list[str]:
    """Appends "#2", "#3" and so on to the second, third and later occurrence of a name."""
    before = [names[:i].count(name) for i, name in enumerate(names)]
    numbered = zip(names, before, strict=True)
    return [f"{name}#{count + 1}" if count else name for name, count in numbered]


# ---- Files --------------------------------------------------------------------------------------


def _write_events(writer: tf.summary.SummaryWriter, record: Record) -> None:
    """Writes a record as scalars and histograms, and flushes the file."""
    keys = ("loss_scale", "suggested_scale", "skipped_steps")
    scalars = {name: record[name] for name in keys}
    scalars |= {f"gradients/{name}": record["gradients"][name] for name in (*SHARES, "zeros")}
    with writer.as_default(step=record["step"]), tf.summary.record_if(True):
        for name, value in scalars.items():
            if value is not None:
                # Like tf.summary.scalar, which needs the package tensorboard.
                _write("scalars", 1, name, np.float32(value))
        for name, described in record["variables"].items():
            # tf.summary.histogram computes its own bins from values; these are bins already:
            # left edge, right edge, number.
            if counts := described["exponents"]:
                exponents = range(min(counts), max(counts) + 1)
                bins = np.array(
                    [(low, low + 1, counts.get(low, 0)) for low in exponents],
                    "float64",
                )
                _write("histograms", 2, f"variables/{name}", bins)
    writer.flush()


def _write(plugin: str, data_class: int, tag: str, value: np.ndarray) -> None:
    metadata = tf.compat.v1.SummaryMetadata(data_class=data_class)
    metadata.plugin_data.plugin_name = plugin
    tf.summary.write(f"numerics/{tag}", value, metadata=metadata)


# ---- Optimizers ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scaling:
    """How an optimizer scales losses.

    Attributes:
        scale: Returns the scale as a tensor or number.
        skips: Returns the numbers of skipped steps, in all and in a row, as tensors; None if
            the optimizer does not count them.
        steps: Returns the number of steps taken so far, including skipped ones.
    """

    scale: Callable[[], Tensor] = lambda: 1.0
    skips: Callable[[], tuple[Tensor, Tensor]] | None = None
    steps: Callable[[], int] = lambda: 0


def scaling_of(optimizer: Optimizer | GradScaler | GradientAccumulator | None) -> Scaling:
    """Returns how an optimizer scales losses.

    Args:
        optimizer: A `keras.optimizers.Optimizer`, a `tfamp.LossScaleOptimizer`, a
            `tfamp.GradScaler`, a `tfamp.GradientAccumulator`, which scales like its optimizer,
            or None for no scaling.

    Raises:
        TypeError: It is of another class.
    """
    if isinstance(optimizer, GradientAccumulator):
        optimizer = optimizer.optimizer
    if optimizer is None:
        return Scaling()
    if isinstance(optimizer, LossScaleOptimizer):
        return Scaling(
            lambda: as_tensor(optimizer.dynamic_scale),
            lambda: (optimizer.skipped_steps, optimizer.consecutive_skipped_steps),
            lambda: _iterations(optimizer) + int(optimizer.skipped_steps),
        )
    if isinstance(optimizer, GradScaler):
        return Scaling(optimizer.get_scale)
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return Scaling(lambda: _keras_scale(optimizer), None, lambda: _iterations(optimizer))
    raise TypeError(
        "optimizer must be a Keras optimizer, a tfamp.LossScaleOptimizer, a tfamp.GradScaler "
        f"or a tfamp.GradientAccumulator; got {described(optimizer)}"
    )


def _keras_scale(optimizer: keras.optimizers.Optimizer) -> Tensor:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return as_tensor(optimizer.dynamic_scale) if optimizer.built else 1.0
    return optimizer.loss_scale_factor or 1.0


def _iterations(optimizer: keras.optimizers.Optimizer) -> int:
    return int(as_tensor(optimizer.iterations))


def watch_optimizer(optimizer: Optimizer, observer: Observer) -> Callable[[], None]:
    """Calls an observer with all gradients that an optimizer applies.

    Functions traced before have to be traced again.

    Args:
        optimizer: A built or unbuilt `keras.optimizers.Optimizer`.
        observer: The observer.

    Returns:
        A function that removes the observer.
    """
    if isinstance(optimizer, LossScaleOptimizer):
        optimizer.gradient_observers += (observer,)

        def drop() -> None:
            observers = optimizer.gradient_observers
            others = (other for other in observers if other is not observer)
            optimizer.gradient_observers = tuple(others)

        return drop
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)

    @as_written
    def apply(
        original: Callable[..., Any],
        grads: Iterable[Tensor],
        trainable_variables: Iterable[Variable] | None = None,
        **options: Any,
    ) -> Any:
        grads = list(grads)
        if trainable_variables is None:
            variables = built_for(optimizer)
        else:
            variables = list(trainable_variables)
        if variables and not optimizer.built:
            outside_the_graph(lambda: optimizer.build(variables))
        if variables:
            # Keras's LossScaleOptimizer does not report whether it skips a step.
            finite = on_every_replica(Gradients.of_any(grads).all_finite()) if scales else None
            observer(grads, variables, scaling_of(optimizer).scale(), finite)
        return original(grads, trainable_variables, **options)

    return wrap_method(optimizer, "apply", apply)
