"""POST /tokenize and /detokenize."""

from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import PromptError
from octavo.server.api.decode import decode
from octavo.server.api.prompts import Prompts, Reading
from octavo.server.api.sse import encode
from octavo.server.api.types import MAX_MESSAGES, JsonObject, TokenId
from octavo.server.context import Context
from octavo.server.errors import refused


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /tokenize: a prompt, or messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[JsonObject], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
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


async def tokenize(context: Context, request: Request) -> Response:
    """Return a text's or a conversation's token ids."""
    body = await context.bodies.read(request.scope["headers"], request.receive)
    asked = decode(body, TokenizeRequest)
    context.check_model(asked.model)
    prompts = Prompts(context.engine.prompts)
    token_ids = await context.run(_tokenize, prompts, asked)
    engine = context.loop.engine
    texts = None
    if asked.return_token_strs and engine.tokenizer is not None:
        texts = [engine.tokenizer.token_text(token_id) for token_id in token_ids]
    answer = Tokens(
        count=len(token_ids), max_model_len=engine.plan.max_model_len, tokens=token_ids, token_strs=texts
    )
    return Response(encode(answer), media_type="application/json")


async def detokenize(context: Context, request: Request) -> Response:
    """Return the text of token ids."""
    body = await context.bodies.read(request.scope["headers"], request.receive)
    asked = decode(body, DetokenizeRequest)
    context.check_model(asked.model)
    engine = context.engine
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise PromptError("this model has no tokenizer")
    vocab_size = engine.model_config.vocab_size
    if max(asked.tokens, default=0) >= vocab_size:
        raise refused("tokens", f"must be in [0, {vocab_size - 1}], got {max(asked.tokens)}")

    def detokenized() -> str:
        return tokenizer.decode(asked.tokens, skip_special_tokens=asked.skip_special_tokens)

    return Response(encode(Text(await context.run(detokenized))), media_type="application/json")


def _tokenize(prompts: Prompts, asked: TokenizeRequest) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        raise refused("prompt", "or messages must be given, and not both")
    if asked.prompt is not None:
        return prompts.encode(asked.prompt, Reading(asked.add_special_tokens))
    text = prompts.render(
        asked.messages or [],
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        variables=asked.chat_template_kwargs,
    )
    return prompts.encode(text, Reading(bool(asked.add_special_tokens)))
