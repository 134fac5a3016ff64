"""Keeping float32 copies of a model's variables; a part of `LossScaleOptimizer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras

from tfamp.training import gradients as gradient_lib
from tfamp.training.master_weights import (
    Mastered,
    Masters,
    create_master,
    follow_model,
    needs_master,
    write_to_model,
)

if TYPE_CHECKING:
    from keras.optimizers import Optimizer as _Base
else:
    _Base = object


class MasterKeeping(_Base):
    """Adds float32 copies of low-precision variables to an optimizer that wraps another."""

    inner_optimizer: keras.optimizers.Optimizer

    def _start_masters(self, wanted: bool) -> None:
        self._has_masters = wanted
        self._masters = Masters()

    @property
    def master_weights(self) -> bool:
        """Whether float16 and bfloat16 variables are updated through float32 copies."""
        return self._has_masters

    @property
    def master_variables(self) -> list[keras.Variable]:
        """The float32 copies, in the order of the variables they belong to; empty without any."""
        return [master for _, master in self._masters.pairs()]

    def _create_masters(self, variables: Sequence[Any]) -> list[Any]:
        """Creates what copies are wanted; returns what the inner optimizer is to update."""
        low = [v for v in variables if needs_master(v)] if self._has_masters else []
        if not low or self._masters.by_key:
            return [self._target(variable) for variable in variables]
        if self.inner_optimizer.built:
            raise ValueError(
                f"{self.inner_optimizer.name} was built for {len(low)} low-precision variables, "
                f"such as {gradient_lib.variable_name(low[0])}, before master_weights could give "
                "it float32 copies to update. Create a new inner optimizer, and let "
                "LossScaleOptimizer build it."
            )
        for variable in low:
            master = create_master(variable)
            self._track_variable(master)
            self._masters.by_key[self._var_key(variable)] = Mastered(variable, master)
        # For tf.train.Checkpoint, which finds variables by attributes.
        self._master_list = self.master_variables
        self._carry_over_exclusions()
        return [self._target(variable) for variable in variables]

    def _carry_over_exclusions(self) -> None:
        inner = self.inner_optimizer
        excluded: set[Any] = getattr(inner, "_exclude_from_weight_decay", set())
        excluded |= {
            inner._var_key(master)
            for variable, master in self._masters.pairs()
            if inner._var_key(variable) in excluded
        }

    def _target(self, variable: Any) -> Any:
        """What the inner optimizer updates for a variable: its copy, or the variable itself."""
        mastered = self._masters.by_key.get(self._var_key(variable))
        return variable if mastered is None else mastered.master

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Puts the inner optimizer's moving averages into the weights, as `fit` does at its end.

        Args:
            var_list: The trainable variables.
        """
        pairs = self._masters.pairs()
        follow_model(pairs)
        self.inner_optimizer.finalize_variable_values([self._target(v) for v in var_list])
        write_to_model(pairs)
