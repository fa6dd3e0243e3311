"""Which generation of GPUs kernels are chosen for."""

import pytest
import torch

from octavo.errors import ConfigError
from octavo.kernels import device

CUDA = torch.device("cuda", 0)


@pytest.fixture
def generation(monkeypatch: pytest.MonkeyPatch):
    """Return a function: the variable's value -> what choosers are told on a GPU of generation 9."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)

    def ask(value: str) -> int:
        monkeypatch.setenv(device.GENERATION_VARIABLE, value)
        return device.nvidia_generation.__wrapped__(CUDA)

    return ask


def test_an_older_generation_can_be_named(generation) -> None:
    assert [generation(value) for value in ("", "8", "9")] == [9, 8, 9]
    assert device.nvidia_generation.__wrapped__(torch.device("cpu")) == 0


@pytest.mark.parametrize("value", ["7", "10", "9.0", " 9", "hopper"])
def test_no_other_value_is_taken(generation, value: str) -> None:
    with pytest.raises(
        ConfigError, match=f"OCTAVO_GPU_GENERATION must be 8 to 9, that of this GPU, got '{value}'"
    ):
        generation(value)
