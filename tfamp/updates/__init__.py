"""How gradients become an update: checked, summed, clipped, put on weights or on masters."""
