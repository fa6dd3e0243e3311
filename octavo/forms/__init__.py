"""What a weight is: numbers as they are stored, and what makes weights of them.

    form      what is stored                                        matrices [N, K]        experts [E, N, K]
    floats    float32, float16, bfloat16                            a tensor               float_experts
    float8    e4m3 numbers; a scale for a row or a tile             float8                 float_experts
    blocks    integers of 4 or 8 bits share a scale and a minimum   blocks, stored_blocks
    packed    the same in the order of a GPU's kernels              packed                 packed_experts
    mxfp4     4-bit floats; a power of two for 32 of a row          mxfp4                  mxfp4_experts

`base` says what all of them can do: take and join rows, move, dequantise, and how many bytes they are.
Checkpoints' formats hand them out, `octavo.gemm` multiplies them.
"""
