"""Few-shot evaluation: score answers to a question whose prefix is computed once."""

from octavo import LLM

llm = LLM("smollm2")
prefix = "Q: What colour is the sky?\nA: blue\nQ: What colour is grass?\nA:"
choices = [" green", " red", " a kind of fish"]
for choice, score in zip(choices, llm.score(prefix, choices), strict=True):
    print(f"{choice!r:20} log-probability {score.logprob:8.3f}, per token {score.normalized_logprob:8.3f}")
