"""Tools of device code, without policy: which kernel runs is decided in the rooms above.

    device, driver, padded_rows,      facts about the GPU and its memory
    copies
    launch, tape, repeat, compiled    how kernels are launched, recorded, run again and compiled ahead
    ring, descriptor                  pipelines in shared memory and TMA, for Hopper GPUs
    rms_norm, activation,             what products begin and end with
    clamped_swiglu
    c/                                the C compiler, vectors, teams of threads

Modules with kernels are imported only where Triton runs.
"""
