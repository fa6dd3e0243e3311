"""What random calls are checked by."""

from dataclasses import replace

import torch

from octavo.errors import InvalidArgumentError

BLOCK_SIZES, HEADS = (1, 2, 3, 16, 17), ((1, 1), (2, 2), (4, 2), (7, 1), (6, 2), (50, 1))
NOWHERE = (-1, -(2**31), 2**31 - 1)


def refused(call, *arguments, **options):
    """Check that a call ends in a typed error."""
    try:
        call(*arguments, **options)
    except InvalidArgumentError:
        return
    raise AssertionError(f"accepted by {call}: {arguments} {options}")


def close(actual, expected, scale=1.0):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * scale)


def strided(pick, case):
    """The same numbers, with what lies between them in memory NaN."""
    wide = torch.full((case.q.shape[0], case.q.shape[1] + 3, case.q.shape[2]), torch.nan)
    wide[:, 2:-1] = case.q
    both = torch.stack([case.k_cache, case.v_cache], dim=3)
    return replace(case, q=wide[:, 2:-1], k_cache=both[:, :, :, 0], v_cache=both[:, :, :, 1])


def slots_of(case):
    """Where the query tokens of a case lie in its cache."""
    metadata, block_size = case.metadata, case.k_cache.shape[1]
    sequence = torch.repeat_interleave(torch.arange(metadata.seq_lens.shape[0]), metadata.cu_seqlens_q.diff())
    positions = metadata.positions.long()
    return (
        metadata.block_table[sequence, positions // block_size].long() * block_size + positions % block_size
    )
