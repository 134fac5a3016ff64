"""`device_report` and `model_report`: what low precision gains on a machine and a model."""
