"""A user's typed program: what type checkers know of tfamp's public names.

Not a test module: CI's section on types checks it with `mypy --strict` and with pyright, in the
settings of tests/typing. Neither runs it. Each `type: ignore` and `pyright: ignore` marks a mistake
that both must find; one that a checker does not find is an unused comment, an error as well.
"""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import assert_type

import tfamp
from tfamp.diagnostics import NonFiniteReport, find_nonfinite


class Net(keras.Model):
    """A model with a method of its own."""

    def width(self) -> int:
        return 4


# ---- rewrite keeps arguments and result ----------------------------------------------------------


@tfamp.rewrite(dtype="bfloat16", placement="lists", on_error="keep")
def step(x: list[int], *, scale: float = 1.0) -> dict[str, float]:
    return {"loss": scale * len(x)}


@tfamp.rewrite
def plain(x: int) -> str:
    return str(x)


class Trainer:
    """A rewritten method is called without its object."""

    @tfamp.rewrite(dtype=tf.bfloat16)
    def step(self, x: int, name: str = "") -> float:
        return float(x)


def original(x: int) -> float:
    return float(x)


assert_type(step([1], scale=2.0), dict[str, float])
assert_type(plain(1), str)
assert_type(Trainer().step(1, name="x"), float)
assert_type(tfamp.rewrite(original, dtype=np.float16)(3), float)
assert_type(step.copy(dtype="float16")([1]), dict[str, float])
assert_type(step.plan([1]).to_text(), str)
step("x")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
step([1], scales=2.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
plain()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
Trainer().step("x")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
tfamp.rewrite(original, dtype="fp16")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
tfamp.rewrite(original, placement="mincut")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
tfamp.rewrite(original, on_error="warn")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]


# ---- prepare returns a model of the same type ----------------------------------------------------

prepared = tfamp.prepare(Net(), "adam", level="O2", dtype="float16", loss_scale="dynamic")
assert_type(prepared.model, Net)
assert_type(prepared.model.width(), int)
assert_type(prepared.settings.level, str | None)
net, optimizer = tfamp.prepare(Net(), level="O1", placement="fused", config={"slots": "float16"})
assert_type(net, Net)
tfamp.prepare(Net(), level="O4")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
tfamp.prepare(Net(), dtype="half")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
tfamp.prepare(Net(), placement="cut")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
tfamp.prepare(Net(), loss_scale="static")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
tfamp.prepare(Net(), weight_rounding="up")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
tfamp.prepare(Net(), float32_outputs="sum")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# ---- Names from a file are checked when the program runs -----------------------------------------


def from_settings(settings: dict[str, str]) -> tfamp.PrecisionConfig:
    return tfamp.PrecisionConfig.from_dict(settings)


config = tfamp.PrecisionConfig(level="O1", loss_scale={"scale": 512.0}, grad_clip=35.0)
assert_type(config.grad_clip, tfamp.GradClip | None)
tfamp.PrecisionConfig(level="O5")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# ---- Policies ------------------------------------------------------------------------------------

policy = tfamp.Policy("mixed_float16", float32_layers=["Softmax"], float32_outputs="sums")
assert_type(policy.compute_dtype, str)
tfamp.set_global_policy(policy)
tfamp.set_global_policy("auto")
tfamp.set_global_policy(keras.DTypePolicy("mixed_bfloat16"))
with tfamp.policy_scope("mixed_bfloat16") as in_force:
    assert_type(in_force, tfamp.Policy)
tfamp.Policy("mixed_fp16")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
tfamp.set_global_policy("mixed")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
tfamp.policy_scope("bf16")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
tfamp.set_layer_dtype(net, "float64")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# ---- autocast decorates, optimizers, op lists, files ---------------------------------------------


@tfamp.autocast("float16")
def forward(x: int) -> str:
    return str(x)


assert_type(forward(1), str)
with tfamp.autocast(tf.float16), tfamp.autocast("float32", enabled=False):
    pass
wrapped = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.1), weight_rounding="split")
lists = tfamp.OpLists.default("bfloat16", device="cpu").with_changes(deny_add=["Softmax"])
plan = tfamp.rewrite_saved_model(Path("a"), "b", dtype="bfloat16", device="gpu")
report = tfamp.tune(original, 1, candidates=["float32", "xla"])
assert_type(plan.to_json(), str)
assert_type(report.speed_up, float)
tfamp.autocast("float61")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
tfamp.LossScaleOptimizer(keras.optimizers.SGD(), slots="half")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
tfamp.OpLists.default("float32")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
tfamp.rewrite_saved_model("a", "b", device="cuda")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
tfamp.tune(original, 1, candidates=["xla_lists"])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]


# ---- find_nonfinite returns None where everything is finite --------------------------------------

found = find_nonfinite(net, np.ones((2, 4)), dtype="float16")
assert_type(found, NonFiniteReport | None)
print(found.fix)  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
if found is not None:
    assert_type(found.layer, str | None)
