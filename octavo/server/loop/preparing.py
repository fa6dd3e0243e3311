"""Prepares a request for the engine: reads its prompt into ids and compiles its grammar."""

import asyncio
import time
from collections.abc import Mapping, Sized
from concurrent.futures import ThreadPoolExecutor

from octavo.engine.engine import Engine
from octavo.engine.prompt_reader import Prompt, PromptReader, TokenIds
from octavo.engine.structured.matcher import Grammar
from octavo.sampling_params import SamplingParams
from octavo.server.loop.stats import Histogram

# Longer prompts are read by other threads. Handing a shorter one over takes longer than reading it.
_MAX_INLINE_CHARS, _MAX_INLINE_IDS = 256, 4096
_NUM_THREADS = 2


class Preparing:
    """Prepares requests for callers on event loops, in threads of its own where that takes long.

    Attributes:
        compile_s: seconds it took to compile grammars.
    """

    def __init__(self) -> None:
        self.compile_s = Histogram()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "octavo-prompts")

    async def read(self, prompts: PromptReader, prompt: Prompt | TokenIds) -> TokenIds:
        """Read a prompt, in the caller's thread if it is short.

        Raises:
            PromptError: as PromptReader.read.
        """
        if _is_long(prompt):
            return await asyncio.get_running_loop().run_in_executor(self._threads, prompts.read, prompt)
        return prompts.read(prompt)

    async def compile(self, engine: Engine, params: SamplingParams) -> Grammar | None:
        """Compile the grammar that a request asks for, if any.

        Raises:
            SamplingParamsError, ConfigError: as Grammars.of.
        """
        if params.structured is None:
            return None
        begun = time.monotonic()
        events = asyncio.get_running_loop()
        grammar = await events.run_in_executor(self._threads, engine.grammars.of, params)
        self.compile_s.observe(time.monotonic() - begun)
        return grammar

    def stop(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _is_long(prompt: object) -> bool:
    content = next(iter(prompt.values()), None) if isinstance(prompt, Mapping) else prompt
    limit = _MAX_INLINE_CHARS if isinstance(content, str) else _MAX_INLINE_IDS
    return isinstance(content, Sized) and len(content) > limit
