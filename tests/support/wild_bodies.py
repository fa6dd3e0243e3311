"""Random bodies of requests, mostly ones that could be right."""

from typing import Any

from hypothesis import strategies as st

from octavo.server.api.structs import ChatRequest, CompletionRequest

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
FIELDS = sorted(
    {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, "input", "tokens", "tools", "x"}
    - {"max_tokens", "max_completion_tokens"}
)

numbers = st.sampled_from([-(2**63), -1, 0, 1, 2, 5, 300, 332, 333, 338, 2**31, 2**63, 0.5, 1e308, -0.0])
texts = st.one_of(st.sampled_from(["", "a", "Hi 😀", "left", "\x00"]), st.text(max_size=20))
leaves = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", ""]), "content": st.one_of(texts, values)}
    ),
    max_size=3,
)
prompts = st.one_of(texts, st.lists(numbers, max_size=5), st.lists(st.lists(numbers, max_size=3), max_size=3))
# Mostly what could be right, so that many get as far as the engine.
likely = {
    "n": st.integers(-1, 4),
    "temperature": st.floats(-0.5, 3, allow_nan=False),
    "top_k": st.integers(-2, 400),
    "top_p": st.floats(-0.1, 1.1),
    "seed": st.integers(-1, 2**63),
    "stream": st.booleans(),
    "echo": st.booleans(),
    "logprobs": st.one_of(st.booleans(), st.integers(-1, 21)),
    "top_logprobs": st.integers(-1, 21),
    "prompt_logprobs": st.integers(-1, 21),
    "stop": st.one_of(texts, st.lists(texts, max_size=3)),
    "stop_token_ids": st.lists(st.integers(-1, 340), max_size=3),
    "logit_bias": st.dictionaries(st.integers(-1, 340).map(str), st.floats(-101, 101), max_size=3),
    "messages": messages,
    "prompt": prompts,
    "input": st.one_of(texts, messages),
    "tokens": st.lists(st.integers(-1, 340), max_size=5),
}


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": draw(st.sampled_from([1, 2, 3]))}
    for name in draw(st.lists(st.sampled_from(["messages", "prompt", "input", "tokens"]), max_size=1)):
        body[name] = draw(likely[name])
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=5, unique=True)):
        wild = draw(st.integers(0, 4)) == 0
        body[name] = draw(values if wild or name not in likely else likely[name])
    return body
