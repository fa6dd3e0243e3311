"""The routes whose bodies are read here, and how each body is read."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from msgspec import Struct, structs

from octavo.server.api.anthropic.messages_input import counted, parse_messages
from octavo.server.api.anthropic.messages_structs import MessageParam, MessagesRequest
from octavo.server.api.decisions.decision_input import read_decisions
from octavo.server.api.ollama.ollama_input import read_ollama_chat, read_ollama_generate
from octavo.server.api.responses.response_input import parse_response
from octavo.server.api.responses.response_structs import ResponsesRequest
from octavo.server.api.sampling import Defaults
from octavo.server.api.structs import ChatRequest, CompletionRequest
from octavo.server.api.tokenize import detokenized, tokenized
from octavo.server.reading.requests import Answered, ChatInput, Materials, parse_chat

Fields = TypeVar("Fields", bound=Struct)

CHATS: Mapping[str, tuple[type[Struct], Callable[[bytes, Defaults], ChatInput]]] = {
    "/v1/chat/completions": (ChatRequest, parse_chat),
    "/v1/responses": (ResponsesRequest, parse_response),
    "/v1/messages": (MessagesRequest, parse_messages),
}
"""Bodies that ask for chats: their type, and how they are decoded."""
ANSWERS: Mapping[str, Callable[[Materials, bytes], Answered]] = {
    "/tokenize": tokenized,
    "/detokenize": detokenized,
    "/v1/messages/count_tokens": counted,
    "/v1/decisions": read_decisions,
    "/api/chat": read_ollama_chat,
    "/api/generate": read_ollama_generate,
}
"""Bodies that are answered from their content only, or read into what is computed then."""

# Fields dropped once the prompt has been read: it was built from them, and they may be long. All other
# fields are sent back, so that a new one is not forgotten.
_PARAMETERS = "stop stop_token_ids logit_bias response_format structured_outputs"
_CHAT_PARTS = "tools tool_choice chat_template_kwargs"
_MESSAGES_PARTS = "system tools tool_choice stop_sequences output_config output_format"


def _nulls(names: str) -> Mapping[str, None]:
    return dict.fromkeys(names.split())


READ: Mapping[type[Struct], Mapping[str, object]] = {
    CompletionRequest: {"prompt": "", **_nulls(_PARAMETERS)},
    ChatRequest: {"messages": [{}], **_nulls(_PARAMETERS), **_nulls(_CHAT_PARTS)},
    ResponsesRequest: {"input": ""},
    MessagesRequest: {"messages": [MessageParam(role="user", content="")], **_nulls(_MESSAGES_PARTS)},
}
"""By type of body: fields that no answer needs once the prompts have been read, and what stands for them."""


def needed(fields: Fields) -> Fields:
    """Return what an answer needs of a body whose prompts have been read."""
    return structs.replace(fields, **READ[type(fields)])
