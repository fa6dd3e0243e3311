"""Products of matrices, y = epilogue(prologue(x) W^T), W of a dense layer or of experts; `table` chooses.

    room        what is there
    cpu/        by C, MKL and oneDNN
    hopper/     by kernels that need a Hopper GPU: floats, float8, packed, mxfp4
    portable/   by Triton on every NVIDIA GPU

`fused` says what a layer's product may take in: norm, activation and residual sum. A product's
`unsupported_reason` returns why it cannot run, or None. The tables and tilings import no Triton.
"""
