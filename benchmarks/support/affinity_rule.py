"""The rule of Ray Serve's PrefixCacheAffinityRouter with its default options, as its documentation gives it.

It keeps a tree of all prompts that it has sent, and never forgets one. A prompt goes to a replica that was
sent the longest beginning of it, if that is a tenth of the prompt or more; else to one that was sent the
fewest characters so far. Among equals, the shortest queue counts. What replicas evict it does not know. The
original compares characters; this one compares marks, which lie up to 256 bytes apart.
"""

from collections.abc import Sequence

from octavo.router import Marks

_MATCH_RATE = 0.1


class AffinityRule:
    """Chooses by what was sent before."""

    def __init__(self, num_replicas: int) -> None:
        self._sent: list[set[bytes]] = [set() for _ in range(num_replicas)]
        self._num_bytes = [0] * num_replicas

    def choose(self, marks: Marks, queues: Sequence[int]) -> int:
        """Return the index of a replica, and note that it is sent the prompt.

        Args:
            marks: of the prompt.
            queues: [replicas] requests under way.
        """
        matched = [self._matched(sent, marks) for sent in self._sent]
        if max(matched) < _MATCH_RATE * marks.num_bytes or not marks.num_bytes:
            sizes = self._num_bytes
            best = [index for index, size in enumerate(sizes) if size == min(sizes)]
        else:
            best = [index for index, size in enumerate(matched) if size == max(matched)]
        index = min(best, key=lambda one: queues[one])
        self._num_bytes[index] += marks.num_bytes - matched[index]
        self._sent[index].update(marks.digests)
        return index

    def _matched(self, sent: set[bytes], marks: Marks) -> int:
        """Return how many bytes of a prompt a replica was sent."""
        found = 0
        for digest, end in zip(marks.digests, marks.ends, strict=True):
            if digest not in sent:
                break
            found = end
        return found
