"""Hugging Face transformers on Octavo's operators: their models, their `generate`, our attention.

    import octavo.hf

    octavo.hf.attach(model)                  # then model.generate(...) or model.generate_batch(...)
    octavo.hf.stand_in_for_flash_attn()      # or: their flash_attention_2, on our kernels

docs/huggingface.md says which of the two to take. transformers is imported when it is needed, not before.
"""

from octavo.hf.flash_attn_module import stand_in_for_flash_attn
from octavo.hf.recipes import attach, register

__all__ = ["attach", "register", "stand_in_for_flash_attn"]
