"""`compare`: float32 against mixed precision, and what to keep in float32."""
