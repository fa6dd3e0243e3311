"""Tokenizers of model folders."""

import json
from itertools import chain, combinations

import pytest
from tokenizer_samples import byte_level_metadata, sample_texts, sentencepiece_metadata
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from octavo.errors import FileFormatError, ModelNotFoundError, OctavoError
from octavo.tokenizer import Tokenizer
from octavo.tokenizer.gguf_vocabulary import read_gguf_vocabulary

MESSAGES = [{"role": "user", "content": "x"}]


def backend(pre: str = "gpt-2") -> Backend:
    return read_gguf_vocabulary(byte_level_metadata(pre), "test").backend


@pytest.fixture
def folder(tmp_path):
    backend().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder, name, value):
    (folder / name).write_text(json.dumps(value), encoding="utf-8")


@pytest.mark.parametrize("metadata", [byte_level_metadata("qwen2"), sentencepiece_metadata()])
def test_ids_equal_transformers(tmp_path, metadata):
    from transformers import PreTrainedTokenizerFast

    original = read_gguf_vocabulary(metadata, "test").backend
    original.post_processor = processors.TemplateProcessing(single="$A <bos>", special_tokens=[("<bos>", 1)])
    original.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_folder(tmp_path)
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in sample_texts(200):
        assert ours.encode(text) == oracle.encode(text)
        plain = ours.encode(text, add_special_tokens=False)
        assert plain == oracle.encode(text, add_special_tokens=False)
        assert ours.decode(plain) == oracle.decode(plain, skip_special_tokens=True)


def test_special_tokens_of_the_configuration(folder):
    write(folder, "tokenizer_config.json", {"bos_token": {"content": "<|im_start|>"}, "eos_token": None})
    write(folder, "special_tokens_map.json", {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == {2}


def test_eos_ids_of_generation_config_come_before_those_of_config(folder):
    write(folder, "config.json", {"eos_token_id": 5})
    assert Tokenizer.from_folder(folder).eos_token_ids == {5}
    write(folder, "generation_config.json", {"eos_token_id": [6, 7]})
    assert Tokenizer.from_folder(folder).eos_token_ids == {6, 7}


def test_plain_folder_has_no_extras(folder):
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.bos_token_id is None
    assert tokenizer.eos_token_ids == frozenset()
    assert tokenizer.chat_template is None


def test_chat_template_is_found_in_each_place(folder):
    write(
        folder, "tokenizer_config.json", {"chat_template": "one {{ eos_token }}", "eos_token": "<|im_end|>"}
    )
    assert Tokenizer.from_folder(folder).chat_template.render(MESSAGES) == "one <|im_end|>"
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    assert Tokenizer.from_folder(folder).chat_template.render(MESSAGES) == "two"
    assert Tokenizer.from_folder(folder).chat_template.render(MESSAGES, tools=[]) == "three"
    (folder / "chat_template.jinja").write_text("four")
    assert Tokenizer.from_folder(folder).chat_template.render(MESSAGES) == "four"


# Files with a template, each with the text it renders; later ones are written over earlier folders.
PLACES = {
    "tokenizer_config": lambda f: write(f, "tokenizer_config.json", {"chat_template": "config"}),
    "named": lambda f: write(
        f,
        "tokenizer_config.json",
        {
            "chat_template": [
                {"name": "default", "template": "named"},
                {"name": "tool_use", "template": "tools"},
            ]
        },
    ),
    "jinja": lambda f: (f / "chat_template.jinja").write_bytes(b"jinja\r\n\n"),
    "tool_use": lambda f: write_more(f, "tool_use", "more tools"),
    "rag": lambda f: write_more(f, "rag", "rag"),
    "default": lambda f: write_more(f, "default", "more default"),
}


def write_more(folder, name, source):
    (folder / "additional_chat_templates").mkdir(exist_ok=True)
    (folder / "additional_chat_templates" / f"{name}.jinja").write_text(source)


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize(
    "places", list(chain.from_iterable(combinations(PLACES, n) for n in (1, 2, 3))), ids="+".join
)
def test_the_template_is_the_one_that_transformers_takes(folder, places, tools):
    from transformers import AutoTokenizer

    write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    for place in places:
        PLACES[place](folder)
    try:
        expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
            MESSAGES, tools=tools, tokenize=False
        )
    except ValueError:  # no default: transformers forgets tokenizer_config.json's, and that is no use
        assert "jinja" not in places
        assert "default" not in places
    else:
        assert Tokenizer.from_folder(folder).chat_template.render(MESSAGES, tools=tools) == expected


def test_a_processors_template_is_taken_where_there_is_no_other(folder):
    write(folder, "chat_template.json", {"chat_template": "legacy"})
    assert Tokenizer.from_folder(folder).chat_template.render(MESSAGES) == "legacy"
    write(folder, "processor_config.json", {"chat_template": "processor", "other": 1})
    assert Tokenizer.from_folder(folder).chat_template.render(MESSAGES) == "processor"
    write(folder, "tokenizer_config.json", {"chat_template": "config"})
    assert Tokenizer.from_folder(folder).chat_template.render(MESSAGES) == "config"


@pytest.mark.parametrize(
    "fields",
    [
        {"pad_token": "<|im_end|>", "unk_token": "<|im_start|>"},
        {"pad_token": {"__type": "AddedToken", "content": "<|im_end|>"}, "mask_token": None},
        {"image_token": "<|im_start|>", "extra_special_tokens": {"boi_token": "<|im_end|>", "audio": "x"}},
        {"extra_special_tokens": ["<|im_start|>"], "add_bos_token": True, "sep_token": "a", "cls_token": "b"},
        {
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "additional_special_tokens": ["<|im_start|>"],
        },
    ],
)
@pytest.mark.parametrize(
    "others", [None, {"unk_token": "<|endoftext|>", "pad_token": {"content": "<|im_start|>"}}]
)
def test_templates_see_the_special_tokens_that_transformers_gives_them(folder, fields, others):
    from transformers import AutoTokenizer

    names = ("bos", "eos", "unk", "pad", "sep", "cls", "mask", "image", "boi", "audio")
    source = "".join(f"{{{{ {name}_token|default('-') }}}}," for name in names) + "{{ audio|default('-') }}"
    write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **fields})
    if others is not None:
        write(folder, "special_tokens_map.json", others)
    (folder / "chat_template.jinja").write_text(source)
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(MESSAGES, tokenize=False)
    assert Tokenizer.from_folder(folder).chat_template.render(MESSAGES) == expected


def test_template_with_a_mistake_fails_the_chat_but_not_the_model(folder):
    write(folder, "tokenizer_config.json", {"chat_template": "{% if %}"})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("fox")
    with pytest.raises(OctavoError, match="syntax error"):
        tokenizer.chat_template.render(MESSAGES)


def test_truncation_and_padding_of_training_are_switched_off(folder):
    cutting = backend()
    cutting.enable_truncation(2)
    cutting.enable_padding(length=2)
    cutting.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("the quick brown fox") == backend().encode("the quick brown fox").ids
    assert tokenizer.encode("") == []


def test_tokens_that_only_the_configuration_calls_special_are_special(folder):
    write(folder, "tokenizer_config.json", {"additional_special_tokens": ["fox", "not a token"]})
    tokenizer = Tokenizer.from_folder(folder)
    plain = backend()
    plain.add_tokens(["fox"])
    plain.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode("a fox.")) == "a ."


def test_missing_files_are_named(tmp_path):
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ModelNotFoundError, match=r"expected a tokenizer\.json"):
            Tokenizer.from_folder(place)


def test_every_cut_of_tokenizer_json_is_refused(folder):
    path = folder / "tokenizer.json"
    whole = path.read_bytes()
    for length in [0, 1, 10, *range(100, len(whole) - 2, len(whole) // 15), len(whole) - 3]:
        path.write_bytes(whole[:length])
        with pytest.raises(FileFormatError, match=r"tokenizer\.json"):
            Tokenizer.from_folder(folder)


@pytest.mark.parametrize("content", [b"not json", b"[]", b'"text"', b"{}", b"\xff\xfe\x00", b'{"model": 3}'])
def test_other_content_of_tokenizer_json_is_refused(folder, content):
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(FileFormatError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokenizer_config.json", []),
        ("tokenizer_config.json", {"eos_token": 3}),
        ("tokenizer_config.json", {"eos_token": "not in the vocabulary"}),
        ("tokenizer_config.json", {"chat_template": 3}),
        ("tokenizer_config.json", {"chat_template": [{"name": "other", "template": "x"}]}),
        ("special_tokens_map.json", {"bos_token": {"text": "x"}}),
        ("generation_config.json", {"eos_token_id": "2"}),
        ("generation_config.json", {"eos_token_id": [2, None]}),
    ],
)
def test_wrong_values_in_the_configuration_are_refused(folder, name, value):
    write(folder, name, value)
    with pytest.raises(FileFormatError):
        Tokenizer.from_folder(folder)


def test_configuration_that_is_not_json_is_refused(folder):
    for content in (b"{", b"\xff"):
        (folder / "generation_config.json").write_bytes(content)
        with pytest.raises(FileFormatError, match="generation_config"):
            Tokenizer.from_folder(folder)
    (folder / "generation_config.json").unlink()
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(FileFormatError, match="UTF-8"):
        Tokenizer.from_folder(folder)
