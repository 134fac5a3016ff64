"""Graph-to-graph rewrites before and after the plan, one pass a file."""
