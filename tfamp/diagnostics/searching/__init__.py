"""`find_nonfinite`: the op that made the first NaN or infinity, why, and what to change."""
