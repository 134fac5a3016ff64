"""The tools of a loop written as for PyTorch: `tfamp.autocast` and `tfamp.GradScaler`."""
