"""Embeddings on a CPU: Octavo beside sentence-transformers, the same checkpoint, texts and float32.

The model has the shapes of Qwen3-Embedding-0.6B with random weights and few layers. All texts have the same
number of tokens, so that nobody pads. Rounds alternate, each in a fresh process; the least seconds count,
because busy neighbours only add to them. The last line is JSON.

    python benchmarks/cpu_embeddings.py [--texts 256] [--tokens 512] [--layers 2] [--rounds 2] [--save NAME]

It needs sentence-transformers, which may lie in a folder of PYTHONPATH.
"""

import argparse
import json
import random
import string
import tempfile
import time
from pathlib import Path

import numpy as np
from support.common import figures_table, make_parser, measure_apart, publish

_BATCH = 32


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--child", nargs=2, metavar=("ENGINE", "FOLDER"))
    arguments = parser.parse_args()
    if arguments.child:
        engine, folder = arguments.child
        texts = _texts(arguments.texts, arguments.tokens)
        measure = {"octavo": _octavo, "sentence-transformers": _sentence_transformers}[engine]
        print(json.dumps(measure(Path(folder), texts)))
        return
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder), arguments.layers, arguments.tokens)
        _compare(arguments, Path(folder))


def _compare(arguments: argparse.Namespace, folder: Path) -> None:
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("texts", "tokens", "layers")]
    seconds: dict[str, list[float]] = {"sentence-transformers": [], "octavo": []}
    for _ in range(arguments.rounds):
        for engine, found in seconds.items():
            found.append(measure_apart(__file__, *sizes, "--child", engine, str(folder))["seconds"])
    vectors = [np.load(folder / f"{engine}.npy") for engine in seconds]
    least = {engine: min(found) for engine, found in seconds.items()}
    figures = {
        "texts": arguments.texts,
        "tokens_each": arguments.tokens,
        "layers": arguments.layers,
        **{f"{engine}_s": value for engine, value in least.items()},
        "octavo_tokens_per_s": arguments.texts * arguments.tokens / least["octavo"],
        "speedup": least["sentence-transformers"] / least["octavo"],
        "least_cosine": float((vectors[0] * vectors[1]).sum(-1).min()),
    }
    print(figures_table(figures))
    publish("cpu_embeddings", {**figures, "rounds": seconds}, arguments)


def _texts(number: int, num_tokens: int) -> list[str]:
    pick = random.Random(0)
    # Each letter is a token, and the last token is the one that the tokenizer puts behind each text.
    return ["".join(pick.choices(string.ascii_letters, k=num_tokens - 1)) for _ in range(number)]


def _octavo(folder: Path, texts: list[str]) -> dict[str, float]:
    from octavo import LLM

    llm = LLM(str(folder), dtype="float32")
    llm.embed(texts[:2])
    llm.reset_prefix_cache()
    begun = time.perf_counter()
    vectors = [output.values for output in llm.embed(texts)]
    seconds = time.perf_counter() - begun
    np.save(folder / "octavo.npy", np.array(vectors))
    return {"seconds": seconds}


def _sentence_transformers(folder: Path, texts: list[str]) -> dict[str, float]:
    from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]

    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"torch_dtype": "float32"})
    model.encode(texts[:2])
    begun = time.perf_counter()
    vectors = model.encode(texts, batch_size=_BATCH, show_progress_bar=False)
    seconds = time.perf_counter() - begun
    np.save(folder / "sentence-transformers.npy", vectors)
    return {"seconds": seconds}


def _write_model(folder: Path, num_layers: int, num_tokens: int) -> None:
    """Write the checkpoint as sentence-transformers writes one."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, processors

    pieces = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(models.BPE(dict(zip(pieces, range(257), strict=True)), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(pieces[:1])
    backend.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
    config = transformers.Qwen3Config(
        vocab_size=257,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=num_tokens + 1,
        pad_token_id=0,
    )
    transformers.Qwen3Model(config).float().save_pretrained(folder)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    pooling = {
        "word_embedding_dimension": 1024,
        "pooling_mode_mean_tokens": False,
        "pooling_mode_lasttoken": True,
    }
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


if __name__ == "__main__":
    main()
