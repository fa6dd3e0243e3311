"""Options from flags, the environment and octavo.toml: every field by every way, and nothing is ignored."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from octavo import EngineConfig, SamplingParams, StructuredOutput
from octavo.cli.app import app
from octavo.cli.settings import settings_of
from octavo.errors import ConfigError, OctavoError

ENGINE: dict[str, object] = {
    "model": "elsewhere",
    "dtype": "float16",
    "device": "cuda:1",
    "load_format": "dummy",
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
    "seed": 2**40,
    "attention_impl": "torch",
    "quantization": "int8",
    "kv_cache_dtype": "fp8",
    "tensor_parallel_size": 2,
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


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("OCTAVO_"):
            monkeypatch.delenv(name)


def parse(*arguments: str) -> dict[str, object]:
    """The fields that a command would run with."""
    _, bound, *_ = app.parse_args(list(arguments), exit_on_error=False, print_error=False)
    bound.apply_defaults()
    found: dict[str, object] = {}
    for name in ("sampling", "engine"):
        if name in bound.arguments:
            options = bound.arguments[name]
            found |= {field.name: getattr(options, field.name) for field in fields(options)}
    return found


def as_flags(name: str, value: object) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, tuple):
        return [word for item in value for word in (flag, str(item))]
    if isinstance(value, Mapping):
        return [word for key, item in value.items() for word in (flag, f"{key}={item}")]
    return [flag, str(value)]


def as_variable(value: object) -> str:
    return json.dumps(value) if isinstance(value, tuple | dict | bool) else str(value)


def as_toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {item}" for key, item in value.items()) + " }"
    return json.dumps(value)


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
def test_every_field_is_a_key_of_the_file(name: str, value: object, in_table: bool) -> None:
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
    chat = parse("chat", "--max-tokens", "9")
    assert (chat["temperature"], chat["top_p"], chat["max_tokens"]) == (0.6, 0.95, 9)


STRUCTURED = {
    "json_schema": '{"type": "object"}',
    "json_object": True,
    "regex": "[a-z]+",
    "choice": ("yes", "no, never", "[é]"),
    "grammar": 'start: "a"',
}


@pytest.mark.parametrize("source", ["flags", "variable", "file"])
@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("kind", STRUCTURED)
def test_what_an_output_must_be(
    kind: str, command: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schemas and grammars are files."""
    given = expected = STRUCTURED[kind]
    if kind in ("json_schema", "grammar"):
        given = "spec.txt"
        Path(given).write_text(str(expected))
    arguments = []
    if source == "flags":
        arguments = as_flags(kind, given)
    elif source == "variable":
        monkeypatch.setenv(f"OCTAVO_{kind.upper()}", as_variable(given))
    else:
        Path("octavo.toml").write_text(f"[{command}]\n{kind} = {as_toml(given)}")
    structured = parse(command, *arguments)["structured"]
    assert isinstance(structured, StructuredOutput)
    assert structured.kind == kind
    assert getattr(structured, kind) == expected


def test_an_output_need_not_be_anything() -> None:
    assert parse("generate")["structured"] is None


def test_what_cannot_be_an_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff")
    (tmp_path / "long").write_text("x" * 70_000)
    for name, message in (("missing", "No such file"), ("bytes", "utf-8"), ("long", "bytes"), ("", "file")):
        for flag in ("--json-schema", "--grammar"):
            with pytest.raises((OctavoError, CycloptsError), match=message):
                parse("generate", flag, str(tmp_path / name))
    with pytest.raises((OctavoError, CycloptsError), match="exactly one"):
        parse("generate", "--regex", "a", "--choice", "b")


@pytest.mark.parametrize(
    ("spelling", "bias"),
    [
        ("5=-100", {5: -100}),
        ("5=-100,7=3", {5: -100, 7: 3}),
        ('{"5": -100, "7": 3.5}', {5: -100, 7: 3.5}),
        ("{}", {}),
    ],
)
def test_spellings_of_logit_bias(
    spelling: str, bias: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parse("generate", "--logit-bias", spelling)["logit_bias"] == bias
    assert parse("generate", f"--logit-bias={spelling}")["logit_bias"] == bias
    monkeypatch.setenv("OCTAVO_LOGIT_BIAS", spelling)
    assert parse("generate")["logit_bias"] == bias


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("5", "expected ID=VALUE, such as 5=-100, got '5'"),
        ("", "expected ID=VALUE"),
        ("a=1", "'a'"),
        ("5=a", "'a'"),
        ("5=1,5=2", "each token id may be there once"),
        ('{"5": 1, "5": 2}', "each token id may be there once"),
        ("{5: 1}", "Expecting property name"),
        ('{"5": "a"}', "must be a number"),
        ('{"5": true}', "must be a number"),
        ("5=101", r"must be a number in \[-100, 100\]"),
        ("5=nan", "must be a number"),
        ("-1=1", "logit_bias keys must be an integer"),
    ],
)
def test_what_is_no_logit_bias_is_refused(spelling: str, message: str) -> None:
    with pytest.raises(Exception, match=message) as caught:
        parse("generate", f"--logit-bias={spelling}")
    assert type(caught.value).__module__.startswith(("octavo", "cyclopts"))


@pytest.mark.parametrize("text", ["2.5", "3.0", "1.0e400"])
def test_no_fraction_is_rounded_to_an_integer(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in ("--block-size", "--stop-token-ids"):
        with pytest.raises(ConfigError, match=f"{flag} must be an integer, got {text}"):
            parse("generate", flag, text)
    monkeypatch.setenv("OCTAVO_BLOCK_SIZE", text)
    with pytest.raises(ConfigError, match="OCTAVO_BLOCK_SIZE must be an integer"):
        parse("generate")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("OCTAVO_BLOKSIZE", "did you mean 'OCTAVO_BLOCK_SIZE'"),
        ("OCTAVO_block_size", "unknown environment variable 'OCTAVO_block_size'"),
        ("OCTAVO_NO_SHARE_PREFIXES", "did you mean 'OCTAVO_SHARE_PREFIXES'"),
        ("OCTAVO_PROMPTS", "unknown environment variable"),
        ("OCTAVO_", "unknown environment variable"),
    ],
)
def test_variables_of_no_option_are_refused(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_HEAD_DIM", "8")  # of another command
    assert parse("generate")
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=message):
        parse("generate")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("nonsense = 1", r"octavo\.toml: unknown option 'nonsense'"),
        ("blok_size = 1", "unknown option 'blok_size'; did you mean 'block_size'"),
        ("[generatte]\nn = 1", "unknown option 'generatte'; did you mean 'generate'"),
        ("[generate]\nblok-size = 1", r"\[generate\]: unknown option 'blok-size'; did you mean 'block_size'"),
        ("[bench]\nhead_dim = 4", r"\[bench\]: unknown option 'head_dim'"),
        ("[bench.prefx]\nn = 1", r"\[bench\]: unknown option 'prefx'; did you mean 'prefix'"),
        ("[chat]\nnum_prompts = 4", r"\[chat\]: unknown option 'num_prompts'"),
        ("[chat]\njson = true", r"\[chat\]: unknown option 'json'"),
        ("prompts = ['a']", "unknown option 'prompts'"),
        ("generate = 5", r"\[generate\] must be a table of options, got 5"),
        ("block_size = 1\nblock-size = 2", "block_size is there twice"),
        ("block_size = 2.5", "block_size.* must be an integer"),
        ("block_size = true", 'unable to convert "True" into int'),
        ("block_size = [1, 2]", "block_size"),
        ("block_size = {a = 1}", "block_size"),
        ("share_prefixes = 'perhaps'", "share_prefixes"),
        ("a = [", r"octavo\.toml must be valid TOML"),
        ("a = " + "[" * 100_000, r"octavo\.toml must be valid TOML"),
        ("# " + "a" * (1 << 20), r"octavo\.toml must hold at most 1048576 bytes"),
    ],
    ids=lambda text: text[:30],
)
def test_a_file_that_says_something_else_is_refused_by_every_command(document: str, message: str) -> None:
    Path("octavo.toml").write_text(document)
    with pytest.raises(Exception, match=message) as caught:
        parse("generate")
    assert type(caught.value).__module__.startswith(("octavo", "cyclopts"))
    if isinstance(caught.value, OctavoError) and "integer" not in message:
        with pytest.raises(ConfigError, match=message):
            parse("bench", "prefix")


def test_what_is_no_file_of_text_is_refused() -> None:
    path = Path("octavo.toml")
    path.mkdir()
    with pytest.raises(ConfigError, match=r"octavo\.toml must be a file, got a folder"):
        parse("generate")
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="got a device or pipe"):
        parse("generate")
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        parse("generate")
    path.unlink()
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"octavo\.toml must be valid TOML: 'utf-8'"):
        parse("generate")


def test_settings_of_a_command_are_its_own() -> None:
    options = {("a",): frozenset({"x", "y"}), ("b",): frozenset({"y", "z"}), ("b", "c"): frozenset({"x"})}
    document = {"x": 1, "y": 2, "a": {"x": 3}, "b": {"z": 4, "c": {}}}
    assert settings_of(document, options, ("a",)) == {"x": 3, "y": 2}
    assert settings_of(document, options, ("b",)) == {"y": 2, "z": 4}
    assert settings_of(document, options, ("b", "c")) == {"x": 1}


def test_the_readmes_file_is_one() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (document,) = re.findall(r"```toml\n(.*?)```", readme, flags=re.DOTALL)
    Path("octavo.toml").write_text(document)
    found = parse("generate")
    assert (found["block_size"], found["temperature"]) == (32, 0.7)
    assert (found["stop"], found["logit_bias"]) == (("\n\n", "END"), {5: -100})
    assert parse("inspect")["block_size"] == 32
