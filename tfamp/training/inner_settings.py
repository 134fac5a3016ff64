"""Settings of the inner optimizer, shown by the wrapper; a part of `LossScaleOptimizer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

if TYPE_CHECKING:
    from keras.optimizers import Optimizer as _Base
else:
    _Base = object


class _OfInner:
    """An attribute that is the inner optimizer's once there is one."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        if wrapper is None:
            return self
        holder = vars(wrapper)
        inner = holder.get("inner_optimizer")
        if inner is None or holder.get("_hides_inner", False):
            return holder.get(self._name)
        return getattr(inner, self._name, None)

    def __set__(self, wrapper: Any, value: Any) -> None:
        inner = vars(wrapper).get("inner_optimizer")
        if inner is None:  # Keras's constructor sets the defaults of the wrapper itself.
            vars(wrapper)[self._name] = value
        else:
            setattr(inner, self._name, value)


class InnerSettings(_Base):
    """Adds the settings Keras knows on every optimizer; setting one sets the inner optimizer's."""

    weight_decay = _OfInner()
    clipnorm = _OfInner()
    clipvalue = _OfInner()
    global_clipnorm = _OfInner()
    use_ema = _OfInner()
    ema_momentum = _OfInner()
    ema_overwrite_frequency = _OfInner()
    gradient_accumulation_steps = _OfInner()

    def _register(self, variables: list[Any]) -> None:
        """Makes `variables` known as the ones the optimizer was built for."""
        # Keras would make the accumulators and averages that are the inner optimizer's a second
        # time.
        self._hides_inner = True
        try:
            # Past Keras's LossScaleOptimizer.build, which would make more state variables.
            keras.optimizers.Optimizer.build(self, variables)
        finally:
            self._hides_inner = False
