"""What kernels take: made once where nothing of it depends on the layer, and told apart where it does."""

from dataclasses import replace

import pytest
import torch
from triton_cases import make_case, to_device

from octavo.attention import KVCache
from octavo.attention.hopper import pipe, tma_prefill
from octavo.attention.score_options import ScoreOptions
from octavo.attention.tilings.portable import TileShape
from octavo.attention.triton.kernel_call import constant, empty_results, make_call
from octavo.kernels.device import power_of_two

TILE = TileShape(16, 32, 4, 2, 1)


def call(options=None, **shape):
    moved = to_device(make_case([40, 9], [3, 1], **shape))
    return make_call(
        *(moved.q, moved.cache, moved.metadata.positions, moved.metadata.block_table),
        options or ScoreOptions(0.25),
        empty_results(moved.q),
    )


def test_layers_that_are_alike_share_the_very_same_shape():
    shape = call().shape(TILE)
    assert call(ScoreOptions(0.5)).shape(TILE) is shape
    assert (shape.rows.value, shape.keys.value, shape.windowed.value) == (16, 32, False)
    assert call(head_dim=24).shape(TILE).padded_dim.value == 32
    assert call(head_dim=24, dtype=torch.float16).shape(TILE).padded_dim.value == 64


@pytest.mark.parametrize(
    "other",
    [
        lambda: call(ScoreOptions(0.25, window=8)).shape(TILE),
        lambda: call(ScoreOptions(0.25, softcap=8.0)).shape(TILE),
        lambda: call(head_dim=24).shape(TILE),
        lambda: call(heads=8).shape(TILE),
        lambda: call().shape(replace(TILE, keys=64)),
    ],
)
def test_what_is_compiled_for_is_told_apart(other):
    """By hash, which is how Triton finds the compiled kernel."""
    assert hash(other()) != hash(call().shape(TILE))


def test_tables_of_any_width_have_one_kernel():
    """Triton compiles another one where an integer is 1, and where it is a multiple of 16."""
    moved = to_device(make_case([40, 9], [3, 1]))
    tables = (torch.zeros(2, width, dtype=torch.int32) for width in (1, 2, 16, 17))
    calls = [
        make_call(
            moved.q, moved.cache, moved.metadata.positions, table, ScoreOptions(0.1), empty_results(moved.q)
        )
        for table in tables
    ]
    rows = [made.cache.table_row for made in calls]
    assert [row != 1 and row % 16 != 0 for row in rows] == [True] * 4
    # Where a warp has too few registers for the shift, the kernel takes the stride itself.
    parameters = {parameter.name: parameter for parameter in tma_prefill._attend_kernel.params}
    assert parameters["table_row"].do_not_specialize


def test_a_constant_is_one_object_for_each_value():
    assert constant(16) is constant(16)
    assert hash(constant(16)) != hash(constant(32))
    assert constant(True) is not constant(1)
    assert constant(True).value is True


def test_results_are_contiguous_beside_strided_queries():
    out, lse = empty_results(torch.zeros(5, 8, 16).transpose(0, 1).half())
    assert (out.shape, out.dtype, out.is_contiguous()) == ((8, 5, 16), torch.float16, True)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((8, 5), torch.float32, True)


def test_powers_of_two():
    assert [power_of_two(n) for n in (0, 1, 2, 3, 4, 5, 64, 65)] == [1, 1, 2, 4, 4, 8, 64, 128]


def test_a_descriptor_is_of_an_address_and_a_geometry():
    """What TMA is told is kept by address; it must not keep a cache's memory alive."""
    sizes = {"num_layers": 2, "num_blocks": 5, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float16}
    cache = KVCache.allocate(block_size=64, **sizes)
    k, v, other = cache.layer(0).k, cache.layer(0).v, cache.layer(1).k

    def describe(tensor, keys=64):
        geometry = (tensor.dtype, tensor.shape, tensor.stride(), keys)
        return pipe._describe(tensor.data_ptr(), *geometry)

    descriptor, matrices = describe(k)
    assert describe(k)[0] is descriptor
    assert descriptor.base.data_ptr() == k.data_ptr()
    assert not isinstance(descriptor.base, torch.Tensor)
    assert (descriptor.shape, descriptor.strides) == ([5 * 2 * 64, 64], [64, 1])
    assert matrices == (2 * 64, 64, 0)
    assert {describe(t)[0].base.data_ptr() for t in (k, v, other)} == {t.data_ptr() for t in (k, v, other)}
    assert describe(KVCache.allocate(block_size=128, **sizes).layer(0).k, 128)[0].block_shape == [128, 64]
