"""Shared by tests; importable because pytest puts the tests directory on the path."""
