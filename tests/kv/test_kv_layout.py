"""Layouts: how layers of the shapes that models have share pages, and how many tokens fit."""

from math import gcd, lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import InvalidArgumentError
from octavo.kv import CacheLayer, CacheLayout, num_blocks_for, plan_layout


def mixed(num_layers: int, every: int, windowed: CacheLayer, full: CacheLayer) -> list[CacheLayer]:
    """Make every so many-th layer a full one, as such models do."""
    return [windowed if (index + 1) % every else full for index in range(num_layers)]


SHAPES = {
    "gpt-oss 20b": mixed(24, 2, CacheLayer(8, 64, 128), CacheLayer(8, 64)),
    "Gemma 3 4B": mixed(34, 6, CacheLayer(4, 256, 1024), CacheLayer(4, 256)),
    "Gemma 3 12B": mixed(48, 6, CacheLayer(8, 256, 1024), CacheLayer(8, 256)),
    "Gemma 4 31B": mixed(60, 6, CacheLayer(16, 256, 1024), CacheLayer(4, 512)),
    "Gemma 4 26B-A4B": mixed(30, 6, CacheLayer(8, 256, 1024), CacheLayer(2, 512)),
    "Gemma 4 E2B": mixed(15, 5, CacheLayer(1, 256, 512), CacheLayer(1, 512)),
    "all windows": [CacheLayer(8, 128, 4096)] * 32,
    "ordinary": [CacheLayer(8, 128)] * 36,
}
# Groups, blocks of the first one in a page, its layers in a slice, slices.
PLANS = {
    "gpt-oss 20b": (2, 1, 1, 12),
    "Gemma 3 4B": (2, 5, 1, 29),
    "Gemma 3 12B": (2, 5, 1, 40),
    "Gemma 4 31B": (2, 10, 2, 50),
    "Gemma 4 26B-A4B": (2, 10, 2, 25),
    "Gemma 4 E2B": (2, 2, 1, 6),
    "all windows": (2, 8192, 1, 32),
    "ordinary": (1, 1, 1, 36),
}


def layout_of(name: str) -> CacheLayout:
    return plan_layout(SHAPES[name], 16, 131072)


def check_layout(layout: CacheLayout, num_pages: int) -> None:
    """Assert that blocks of all layers fill places of their own, inside the page that they belong to."""
    size, taken = layout.slice_size, set[int]()
    unit = layout.block_size * gcd(*(group.kind.size for group in layout.groups))
    for group in layout.groups:
        width = layout.block_size * group.kind.size
        for layer in group.layers:
            first = group.first_block(layer, num_pages)
            for page in range(num_pages):
                for block_id in group.block_ids(page, num_pages):
                    assert group.page(block_id, num_pages) == page
                    begin = (first + block_id) * width
                    assert begin // size % num_pages == (begin + width - 1) // size % num_pages == page
                    assert begin + width <= layout.num_slices * num_pages * size
                    cells = set(range(begin // unit, (begin + width) // unit))
                    # Groups never share a page, so layers of others may use the same place.
                    assert taken.isdisjoint(cells)
                    taken |= cells
        taken.clear()


@pytest.mark.parametrize("name", SHAPES)
def test_layers_of_real_models_fall_into_groups_that_fill_pages(name: str) -> None:
    layout = layout_of(name)
    first = layout.groups[0]
    plan = len(layout.groups), first.blocks_per_page, first.layers_per_slice, layout.num_slices
    assert plan == PLANS[name]
    layers = sorted(layer for group in layout.groups for layer in group.layers)
    assert layers == list(range(len(layout.layers)))
    assert all(layout.layers[layer] == group.kind for group in layout.groups for layer in group.layers)
    assert all(layout.group_of(layer) == index for index, g in enumerate(layout.groups) for layer in g.layers)
    if name != "all windows":
        check_layout(layout, 3)


@pytest.mark.parametrize(
    ("name", "least"), [("gpt-oss 20b", 1.9), ("Gemma 3 4B", 4), ("Gemma 3 12B", 4), ("ordinary", 1)]
)
def test_windows_leave_room_for_more_tokens_of_32k_requests(name: str, least: float) -> None:
    layout = layout_of(name)
    num_pages = layout.num_pages(32768)
    of_one_group = 2 * sum(layer.size for layer in layout.layers) * 32768
    assert of_one_group >= least * num_pages * layout.page_size


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("num_pages", [1, 2, 50, 1000, 12345])
def test_the_tokens_that_fit_some_pages_are_the_most_that_do(name: str, num_pages: int) -> None:
    layout = layout_of(name)
    num_tokens = layout.num_tokens(num_pages)
    assert layout.num_pages(num_tokens) <= num_pages
    assert layout.num_pages(num_tokens + 1) > num_pages
    assert num_tokens % 16 == 0


KINDS = st.builds(
    CacheLayer, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]), st.sampled_from([None, 1, 5, 8])
)


@given(layers=st.lists(KINDS, min_size=1, max_size=12), block_size=st.integers(1, 4), pages=st.integers(1, 5))
def test_blocks_of_any_layers_never_overlap_in_the_arena(
    layers: list[CacheLayer], block_size: int, pages: int
) -> None:
    sizes = {layer.size for layer in layers}
    if lcm(*sizes) <= 64 * min(sizes):
        layout = plan_layout(layers, block_size, 40)
        check_layout(layout, pages)
        assert layout.num_pages(layout.num_tokens(pages)) <= pages


def test_windows_as_long_as_any_sequence_keep_all_keys() -> None:
    layers = [CacheLayer(1, 4, 64), CacheLayer(1, 4)]
    assert plan_layout(layers, 16, 64).windows == ()
    assert plan_layout(layers, 16, 65).windows == (64,)


def test_no_layers_and_heads_that_cannot_share_a_cache_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="at least one layer"):
        plan_layout([], 16, 64)
    with pytest.raises(InvalidArgumentError, match="cannot share a cache"):
        plan_layout([CacheLayer(1, 67), CacheLayer(1, 71)], 16, 64)


def test_windows_alone_take_a_page_for_ids_and_those_of_the_window() -> None:
    layout = layout_of("all windows")
    assert layout.num_pages(1) == 2
    assert layout.num_pages(131072) == 1 + num_blocks_for(4096, 16) + 1
