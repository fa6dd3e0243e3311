"""Linear layers: `choice` chooses among these GEMMs.

    GEMM        runs by        files
    plain       torch          plain
    packed      MKL            packed
    int8        oneDNN         int8
    blocks      C              blocks, {block_weight,stored_blocks}, layers/cpu/{blocks,dots,tiles}.c
    grouped     Gluon, Triton  grouped/: few, medium and many rows
    float8      torch, Triton  float8/, skinny, hopper/, layers/triton/quantise
    skinny      Triton         skinny, skinny_tiling
    hopper      Gluon          hopper/
    invariant   Triton         invariant, invariant_tiling

quantised says what a weight is that stays as the checkpoint stores it, fused what a layer is that takes norm,
activation and residual sum into its GEMMs. Each GEMM's `unsupported_reason` returns why it cannot run here,
or None. choice and the tilings import no Triton.
"""
