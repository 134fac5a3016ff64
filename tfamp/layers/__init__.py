"""What a policy does to Keras layers and models: their dtypes, outputs and fused kernels."""
