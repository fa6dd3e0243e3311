"""Mixtures of experts: a router sends each token to a few of many feed-forwards.

    x [T, hidden] --router--> chosen [T, k], weights [T, k]      router
      |                           |
      +---> rows by expert --> gate, up --> activation --> down  experts (any device), stacked (Triton)
                                                     |
    sum over a token's k rows, times their weights <-+           always in the order of the choice

`choice` says how a step's rows are multiplied. choice and tiling import no Triton.
"""
