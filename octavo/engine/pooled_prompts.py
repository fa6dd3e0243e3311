"""From texts to prompts that are pooled: texts to be embedded or classified, and pairs to be scored.

The query of a pair comes before its document, as checkpoints want it. So all documents of a query share the
tokens before them, which the engine computes once and reads once per step.
Source: the prompt of Qwen3-Reranker is the one that its model card publishes.
"""

from collections.abc import Sequence

from octavo.engine.prompt_reader import Prompt, PromptReader, TokenIds
from octavo.errors import InvalidArgumentError, PromptError
from octavo.tokenizer import ChatText

_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def read_pooled(
    reader: PromptReader, prompt: Prompt, *, prompt_name: str | None = None, keep: int | None = None
) -> TokenIds:
    """Read a prompt to be embedded or classified.

    Args:
        reader: of a model that does this.
        prompt: text, or token ids, which are taken as they are.
        prompt_name: which of the checkpoint's prompts begins a text; None: its default, if it has one.
        keep: at most this many tokens, the first ones and the special tokens behind a text; None: all.

    Raises:
        InvalidArgumentError: the model generates text, or has no such prompt.
        PromptError, RequestTooLongError: as PromptReader.read.
    """
    pooling = reader.pooling_for()
    text = reader.text_of(prompt)
    if text is None:
        if prompt_name is not None:
            raise InvalidArgumentError("prompt_name must be left out where the prompt is token ids")
        return reader.read(prompt, keep=keep)
    if not text:
        raise PromptError("expected a text that is not empty")
    token_ids = reader.encode(pooling.prompt(prompt_name) + text)
    special = [] if keep is None or len(token_ids) <= keep else reader.encode("")
    num_behind = next((n for n in range(len(special), 0, -1) if token_ids[-n:] == special[-n:]), 0)
    return _cut(reader, token_ids, keep, num_behind)


def read_pairs(
    reader: PromptReader,
    firsts: Sequence[str],
    seconds: Sequence[str],
    *,
    are_answers: bool = False,
    instruction: str | None = None,
    keep: int | None = None,
) -> list[TokenIds]:
    """Read pairs of texts, of which Pooling.relevances then says how well they fit together.

    Args:
        reader: of a model that scores pairs or embeds.
        firsts: the first texts, as many as second ones; or one for all.
        seconds: the second texts.
        are_answers: the first texts are queries and the second ones documents, for which the checkpoint of a
            model that embeds may have prompts.
        instruction: what a query asks for, for models that read one; None: their usual one.
        keep: at most this many tokens of each prompt, of which the second text loses the rest; None: all.

    Raises:
        InvalidArgumentError: the model does neither, reads no instruction, or the numbers do not fit.
        PromptError, RequestTooLongError: as PromptReader.read.
    """
    pooling = reader.pooling_for()
    if isinstance(seconds, str) or not seconds or len(firsts) not in (1, len(seconds)):
        kind = f"{type(seconds).__name__} of {len(seconds)}"
        raise PromptError(f"expected a list of texts, and one for all or one for each, got {kind}")
    wrong = [one for one in (*firsts, *seconds, instruction or "") if not isinstance(one, str)]
    if wrong:
        raise PromptError(f"queries, documents and instruction must be texts, got {type(wrong[0]).__name__}")
    if instruction is not None and not pooling.is_qwen3_pair:
        raise InvalidArgumentError("instruction must be left out: this model reads none")
    if pooling.task == "embed":
        known = dict(pooling.prompts) if are_answers else {}
        names = ["query" if "query" in known else None] * len(firsts)
        names += ["document" if "document" in known else None] * len(seconds)
        texts = zip([*firsts, *seconds], names, strict=True)
        return [read_pooled(reader, text, prompt_name=name, keep=keep) for text, name in texts]
    if pooling.size != 1:
        raise InvalidArgumentError(
            f"pairs need a model that embeds or has one label, got {pooling.size} labels"
        )
    pairs = zip(list(firsts) * len(seconds) if len(firsts) == 1 else firsts, seconds, strict=True)
    if not pooling.is_qwen3_pair:
        return [_cut(reader, reader.encode(first, pair=second), keep) for first, second in pairs]
    instruction = _INSTRUCTION if instruction is None else instruction
    num_behind = len(reader.encode(_AFTER, add_special_tokens=False))
    texts = (f"<Instruct>: {instruction}\n<Query>: {first}\n<Document>: {second}" for first, second in pairs)
    return [_cut(reader, reader.encode_chat(_around(reader, text)), keep, num_behind) for text in texts]


def _around(reader: PromptReader, text: str) -> ChatText:
    """Return the published prompt around a user's text, whose control tokens stay text."""
    template = None if reader.tokenizer is None else reader.tokenizer.chat_template
    guarded = ChatText(text) if template is None else template.guarded(text, reader.message_control_tokens)
    return ChatText(_BEFORE + guarded.marked + _AFTER, guarded.mark)


def _cut(reader: PromptReader, token_ids: list[int], keep: int | None, num_behind: int = 0) -> TokenIds:
    """Return checked token ids; when some are cut, the last `num_behind` stay."""
    if keep is not None and len(token_ids) > keep:
        if keep <= num_behind:
            raise PromptError(f"truncate_prompt_tokens must be above {num_behind} for this model, got {keep}")
        token_ids = token_ids[: keep - num_behind] + token_ids[len(token_ids) - num_behind :]
    return reader.read(token_ids)
