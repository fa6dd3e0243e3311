"""What octavo.hf cannot honour it refuses by name."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tiny_models import make_model, make_prompts
from transformers import masking_utils

import octavo.hf
from octavo.errors import InvalidArgumentError
from octavo.hf.attention_function import octavo_attention
from octavo.hf.attention_masks import octavo_mask


def call(**arguments: Any) -> None:
    module = torch.nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    q = torch.zeros(2, 4, 3, 8)
    octavo_attention(module, q, q[:, :2], q[:, :2], arguments.pop("attention_mask", None), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"output_attentions": True}, "output_attentions"),
        ({"position_bias": torch.zeros(1)}, "'position_bias'"),
        ({"head_mask": torch.zeros(1)}, "'head_mask'"),
        ({"attention_mask": torch.zeros(2, 1, 3, 3)}, r"\[2, 1, 3, 3\] of torch.float32"),
        ({"attention_mask": torch.ones(2, 3, dtype=torch.bool)}, r"\[2, 3\] of torch.bool"),
        ({"attention_mask": torch.empty(0, 1, 1, 2, dtype=torch.int32)}, "cu_seq_lens_q"),
        ({"cu_seq_lens_q": torch.tensor([0, 3])}, "packed sequences need one row"),
    ],
)
def test_arguments_of_attention(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        call(**arguments)


def test_arguments_that_concern_no_attention_pass() -> None:
    call(position_ids=torch.zeros(2, 3), use_cache=True, head_mask=None, output_attentions=False)


def test_padding_between_tokens() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]], dtype=torch.bool)
    with pytest.raises(
        InvalidArgumentError, match=r"row 1 of attention_mask \[2, 4\] has padding between tokens"
    ):
        octavo_mask(2, 4, 4, mask_function=masking_utils.causal_mask_function, attention_mask=mask)


def test_chunked_attention() -> None:
    chunked = masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(InvalidArgumentError, match="chunked_overlay"):
        octavo_mask(2, 8, 8, mask_function=chunked)


def test_patterns_of_the_caller() -> None:
    both = masking_utils.or_masks(masking_utils.causal_mask_function, lambda batch, head, q, kv: kv >= q)
    with pytest.raises(InvalidArgumentError, match="or_mask"):
        octavo_mask(2, 8, 8, mask_function=both)


def test_a_two_sided_window_with_padding_on_the_right() -> None:
    window = masking_utils.sliding_window_bidirectional_mask_function(2)
    mask = torch.tensor([[1, 1, 1, 0]], dtype=torch.bool)
    with pytest.raises(InvalidArgumentError, match="padding on the left"):
        octavo_mask(1, 4, 4, mask_function=window, attention_mask=mask)
    assert octavo_mask(1, 4, 4, mask_function=window, attention_mask=mask.flip(1)).tolist() == [[[[1, 4]]]]


def test_packed_sequences_without_their_lengths() -> None:
    model, _ = make_model("llama")
    octavo.hf.attach(model)
    ids, _ = make_prompts()
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with pytest.raises(InvalidArgumentError, match="packed in one row"), torch.no_grad():
        model(ids[2:], position_ids=positions, use_cache=False)


def test_a_model_that_needs_a_mask_tensor() -> None:
    model, _ = make_model("llama")
    model._supports_flash_attn = False
    with pytest.raises(
        InvalidArgumentError, match="LlamaForCausalLM does not support attention without a mask"
    ):
        octavo.hf.attach(model)
    assert model.config._attn_implementation == "sdpa"


def test_what_is_no_model() -> None:
    with pytest.raises(InvalidArgumentError, match="model must be a model of transformers, got str"):
        octavo.hf.attach("HuggingFaceTB/SmolLM2-135M-Instruct")


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    [(0, 5, [[3, 5], [0, 5]]), (torch.tensor(5), 1, [[3, 6], [0, 6]])],
)
def test_the_end_of_a_static_cache_is_not_seen(offset: Any, length: int, expected: list[list[int]]) -> None:
    mask = torch.ones(2, int(offset) + length, dtype=torch.bool)
    mask[0, :3] = False
    rows = octavo_mask(
        2, length, 16, offset, mask_function=masking_utils.causal_mask_function, attention_mask=mask
    )
    assert rows[:, 0, 0].tolist() == expected
