"""POST /tokenize and /detokenize."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from octavo.errors import PromptError
from octavo.server.api.body import decode
from octavo.server.api.prompt_tokens import Prompts, Reading
from octavo.server.api.structs import MAX_MESSAGES, JsonObject, RequestBody, TokenId
from octavo.server.api_errors import refused
from octavo.server.reading.requests import Answered, Materials, check_model


class TokenizeRequest(RequestBody, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /tokenize: a prompt, or messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[JsonObject], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestBody, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool = False


class Tokens(Struct, kw_only=True):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(Struct):
    """Answer of POST /detokenize."""

    prompt: str


def tokenized(materials: Materials, body: bytes) -> Answered:
    """Answer a body of /tokenize. May take long.

    Raises:
        ApiError, ChatTemplateError, PromptError: it is malformed.
    """
    fields, left_out = decode(body, TokenizeRequest)
    check_model(fields.model, materials.model)
    prompts = materials.prompts
    token_ids = _tokenize(prompts, fields)
    texts = None
    if fields.return_token_strs and prompts.tokenizer is not None:
        texts = [prompts.tokenizer.token_text(token_id) for token_id in token_ids]
    found = Tokens(
        count=len(token_ids), max_model_len=prompts.max_model_len, tokens=token_ids, token_strs=texts
    )
    return msgspec.json.encode(found), left_out


def detokenized(materials: Materials, body: bytes) -> Answered:
    """Answer a body of /detokenize. May take long.

    Raises:
        ApiError, PromptError: it is malformed, or the model has no tokenizer.
    """
    fields, left_out = decode(body, DetokenizeRequest)
    check_model(fields.model, materials.model)
    tokenizer, vocab_size = materials.prompts.tokenizer, materials.prompts.vocab_size
    if tokenizer is None:
        raise PromptError("this model has no tokenizer")
    if max(fields.tokens, default=0) >= vocab_size:
        raise refused("tokens", f"must be in [0, {vocab_size - 1}], got {max(fields.tokens)}")
    text = tokenizer.decode(fields.tokens, skip_special_tokens=fields.skip_special_tokens)
    return msgspec.json.encode(Text(text)), left_out


def _tokenize(prompts: Prompts, fields: TokenizeRequest) -> list[int]:
    if (fields.prompt is None) == (fields.messages is None):
        raise refused("prompt", "or messages must be given, and not both")
    if fields.prompt is not None:
        return prompts.encode(fields.prompt, Reading(fields.add_special_tokens))
    chat = prompts.render(
        fields.messages or [],
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        variables=fields.chat_template_kwargs,
    )
    return prompts.encode_chat(chat, Reading(fields.add_special_tokens))
