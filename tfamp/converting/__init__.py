"""What `rewrite_saved_model` is made of: a SavedModel's files, graphs, values and ranges."""
