"""Answers that a program can read: JSON under a schema, one of some words, a date."""

import json

from octavo import LLM, SamplingParams, StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
ASKED = {
    "Ada is 36 and likes maths and long walks. Describe her in JSON.": StructuredOutput(json_schema=SCHEMA),
    "Is the sentence 'What a lovely day!' happy or sad?": StructuredOutput(choice=["happy", "sad"]),
    "When did people first walk on the moon?": StructuredOutput(
        regex=r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
    ),
    "Write 12 times 7 plus 5 as a formula.": StructuredOutput(
        grammar='start: N (OP N)+ "=" N\nOP: "+" | "*"\nN: /[0-9]{1,3}/'
    ),
}

llm = LLM("smollm2")
outputs = llm.chat(
    [[{"role": "user", "content": question}] for question in ASKED],
    [SamplingParams(temperature=0, max_tokens=80, structured=structured) for structured in ASKED.values()],
)
for question, output in zip(ASKED, outputs, strict=True):
    print(question, "->", output.outputs[0].text)
print(json.loads(outputs[0].outputs[0].text)["age"] + 1)
