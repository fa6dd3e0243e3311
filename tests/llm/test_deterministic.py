"""deterministic=True where it cannot run is refused; where it can, see test_deterministic_gpu.py."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from octavo import LLM, EngineConfig
from octavo.attention import AttentionMetadata, KVCache
from octavo.engine.engine import Engine
from octavo.errors import ConfigError
from octavo.layers import make_invariant_linear, make_step
from octavo.models import load_decoder
from octavo.parallel import TensorParallel

MakeLLM = Callable[..., LLM]


@pytest.mark.parametrize(
    "options", [{}, {"attention_impl": "reference"}, {"quantization": "int8"}, {"quantization": "fp8"}]
)
def test_a_cpu_refuses(tiny: MakeLLM, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"deterministic=True .* device=cpu .* use deterministic=False"):
        tiny(device="cpu", deterministic=True, **options)


def test_a_decoder_of_the_other_kind_is_refused(tiny: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny(device="cpu").engine
    monkeypatch.setattr("octavo.engine.memory.plan._check_deterministic", lambda *arguments: None)
    config = EngineConfig(
        model=engine.config.model, load_format="dummy", device="cpu", num_blocks=4, deterministic=True
    )
    with pytest.raises(ConfigError, match="contradicts the decoder"):
        Engine(config, decoder=engine.runner.decoder)


@pytest.mark.parametrize(("quantization", "num_ranks"), [("int8", 1), ("fp8", 1), ("none", 2)])
def test_the_loader_refuses_what_it_cannot_promise(quantization: str, num_ranks: int, tiny: MakeLLM) -> None:
    config = replace(tiny(device="cpu").engine.model_config, has_wide_qk_norm=num_ranks > 1)
    with pytest.raises(ConfigError, match="on one rank, got 2" if num_ranks > 1 else f"got '{quantization}'"):
        load_decoder(
            config,
            None,  # type: ignore[arg-type]
            dtype=torch.float32,
            device="cpu",
            parallel=TensorParallel(0, num_ranks, object() if num_ranks > 1 else None),
            quantization=quantization,
            deterministic=True,
        )


def test_layers_refuse_a_cpu() -> None:
    with pytest.raises(ConfigError, match="weights on cpu"):
        make_invariant_linear(torch.zeros(2, 2))
    cache = KVCache.allocate(num_layers=1, num_blocks=1, block_size=4, num_kv_heads=1, head_dim=8)
    ints = torch.zeros(1, dtype=torch.int32)
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=ints + 1,
        positions=ints,
        slot_mapping=ints.long(),
        block_table=ints[None],
        max_query_len=1,
        max_seq_len=1,
    )
    with pytest.raises(ConfigError, match='attention_impl="triton"'):
        make_step(cache, [metadata], num_heads=1, impl="auto", dtype=torch.float32, deterministic=True)
