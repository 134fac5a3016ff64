"""What `tfamp.rewrite` needs around `tfamp.graph`: calls, traces and cached low weights."""
