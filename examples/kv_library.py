"""octavo.kv without an engine: page a cache for your own model loop. Needs NumPy only."""

from octavo.errors import OutOfBlocksError
from octavo.kv import PagedSequences

sequences = PagedSequences(num_blocks=8, block_size=4, bytes_per_block=1024)

prompt = [11, 12, 13, 14, 15, 16]
extension = sequences.alloc("first", prompt)
print("first: compute positions", extension.positions.tolist(), "write slots", extension.slots.tolist())
extension = sequences.update("first", [17, 18, 19])  # crosses a block edge
print("first: then", extension.positions.tolist(), "into", extension.slots.tolist())

extension = sequences.alloc("second", [*prompt, 99])  # shares the full blocks of the prompt
print("second: only", extension.positions.tolist(), "into", extension.slots.tolist())
copies = sequences.fork("second", "third")  # shares everything but the partial last block
print("third: copy blocks", copies)

block_table, seq_lens = sequences.block_table(["first", "second", "third"])
print("block table\n", block_table, "\nlengths", seq_lens)
print(sequences.manager.stats())

try:
    sequences.alloc("too long", list(range(100, 140)))
except OutOfBlocksError as error:
    print(error)
