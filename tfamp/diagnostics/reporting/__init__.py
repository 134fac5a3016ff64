"""Plots and `training_report`: what is known of a training run, for people to look at."""
