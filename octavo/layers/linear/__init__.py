"""Linear layers: `choice` chooses among these GEMMs.

    GEMM        runs by     files
    plain       torch       plain
    packed      MKL         packed
    int8        oneDNN      int8
    blocks      C           blocks, block_weight, layers/cpu/blocks.c
    grouped     Gluon     grouped/
                Triton
    skinny      Triton      skinny, skinny_tiling
    hopper      Gluon       hopper, hopper_kernel, hopper_tiling
    invariant   Triton      invariant, invariant_tiling

Each GEMM's `unsupported_reason` returns why it cannot run here, or None. choice and the tilings import no
Triton.
"""
