"""Tiny random models of transformers, and prompts for them."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

_SIZE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": None,
}
# What each adds to Llama: a window, a soft cap and a scale, attention sinks. sdpa has neither cap nor sinks.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "sdpa", {}),
    "mistral": ("Mistral", "sdpa", {"sliding_window": 6}),
    "gemma2": (
        "Gemma2",
        "eager",
        {"sliding_window": 6, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0},
    ),
    "gpt_oss": ("GptOss", "eager", {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def make_model(family: str) -> tuple[Any, str]:
    """A float32 model whose weights are large enough for its tokens to differ, and what to compare with."""
    import transformers

    name, peer, fields = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**_SIZE, **fields)
    config._attn_implementation = peer
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 1.0, std=0.2)
    return model, peer


def make_prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts of 7, 11 and 12 tokens, padded on the left: ids and mask, both [3, 12] int64."""
    ids = torch.randint(3, 101, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    mask[1, :1] = 0
    return ids * mask, mask


def greedy(model: Any, **options: Any) -> list[list[int]]:
    """The tokens of `generate` for the prompts."""
    ids, mask = (x.to(model.device) for x in make_prompts())
    config = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    out = model.generate(ids, attention_mask=mask, generation_config=config, **options)
    return out[:, ids.shape[1] :].tolist()


def _unpadded_prompts() -> list[list[int]]:
    return [row[kept.bool()].tolist() for row, kept in zip(*make_prompts(), strict=True)]


def _batch_options(options: dict[str, Any]) -> dict[str, Any]:
    return {
        "generation_config": GenerationConfig(
            max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=-1
        ),
        "continuous_batching_config": ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64, **options),
    }


def greedy_batch(model: Any, **options: Any) -> list[list[int]]:
    """The tokens of `generate_batch` for the prompts; options are those of its pool of blocks."""
    prompts = _unpadded_prompts()
    results = model.generate_batch(prompts, **_batch_options(options), progress_bar=False)
    outputs = sorted(results.values(), key=lambda output: prompts.index(list(output.prompt_ids)))
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [list(output.generated_tokens) for output in outputs]


def greedy_one_by_one(model: Any, **options: Any) -> list[list[int]]:
    """The same, if each prompt comes when the one before it has its first tokens: steps that do both."""
    prompts = _unpadded_prompts()
    manager = model.init_continuous_batching(**_batch_options(options))
    manager.start()
    try:
        outputs: dict[str, Any] = {}
        names = []
        for prompt in prompts:
            names.append(manager.add_request(prompt, streaming=True))
            while names[-1] not in outputs:
                _take_output(manager, outputs)
        while not all(outputs[name].is_finished() for name in names):
            _take_output(manager, outputs)
    finally:
        manager.stop(block=True)
    return [list(outputs[name].generated_tokens) for name in names]


def _take_output(manager: Any, outputs: dict[str, Any]) -> None:
    output = manager.get_result(timeout=60)
    assert output is not None, "no token for a minute"
    assert output.error is None
    outputs[output.request_id] = output


def count_calls(monkeypatch: Any, module: Any, names: tuple[str, ...]) -> dict[str, int]:
    """Count the calls of a module's functions from now on."""
    counts = dict.fromkeys(names, 0)

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # transformers reads its signature
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    for name in names:
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return counts
