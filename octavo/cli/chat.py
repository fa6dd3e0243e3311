"""`octavo chat`: a conversation in the terminal. Each turn finds its history in the prefix cache."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from octavo.cli.loading import load
from octavo.cli.options import ChatSampling
from octavo.cli.streams import check_text
from octavo.config import EngineConfig
from octavo.errors import OctavoError
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.llm_arguments import Message

_HELP = "/reset forgets the conversation, /quit leaves"


def run_chat(texts: list[str], system: str | None, config: EngineConfig, sampling: ChatSampling) -> None:
    """Answer the given messages, or talk until the user leaves."""
    check_text(texts, "the command line", sys.getfilesystemencoding())
    llm = load(config)
    params = sampling.completed(llm.engine.sampling_defaults.values)
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    if texts:
        for text in texts:
            if len(texts) > 1:
                print(f"> {text}")
            opening.append({"role": "user", "content": text})
            opening.append({"role": "assistant", "content": _answer(llm, opening, params)})
    else:
        llm.engine.prompts.require_chat_template()
        print(f"{config.model} is ready. {_HELP}.")
        _talk(llm, opening, params)


def _talk(llm: "LLM", opening: "list[Message]", params: SamplingParams) -> None:
    conversation = list(opening)
    for text in _user_lines():
        if text == "/quit":
            return
        if text == "/reset":
            conversation = list(opening)
        elif text.startswith("/"):
            print(f"unknown command {text!r}: {_HELP}")
        else:
            _turn(llm, conversation, text, params)


def _turn(llm: "LLM", conversation: "list[Message]", text: str, params: SamplingParams) -> None:
    """Answer one message; a refused message leaves the conversation unchanged."""
    user: Message = {"role": "user", "content": text}
    try:
        answer = _answer(llm, [*conversation, user], params)
    except OctavoError as error:
        print(f"octavo: error: {error} (/reset starts over)", file=sys.stderr)
        return
    conversation += [user, {"role": "assistant", "content": answer}]


def _answer(llm: "LLM", messages: "list[Message]", params: SamplingParams) -> str:
    """Stream an answer to the terminal, then a one-line summary; Ctrl-C ends the answer early."""
    output: RequestOutput | None = None
    text = ""
    try:
        with llm.chat_stream(messages, params) as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)
                text += delta.text
                output = delta.output
    except KeyboardInterrupt:
        pass
    print()
    if output is not None:
        print(_summary(llm, output), file=sys.stderr)
    return text


def _summary(llm: "LLM", output: RequestOutput) -> str:
    metrics, kv = output.metrics, llm.stats.kv
    ttft, total = metrics.time_to_first_token_s or 0.0, metrics.e2e_latency_s or 0.0
    rate = (metrics.num_output_tokens - 1) / (total - ttft) if total > ttft else 0.0
    num_blocks = -(-(metrics.num_prompt_tokens + metrics.num_output_tokens) // llm.engine.plan.block_size)
    return (
        f"[{metrics.num_output_tokens} tokens, {rate:.1f} tokens/s, first token after {ttft * 1000:.0f} ms, "
        f"{num_blocks} of {kv.num_blocks} KV blocks used, prefix cache hit {output.num_cached_tokens} of "
        f"{metrics.num_prompt_tokens} prompt tokens]"
    )


def _user_lines() -> Iterator[str]:
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line:
            yield line
