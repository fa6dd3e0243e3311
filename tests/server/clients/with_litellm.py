"""litellm: chats whole, streamed and asynchronous, text completions, and its own error types."""

import asyncio
import contextlib
import os
import sys
from typing import Any

# Else it asks the internet for prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

ARGUMENTS: dict[str, Any] = {
    "api_base": f"{sys.argv[1]}/v1",
    "api_key": "none",
    "temperature": 0,
    "max_tokens": 16,
}
MESSAGES = [{"role": "user", "content": "What is gravity?"}]
MODEL = "openai/octavo"
litellm.suppress_debug_info = True

answer = litellm.completion(MODEL, MESSAGES, **ARGUMENTS)
text = answer.choices[0].message.content
assert answer.usage.completion_tokens > 0
stream = litellm.completion(MODEL, MESSAGES, stream=True, **ARGUMENTS)
assert "".join(piece.choices[0].delta.content or "" for piece in stream) == text
assert asyncio.run(litellm.acompletion(MODEL, MESSAGES, **ARGUMENTS)).choices[0].message.content == text
completion = litellm.text_completion(model="text-completion-openai/octavo", prompt="The sky is", **ARGUMENTS)
assert completion.choices[0].text
with contextlib.suppress(litellm.BadRequestError):
    litellm.completion(MODEL, MESSAGES, **{**ARGUMENTS, "temperature": -1})
    raise AssertionError("a temperature of -1 was taken")
print("whole = streamed = async, a completion, BadRequestError")
