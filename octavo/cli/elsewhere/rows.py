"""What a row of the tables of other servers' options is."""

from typing import NamedTuple

LORA = "LoRA adapters are not supported; merge the adapter into the weights"
IMAGES = "Octavo serves text only: no images, audio or video"
DRAFTS = "speculative decoding is not supported"
EMBEDDINGS = "Octavo generates text: no embeddings, pooling, scores or ranks"
OFFLOAD = "weights and cache stay on one device; see octavo inspect, --quantization and --kv-cache-dtype"
MACHINES = "one model runs on one machine; see --tensor-parallel-size and --replicas"
PIPELINE = "layers are not split over devices; see --tensor-parallel-size"
ALWAYS = "it is always so, and needs no option"
NO_CODE = "code that comes with a model or from outside is never run"
TEMPLATE = "the model's own template is used; put chat_template.jinja into the model's folder"
TOKENIZER = "the tokenizer is the one in the model's folder or GGUF file"
OVERRIDE = "the model's own configuration is used; change config.json in its folder"
ROPE = "the model's own rope scaling is used; change config.json in its folder"
CORS = "pages of other origins cannot call the server; put a proxy before it"
REQUEST = "it is a field of each request"
PRIVATE = "the log never holds prompts or answers"
HUB = "give a hub id as the model, and choose the files by a folder of your own"
TOKEN = "huggingface-hub reads HF_TOKEN and its other variables"
LOGGING = "there is one level of logging; see --access-log and --log-format"
SAMPLER = "Octavo has no such sampler; it has temperature, top_p, top_k, min_p and penalties"
THREADS = "OMP_NUM_THREADS sets the threads of a CPU"


class Row(NamedTuple):
    """Options of another server that have one answer.

    Attributes:
        names: theirs, separated by spaces.
        ours: Octavo's options that do the same, separated by spaces, or "".
        note: how they differ, or why there is none; a phrase.
    """

    names: str
    ours: str
    note: str = ""
