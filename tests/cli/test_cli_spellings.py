"""Options of more than one word, and what is no option: refused, never ignored."""

import os
import re
from pathlib import Path

import pytest
from cyclopts import CycloptsError
from settings_cases import as_flags, as_toml, as_variable, parse

from octavo import StructuredOutput
from octavo.cli.settings import settings_of
from octavo.errors import ConfigError, OctavoError

pytestmark = pytest.mark.usefixtures("nothing_is_set")
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
    monkeypatch.setenv("OCTAVO_DEBUG", "1")  # of operators
    monkeypatch.setenv("OCTAVO_GPU_GENERATION", "8")  # of kernels
    assert parse("generate")
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=message):
        parse("generate")


SERVICES = ("OCTAVO", "OCTAVO_FRONT", "OCTAVO_REPLICAS", "OCTAVO_MODEL", "OCTAVO_2", "OCTAVO_PORT")


@pytest.mark.parametrize("service", SERVICES)
def test_what_kubernetes_and_docker_set_for_a_service_is_left_alone(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service whose name begins with "octavo" adds these to each pod beside it."""
    without = parse("serve")
    address = "10.96.0.17"
    variables = {
        "SERVICE_HOST": address,
        "SERVICE_PORT": "80",
        "PORT": f"tcp://{address}:80",
        "NAME": "/web/o",
    }
    variables |= {f"SERVICE_PORT_{name}": "80" for name in ("HTTP", "METRICS_2")}
    for protocol in ("tcp", "udp", "sctp"):
        port = f"PORT_8000_{protocol.upper()}"
        variables |= {port: f"{protocol}://{address}:8000", f"{port}_PROTO": protocol}
        variables |= {f"{port}_PORT": "8000", f"{port}_ADDR": address, f"{port}_PORT_START": "8000"}
    variables |= {"ENV_PATH": "/usr/bin", "ENV_OCTAVO_API_KEY": "sk", "PORT_START": f"udp://{address}:80"}
    for name, value in variables.items():
        monkeypatch.setenv(f"{service}_{name}", value)
    assert parse("serve") == without


def test_a_port_that_is_none_of_a_service_is_an_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OCTAVO_PORT", "8123")
    assert parse("serve")["port"] == 8123
    (tmp_path / "octavo.toml").write_text("port = 8124")
    monkeypatch.setenv("OCTAVO_PORT", "tcp://10.96.0.17:80")
    assert parse("serve")["port"] == 8124, "the file sets what a service does not"
    monkeypatch.setenv("OCTAVO_PORT", "http://10.96.0.17:80")
    with pytest.raises(Exception, match="OCTAVO_PORT"):
        parse("serve")


@pytest.mark.parametrize("name", ["OCTAVO_SERVICE", "OCTAVO_SERVICE_HOSTS", "OCTAVO_PORT_TCP", "OCTAVO_NAME"])
def test_what_only_looks_like_a_service_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "10.96.0.17")
    with pytest.raises(ConfigError, match=f"unknown environment variable '{name}'"):
        parse("serve")


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
