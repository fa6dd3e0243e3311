"""One rank of a tensor-parallel decoder, run as `python parallel_worker.py rank size folder`.

Reads config.json and weights.safetensors from the folder, writes result<rank>.json.
"""

import json
import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from decoder_harness import DictWeights, PagedSequences, greedy, make_decoder, run_chunked
from safetensors.torch import load_file

from octavo.models import Decoder, ModelConfig
from octavo.parallel import TensorParallel, connect_gloo


def build(folder: Path, parallel: TensorParallel) -> Decoder:
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    return make_decoder(config, DictWeights(load_file(folder / "weights.safetensors")), parallel=parallel)


def outputs(decoder: Decoder) -> dict[str, object]:
    """Logits of ragged prompts and a greedy continuation."""
    vocab_size = decoder.config.vocab_size
    prompts = {"a": [i * 7 % vocab_size for i in range(13)], "b": [vocab_size - 1, 0], "c": list(range(5))}
    sequences = PagedSequences(decoder, block_size=4)
    logits = run_chunked(sequences, prompts)
    return {
        "num_kv_heads": decoder.num_kv_heads,
        "logits": {name: rows.tolist() for name, rows in logits.items()},
        "tokens": greedy(sequences, logits, 10),
    }


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    decoder = build(folder, connect_gloo(rank, size, folder / "rendezvous"))
    (folder / f"result{rank}.json").write_text(json.dumps(outputs(decoder)))


if __name__ == "__main__":
    main()
