"""Values that every part uses, free of TensorFlow and Keras."""
