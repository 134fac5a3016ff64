"""The machine tfamp runs on: its hardware, how fast it is, and how its files are replaced."""
