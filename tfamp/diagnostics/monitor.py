"""`NumericsMonitor`: what loss scale and gradients do during training."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfamp.core.errors import SkippedStepsError
from tfamp.core.options import checked_count
from tfamp.diagnostics.step_statistics import SHARES, Sample, StepStatistics, make_record
from tfamp.gradient_accumulator import GradientAccumulator
from tfamp.interop.keras_hooks import add_to_epoch_logs, as_tensor, built_for, described
from tfamp.interop.patching import unwrap_methods, wrap_method
from tfamp.interop.tf_private import as_written
from tfamp.optimizer import LossScaleOptimizer
from tfamp.reports.tables import table_lines
from tfamp.torch_style.grad_scaler import GradScaler
from tfamp.training import gradients as gradient_lib
from tfamp.training.gradients import Gradients, on_every_replica, outside_the_graph

# Of `SHARES`, those that show whether a scale is too low or too high.
_LOGGED_SHARES = ("under_2**-14", "over_65504")
# Of so many steps before a record the loss scales are kept: each takes 16 bytes on the device.
_MOST_REMEMBERED = 100_000
_HEADINGS = (
    *("gradients of", "zeros", "<2^-24", "<2^-14", ">65504"),
    *("unscaled <2^-24", "unscaled size"),
)
_MOST_ROWS = 12

# Called with gradients, variables, what the gradients are still to be divided by, and whether all
# are finite; None where the optimizer does not skip steps.
Observer: TypeAlias = Callable[[list[Any], list[Any], Any, Any], None]


class NumericsMonitor(keras.callbacks.Callback):
    """Watches loss scale, skipped steps and the size of gradients; tells if float16 is enough.

    As a callback of `model.fit` it sees the gradients the optimizer applies, whichever Keras
    optimizer that is, under a `MirroredStrategy`, with `jit_compile`, `run_eagerly` and several
    steps per execution too. In a custom loop call `record` in the step and `advance` behind it.

    Every `every` steps the gradients of one step are counted by binary exponent, on the device.
    What there is to count is kept in variables; between the records the host never waits for the
    device, but to read one number every `max_consecutive_skips` steps, to know when to stop.

    `history` is a list with one dict per record:

    - "step": the step whose gradients were counted, from 1. "loss_scale": its loss scale, 1.0
      without. "suggested_scale": the power of two that would have put the most gradient values in
      float16's normal range and none over 65504; None if all are zero.
    - "skipped_steps", "consecutive_skipped_steps": how many there have been when the record was
      made. "skipped": those since the last record. "loss_scales": pairs of a step since the last
      record and the loss scale from this step on.
    - "first_nonfinite": the first variable with an inf or NaN in its gradient, or None.
    - "variables": for each variable, "exponents" (e -> number of gradient values with
      2**e <= |value| < 2**(e + 1), without loss scale), "values" (number of them), "zeros" (share
      of them), "nonfinite" (number), "largest" (without loss scale), and as shares of what is not
      zero "under_2**-24", "under_2**-14" and "over_65504", with loss scale as in the backward pass.
      "unscaled" has the same three without it. What float16 has flushed already is among the zeros.
    - "gradients": the same of all variables together.

    In `model.fit` each epoch's logs get "loss_scale" and "skipped_steps" as they are at its end,
    and of the last record "suggested_scale" and the shares "gradients_under_2**-14" and
    "gradients_over_65504", NaN before there is one: `History`, `CSVLogger`, `TensorBoard` and
    others record them. A metric of one of these names stays what it is.

    Source: the exponents of gradients are Figure 3 of Micikevicius et al., "Mixed Precision
    Training", ICLR 2018.

    Args:
        every: Steps between records.
        jsonl: File that each record is appended to, as one line of JSON.
        tensorboard: Folder for an event file with scalars and histograms.
        max_consecutive_skips: Training stops with a `SkippedStepsError` after this many skipped
            steps in a row; None never stops it.

    Raises:
        ValueError: `every` or `max_consecutive_skips` is less than 1.
        TypeError: One of them is no integer.
        tf.errors.OpError: No event file can be made in the folder `tensorboard`.

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
            every, jsonl=jsonl, tensorboard=tensorboard, max_consecutive_skips=max_consecutive_skips
        )
        # A number is a TypeError: it would be written to as a file that is open already.
        self._jsonl = None if jsonl is None else Path(os.fspath(jsonl))
        self._events = (
            None if tensorboard is None else tf.summary.create_file_writer(os.fspath(tensorboard))
        )
        self._statistics: StepStatistics | None = None
        self._scaling: Scaling = scaling_of(None)
        self._watching = contextlib.ExitStack()
        self._taken = 0  # Steps the device has taken, at most; known exactly after each look.
        self._next_look = 0.0
        self._reported = 0  # The last step whose loss scale is in a record.
        self._pending = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> NumericsMonitor:
        """Returns a monitor with the same arguments: tuners copy their callbacks for each model."""
        return self._again()

    # Training with model.fit.

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts to watch the model's optimizer; its train function is traced anew."""
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
        """Looks at what the steps before left, if it is time."""
        # Not on_train_batch_end: for a callback that has it Keras waits for every step's loss.
        self.advance(self._pending)
        self._pending = int(self.model.steps_per_execution)

    def on_train_end(self, logs: Any = None) -> None:
        """Stops watching."""
        self.advance(self._pending)
        self._pending = 0
        self.detach()

    def detach(self) -> None:
        """Stops watching; only needed if `model.fit` was interrupted and goes on without it."""
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
        """Looks at the gradients of one step of a custom loop, before they are applied.

        Call it once a step, in eager mode or in a `tf.function`, in `strategy.run` too. Whatever
        is not at hand there, `advance` does, called behind each step from plain Python; in eager
        mode `record` calls it.

        Args:
            gradients: Float tensors, `tf.IndexedSlices` or None, as `tape.gradient` returns them;
                or, without `variables`, pairs of gradient and variable.
            variables: The variables they belong to, in the same order.
            optimizer: The `tfamp.LossScaleOptimizer`, `tfamp.GradScaler` or
                `tfamp.GradientAccumulator` the loss was scaled with, or any Keras optimizer. None:
                there is no loss scale but `loss_scale`.
            loss_scale: The scale of this step's loss, scalar. None: the optimizer's.
            unscaled: Whether the gradients have been divided by the loss scale already.
            finite: Whether this step is applied, scalar bool, such as `GradScaler.step` returns.
                Only needed where the optimizer does not count the skipped steps itself, as a
                `tfamp.LossScaleOptimizer` does; None: it is.
            step: Number of this step, from 1, scalar. None: one more than the last.

        Raises:
            ValueError: The gradients do not fit the variables, or the variables are others than
                at the first call.
            TypeError: A gradient is no float tensor, or `optimizer` is neither.
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
        """Says that steps were taken; makes a record and may stop the loop, if it is time.

        Reads from the device only then. Call it outside any `tf.function`.

        Args:
            steps: How many steps there have been since the last call, or more.

        Raises:
            SkippedStepsError: `max_consecutive_skips` steps in a row were skipped.
        """
        self._taken += steps
        if self._taken >= self._next_look and self._statistics is not None:
            self._look(self._statistics)

    # Results.

    def to_text(self) -> str:
        """Returns a summary of the last record: the run, and a table of the variables."""
        if not self.history:
            return "no record yet"
        record = self.history[-1]
        # The variables that lose most come first.
        variables = sorted(record["variables"].items(), key=lambda item: -item[1][SHARES[1]])
        rows = [_row("all variables", record["gradients"])]
        rows += [_row(*each) for each in variables[:_MOST_ROWS]]
        if rest := variables[_MOST_ROWS:]:
            rows.append((f"and {len(rest)} others", *[""] * (len(_HEADINGS) - 1)))
        lines = [
            f"step {record['step']}: loss scale {_scale_text(record['loss_scale'])}, skipped "
            f"{record['skipped_steps']} steps, {record['consecutive_skipped_steps']} in a row",
            f"suggested loss scale: {_scale_text(record['suggested_scale'])}",
        ]
        if record["first_nonfinite"] is not None:
            lines.append(f"first variable with an inf or NaN: {record['first_nonfinite']}")
        return "\n".join([*lines, *table_lines([_HEADINGS, *rows], left=1)])

    # What runs on the device.

    def _start(self, steps_at_once: int) -> None:
        if self._statistics is not None:
            return
        skipped = int(self._scaling.skips()[0]) if self._scaling.skips else 0
        start = self._scaling.steps()
        # The host comes to look after as many steps at once as Keras takes.
        remembered = min(self.every, _MOST_REMEMBERED) + steps_at_once
        self._statistics = StepStatistics(self.every, remembered, start, skipped)
        self._taken = self._reported = start
        self._plan_next_look(0)

    def _observe(
        self, grads: list[Any], variables: list[Any], divisor: Any, finite: Any, scale: Any = None
    ) -> None:
        statistics = self._statistics
        if statistics is None:
            return
        skips = self._scaling.skips
        if skips is None:
            finite = tf.constant(True) if finite is None else tf.convert_to_tensor(finite)
            before, faulty = statistics.own_skips(finite), tf.logical_not(finite)
        else:
            before, in_a_row = skips()
            # Before a step is applied nobody knows yet whether it will be skipped: the gradients
            # of a step behind a skipped one are looked at.
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
        """What logs are told after an epoch, of the same names always: loggers keep to the first.

        Looks at what the last steps of the epoch left, if it is time.
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
        # No sooner can there be so many skipped steps in a row.
        self._next_look = min(regular, self._taken + self._limit - consecutive)

    @property
    def _limit(self) -> float:
        return math.inf if self.max_consecutive_skips is None else self.max_consecutive_skips

    def _add_record(self, statistics: StepStatistics, sample: Sample, skips: Sequence[int]) -> None:
        names = _distinct([gradient_lib.variable_name(v) for v in statistics.variables])
        past = statistics.past(self._reported + 1, self._taken)
        record = make_record(sample, names, past, skips)
        self._reported = self._taken
        self.history.append(record)
        if self._jsonl is not None:
            self._jsonl.parent.mkdir(parents=True, exist_ok=True)
            # Opened for each record: the file ends with a complete line whenever a run ends.
            with self._jsonl.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n")
        if self._events is not None:
            _write_events(self._events, record)

    def _why_stopped(self, consecutive: int) -> str:
        record = self.history[-1] if self.history else {"variables": {}}
        bad = [name for name, each in record["variables"].items() if each["nonfinite"]]
        where = "no record of them names a variable: every=1 records each step"
        if bad:
            where = (
                f"at step {record['step']} the first bad variable was {bad[0]}, of {len(bad)} in "
                f"all; the backward pass comes to {bad[-1]} first"
            )
        return (
            f"{consecutive} steps in a row were skipped because gradients were not finite; {where}."
            " No weight has changed in these steps, and lowering the loss scale has not helped: "
            "find the cause with tfamp.diagnostics.find_nonfinite, lower the learning rate, or use "
            "bfloat16."
        )


# ---- Records ------------------------------------------------------------------------------------


def _scale_text(scale: float | None) -> str:
    """Returns a loss scale for people: "2^15", "1000", "none"."""
    if scale is None:
        return "none"
    mantissa, exponent = math.frexp(scale)
    return f"{scale:g}" if mantissa != 0.5 else f"2^{exponent - 1}"


def _row(name: str, described: Mapping[str, Any]) -> tuple[str, ...]:
    exponents = described["exponents"]
    span = f"2^{min(exponents)}..2^{max(exponents) + 1}" if exponents else "-"
    shares = [described[key] for key in ("zeros", *SHARES)] + [described["unscaled"][SHARES[0]]]
    return (name, *(f"{share:.1%}" for share in shares), span)


def _distinct(names: Sequence[str]) -> list[str]:
    """Appends "#2", "#3" and so on to the second, third and later occurrence of a name."""
    before = [names[:i].count(name) for i, name in enumerate(names)]
    return [f"{name}#{n + 1}" if n else name for name, n in zip(names, before, strict=True)]


# ---- Files --------------------------------------------------------------------------------------


def _write_events(writer: Any, record: Mapping[str, Any]) -> None:
    """Writes a record as scalars and histograms; it is in the file when this returns."""
    scalars = {name: record[name] for name in ("loss_scale", "suggested_scale", "skipped_steps")}
    scalars |= {f"gradients/{name}": record["gradients"][name] for name in (*SHARES, "zeros")}
    with writer.as_default(step=record["step"]), tf.summary.record_if(True):
        for name, value in scalars.items():
            if value is not None:
                # As tf.summary.scalar, which needs the package tensorboard.
                _write("scalars", 1, name, np.float32(value))
        for name, described in record["variables"].items():
            # tf.summary.histogram makes bins of its own, from values; these are the bins already:
            # left edge, right edge, number.
            if counts := described["exponents"]:
                exponents = range(min(counts), max(counts) + 1)
                bins = np.array([(e, e + 1, counts.get(e, 0)) for e in exponents], "float64")
                _write("histograms", 2, f"variables/{name}", bins)
    writer.flush()


def _write(plugin: str, data_class: int, tag: str, value: Any) -> None:
    metadata = tf.compat.v1.SummaryMetadata(data_class=data_class)
    metadata.plugin_data.plugin_name = plugin
    tf.summary.write(f"numerics/{tag}", value, metadata=metadata)


# ---- Optimizers ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scaling:
    """How losses are scaled.

    Attributes:
        scale: Returns the scale as a tensor or number.
        skips: Returns the numbers of skipped steps, in all and in a row, as tensors; None where
            nobody counts them.
        steps: Returns the number of steps taken so far, skipped ones included.
    """

    scale: Callable[[], Any] = lambda: 1.0
    skips: Callable[[], tuple[Any, Any]] | None = None
    steps: Callable[[], int] = lambda: 0


def scaling_of(optimizer: Any) -> Scaling:
    """Returns how an optimizer scales losses.

    Args:
        optimizer: A `keras.optimizers.Optimizer`, a `tfamp.LossScaleOptimizer`, a
            `tfamp.GradScaler`, a `tfamp.GradientAccumulator`, which scales as its optimizer does,
            or None for no scaling.

    Raises:
        TypeError: It is something else.
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
        "optimizer must be a Keras optimizer, a tfamp.LossScaleOptimizer, a tfamp.GradScaler or a "
        f"tfamp.GradientAccumulator; got {described(optimizer)}"
    )


def _keras_scale(optimizer: keras.optimizers.Optimizer) -> Any:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return as_tensor(optimizer.dynamic_scale) if optimizer.built else 1.0
    return optimizer.loss_scale_factor or 1.0


def _iterations(optimizer: keras.optimizers.Optimizer) -> int:
    return int(as_tensor(optimizer.iterations))


def watch_optimizer(optimizer: Any, observer: Observer) -> Callable[[], None]:
    """Has a function see all gradients an optimizer applies.

    Functions traced before do not know of it: trace them again.

    Args:
        optimizer: A built or unbuilt `keras.optimizers.Optimizer`.
        observer: The function.

    Returns:
        A function that takes the observer off again.
    """
    if isinstance(optimizer, LossScaleOptimizer):
        optimizer.gradient_observer = observer

        def drop() -> None:
            if optimizer.gradient_observer is observer:
                optimizer.gradient_observer = None

        return drop
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)

    @as_written
    def apply(original: Any, grads: Any, trainable_variables: Any = None, **options: Any) -> Any:
        grads, given = list(grads), trainable_variables
        variables = built_for(optimizer) if given is None else list(given)
        if variables and not optimizer.built:
            outside_the_graph(lambda: optimizer.build(variables))
        if variables:
            # Keras's own loss scaling tells nobody what it found.
            finite = on_every_replica(Gradients.of_any(grads).all_finite()) if scales else None
            observer(grads, variables, scaling_of(optimizer).scale(), finite)
        return original(grads, trainable_variables, **options)

    unwrap_methods(optimizer)  # One may have been left here by a fit that was interrupted.
    return wrap_method(optimizer, "apply", apply)
