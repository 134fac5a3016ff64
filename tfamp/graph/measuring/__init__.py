"""Running a graph on data: what its tensors hold, and which nodes are too large for a dtype."""
