"""Options from flags, the environment and octavo.toml: every field by every way, and nothing is ignored."""

from dataclasses import fields
from pathlib import Path

import pytest
from settings_cases import as_flags, as_toml, as_variable, parse

from octavo import EngineConfig, SamplingParams
from octavo.cli.options import ChatSampling, GenerateSampling
from octavo.cli.settings import SENSITIVE
from octavo.errors import SamplingParamsError

pytestmark = pytest.mark.usefixtures("nothing_is_set")
ENGINE: dict[str, object] = {
    "model": "elsewhere",
    "dtype": "float16",
    "device": "cuda:1",
    "load_format": "dummy",
    "generation_config": "elsewhere",
    "task": "embed",
    "max_model_len": 77,
    "block_size": 5,
    "num_blocks": 9,
    "memory_fraction": 0.25,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 40,
    "max_step_ms": 12.5,
    "prepare": False,
    "kernel_cache_dir": "/tmp/kernels",
    "enable_prefix_caching": False,
    "share_prefixes": False,
    "deterministic": True,
    "message_control_tokens": "refuse",
    "seed": 2**40,
    "attention_impl": "torch",
    "quantization": "int8",
    "kv_cache_dtype": "fp8",
    "tensor_parallel_size": 2,
    "expert_parallel": True,
    "all_reduce": "nccl",
}
SAMPLING: dict[str, object] = {
    "n": 3,
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.75,
    "max_tokens": 33,
    "min_tokens": 2,
    "stop": ("a b", "\n", "[", "é,=", '"'),
    "stop_token_ids": (4, 5),
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "logprobs": 4,
    "prompt_logprobs": 5,
    "logit_bias": {5: -100.0, 7: 3.5},
    "skip_special_tokens": False,
    "detokenize": False,
}
VALUES = list((ENGINE | SAMPLING).items())


def test_the_values_are_of_all_fields() -> None:
    assert set(ENGINE) == {field.name for field in fields(EngineConfig)}
    # A request's own seed has no flag: --seed is the engine's, which seeds every request. What an output must
    # be has one flag for each kind.
    assert {*SAMPLING, "seed", "structured"} == {field.name for field in fields(SamplingParams)}
    defaults = parse("generate")
    assert not [name for name, value in VALUES if defaults[name] == value]


@pytest.mark.parametrize(("name", "value"), VALUES)
def test_every_field_is_a_flag(name: str, value: object) -> None:
    assert parse("generate", *as_flags(name, value))[name] == value


@pytest.mark.parametrize(("name", "value"), VALUES)
def test_every_field_is_a_variable(name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"OCTAVO_{name.upper()}", as_variable(value))
    assert parse("generate")[name] == value


@pytest.mark.parametrize(
    ("name", "value", "in_table"),
    [
        pytest.param(*pair, in_table, marks=pytest.mark.slow if (number + in_table) % 2 else [])
        for number, pair in enumerate(VALUES)
        for in_table in (False, True)
    ],
)
def test_every_field_is_a_key_of_the_file(
    name: str, value: object, in_table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in SENSITIVE:
        monkeypatch.setenv("OCTAVO_CONFIG", "octavo.toml")
    key = f"[generate]\n{name.replace('_', '-')}" if in_table else name
    Path("octavo.toml").write_text(f"{key} = {as_toml(value)}")
    assert parse("generate")[name] == value


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "inspect"])
def test_a_key_of_the_file_is_for_every_command_that_takes_it(command: str) -> None:
    Path("octavo.toml").write_text("block_size = 7\ntemperature = 0.5\n[bench.prefix]\nhead_dim = 8")
    found = parse(command)
    assert found["block_size"] == 7
    assert found.get("temperature") == (0.5 if command in ("generate", "chat") else None)


def test_flags_outrank_variables_and_they_the_commands_table_and_it_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("octavo.toml").write_text(
        "n = 2\ntop_k = 2\nmin_tokens = 2\nmax_tokens = 2\nlogit_bias = {5 = 2}\n"
        "[generate]\nn = 3\ntop_k = 3\nmin_tokens = 3\nlogit_bias = {6 = 3}\n[chat]\nn = 9\n"
    )
    monkeypatch.setenv("OCTAVO_N", "4")
    monkeypatch.setenv("OCTAVO_TOP_K", "4")
    found = parse("generate", "--n", "5", "--max-tokens", "8")
    assert [found[name] for name in ("n", "top_k", "min_tokens", "max_tokens")] == [5, 4, 3, 8]
    assert found["logit_bias"] == {6: 3}, "a table is one value"
    assert parse("generate", "--logit-bias", "7=1", "--max-tokens", "8")["logit_bias"] == {7: 1}


def test_a_flag_leaves_the_commands_other_defaults_alone() -> None:
    assert parse("generate", "--temperature", "0")["max_tokens"] == 128
    assert parse("chat", "--max-tokens", "9")["temperature"] is None, "the model's own, if it has one"


def test_what_a_flag_says_comes_before_the_models_defaults_and_they_before_ours() -> None:
    chat = ChatSampling(max_tokens=9, top_k=0)
    assert chat.completed({}) == SamplingParams(temperature=0.6, top_p=0.95, max_tokens=9)
    own = chat.completed({"temperature": 0.3, "top_k": 20})
    assert own == SamplingParams(temperature=0.3, top_p=0.95, max_tokens=9)
    neutral = GenerateSampling(temperature=1.0, top_p=1.0, max_tokens=9, stop="a")
    assert neutral.completed({"temperature": 0.3, "top_p": 0.5, "min_p": 0.1}) == SamplingParams(
        max_tokens=9, stop="a", min_p=0.1
    )
    with pytest.raises(SamplingParamsError, match="top_p"):
        GenerateSampling(top_p=0)
