"""The child: reads bodies one at a time, within limits on time and memory, until its parent ends.

    python -m octavo.server.reading.child CPU_SECONDS MEMORY_BYTES

It imports neither PyTorch nor the server's libraries.
"""

import traceback

import msgspec
from msgspec import structs

from octavo.server.api.pooled.pooled_input import POOLED, read_body
from octavo.server.api.pooled.pooled_structs import ClassifyRequest
from octavo.server.api.tools.toolbox import read_prompt
from octavo.server.api_errors import as_api_error
from octavo.server.reading.forms import (
    Outline,
    ReadAnswer,
    ReadChat,
    ReadPooled,
    ReadTexts,
    Refusal,
    Reply,
    Task,
    Tools,
    encode,
    packed,
)
from octavo.server.reading.kinds import ANSWERS, CHATS, needed
from octavo.server.reading.requests import (
    Materials,
    TextInput,
    check_model,
    parse_completion,
    read_texts,
    reading_of,
)
from octavo.tokenizer.template_sandbox import run


def main() -> None:
    """Limit this process and serve: the first request describes the model, the others are tasks."""
    materials = None

    def answer(request: bytes) -> bytes:
        nonlocal materials
        if materials is not None:
            return read(materials, msgspec.msgpack.decode(request, type=Task))
        materials = Outline.decode(request).materials()
        return b""

    run(answer)


def read(materials: Materials, task: Task) -> bytes:
    """Read a body; return a Reply as msgpack."""
    try:
        return encode(_reply(materials, task))
    except Exception as error:
        found = as_api_error(error)
        # A message might contain a prompt; the places in the code do not.
        frames = "".join(traceback.format_tb(error.__traceback__)) if found.status == 500 else ""
        return encode(Refusal(found.status, found.detail, found.headers, frames))


def _reply(materials: Materials, task: Task) -> Reply:
    if task.path in ANSWERS:
        return ReadAnswer(*ANSWERS[task.path](materials, task.body))
    if task.path in POOLED:
        return _pooled(materials, task)
    if task.path in CHATS:
        return _chat(materials, task)
    return _texts(materials, parse_completion(task.body, materials.defaults))


def _chat(materials: Materials, task: Task) -> ReadChat:
    _, parse = CHATS[task.path]
    found = parse(task.body, materials.defaults)
    chat = found.chat
    check_model(getattr(found.fields, "model", None), materials.model)
    prompt, box, constrained = read_prompt(
        materials.prompts, chat, materials.formats, reading_of(chat), found.params
    )
    return ReadChat(
        fields=msgspec.json.encode(needed(found.fields)),
        chat=needed(chat),
        params=found.params,
        left_out=found.left_out,
        constrained_params=constrained,
        prompt=packed(prompt),
        tools=Tools.of(box),
    )


def _pooled(materials: Materials, task: Task) -> ReadPooled:
    fields, prompts, left_out = read_body(materials, task.path, task.body)
    if isinstance(fields, ClassifyRequest):
        fields = structs.replace(fields, input="")
    return ReadPooled(msgspec.json.encode(fields), left_out, [packed(ids) for ids in prompts])


def _texts(materials: Materials, found: TextInput) -> ReadTexts:
    check_model(found.fields.model, materials.model)
    prompts = read_texts(materials.prompts, found)
    return ReadTexts(
        needed(found.fields), found.params, found.left_out, [packed(prompt) for prompt in prompts]
    )


if __name__ == "__main__":
    main()
