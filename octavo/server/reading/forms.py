"""Messages between a server and the processes that read its bodies, as msgpack."""

import json
from array import array
from collections.abc import Mapping

import msgspec
import tokenizers
from msgspec import Struct

from octavo.config import MessageControlTokens
from octavo.engine.prompt_reader import PromptReader, TokenIds
from octavo.pooling import Pooling
from octavo.sampling_params import SamplingParams
from octavo.server.api.prompt_tokens import Prompts
from octavo.server.api.sampling import Defaults
from octavo.server.api.structs import ChatRequest, CompletionRequest
from octavo.server.api.tools.toolbox import Toolbox
from octavo.server.api_errors import ErrorDetail
from octavo.server.config import ReasoningParser, ServerConfig, ToolCallParser
from octavo.server.parsing.formats import ModelFormats, formats_of
from octavo.server.reading.requests import Materials
from octavo.tokenizer import Tokenizer
from octavo.tokenizer.vocabularies import Vocabulary

encode = msgspec.msgpack.Encoder().encode


class Outline(Struct, kw_only=True):
    """The description of the model that a child needs; it is sent once."""

    model: str
    vocabulary: Vocabulary | None
    vocab_size: int
    max_model_len: int
    num_kv_tokens: int
    message_control_tokens: MessageControlTokens
    tool_call_parser: ToolCallParser
    reasoning_parser: ReasoningParser
    canonical_prompts: bool
    defaults: dict[str, int | float]
    pooling: Pooling | None

    @classmethod
    def of(cls, model: str, reader: PromptReader, config: ServerConfig, defaults: Defaults) -> "Outline":
        """Return the outline of a model by the name that clients give."""
        return cls(
            model=model,
            vocabulary=None if reader.tokenizer is None else reader.tokenizer.vocabulary,
            vocab_size=reader.vocab_size,
            max_model_len=reader.max_model_len,
            num_kv_tokens=reader.num_kv_tokens,
            message_control_tokens=reader.message_control_tokens,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            canonical_prompts=config.canonical_prompts,
            defaults=dict(defaults),
            pooling=reader.pooling,
        )

    @classmethod
    def decode(cls, data: bytes) -> "Outline":
        """Return what `encode` has written."""
        return msgspec.msgpack.decode(data, type=cls, dec_hook=_backend_of)

    def encode(self) -> bytes:
        """Encode it; a compiled vocabulary becomes JSON, which takes a fraction of a second."""
        return msgspec.msgpack.encode(self, enc_hook=_json_of)

    def materials(self) -> Materials:
        """Rebuild the model's tokenizer, and what else is needed to read bodies."""
        tokenizer = None if self.vocabulary is None else Tokenizer(self.vocabulary)
        reader = PromptReader(
            tokenizer,
            self.vocab_size,
            max_model_len=self.max_model_len,
            num_kv_tokens=self.num_kv_tokens,
            message_control_tokens=self.message_control_tokens,
            pooling=self.pooling,
        )
        formats = formats_of(tokenizer, self.tool_call_parser, self.reasoning_parser)
        prompts = Prompts(reader, is_canonical=self.canonical_prompts)
        return Materials(self.model, prompts, formats, self.defaults)


def _json_of(value: object) -> str:
    assert isinstance(value, tokenizers.Tokenizer)
    return value.to_str()


def _backend_of(kind: type, value: str) -> tokenizers.Tokenizer:
    assert kind is tokenizers.Tokenizer
    return kind.from_str(value)


class Task(Struct):
    """A body to read, and the path it was sent to."""

    path: str
    body: bytes


class Tools(Struct):
    """A Toolbox without the parts that only its prompt needed.

    Attributes:
        functions: as JSON, whose numbers may be longer than msgpack's.
    """

    functions: bytes
    strict: list[str]
    must_call: bool
    parallel: bool
    customs: list[str]
    has_begun_reasoning: bool
    channel: str | None

    @classmethod
    def of(cls, box: Toolbox) -> "Tools":
        """Return a toolbox's part."""
        functions, strict = json.dumps(box.functions).encode(), list(box.strict)
        return cls(
            functions,
            strict,
            box.must_call,
            box.parallel,
            list(box.customs),
            box.has_begun_reasoning,
            box.channel,
        )

    def box(self, formats: ModelFormats) -> Toolbox:
        """Return the toolbox."""
        return Toolbox(
            tools=(),
            functions=json.loads(self.functions),
            strict=frozenset(self.strict),
            must_call=self.must_call,
            parallel=self.parallel,
            formats=formats,
            customs=frozenset(self.customs),
            has_begun_reasoning=self.has_begun_reasoning,
            channel=self.channel,
        )


class ReadChat(Struct, tag=True):
    """A chat: what its answer needs, `fields` as JSON, and its prompt."""

    fields: bytes
    chat: ChatRequest
    params: SamplingParams
    left_out: tuple[str, ...]
    constrained_params: SamplingParams
    prompt: bytes
    tools: Tools


class ReadTexts(Struct, tag=True):
    """A completion: what its answer needs, and its prompts."""

    fields: CompletionRequest
    params: SamplingParams
    left_out: tuple[str, ...]
    prompts: list[bytes]


class ReadPooled(Struct, tag=True):
    """A body that was read to be pooled: what its answer needs, as JSON, and its prompts."""

    fields: bytes
    left_out: tuple[str, ...]
    prompts: list[bytes]


class ReadAnswer(Struct, tag=True):
    """A whole answer."""

    body: bytes
    left_out: tuple[str, ...]


class Refusal(Struct, tag=True):
    """An ApiError; an unexpected one says where in the code it came from."""

    status: int
    detail: ErrorDetail
    headers: Mapping[str, str]
    frames: str = ""


Reply = ReadChat | ReadTexts | ReadPooled | ReadAnswer | Refusal


def packed(prompt: TokenIds) -> bytes:
    """Return token ids as bytes."""
    return prompt.packed.tobytes()


def unpacked(prompt: bytes) -> TokenIds:
    """Return the token ids that `packed` has packed."""
    ids = array("i")
    ids.frombytes(prompt)
    return TokenIds(ids.tolist(), ids)
