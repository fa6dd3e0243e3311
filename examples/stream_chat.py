"""Chat with streaming; the second turn finds the first in the prefix cache."""

from octavo import LLM, SamplingParams

llm = LLM("smollm2")
params = SamplingParams(temperature=0, max_tokens=32)
messages = []
for question in ("What is gravity?", "Who found its law?"):
    messages.append({"role": "user", "content": question})
    answer = ""
    for delta in llm.chat_stream(messages, params):
        print(delta.text, end="", flush=True)
        answer += delta.text
        if delta.output is not None:
            print(f"\n[{delta.output.num_cached_tokens} prompt tokens from the prefix cache]")
    messages.append({"role": "assistant", "content": answer})
