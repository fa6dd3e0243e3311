"""The routes whose bodies are read here: by path, what is made of a body."""

from collections.abc import Callable, Mapping

from msgspec import Struct, structs

from octavo.server.api.anthropic.input import counted, parse_messages
from octavo.server.api.anthropic.types import MessageParam, MessagesRequest
from octavo.server.api.responses.input import parse_response
from octavo.server.api.responses.types import ResponsesRequest
from octavo.server.api.tokenize import detokenized, tokenized
from octavo.server.api.types import ChatRequest, CompletionRequest, SamplingFields
from octavo.server.reading.input import ChatInput, Materials, parse_chat

CHATS: Mapping[str, tuple[type[Struct], Callable[[bytes], ChatInput]]] = {
    "/v1/chat/completions": (ChatRequest, parse_chat),
    "/v1/responses": (ResponsesRequest, parse_response),
    "/v1/messages": (MessagesRequest, parse_messages),
}
"""Bodies that ask for chats: their type, and how they are decoded."""
COMPLETIONS = "/v1/completions"
ANSWERS: Mapping[str, Callable[[Materials, bytes], bytes]] = {
    "/tokenize": tokenized,
    "/detokenize": detokenized,
    "/v1/messages/count_tokens": counted,
}
"""Bodies that are answered by what is read in them."""

_NEEDED = (
    "model",
    "prompt_logprobs",
    "stream",
    "stream_options",
    "stream_interval",
    "cache_salt",
    "priority",
    "request_id",
    "return_token_ids",
    "return_tokens_as_token_ids",
)
_NEEDED_OF_CHAT = (*_NEEDED, "logprobs", "top_logprobs")
_NEEDED_OF_COMPLETION = (*_NEEDED, "logprobs", "max_tokens", "echo")


def needed_of_chat(asked: ChatRequest) -> ChatRequest:
    """Return what an answer needs of a chat whose prompt has been read."""
    return ChatRequest(messages=[{}], **_values(asked, _NEEDED_OF_CHAT))


def needed_of_completion(asked: CompletionRequest) -> CompletionRequest:
    """Return what an answer needs of a completion whose prompts have been read."""
    return CompletionRequest(prompt="", **_values(asked, _NEEDED_OF_COMPLETION))


def needed(asked: Struct) -> Struct:
    """Return what an answer needs of a body of CHATS whose prompt has been read."""
    if isinstance(asked, ChatRequest):
        return needed_of_chat(asked)
    if isinstance(asked, ResponsesRequest):
        return structs.replace(asked, input="", user=None, prompt_cache_key=None, safety_identifier=None)
    assert isinstance(asked, MessagesRequest)
    return MessagesRequest(
        messages=[MessageParam(role="user", content="")], max_tokens=asked.max_tokens, stream=asked.stream
    )


def _values(asked: SamplingFields, names: tuple[str, ...]) -> dict:
    return {name: getattr(asked, name) for name in names}
