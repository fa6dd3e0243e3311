"""Best of n: completions share the prompt's blocks; the likeliest by mean log-probability wins."""

from octavo import LLM, SamplingParams

llm = LLM("smollm2")
params = SamplingParams(n=8, temperature=0.8, max_tokens=16, logprobs=0, seed=1)
output = llm.generate("My favourite season is", params)[0]
for completion in sorted(output.outputs, key=lambda c: -(c.cumulative_logprob or 0) / len(c.token_ids)):
    print(f"{(completion.cumulative_logprob or 0) / len(completion.token_ids):6.2f}", completion.text.strip())
