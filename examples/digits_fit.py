"""Measures mixed precision on this machine: the accuracy it keeps and the time it saves.

Accuracy: a CNN trains on scikit-learn's digits with `model.fit`, in float32, in float16 and under
the policy that `auto` picks here. Two lines change: the policy under which the model is built, and
`tfamp.LossScaleOptimizer` around the optimizer. BatchNormalization and the output layer stay in
float32 automatically.

Time: `tfamp.tune` measures a train step of a larger model and keeps float32 where low precision
does not pay.

    python examples/digits_fit.py [--plot PICTURE.png] [--dtype float16|bfloat16] [--small]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # log lines break the progress bar

import keras
import tensorflow as tf
import tune_step
from _common import Digits, ProgressBar, load_digits, make_parser, parse, policies, progress
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import tfamp
from tfamp.diagnostics import device_report
from tfamp.machine.hardware import automatic_policy, detect

BATCH = 64
HEADINGS = ("test\naccuracy", "loss\nscale", "skipped\nsteps", "low-precision\nlayers")
GPU_POLICIES = (
    "On a GPU, auto picks mixed_bfloat16 from compute capability 8.0 on (A100, L4, RTX 30),"
    "\nand mixed_float16, with loss scaling, at 7.x (V100, T4)."
)


def build_model() -> keras.Model:
    """Returns a small CNN; nothing in it mentions precision."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same"),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Conv2D(32, 3, padding="same"),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same"),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dropout(0.3),
            layers.Dense(10),
        ]
    )


def make_optimizer(policy: str, steps: int) -> keras.optimizers.Optimizer:
    """Returns Adam over a cosine schedule; of the dtypes, only float16 needs a loss scale."""
    adam = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(2e-3, steps))
    return tfamp.LossScaleOptimizer(adam) if policy == "mixed_float16" else adam


def train(policy: str, data: Digits, epochs: int, seed: int, display: Progress) -> keras.Model:
    """Returns a model built under `policy` and trained."""
    keras.utils.set_random_seed(seed)
    with tfamp.policy_scope(policy):  # a program with one policy: tfamp.set_global_policy(policy)
        model = build_model()
    model.compile(
        make_optimizer(policy, epochs * -(-len(data.x_train) // BATCH)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        data.x_train,
        data.y_train,
        batch_size=BATCH,
        epochs=epochs,
        verbose=0,
        callbacks=[ProgressBar(display, policy, "accuracy")],
    )
    return model


def low_precision_share(model: keras.Model) -> str:
    """Returns how many of the layers that have weights compute in float16 or bfloat16."""
    dtypes = [layer.compute_dtype for layer in model.layers if layer.weights]
    low = sum(dtype in ("float16", "bfloat16") for dtype in dtypes)
    return f"{low} of {len(dtypes)} ({low / len(dtypes):.0%})"


def accuracy_row(model: keras.Model, data: Digits) -> tuple[str, ...]:
    """Returns test accuracy, loss scale, skipped steps and share of low-precision layers."""
    found = model.evaluate(data.x_test, data.y_test, verbose=0, return_dict=True)
    scale, skipped = "-", "-"
    if isinstance(model.optimizer, tfamp.LossScaleOptimizer):
        scale = f"{float(model.optimizer.loss_scale):g}"
        skipped = str(int(model.optimizer.skipped_steps))
    return f"{found['accuracy']:.2%}", scale, skipped, low_precision_share(model)


def tune(data: Digits, small: bool, seed: int, display: Progress) -> tfamp.TuneReport:
    """Measures a large model's train step, alternating float32 and low precision."""
    width, batch, rounds = (64, 64, 2) if small else (2048, 512, 7)
    step = tune_step.make_step(tune_step.build_model(width, seed))
    x, y = tf.constant(data.x_train[:batch]), tf.constant(data.y_train[:batch])
    task = display.add_task("step time", total=1, note=f"a train step, {width} units a layer")
    with redirect_stdout(StringIO()):  # `tune` has a bar of its own on terminals.
        report = tfamp.tune(step, x, y, rounds=rounds)
    display.advance(task)
    return report


def accuracy_table(rows: dict[str, tuple[str, ...]]) -> Table:
    """Returns the policies side by side."""
    table = Table(
        title="Accuracy: a CNN on scikit-learn's digits",
        caption="Low-precision layers: of those that have weights.\n"
        "BatchNormalization and the output layer stay in float32.\n"
        "Most CPUs emulate float16, slowly: here it shows its accuracy.",
    )
    table.add_column("policy", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for policy, row in rows.items():
        table.add_row(policy, *row)
    return table


def verdict(report: tfamp.TuneReport) -> str:
    """Returns a sentence that compares the chosen candidate with float32."""
    wide, chosen = report.rows[0], report.chosen
    times = f"float32 {1e3 * wide.seconds:.1f} ms"
    if chosen.candidate == "xla":
        return (
            f"{times}, compiled by XLA {1e3 * chosen.seconds:.1f} ms: {report.dtype} does not pay "
            "here; keep float32, with tf.function(jit_compile=True)."
        )
    if not chosen.low_nodes or chosen.quartiles[1] >= wide.quartiles[0]:
        return f"{times}: {report.dtype} does not pay here, or no more than by noise; keep float32."
    return (
        f"{times}, tfamp's best way {1e3 * chosen.seconds:.1f} ms:\n{report.speed_up:.2f} times as"
        f" fast, by {chosen.candidate} in {report.dtype}: report.best is that step."
    )


def plot(curves: dict[str, list[float]], report: tfamp.TuneReport, path: str) -> None:
    """Draws accuracy by epoch and the step time of each candidate."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for style, (policy, values) in zip(("-", "--", ":"), curves.items(), strict=False):
        epochs = range(1, len(values) + 1)
        left.plot(epochs, [100 * each for each in values], style, label=policy, linewidth=2)
    left.set(title="A CNN on digits", xlabel="epoch", ylabel="training accuracy, %")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(loc="lower right")
    names = [
        f"{row.candidate}, {report.dtype if row.low_nodes else 'float32'}" for row in report.rows
    ]
    names[0] = "float32"
    times = [1e3 * row.seconds for row in report.rows]
    colors = ["tab:green" if row.chosen else "tab:gray" for row in report.rows]
    bars = right.barh(names, times, color=colors)
    right.bar_label(bars, [f"{times[0] / each:.2f}x" for each in times], padding=3)
    right.margins(x=0.12)
    right.invert_yaxis()
    right.set(title="A train step of a larger model, by tfamp.tune", xlabel="ms; green is chosen")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains once per policy, measures the step, and prints both results."""
    parser = make_parser(__doc__, epochs=20, small_epochs=2)
    parser.add_argument("--plot", metavar="PATH", help="also draw both; needs matplotlib")
    args = parse(parser, argv)
    data, console = load_digits(), Console(file=sys.stdout)
    auto = tfamp.Policy("auto").name
    rows, curves = {}, {}
    with progress(console) as display:
        for policy in dict.fromkeys([*policies(args.dtype), auto]):
            model = train(policy, data, args.epochs, args.seed, display)
            name = f"{policy} (auto)" if policy == auto else policy
            rows[name] = accuracy_row(model, data)
            curves[name] = model.history.history["accuracy"]
        report = tune(data, args.small, args.seed, display)
    console.print(accuracy_table(rows))
    # Such as kernels that TensorFlow has for this machine and does not use; one is of all machines.
    issues = [x for x in device_report().known_issues if x.name != "sums-in-low-variables"]
    lines = (
        f"auto is {auto} here: {automatic_policy(detect())[1]}.",
        f"A train step of a larger model: {verdict(report)}",
        GPU_POLICIES,
        *(f"{each.text}\n{each.advice}" for each in issues),
    )
    console.print(*lines, sep="\n", highlight=False, soft_wrap=True)
    if args.plot:
        plot(curves, report, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
