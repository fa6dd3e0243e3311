"""octavo.kv without an engine: page a cache for your own model loop. Needs NumPy only."""

from octavo.errors import OutOfBlocksError
from octavo.kv import PagedSequences

sequences = PagedSequences(num_blocks=8, block_size=4, bytes_per_block=1024)

prompt = [11, 12, 13, 14, 15, 16]
extension = sequences.alloc("first", prompt)
print("first: compute positions", extension.positions.tolist(), "write slots", extension.slots.tolist())
extension = sequences.update("first", [17, 18, 19])  # crosses a block edge
print("first: then", extension.positions.tolist(), "into", extension.slots.tolist())
sequences.commit("first")  # all its slots are written: others may share its full blocks

extension = sequences.alloc("second", [*prompt, 99])  # shares the full blocks of the prompt
print("second: only", extension.positions.tolist(), "into", extension.slots.tolist())
copies = sequences.fork("second", "third")  # shares everything but the partial last block
print("third: copy blocks", copies)

block_table, seq_lens = sequences.block_table(["first", "second", "third"])
print("block table\n", block_table, "\nlengths", seq_lens)

print("first cut inside a full block that others can find: copy", sequences.truncate("first", 6))
extension = sequences.update("first", [99])  # now it equals the second
sequences.commit("first")
print("first: goes on at", extension.positions.tolist(), "in", sequences.block_table(["first"])[0].tolist())

for name in ("fourth", "fifth"):  # computed side by side, joined when they are there
    sequences.alloc(name, [*prompt[:4], 21, 22, 23, 24])
for name in ("fourth", "fifth"):
    sequences.commit(name)
print("fourth and fifth\n", sequences.block_table(["fourth", "fifth"])[0])

stats = sequences.stats()
print(
    f"{stats.referenced_bytes} bytes in use, {stats.reserved_unfilled_bytes} of them reserved but unfilled;"
)
print(
    f"sharing saves {stats.saved_bytes}; {stats.cached_bytes} can still be hit, {stats.free_bytes} are free"
)

try:
    sequences.alloc("too long", list(range(100, 140)))
except OutOfBlocksError as error:
    print(error)
