"""What a model stored in low precision saves of the memory of a training step, in bytes.

Counted in the graph of the step, not measured: the variables of the model and of the optimizer, the
gradients, and the activations, which are all tensors of the forward pass that the backward pass
reads. Temporary memory of single ops is left out.

python -m benchmarks.master_weights [--small] [--dtype bfloat16] [--workload NAME]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import keras
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import tfamp
from benchmarks.workloads import WORKLOADS, Workload


@dataclass(frozen=True)
class Memory:
    """Bytes that a training step holds.

    Attributes:
        weights: The model's variables.
        masters: Their float32 copies in the optimizer.
        slots: What the inner optimizer keeps, as moments.
        gradients: The gradients of the trainable variables.
        activations: What the backward pass reads of the forward pass.
    """

    weights: int
    masters: int
    slots: int
    gradients: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.masters + self.slots + self.gradients + self.activations


PARTS = ("weights", "masters", "slots", "gradients", "activations", "total")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="small models")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), action="append")
    args = parser.parse_args()
    systems = {
        "float32": ("float32", False),
        f"mixed_{args.dtype}": (f"mixed_{args.dtype}", False),
        f"{args.dtype}, masters": (args.dtype, True),
        f"{args.dtype}, none": (args.dtype, False),
    }
    for name in args.workload or ("mlp", "transformer"):
        workload = WORKLOADS[name](args.small)
        found = {each: measure(workload, *how) for each, how in systems.items()}
        Console().print(table(f"{name}, Adam: MB of a training step", found))


def measure(workload: Workload, policy: str, masters: bool) -> Memory:
    """Counts the bytes of one training step of a workload under a policy."""
    keras.utils.set_random_seed(0)
    with tfamp.policy_scope(policy):
        model = workload.build()
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.Adam(1e-3), master_weights=masters)
    optimizer.build(model.trainable_variables)
    gradients, activations = _traced(model, optimizer, workload)
    return Memory(
        weights=_bytes(model.variables),
        masters=_bytes(optimizer.master_variables),
        slots=_bytes(optimizer.inner_optimizer.variables),
        gradients=gradients,
        activations=activations,
    )


def _traced(
    model: keras.Model, optimizer: tfamp.LossScaleOptimizer, workload: Workload
) -> tuple[int, int]:
    """Returns the bytes of the gradients and of the activations."""
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found: dict[str, int] = {}

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        graph = tf.compat.v1.get_default_graph()
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(loss_fn(y, model(x, training=True)))
        forward = {id(op) for op in graph.get_operations() if op.type not in _NOT_HELD}
        start = len(graph.get_operations())
        gradients = tape.gradient(scaled, [v.value for v in model.trainable_variables])
        held = {
            id(tensor): tensor
            for op in graph.get_operations()[start:]
            for tensor in op.inputs
            if id(tensor.op) in forward
        }
        found["activations"] = sum(map(_size, _without_views(held.values())))
        found["gradients"] = sum(
            _size(g.values if isinstance(g, tf.IndexedSlices) else g) for g in gradients
        )

    tf.function(step).get_concrete_function(workload.x, workload.y)
    return found["gradients"], found["activations"]


# Variables and constants, which are there anyway, and shapes.
_NOT_HELD = {"Placeholder", "ReadVariableOp", "Const", "Shape", "ShapeN", "Size"}
_VIEWS = {"Reshape", "Identity", "Squeeze", "ExpandDims", "StopGradient"}


def _without_views(tensors: object) -> list[tf.Tensor]:
    """Leaves out tensors that share the memory of another one, and casts of variables."""
    found = {}
    for tensor in tensors:
        while tensor.op.type in _VIEWS:
            tensor = tensor.op.inputs[0]
        found[id(tensor)] = tensor
    return [tensor for tensor in found.values() if tensor.op.type not in _NOT_HELD]


def _size(tensor: tf.Tensor) -> int:
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def _bytes(variables: list[keras.Variable]) -> int:
    return sum(_size(tf.convert_to_tensor(variable.value)) for variable in variables)


def table(title: str, found: dict[str, Memory]) -> Table:
    result = Table(
        title=title,
        caption="In brackets: share of float32's that is saved; negative where it takes more.",
    )
    result.add_column("")
    for part in PARTS:
        result.add_column(part, justify="right")
    base = found["float32"]
    for name, memory in found.items():
        result.add_row(name, *(_cell(getattr(memory, p), getattr(base, p)) for p in PARTS))
    return result


def _cell(size: int, base: int) -> str:
    text = f"{size / 1e6:.1f}"
    return text if not base or size == base else f"{text} ({1 - size / base:.0%})"


if __name__ == "__main__":
    main()
