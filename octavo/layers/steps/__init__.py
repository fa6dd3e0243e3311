"""One step's attention over the KV cache, for any layer: by operators, in C, in Triton."""
