"""`NumericsMonitor`: what gradients, layers and the loss scale do during training."""
