"""Loss scaling, gradients and updates."""
