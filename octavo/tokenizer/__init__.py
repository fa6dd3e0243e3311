"""Turns text into token ids and back: vocabularies, streamed decoding, stop strings, chat templates."""

from octavo.tokenizer.chat_template import ChatTemplate, ChatText
from octavo.tokenizer.decoding import IncrementalDecoder
from octavo.tokenizer.stop import StopChecker
from octavo.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "ChatText", "IncrementalDecoder", "StopChecker", "Tokenizer"]
