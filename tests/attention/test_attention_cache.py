"""KVCache: sizes that make sense, and blocks that exist."""

import pytest
import torch

from octavo.attention import KVCache
from octavo.errors import InvalidArgumentError

SIZES = {"num_layers": 2, "num_blocks": 4, "block_size": 4, "num_kv_heads": 2, "head_dim": 8}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [0, -1, 2.5, "4", None])
def test_sizes_are_positive_integers(name, size):
    with pytest.raises(InvalidArgumentError, match=f"{name} must be a positive integer, got {size!r}"):
        KVCache.allocate(**SIZES | {name: size})


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, "float32"])
def test_dtypes_are_of_floats(dtype):
    with pytest.raises(InvalidArgumentError, match=r"dtype must be a torch\.dtype of floats"):
        KVCache.allocate(**SIZES, dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda"])
def test_devices_exist(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgumentError, match=f"got (device )?'{device}'"):
        KVCache.allocate(**SIZES, device=device)


@pytest.mark.parametrize("pair", [(-1, 0), (0, -1), (4, 0), (0, 4)])
def test_only_blocks_that_exist_are_copied(pair):
    """A negative id would be somebody else's block, and one too large would end the process on a GPU."""
    cache = KVCache.allocate(**SIZES)
    cache.data.copy_(torch.arange(4.0).view(4, 1, 1, 1).expand_as(cache.data))
    before = cache.data.clone()
    with pytest.raises(InvalidArgumentError, match=r"block ids are 0 \.\. 3"):
        cache.copy_blocks([(0, 1), pair])
    assert torch.equal(cache.data, before)
    cache.copy_blocks([(0, 1)])
    assert not torch.equal(cache.data, before)
