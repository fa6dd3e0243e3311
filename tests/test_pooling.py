"""What becomes of pooled states: numbers at the ends of their range keep their order."""

import numpy as np
import pytest

from octavo.errors import InvalidArgumentError
from octavo.pooling import Pooling, ranked

LOGITS = np.array([-700.0, -60.0, -40.0, -20.0, -1.0, 0.0, 3.0, 12.0], np.float32)


def test_relevances_that_are_almost_0_keep_their_order() -> None:
    pooling = Pooling(task="classify", size=1, activation="sigmoid")
    scores = pooling.relevances([LOGITS[i : i + 1] for i in range(len(LOGITS))], 1)
    assert [one.index for one in ranked(scores)] == [*range(len(LOGITS))][::-1]
    assert scores == pytest.approx(1 / (1 + np.exp(-LOGITS.astype(np.float64))), rel=1e-9)
    assert ranked([0.5, 1.0, 0.5, 1.0])[1].index == 3


def test_a_softmax_of_large_logits_is_finite() -> None:
    pooling = Pooling(task="classify", size=3, activation="softmax")
    values = pooling.read(np.array([3e38, -3e38, 1.0], np.float32))
    assert values.tolist() == [1.0, 0.0, 0.0]


def test_an_embedding_of_zeros_stays_one() -> None:
    assert Pooling(task="embed", size=2).read(np.zeros(2, np.float32)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dimensions", [0, -1, 9, 2.5, "2", 2**70])
def test_a_size_that_is_none_is_refused(dimensions: object) -> None:
    for sizes in ((), (2, 4)):
        pooling = Pooling(task="embed", size=8, is_matryoshka=True, dimensions=sizes)
        with pytest.raises(InvalidArgumentError, match="dimensions"):
            pooling.check_dimensions(dimensions)  # type: ignore[arg-type]
