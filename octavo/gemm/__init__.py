"""Products of matrices, y = epilogue(prologue(x) W^T), W of a dense layer or of experts; `table` chooses.

    room        what is there
    cpu/        by C, MKL and oneDNN
    hopper/     by kernels that need a Hopper GPU: floats, float8, packed, mxfp4
    portable/   by Triton on every NVIDIA GPU

`linear` says what a layer is to a block, and what its product may take in: norm, activation, residual sum.
`make_linear` makes layers; `gpu_linear` and `stacked_experts` run what the table has for a weight on a GPU;
`explain` says which products a weight would take on a GPU that is not here. A product's `unsupported_reason`
returns why it cannot run, or None. The table and the tilings import no Triton.
"""
