"""Every private or patched symbol of TensorFlow and Keras."""
