"""What `tfamp.autocast` is made of: the context, its rule for each op, its state per context."""
