"""The request that an engine answers before it is ready, to set up what first use sets up."""

from octavo.sampling_params import SamplingParams

# Every way to a token: forks, log-probabilities, filters, and changes of logits.
REHEARSAL = SamplingParams(
    n=2,
    max_tokens=4,
    min_tokens=2,
    temperature=0.5,
    top_k=2,
    top_p=0.5,
    min_p=0.1,
    logprobs=1,
    prompt_logprobs=1,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    stop_token_ids=[0],
    detokenize=False,
)
# Tokens of its prompt and answer, rounded up.
REHEARSAL_TOKENS = 8
