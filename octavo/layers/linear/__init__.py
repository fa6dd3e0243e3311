"""Linear layers: `choice` chooses among these GEMMs.

    GEMM        runs by        files
    plain       torch          plain
    packed      MKL            packed
    bfloat16    C, oneDNN      bfloat16, layers/cpu/{few,bfloat16}.c
    int8        C              int8
    blocks      C              blocks/, layers/cpu/{blocks,dots,rows,tiles}.c: MXFP4, too
    grouped     Gluon, Triton  grouped/: few, medium and many rows
    float8      torch, Triton  float8/, skinny, hopper/, layers/triton/quantise
                C              float8/on_cpu, layers/cpu/{few,float8}.c
    dequantised torch          dequantised: float8 and MXFP4 where no kernel multiplies them
    gemv        Gluon          gemv/
    skinny      Triton         skinny, skinny_tiling
    hopper      Gluon          hopper/
    invariant   Triton         invariant, invariant_tiling

`quantised` defines weights that stay as the checkpoint stores them, `fused` layers that take norm, activation
and residual sum into their GEMMs. Each GEMM's `unsupported_reason` returns why it cannot run here,
or None. choice and the tilings import no Triton.
"""
