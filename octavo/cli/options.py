"""Options that only the command line has."""

from dataclasses import dataclass

from octavo.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """A workload of random token ids, greedy, end-of-sequence ignored.

    Attributes:
        num_prompts: requests, all submitted at once.
        input_len: prompt tokens of each.
        output_len: generated tokens of each.
        shared_prefix_len: leading prompt tokens that all requests have in common.
        num_warmup: requests run before the measurement.
    """

    num_prompts: int = 16
    input_len: int = 128
    output_len: int = 64
    shared_prefix_len: int = 0
    num_warmup: int = 1

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.shared_prefix_len <= self.input_len:
            raise ConfigError(
                f"shared_prefix_len must be in [0, input_len = {self.input_len}], "
                f"got {self.shared_prefix_len}"
            )
        if self.num_warmup < 0:
            raise ConfigError(f"num_warmup must be at least 0, got {self.num_warmup}")
