"""What tests share; importable because pytest puts the tests directory on the path."""
