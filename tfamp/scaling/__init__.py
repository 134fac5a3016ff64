"""What `LossScaleOptimizer` and `GradScaler` are made of: the scale, and what is unscaled."""
