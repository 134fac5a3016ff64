"""How gradients become an update: the loss scale, gradients, weights, and what applies them."""
