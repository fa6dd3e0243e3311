"""`octavo chat`: a conversation in the terminal. Each turn finds its history in the prefix cache."""

import sys
from collections.abc import Iterator

from octavo.cli.chat.commands import Commands
from octavo.cli.chat.conversation import Conversation
from octavo.cli.load_model import load
from octavo.cli.options import ChatSampling
from octavo.cli.streams import check_text
from octavo.config import EngineConfig

__all__ = ["run_chat"]


def run_chat(
    texts: list[str], system: str | None, config: EngineConfig, sampling: ChatSampling, *, history: bool
) -> None:
    """Answer the given messages, or talk until the user leaves."""
    check_text(texts, "the command line", sys.getfilesystemencoding())
    llm = load(config)
    params = sampling.completed(llm.engine.sampling_defaults.values)
    conversation = Conversation(llm, params, system or "")
    if texts:
        for text in texts:
            if len(texts) > 1:
                print(f"> {text}")
            conversation.turn(text)
    else:
        conversation.llm.engine.prompts.require_chat_template()
        print(f"{config.model} is ready. /help lists the commands, /exit leaves.")
        _talk(conversation, history)


def _talk(conversation: Conversation, history: bool) -> None:
    commands = Commands(conversation)
    if sys.stdin.isatty() and sys.stdout.isatty():
        # Pipes need no editing.
        from octavo.cli.chat.terminal import edited_texts

        texts = edited_texts(commands, history)
    else:
        texts = _lines()
    for text in texts:
        if not commands.obey(text):
            return


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line:
            yield line
