"""Linear layers: one chooser (`choice`), and the GEMMs it chooses from, a file or a few each.

    GEMM        runs by     files
    plain       torch       plain
    packed      MKL         packed
    int8        oneDNN      int8
    skinny      Triton      skinny, skinny_tiling
    hopper      Gluon       hopper, hopper_kernel, hopper_tiling
    invariant   Triton      invariant, invariant_tiling

Each GEMM says by `unsupported_reason` whether it can run here: None, or why it cannot. Files that import
Triton are imported where they run only; choice and the tilings import none.
"""
