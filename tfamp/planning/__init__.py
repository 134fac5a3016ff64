"""Deciding what of a graph is low: pure values, free of TensorFlow and Keras."""
