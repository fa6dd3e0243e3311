"""Every error a user can meet. A message says what was expected, what was got and what to do.

OctavoError
|-- InvalidArgumentError (ValueError)     an argument, field or flag is wrong
|   |-- SamplingParamsError               a sampling parameter is out of range
|   |   `-- StructuredOutputError         a grammar is malformed, too costly, or cannot go on
|   |-- ConfigError                       an engine option is wrong or contradicts another
|   |-- PromptError                       a prompt is empty, of the wrong type or holds unknown ids
|   |   `-- RequestTooLongError           a prompt can never fit the model or the KV cache
|   `-- ChatTemplateError                 a chat template is missing, fails or is too costly
|       `-- TemplateProcessError          not its fault: its process is stopped, killed or does not start
|-- ModelError                            the model cannot be used
|   |-- ModelNotFoundError                no such folder, file, embedded model or hub id
|   |-- UnsupportedModelError             architecture, quantisation or option that Octavo does not have
|   |-- WeightsError                      tensors are missing, unexpected or of the wrong shape
|   `-- FileFormatError                   a GGUF, safetensors, JSON or tokenizer file is damaged
|-- OutOfBlocksError                      the block pool is exhausted (library use of octavo.kv)
|-- OutOfMemoryError                      weights or KV cache do not fit the device
|-- NotReadyError                         the engine loads, or takes no more requests
|-- QueueFullError                        too much waits already; come back later
|-- IncompleteBatchError                  lines of a batch have errors instead of answers
`-- EngineError                           the engine failed; a bug or a broken device
    `-- EngineDeadError                   it ended, or a step of it does not end
"""

import difflib
import re
from collections.abc import Collection, Iterable


class OctavoError(Exception):
    """Base of every error Octavo raises on purpose."""


class InvalidArgumentError(OctavoError, ValueError):
    """An argument, field or flag is wrong."""


class SamplingParamsError(InvalidArgumentError):
    """A sampling parameter is out of range or contradicts another."""


class StructuredOutputError(SamplingParamsError):
    """A grammar or a JSON schema is malformed, too costly, or its output cannot go on."""


class ConfigError(InvalidArgumentError):
    """An engine option is wrong or contradicts another."""


class PromptError(InvalidArgumentError):
    """A prompt is empty, of the wrong type or holds unknown token ids."""


class RequestTooLongError(PromptError):
    """A prompt can never fit the model's context or the KV cache."""


class ChatTemplateError(InvalidArgumentError):
    """A chat template is missing, fails, or exceeds its time or size bound."""


class TextOnlyError(ChatTemplateError):
    """A message has an image, a sound or a file where models read text only."""


class TemplateProcessError(ChatTemplateError):
    """The process that renders chat templates was stopped or killed, or does not start: try again."""


class ModelError(OctavoError):
    """The model cannot be used."""


class ModelNotFoundError(ModelError):
    """No such folder, file, embedded model or hub id."""


class UnsupportedModelError(ModelError):
    """An architecture, quantisation or option that Octavo does not have."""


class WeightsError(ModelError):
    """Tensors are missing, unexpected or of the wrong shape."""


class FileFormatError(ModelError):
    """A GGUF, safetensors, JSON or tokenizer file is damaged."""


class OutOfBlocksError(OctavoError):
    """The block pool is exhausted. Nothing was allocated and nothing is leaked."""


class OutOfMemoryError(OctavoError):
    """Weights or KV cache do not fit the device."""


class IncompleteBatchError(OctavoError):
    """Some lines of a batch have errors instead of answers; the others are answered."""


class EngineError(OctavoError):
    """The engine itself failed: a bug in Octavo or a broken device."""


class EngineDeadError(EngineError):
    """The engine behind a server ended, or a step of it passed its deadline."""


class NotReadyError(OctavoError):
    """The engine is still loading, or it drains: it takes no request now."""


class QueueFullError(OctavoError):
    """The queue is full: the most requests or prompt tokens that may wait do wait.

    Attributes:
        retry_after_s: seconds until those that wait now have begun, judged by how fast others began.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def refuse_unknown(
    error: type[OctavoError], what: str, names: Iterable[object], valid: Collection[str]
) -> None:
    """Raise `error` for the first name that is not valid: what it is, the name, and the nearest valid one."""
    for name in names:
        if name not in valid:
            raise error(f"{what} {name!r}{suggest(str(name), valid)}")


def suggest(name: str, valid: Iterable[str], likeness: float = 0.6) -> str:
    """Return ``"; did you mean 'x'?"`` for the valid name nearest to `name`, or ``""``.

    Args:
        name: what was given.
        valid: names that are known.
        likeness: least likeness of a name worth suggesting, 0 to 1: more where names have long endings in
            common.
    """
    matches = difflib.get_close_matches(name, list(valid), n=5, cutoff=likeness)
    near = next((match for match in matches if _differ_little(name, match, likeness)), None)
    return f"; did you mean {near!r}?" if near else ""


def _differ_little(name: str, other: str, likeness: float) -> bool:
    """Compare names without their common words: enable_lora has nothing of enable_prefix_caching."""
    words, others = (re.split(r"[-_.\s]+", text) for text in (name, other))
    own = " ".join(word for word in words if word not in others)
    rest = " ".join(word for word in others if word not in words)
    return not own or not rest or difflib.SequenceMatcher(a=own, b=rest).ratio() >= likeness
