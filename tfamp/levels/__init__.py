"""`prepare`: what a level of mixed precision means, and how it is applied to an existing model."""
