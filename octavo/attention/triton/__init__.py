"""The portable GPU kernels, in Triton. Importing the package imports no Triton."""
