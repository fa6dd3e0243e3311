"""Which file of options is read, who may have written it, what it may set, and that the user learns of it."""

import os
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App
from settings_cases import parse

from octavo.cli import main
from octavo.cli.command_line import app
from octavo.cli.settings import SENSITIVE, _leaves, take_config
from octavo.errors import ConfigError

pytestmark = pytest.mark.usefixtures("nothing_is_set")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def write(text: str, name: str = "octavo.toml") -> Path:
    path = Path(name)
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def all_options() -> dict[str, set[tuple[str, ...]]]:
    """The first name of every option, and the commands that have it."""
    found: dict[str, set[tuple[str, ...]]] = {}

    def walk(part: object, path: tuple[str, ...]) -> None:
        for name in part:  # type: ignore[attr-defined]
            if not name.startswith("-"):
                command = part[name]  # type: ignore[index]
                for argument in command.assemble_argument_collection():
                    if argument.name.startswith("--"):
                        found.setdefault(argument.name[2:].replace("-", "_"), set()).add((*path, name))
                walk(command, (*path, name))

    walk(app, ())
    return found


def kind_of(hint: object) -> str:
    """One number stands for a range of them, and a word for a choice."""
    leaves = _leaves(hint) - {type(None), ...}
    return " or ".join(sorted("str" if isinstance(leaf, str) else str(leaf) for leaf in leaves))


def test_a_variable_has_one_meaning_in_all_commands() -> None:
    """Trap: OCTAVO_JSON was a switch of `generate`, and the name of a file that `bench serve` wrote."""
    kinds: dict[str, dict[tuple[str, ...], str]] = {}

    def walk(part: App, path: tuple[str, ...]) -> None:
        for name in part:
            if not name.startswith("-"):
                for argument in part[name].assemble_argument_collection():
                    if argument.name.startswith("--"):
                        kinds.setdefault(argument.name, {})[*path, name] = kind_of(argument.hint)
                walk(part[name], (*path, name))

    walk(app, ())
    assert {"--json", "--json-file", "--device", "--input-len", "--api-key"} <= kinds.keys()
    assert {name: found for name, found in kinds.items() if len(set(found.values())) > 1} == {}


def test_names_that_begin_alike_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def bound(*words: str) -> dict[str, Any]:
        found = app.parse_args(list(words), exit_on_error=False, print_error=False)[1]
        found.apply_defaults()
        return found.arguments

    monkeypatch.setenv("OCTAVO_JSON", "true")
    write("json = true")
    assert bound("bench", "serve")["load"].json_file is None
    monkeypatch.setenv("OCTAVO_JSON_FILE", "figures")
    assert bound("bench", "serve")["load"].json_file == "figures"
    assert bound("generate")["json"] is True
    monkeypatch.delenv("OCTAVO_JSON")
    Path("octavo.toml").unlink()
    assert bound("generate")["json"] is False


def test_what_a_file_sets_is_said_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    path = write("block_size = 32\n[generate]\ntemperature = 0.5\n[chat]\ntop_k = 3\n")
    assert parse("generate")["block_size"] == 32
    said = capsys.readouterr()
    assert said.err == f"octavo: {path.absolute()} sets block_size, temperature\n"
    assert said.out == ""
    parse("bench", "prefix")
    assert capsys.readouterr().err == f"octavo: {path.absolute()} sets block_size\n"
    write("[chat]\ntop_k = 3\n")
    parse("generate")
    assert capsys.readouterr().err == f"octavo: {path.absolute()} sets nothing for this command\n"
    path.unlink()
    parse("generate")
    assert capsys.readouterr().err == ""


def test_values_are_not_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CONFIG", str(write('api_key = "sk-0123456789"', "own.toml")))
    app.parse_args(["serve"], exit_on_error=False, print_error=False)
    said = capsys.readouterr().err
    assert "sets api_key" in said
    assert "sk-0123456789" not in said


@pytest.mark.parametrize("spelled", ["{}", "[serve]\n{}", "[bench.serve]\n{}", "[generate]\n{}"])
@pytest.mark.parametrize("name", sorted(SENSITIVE))
def test_sensitive_keys_need_a_file_that_is_named(
    name: str, spelled: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table = spelled.partition("]")[0].removeprefix("[").replace(".", " ")
    if spelled != "{}" and tuple(table.split()) not in all_options()[name]:
        pytest.skip("that command has no such option")
    key = name.replace("_", "-")
    value = (
        "true" if name in ("insecure", "public_metrics") else '["x"]' if name == "allowed_hosts" else '"x"'
    )
    write(spelled.format(f"{key} = {value}"))
    for command in ("generate", "serve"):
        with pytest.raises(SystemExit) as caught:
            main([command])
        assert caught.value.code == 2
        said = capsys.readouterr().err
        assert f"sets {key}, which the file of a working directory may not" in said
        assert f"OCTAVO_{name.upper()}" in said


def test_every_option_that_sounds_sensitive_is() -> None:
    """A new option that names an address, a key or a file that is written belongs into the table."""
    words = (
        "host",
        "key",
        "cert",
        "url",
        "uds",
        "endpoint",
        "insecure",
        "public",
        "output_file",
        "cache_dir",
    )
    sounding = {name for name in all_options() if any(word in name for word in words)}
    assert sounding <= SENSITIVE | {"endpoint"}, "which of two routes to measure"
    assert all_options().keys() >= SENSITIVE


@pytest.mark.parametrize("way", ["flag", "flag=", "before the command", "variable", "both"])
def test_a_named_file_is_read_in_place_of_the_working_directorys(
    way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write("no such = syntax")
    named = write('kernel_cache_dir = "elsewhere"\nnum_blocks = 7\n', "named.toml")
    other = write("num_blocks = 8", "other.toml")
    arguments = ["inspect", "nowhere.gguf"]
    if way in ("variable", "both"):
        monkeypatch.setenv("OCTAVO_CONFIG", str(other if way == "both" else named))
    if way in ("flag", "both"):
        arguments += ["--config", str(named)]
    if way == "flag=":
        arguments.append(f"--config={named}")
    if way == "before the command":
        arguments = ["--config", str(named), *arguments]
    with pytest.raises(SystemExit):
        main(arguments)
    said = capsys.readouterr().err
    assert f"octavo: {named.absolute()} sets kernel_cache_dir, num_blocks" in said
    assert "nowhere.gguf" in said


@pytest.mark.parametrize("words", [["--config"], ["--config="], ["--config", "a", "--config=b"]])
def test_one_file_must_be_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["inspect", *words])
    assert caught.value.code == 2
    assert "--config must name one file" in capsys.readouterr().err


def test_a_named_file_must_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["inspect", "--config", "nowhere.toml"])
    assert caught.value.code == 2
    assert "nowhere.toml cannot be read: No such file" in capsys.readouterr().err


def test_words_after_two_dashes_are_prompts() -> None:
    assert take_config(["generate", "--", "--config", "x"]) == (None, ["generate", "--", "--config", "x"])


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("mode", [0o622, 0o620, 0o602, 0o666, 0o664, 0o777])
def test_a_file_that_others_can_change_is_refused(
    mode: int, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("num_blocks = 7")
    path.chmod(mode)
    if named:
        monkeypatch.setenv("OCTAVO_CONFIG", str(path))
    with pytest.raises(ConfigError, match=r"octavo\.toml can be changed by other users; run: chmod go-w"):
        parse("generate")
    path.chmod(0o644)
    assert parse("generate")["num_blocks"] == 7


@as_root
def test_a_file_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("num_blocks = 7")
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345, not to you"):
        parse("generate")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert parse("generate")["num_blocks"] == 7
    os.chown(path, 0, 0)
    assert parse("generate")["num_blocks"] == 7, "root may replace anything anyway"


@as_root
def test_links_are_judged_by_their_owner_and_by_what_they_lead_to() -> None:
    target = write("num_blocks = 7", "target.toml")
    Path("between").symlink_to(target)
    Path("octavo.toml").symlink_to("between")
    assert parse("generate")["num_blocks"] == 7
    os.chown("between", 12345, 12345, follow_symlinks=False)
    with pytest.raises(ConfigError, match="the link between belongs to user 12345"):
        parse("generate")
    os.chown("between", 0, 0, follow_symlinks=False)
    os.chown(target, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        parse("generate")
    Path("between").unlink()
    Path("between").symlink_to("octavo.toml")
    with pytest.raises(ConfigError, match="Too many levels of symbolic links"):
        parse("generate")


def test_a_byte_order_mark_is_no_syntax_error() -> None:
    write("").write_bytes(b"\xef\xbb\xbfnum_blocks = 7\r\n")
    assert parse("generate")["num_blocks"] == 7
