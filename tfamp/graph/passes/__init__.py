"""What is done to a graph before and after the plan: one pass a file."""
