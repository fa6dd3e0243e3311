"""Hits need equal contents and an equal parent, whatever the hash says."""

from octavo.kv import BlockKey, PrefixTree, SequenceBlocks, hash_block
from octavo.kv.prefix_tree import ROOT


def key(name: bytes) -> BlockKey:
    return BlockKey(b"#" + name, name)


def test_longest_match_stops_at_the_first_miss() -> None:
    tree = PrefixTree()
    tree.find_or_insert(4, ROOT, key(b"a"))
    tree.find_or_insert(2, 4, key(b"b"))
    assert tree.longest_match([key(b"a"), key(b"b"), key(b"c")]) == [4, 2]
    assert tree.longest_match([key(b"b")]) == []
    assert len(tree) == 2
    assert 4 in tree


def test_an_equal_block_is_found_instead_of_inserted() -> None:
    tree = PrefixTree()
    assert tree.find_or_insert(4, ROOT, key(b"a")) == 4
    assert tree.find_or_insert(7, ROOT, key(b"a")) == 4
    assert 7 not in tree


def test_equal_digests_of_different_contents_or_parents_do_not_match() -> None:
    tree = PrefixTree()
    tree.find_or_insert(4, ROOT, BlockKey(b"same", b"a"))
    assert tree.find(ROOT, BlockKey(b"same", b"b")) is None
    assert tree.find(4, BlockKey(b"same", b"a")) is None
    assert tree.find_or_insert(5, 4, BlockKey(b"same", b"a")) is None
    tree.check_invariants()


def test_removing_a_block_drops_everything_below_it() -> None:
    tree = PrefixTree()
    tree.find_or_insert(0, ROOT, key(b"a"))
    tree.find_or_insert(1, 0, key(b"b"))
    tree.find_or_insert(2, 1, key(b"c"))
    tree.find_or_insert(3, 0, key(b"d"))
    assert tree.remove(1) == [1, 2]
    tree.check_invariants()
    assert tree.longest_match([key(b"a"), key(b"d")]) == [0, 3]
    assert tree.remove(0) == [0, 3]
    assert len(tree) == 0


def test_digests_are_chained_and_salted() -> None:
    def digests(token_ids: list[int], salt: bytes = b"") -> list[bytes]:
        sequence = SequenceBlocks(block_size=2, salt=salt)
        sequence.extend_keys(token_ids, len(token_ids) // 2)
        return [block_key.digest for block_key in sequence.block_keys]

    plain = digests([1, 2, 3, 4])
    assert digests([1, 2, 3, 4, 5]) == plain
    assert digests([1, 2, 9, 4])[0] == plain[0]
    assert digests([1, 2, 9, 4])[1] != plain[1]
    assert digests([9, 2, 3, 4])[1] != plain[1]
    assert not set(digests([1, 2, 3, 4], b"tenant")) & set(plain)
    assert all(len(digest) == 16 for digest in plain)


def test_each_full_block_is_hashed_once_however_often_keys_are_asked_for() -> None:
    calls: list[bytes] = []

    def counting(parent_digest: bytes, content: bytes) -> bytes:
        calls.append(content)
        return hash_block(parent_digest, content)

    sequence = SequenceBlocks(block_size=4, hash_block=counting)
    token_ids = list(range(100))
    for num_tokens in range(101):
        sequence.extend_keys(token_ids, num_tokens // 4)
        sequence.extend_keys(token_ids, num_tokens // 4)
    assert len(calls) == 25 + 1  # the salt is hashed once as the first block's parent
