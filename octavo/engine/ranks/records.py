"""What ranks tell each other: typed records, which hold nothing that could be run.

rank 0 -> others    Setup, Begin, then any number of Prepare, Step, Masks, Reset
others -> rank 0    Planned, Met, Ready, Prepared; Failed at any time
"""

from typing import Any

import msgspec

from octavo.sampling_params import SamplingParams


class Setup(msgspec.Struct, tag=True, array_like=True):
    """The first record.

    Attributes:
        rank: the receiver's.
        size: number of ranks.
        config: fields of EngineConfig.
    """

    rank: int
    size: int
    config: dict[str, Any]


class Begin(msgspec.Struct, tag=True, array_like=True):
    """Meet the others, then load.

    Attributes:
        num_blocks: KV blocks that all ranks have room for.
        rendezvous: path of the file through which ranks meet.
    """

    num_blocks: int
    rendezvous: str


class Prepare(msgspec.Struct, tag=True, array_like=True):
    """Do what StepRunner.prepare does."""


class NewRequest(msgspec.Struct, array_like=True):
    """What steps read of a request and what never changes. Its tokens come with its first step.

    Attributes:
        number: its name in later records.
        num_prompt_tokens: see Request.
        params: likewise.
        seed: likewise.
        stop_token_ids: likewise.
        prompt_logprobs_start: likewise.
    """

    number: int
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    stop_token_ids: list[int]
    prompt_logprobs_start: int | None


class Item(msgspec.Struct, array_like=True):
    """One request's share of a step; see ScheduledRequest.

    Attributes:
        number: which request.
        start: its tokens computed before.
        num_new_tokens: how many tokens of it this step computes.
        samples: the step samples a token for it.
        row: its row of the block tables.
        token_ids: tokens that it got since its last step, as int32.
        block_ids: blocks likewise; all of its blocks if `are_all`.
        are_all: its block list was replaced since its last step.
    """

    number: int
    start: int
    num_new_tokens: int
    samples: bool
    row: int
    token_ids: bytes
    block_ids: bytes
    are_all: bool


class Step(msgspec.Struct, tag=True, array_like=True):
    """One step; see SchedulerOutput.

    Attributes:
        released: numbers of requests that have ended.
        requests: those that are new.
        items: what is computed.
        block_copies: (source, destination) blocks to copy before.
        num_steps: since the last Reset, how many steps' tokens are in the checksum.
        checksum: of all tokens sampled in those steps.
    """

    released: list[int]
    requests: list[NewRequest]
    items: list[Item]
    block_copies: list[tuple[int, int]]
    num_steps: int
    checksum: int


class Masks(msgspec.Struct, tag=True, array_like=True):
    """Which tokens may come next, within a step that has requests with a grammar.

    Attributes:
        num_rows: R.
        words: [R, ceil(V / 32)] int32, see TokenMasks.fill.
    """

    num_rows: int
    words: bytes


class Reset(msgspec.Struct, tag=True, array_like=True):
    """Forget every request."""


class Planned(msgspec.Struct, tag=True, array_like=True):
    """The rank has planned its memory.

    Attributes:
        num_blocks: KV blocks that it has room for.
    """

    num_blocks: int


class Met(msgspec.Struct, tag=True, array_like=True):
    """The rank has met the others."""


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The rank has loaded its weights and waits for steps."""


class Prepared(msgspec.Struct, tag=True, array_like=True):
    """The rank has done what Prepare asks for."""


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The rank ends.

    Attributes:
        kind: name of the error's class in octavo.errors; "" for any other.
        message: what happened.
        is_echo: it failed because another rank did.
    """

    kind: str
    message: str
    is_echo: bool


Record = Setup | Begin | Prepare | Step | Masks | Reset
Report = Planned | Met | Ready | Prepared | Failed
