"""SGLang's extend and decode over Octavo: prefix lengths, a token pool and normalised scores."""

import numpy as np
import torch
from torch import Tensor

from octavo import LLM
from octavo.kv import PagedSequences
from octavo.ops import flash_attn_with_kvcache

LONGER = [1, 2, *range(11, 16), *range(11, 16)]  # "1234512345" behind two tokens
SHORTER = LONGER[:7]  # "12345" behind them


class TokenPool:
    """Keys and values of one layer, a block for each token, and the queries of the longer text's tokens."""

    def __init__(self) -> None:
        self.sequences = PagedSequences(num_blocks=64, block_size=1)
        self.k_pool, self.v_pool = torch.zeros(64, 1, 2, 32), torch.zeros(64, 1, 2, 32)
        self.q, self.k, self.v = torch.randn(12, 4, 32), torch.randn(12, 2, 32), torch.randn(12, 2, 32)

    def extend(self, name: str, tokens: list[int]) -> Tensor:
        """Compute the suffix that is not cached: store its keys and values, attend over prefix and suffix."""
        extension = self.sequences.alloc(name, tokens)
        new = torch.from_numpy(extension.positions)
        req_to_token, _ = self.sequences.block_table([name])
        out = flash_attn_with_kvcache(
            self.q[None, new],
            self.k_pool,
            self.v_pool,
            self.k[None, new],
            self.v[None, new],
            cache_seqlens=extension.start,
            block_table=torch.from_numpy(req_to_token),
            causal=True,
        )
        self.sequences.commit(name)
        return out[0]


def main() -> None:
    torch.manual_seed(0)
    pool = TokenPool()
    pool.extend("first", SHORTER)
    pool.sequences.free("first")
    assert pool.sequences.stats().num_cached == 7
    suffix = pool.extend("second", LONGER)
    assert suffix.shape[0] == 5  # 12 tokens, 7 cached, positions 7 to 11
    q, k, v = (x.transpose(0, 1)[None] for x in (pool.q, pool.k, pool.v))
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(suffix, dense[0].transpose(0, 1)[7:], atol=1e-5, rtol=1e-5)
    print("12 tokens, 7 of them cached, 5 computed")
    # Decode: one more token, one more slot.
    step = pool.sequences.update("second", [11])
    assert (step.start, step.token_ids, len(step.slots)) == (12, [11], 1)
    # The normalised log-probability of a continuation, however few tokens it has.
    good, bad = LLM("smollm2").score("The capital of France is", [" Paris", " the Eiffel tower of Rome"])
    assert np.isclose(bad.normalized_logprob, np.mean(bad.token_logprobs))
    assert good.normalized_logprob > bad.normalized_logprob
    print(f"Paris {good.normalized_logprob:.2f}, the Eiffel tower of Rome {bad.normalized_logprob:.2f}")


if __name__ == "__main__":
    main()
