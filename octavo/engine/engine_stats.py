"""An engine's counters."""

from dataclasses import dataclass

from octavo.attention.plan.prefix_forest import Sharing
from octavo.engine.step.result import LateWork
from octavo.kv import KVStats


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine.

    Attributes:
        num_running: requests in the running set (each of n completions counts).
        num_waiting: requests waiting for admission.
        num_steps: steps executed.
        num_computed_tokens: tokens the model computed, prompts and outputs, recomputation included.
        num_output_tokens: tokens sampled.
        num_preemptions: times a running request lost its blocks.
        late_work: what steps had to wait for since the engine was ready: compiling, capturing, allocating.
        sharing: shared prefixes of the last step, and what all steps did not read thanks to them.
        kv: the block pool.
    """

    num_running: int
    num_waiting: int
    num_steps: int
    num_computed_tokens: int
    num_output_tokens: int
    num_preemptions: int
    late_work: LateWork
    sharing: Sharing
    kv: KVStats
