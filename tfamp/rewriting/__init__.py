"""`tfamp.rewrite` and `rewrite_saved_model`: traces and SavedModels, converted and put back."""
