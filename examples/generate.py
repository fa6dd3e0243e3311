"""Complete prompts in one batch and look at what the engine did."""

from octavo import LLM, SamplingParams

llm = LLM("smollm2")
prompts = ["The capital of France is", "Water boils at", [1, 2, 3]]
for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12)):
    completion = output.outputs[0]
    print(repr(output.prompt), "->", repr(completion.text), completion.finish_reason)
print(llm.stats.kv)
