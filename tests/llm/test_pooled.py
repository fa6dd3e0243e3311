"""Embeddings, labels and rankings of the offline API, against transformers."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm_helpers import assert_drained
from pooled_checkpoints import TEXTS, Reference, published, unit

from octavo import LLM, SamplingParams
from octavo.engine.prompt_reader import POOLED
from octavo.engine.step import pooled
from octavo.errors import (
    ConfigError,
    EngineError,
    InvalidArgumentError,
    ModelError,
    PromptError,
    UnsupportedModelError,
)

pytest.importorskip("transformers")
OPTIONS: dict[str, Any] = {"num_blocks": 256, "block_size": 4}


def load(reference: Reference, **options: Any) -> LLM:
    return LLM(str(reference.folder), **{**OPTIONS, **options})


def least_cosine(llm: LLM, reference: Reference, texts: list[str], pool: Any = lambda x: x[-1]) -> float:
    found = llm.embed(texts)
    wanted = [reference.embedding(reference.encode(text), pool) for text in texts]
    return min(float(unit(one.values) @ vector) for one, vector in zip(found, wanted, strict=True))


def mean(states: np.ndarray) -> np.ndarray:
    return states.mean(0)


@pytest.mark.parametrize("chunk", [5, 512])
@pytest.mark.parametrize(("mode", "pool"), [("lasttoken", lambda x: x[-1]), ("mean_tokens", mean)])
@pytest.mark.parametrize(
    "name", ["Qwen3Model", "LlamaModel", "MistralModel", "Gemma3TextModel", "Qwen2ForCausalLM"]
)
def test_embeddings_in_any_chunks_and_after_any_prefix(
    tmp_path: Path, name: str, mode: str, pool: Any, chunk: int
) -> None:
    """The second time the same texts are cached, and a mean reads all of its tokens anew."""
    reference = Reference(tmp_path, name, ends=True).sentence_transformer(mode)
    llm = load(reference, max_num_batched_tokens=chunk)
    texts = [*TEXTS, *(f"{TEXTS[1]} {n}" for n in range(3))]
    assert least_cosine(llm, reference, texts, pool) >= 0.9999
    assert least_cosine(llm, reference, texts, pool) >= 0.9999
    hits = [output.num_cached_tokens for output in llm.embed(texts)]
    assert all(hits[-3:]) == (mode == "lasttoken")
    assert_drained(llm)


def test_states_are_as_long_as_the_checkpoint_says(tmp_path: Path) -> None:
    reference = Reference(tmp_path, "Qwen3Model", ends=True).sentence_transformer(normalise=False)
    found = load(reference).embed(TEXTS[0])[0].values
    assert found == pytest.approx(reference.states(reference.encode(TEXTS[0]))[-1].tolist(), abs=1e-4)


def test_a_checkpoint_that_generates_embeds_where_it_is_told_to(tmp_path: Path) -> None:
    reference = Reference(tmp_path, "LlamaForCausalLM")
    assert least_cosine(load(reference, task="embed"), reference, TEXTS) >= 0.9999
    assert load(reference).generate("a", SamplingParams(max_tokens=2))[0].outputs[0].token_ids


def test_the_same_of_two_ranks(tmp_path: Path) -> None:
    reference = Reference(tmp_path, "Qwen3ForSequenceClassification", num_labels=3)
    llm = load(reference, tensor_parallel_size=2, max_num_batched_tokens=16)
    for text, found in zip(TEXTS, llm.classify(TEXTS), strict=True):
        wanted = reference.logits(reference.encode(text)).softmax(-1)
        assert found.values == pytest.approx(wanted.tolist(), abs=1e-5)
    llm.engine.close()


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}])
def test_a_mean_is_summed_in_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """States of a whole step, in float32, would not fit into the memory that is planned."""
    monkeypatch.setattr(pooled, "_ROWS_AT_ONCE", 3)
    reference = Reference(tmp_path, "Qwen3Model", ends=True).sentence_transformer("mean_tokens")
    llm = load(reference, **options)
    assert least_cosine(llm, reference, TEXTS, mean) >= 0.9999
    llm.engine.close()


@pytest.mark.parametrize("name", ["Qwen3ForSequenceClassification", "LlamaForSequenceClassification"])
def test_one_label_ranks_pairs(tmp_path: Path, name: str) -> None:
    """A conversion of Qwen3-Reranker reads the published prompt, any other one both texts."""
    reference = Reference(tmp_path, name, num_labels=1, ends=name.startswith("Llama"))

    def ids(document: str) -> list[int]:
        pair = published("capital?", document)
        return (
            reference.encode(pair)
            if name.startswith("Qwen3")
            else reference.backend.encode("capital?", document).ids
        )

    wanted = [float(reference.logits(ids(text)).sigmoid()) for text in TEXTS]
    found = load(reference).rerank("capital?", TEXTS)
    assert [one.index for one in found] == sorted(range(len(TEXTS)), key=lambda i: -wanted[i])
    assert [one.score for one in found] == pytest.approx(sorted(wanted, reverse=True), abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "activate"),
    [
        ({"problem_type": "multi_label_classification"}, lambda x: 1 / (1 + np.exp(-x))),
        ({"problem_type": "regression"}, lambda x: x),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda x: x),
        ({"problem_type": "single_label_classification"}, lambda x: np.exp(x) / np.exp(x).sum()),
    ],
)
def test_the_checkpoint_says_what_becomes_of_logits(
    tmp_path: Path, fields: dict[str, Any], activate: Any
) -> None:
    reference = Reference(tmp_path, "Qwen2ForSequenceClassification", num_labels=4).config(**fields)
    found = load(reference).classify(TEXTS[0])[0]
    logits = reference.logits(reference.encode(TEXTS[0])).double().numpy()
    assert found.values == pytest.approx(activate(logits).tolist(), abs=1e-4)


def test_prompts_are_whole_or_refused(tmp_path: Path) -> None:
    reference = Reference(tmp_path, "Qwen3Model", ends=True).sentence_transformer()
    llm = load(reference)
    for prompt in ("", [""], [[]], [999], "long " * 400, {"prompt": ""}, b"a"):
        with pytest.raises(PromptError):
            llm.embed(prompt)  # type: ignore[arg-type]
    for keep in (0, -1, 2.5, "3", True):
        for prompt in ("a text", [1, 2, 3]):
            with pytest.raises(InvalidArgumentError, match="truncate_prompt_tokens"):
                llm.embed(prompt, truncate_prompt_tokens=keep)
    assert llm.embed([1, 2, 3], truncate_prompt_tokens=2)[0].prompt_token_ids == [1, 2]
    assert llm.embed([]) == []
    for documents in ("one text", []):
        with pytest.raises(PromptError):
            llm.rerank("a", documents)
    with pytest.raises(InvalidArgumentError, match="embeds texts and generates none"):
        llm.generate("a")
    with pytest.raises(InvalidArgumentError, match="embeds texts and generates none"):
        llm.score("a", ["b"])
    with pytest.raises(InvalidArgumentError, match="embeds texts and does not classify"):
        llm.classify("a")
    assert_drained(llm)


@pytest.mark.parametrize("name", ["Qwen3Model", "Qwen3ForSequenceClassification"])
def test_what_cannot_be_ranked_is_refused(tmp_path: Path, name: str) -> None:
    """No document is dropped in silence, and nothing but texts is read as one."""
    reference = Reference(tmp_path, name, num_labels=1)
    if name.endswith("Model"):
        reference.sentence_transformer()
    llm = load(reference)
    wrong: list[Any] = [(None, ["a"]), (3, ["a"]), ("q", ["a", 3]), ("q", [[1, 2]]), (["q"], ["a"])]
    for query, documents in wrong:
        with pytest.raises(PromptError, match="texts, got"):
            llm.rerank(query, documents)
    for top_n in (0, -1, 1.0, "2"):
        with pytest.raises(InvalidArgumentError, match="top_n"):
            llm.rerank("q", ["a", "b"], top_n=top_n)  # type: ignore[arg-type]
    assert len(llm.rerank("q", ["a", "b"], top_n=9)) == 2
    assert_drained(llm)


def test_dimensions_are_those_that_the_checkpoint_lists(tmp_path: Path) -> None:
    reference = Reference(tmp_path, "Qwen3Model", ends=True).sentence_transformer()
    llm = load(reference)
    assert len(llm.embed("a", dimensions=48)[0].values) == 48
    with pytest.raises(InvalidArgumentError, match="is_matryoshka"):
        llm.embed("a", dimensions=16)
    llm = load(reference.config(matryoshka_dimensions=[8, 16]))
    wanted = unit(reference.states(reference.encode("a"))[-1][:16])
    assert llm.embed("a", dimensions=16)[0].values == pytest.approx(wanted.tolist(), abs=1e-5)
    with pytest.raises(InvalidArgumentError, match=r"one of \[8, 16\]"):
        llm.embed("a", dimensions=9)


def test_an_aborted_request_is_an_error_and_leaks_nothing(tmp_path: Path) -> None:
    llm = load(
        Reference(tmp_path, "Qwen3Model", ends=True).sentence_transformer("mean_tokens"),
        max_num_batched_tokens=4,
    )
    step, errors = llm.engine.step, []

    def abort_all() -> None:
        step()
        for request_id in range(2):
            llm.engine.abort(str(request_id))

    llm.engine.step = abort_all  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="aborted"):
        llm.embed(TEXTS[:2])
    llm.engine.step = step  # type: ignore[method-assign]
    threads = [threading.Thread(target=lambda: errors.append(len(llm.embed(TEXTS)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [len(TEXTS)] * 3
    assert_drained(llm)


def test_an_interrupted_step_is_computed_again(tmp_path: Path) -> None:
    """A mean whose parts were added when the step broke off begins again with its first token."""
    reference = Reference(tmp_path, "Qwen3Model", ends=True).sentence_transformer("mean_tokens")
    llm = load(reference, max_num_batched_tokens=16)
    commit, calls = llm.engine.scheduler.commit, []

    def break_once(item: Any) -> None:
        calls.append(item)
        commit(item)
        if len(calls) == 2:
            raise KeyboardInterrupt

    llm.engine.scheduler.commit = break_once  # type: ignore[method-assign]
    output = llm.engine.add_request(TEXTS[4], POOLED)
    llm.engine.step()
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    while not output.finished:
        llm.engine.step()
    wanted = reference.states(reference.encode(TEXTS[4])).mean(0)
    assert output.vector == pytest.approx(wanted, abs=1e-4)


def test_states_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    reference = Reference(tmp_path, "Qwen3Model", ends=True)
    reference.model.norm.weight.data[0] = float("nan")
    reference.model.save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="not finite"):
        load(reference).embed("a")


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        (["Transformer", "Pooling", "Dense"], {}, "Dense"),
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": True}, "cls_token"),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": True},
            "and",
        ),
        (["Transformer", "Pooling"], {"pooling_mode": ["mean"]}, "mean"),
        (["Transformer", "Pooling"], {"pooling_mode": "mean", "include_prompt": False}, "include_prompt"),
    ],
)
def test_other_ways_to_pool_are_refused_by_name(
    tmp_path: Path, modules: list[str], pooling: dict[str, Any], message: str
) -> None:
    reference = Reference(tmp_path, "Qwen3Model").sentence_transformer()
    listed = [{"path": "1_Pooling", "type": f"sentence_transformers.models.{kind}"} for kind in modules]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(UnsupportedModelError, match=message):
        load(reference)


def test_a_task_that_contradicts_the_checkpoint_is_refused(tmp_path: Path) -> None:
    base = Reference(tmp_path / "base", "LlamaModel")
    labels = Reference(tmp_path / "labels", "LlamaForSequenceClassification", num_labels=2)
    for reference, task in [(base, "generate"), (labels, "generate"), (labels, "embed")]:
        with pytest.raises(ConfigError, match="contradicts"):
            load(reference, task=task)
    with pytest.raises(UnsupportedModelError, match="cannot rerank"):
        load(base, task="rerank")
    damaged = Reference(tmp_path / "damaged", "Qwen3Model")
    for content in ("{}", "[1]", "nothing", '[{"path": 1, "type": "Pooling"}]'):
        (damaged.folder / "modules.json").write_text(content)
        with pytest.raises(ModelError, match=r"modules\.json"):
            load(damaged)
