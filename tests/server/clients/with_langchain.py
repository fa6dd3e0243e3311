"""langchain-openai: a chat, whole, streamed and asynchronous, and an answer by a schema."""

import asyncio
import sys

from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    base_url=f"{sys.argv[1]}/v1",
    api_key="none",
    model="octavo",
    temperature=0,
    max_tokens=16,
    stream_usage=True,
)
PROMPT = [("system", "Answer briefly."), ("user", "What is gravity? 😀")]
answer = model.invoke(PROMPT)
assert answer.usage_metadata["output_tokens"] > 0
pieces = list(model.stream(PROMPT))
assert "".join(piece.text for piece in pieces) == answer.text
assert asyncio.run(model.ainvoke(PROMPT)).text == answer.text
assert [one.text for one in model.batch([PROMPT, PROMPT])] == [answer.text] * 2

SCHEMA = {
    "title": "Color",
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}},
    "required": ["color"],
    "additionalProperties": False,
}
color = model.with_structured_output(SCHEMA, method="json_schema").invoke("Pick a color.")
assert color["color"] in ("red", "blue")
print("whole = streamed = async = batch, usage, a JSON schema")
