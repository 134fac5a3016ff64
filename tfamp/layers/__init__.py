"""The effects of a policy on Keras layers and models: dtypes, output casts and fused kernels."""
