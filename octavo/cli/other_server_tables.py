"""Options and commands of other servers, and Octavo's answers to them.

A line of a table has the names of another server, Octavo's options that do the same ("=": those of the same
names), and a note: how they differ, or why there are none. An indented line continues the one before it.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

_NOTES = {
    "LORA": "LoRA adapters are not supported; merge the adapter into the weights",
    "IMAGES": "Octavo serves text only: no images, audio or video",
    "DRAFTS": "speculative decoding is not supported",
    "EMBEDDINGS": "the checkpoint says how it embeds or classifies; see docs/embeddings.md",
    "OFFLOAD": "weights and cache stay on one device; see octavo inspect, "
    "--quantization and --kv-cache-dtype",
    "MACHINES": "one model runs on one machine; see --tensor-parallel-size and --replicas",
    "PIPELINE": "layers are not split over devices; see --tensor-parallel-size",
    "ALWAYS": "it is always so, and needs no option",
    "NO_CODE": "code that comes with a model or from outside is never run",
    "TEMPLATE": "the model's own template is used; put chat_template.jinja into the model's folder",
    "TOKENIZER": "the tokenizer is the one in the model's folder or GGUF file",
    "OVERRIDE": "the model's own configuration is used; change config.json in its folder",
    "ROPE": "the model's own rope scaling is used; change config.json in its folder",
    "CORS": "pages of other origins cannot call the server; put a proxy before it",
    "REQUEST": "it is a field of each request",
    "PRIVATE": "the log never holds prompts or answers",
    "HUB": "give a hub id as the model, and choose the files by a folder of your own",
    "TOKEN": "huggingface-hub reads HF_TOKEN and its other variables",
    "LOGGING": "there is one level of logging; see --access-log and --log-format",
    "SAMPLER": "Octavo has no such sampler; it has temperature, top_p, top_k, min_p and penalties",
    "THREADS": "OMP_NUM_THREADS sets the threads of a CPU",
}

_VLLM = """
--model | = | or the first argument, as with vLLM
--served-model-name | = | one name
--dtype | = | float32, bfloat16 or float16
--max-model-len | =
--load-format | = | safetensors, gguf or dummy; found by itself
--quantization -q | --quantization | a checkpoint's own form is found by itself: leave it out
--kv-cache-dtype | = | auto, bf16 or fp8 (e4m3)
--seed | =
--block-size | = | any number
--gpu-memory-utilization | --memory-fraction | a share of what is free after the weights
--kv-cache-memory-bytes --num-gpu-blocks-override | --num-blocks | blocks of --block-size tokens
--enable-prefix-caching | = | on unless --no-enable-prefix-caching
--max-num-seqs | =
--max-num-batched-tokens | = | --max-step-ms bounds a step's time, too
--enable-chunked-prefill --async-scheduling | | {ALWAYS}
--max-num-partial-prefills --max-long-partial-prefills --long-prefill-token-threshold | --max-step-ms |
    prompts are cut so that others' tokens come in time
--scheduling-policy | | requests go by their field priority, then in turn
--stream-interval | | {REQUEST}, stream_interval
--tensor-parallel-size -tp | =
--enable-expert-parallel -ep | --expert-parallel
--data-parallel-size -dp --api-server-count -asc | --replicas | requests go where their prefix is
--pipeline-parallel-size -pp | | {PIPELINE}
--nnodes -n --node-rank -r --master-addr --master-port --headless --distributed-executor-backend
    --data-parallel-address -dpa --data-parallel-rank -dpn --data-parallel-size-local -dpl
    --data-parallel-start-rank -dpr --data-parallel-rpc-port -dpp --data-parallel-backend -dpb
    --data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe | | {MACHINES}
--decode-context-parallel-size -dcp --prefill-context-parallel-size -pcp --enable-dbo --enable-eplb
    --eplb-config --all2all-backend --expert-placement-strategy --num-redundant-experts | | Octavo cuts a
    model by heads and by experts only
--disable-custom-all-reduce | --all-reduce | --all-reduce nccl
--swap-space --cpu-offload-gb --kv-offloading-size --kv-offloading-backend | | {OFFLOAD}
--kv-transfer-config --kv-events-config --ec-transfer-config | | prefill and decode share an engine
--attention-backend --attention-config -ac | --attention-impl
--enforce-eager | --no-prepare | kernels and graphs are then made when a request needs them
--compilation-config -cc --optimization-level -O --cudagraph-capture-sizes --max-cudagraph-capture-size
    --max-seq-len-to-capture | | Octavo captures what its scheduler needs before it is ready
--disable-sliding-window --disable-cascade-attn | | shared prefixes: see --share-prefixes
--max-logprobs --logprobs-mode | | up to 20 log-probabilities a token, of the model's own logits
--enable-lora --lora-modules --max-loras --max-lora-rank --lora-dtype --max-cpu-loras --fully-sharded-loras
    --default-mm-loras --enable-tower-connector-lora --specialize-active-lora --lora-extra-vocab-size
    --enable-lora-bias --enable-prompt-adapter --max-prompt-adapters --max-prompt-adapter-token | | {LORA}
--speculative-config -sc --speculative-model --num-speculative-tokens --ngram-prompt-lookup-max --spec-method
    --spec-model --spec-tokens | | {DRAFTS}
--task | = | auto, generate, embed or rerank
--runner --convert --pooler-config --override-pooler-config | --task | {EMBEDDINGS}
--limit-mm-per-prompt --mm-processor-kwargs --mm-processor-cache-gb --mm-processor-cache-type
    --mm-encoder-tp-mode --mm-encoder-only --mm-encoder-attn-backend --media-io-kwargs --interleave-mm-strings
    --skip-mm-profiling --video-pruning-rate --enable-mm-embeds --allowed-local-media-path
    --allowed-media-domains --enable-prompt-embeds --disable-chunked-mm-input --language-model-only | |
    {IMAGES}
--tokenizer --tokenizer-mode --tokenizer-revision --skip-tokenizer-init | | {TOKENIZER}
--trust-remote-code --model-impl --worker-cls --worker-extension-cls --scheduler-cls --middleware
    --logits-processors --logits-processor-pattern --io-processor-plugin --tool-parser-plugin
    --reasoning-parser-plugin | | {NO_CODE}
--hf-overrides --hf-config-path --config-format --additional-config | | {OVERRIDE}
--rope-scaling --rope-theta | | {ROPE}
--override-generation-config | | sampling is set in each request
--revision --code-revision --download-dir --ignore-patterns | | {HUB}
--hf-token | | {TOKEN}
--host | = | 127.0.0.1 by default; another address needs a key, or --insecure
--port | =
--uds | =
--root-path | =
--ssl-certfile --ssl-keyfile | =
--ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --enable-ssl-refresh | | clients show keys, not certificates;
    TLS is 1.3
--api-key | --api-key-file | or the variable OCTAVO_API_KEY: flags can be seen by others
--allowed-origins --allowed-methods --allowed-headers --allow-credentials | | {CORS}
--chat-template --chat-template-content-format --trust-request-chat-template | | {TEMPLATE}
--default-chat-template-kwargs | | {REQUEST}, chat_template_kwargs
--enable-auto-tool-choice | | tools work without it; see --tool-call-parser
--tool-call-parser | = | found by itself: leave it out
--reasoning-parser | = | found by itself: leave it out
--structured-outputs-config --guided-decoding-backend | | llguidance is the only backend
--tool-server --response-role --exclude-tools-when-tool-choice-none | | clients run tools, and roles are the
    template's
--max-log-len --enable-log-requests --enable-log-outputs --enable-log-deltas | | {PRIVATE}
--disable-log-requests | | {ALWAYS}: {PRIVATE}
--disable-uvicorn-access-log --disable-access-log-for-endpoints | --access-log | off unless given; probes are
    left out
--uvicorn-log-level --log-config-file --disable-log-stats --log-error-stack | | {LOGGING}
--enable-prompt-tokens-details --enable-force-include-usage --enable-server-load-tracking | | {ALWAYS}
--otlp-traces-endpoint | =
--collect-detailed-traces --show-hidden-metrics-for-version --kv-cache-metrics --profiler-config | | see
    /metrics and --otlp-traces-endpoint
--enable-sleep-mode --weight-transfer-config | | a server keeps its model until it ends
--enable-request-id-headers --disable-fastapi-docs --enable-tokenizer-info-endpoint | | Octavo's routes are
    fixed; see docs/server-api.md
--shutdown-timeout | =
--config | | write octavo.toml, with a table [serve]
"""

_LLAMA_CPP = """
--model -m | --model | or the first argument: a .gguf file, a folder, or a hub id
--hf-repo -hf -hfr --hf-file -hff --docker-repo -dr --model-url -mu | --model | {HUB}
--hf-token -hft | | {TOKEN}
--offline | | set HF_HUB_OFFLINE=1
--alias -a | --served-model-name
--ctx-size -c --kv-unified-per-slot | --max-model-len | of each sequence, not of all together
--parallel -np | --max-num-seqs | sequences share the cache by blocks; there are no slots
--batch-size -b --ubatch-size -ub | --max-num-batched-tokens
--gpu-layers --n-gpu-layers -ngl | --device | all layers are on the device, cuda or cpu
--device -dev --main-gpu -mg | --device | cuda:1 for the second GPU
--split-mode -sm --tensor-split -ts | --tensor-parallel-size | equal parts on each GPU
--cpu-moe -cmoe --n-cpu-moe -ncmoe --n-cpu-ffn -ncffn --override-tensor -ot --moe-cache-mib --no-kv-offload
    -nkvo --kv-offload -kvo --op-offload --no-op-offload | | {OFFLOAD}
--rpc | | {MACHINES}
--list-devices | | octavo collect-env shows them
--threads -t --threads-batch -tb --threads-http | | {THREADS}
--cpu-mask -C --cpu-range -Cr --cpu-strict --cpu-mask-batch -Cb --cpu-range-batch -Crb --cpu-strict-batch
    --prio --prio-batch --poll --poll-batch --numa | | use taskset, nice or numactl
--cache-type-k -ctk --cache-type-v -ctv | --kv-cache-dtype | auto, bf16 or fp8, for both
--flash-attn -fa | --attention-impl | the fastest is taken by itself
--fit -fit --fit-target -fitt --fit-ctx -fitc | --memory-fraction | octavo inspect shows the plan
--mlock --mmap --no-mmap --load-mode -lm --lazy-mode -lzm --direct-io -dio --check-tensors --repack
    --no-repack -nr --no-host | | files are mapped and checked, and weights laid out, by themselves
--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor
    --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast | | {ROPE}
--override-kv | | {OVERRIDE}
--lora --lora-scaled --lora-init-without-apply --control-vector --control-vector-scaled
    --control-vector-layer-range | | {LORA}
--model-draft -md --draft --draft-max --draft-min --spec-type --lookup-cache-static -lcs
    --lookup-cache-dynamic -lcd --spec-draft-n-max --cache-type-k-draft -ctkd -ctvd --spec-draft-type-k
    --spec-draft-type-v --gpu-layers-draft -ngld | | {DRAFTS}
--mmproj -mm --mmproj-url -mmu --mmproj-auto --no-mmproj --mmproj-offload --image-min-tokens
    --image-max-tokens --media-path --mtmd-batch-max-tokens --video-fps | | {IMAGES}
--embedding --embeddings --rerank --reranking --pooling --embd-normalize | --task | {EMBEDDINGS}
--cont-batching -cb --no-cont-batching -nocb --kv-unified -kvu --metrics --slots --jinja | | {ALWAYS}
--cache-prompt --no-cache-prompt | --enable-prefix-caching | on unless --no-enable-prefix-caching
--cache-reuse --cache-ram -cram --ctx-checkpoints -ctxcp --swa-checkpoints --swa-full --slot-save-path
    --slot-prompt-similarity -sps --defrag-thold -dt | --enable-prefix-caching | every prompt's blocks stay in
    the cache until others need the memory
--context-shift --no-context-shift --keep | | an answer ends at the context with finish_reason length
--warmup --no-warmup | --prepare | everything is compiled before the server is ready
--temperature --temp | --temperature
--top-k | =
--top-p | =
--min-p | =
--repeat-penalty | --repetition-penalty | over the prompt and the whole answer
--presence-penalty | =
--frequency-penalty | =
--repeat-last-n --samplers --sampling-seq --typical --typical-p --top-nsigma --top-n-sigma --xtc-probability
    --xtc-threshold --mirostat --mirostat-lr --mirostat-ent --dynatemp-range --dry-multiplier --dry-base
    --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --adaptive-target --adaptive-decay
    --backend-sampling -bs | | {SAMPLER}
--seed -s | --seed
--predict --n-predict -n | --max-tokens
--ignore-eos | =
--logit-bias -l | --logit-bias | ID=VALUE
--reverse-prompt -r | --stop
--grammar --grammar-file | --grammar | a file in Lark's form, not GBNF
--json-schema -j --json-schema-file -jf | --json-schema | a file
--special -sp | --no-skip-special-tokens
--host | = | --uds for a socket; another address than this machine's needs a key
--port | = | 8000 by default
--path --ui --webui --no-ui --no-webui --ui-config --webui-config --reuse-port --tags | | the page at / comes
    with the server
--api-prefix | --root-path
--api-key | --api-key-file | or the variable OCTAVO_API_KEY: flags can be seen by others
--api-key-file | =
--ssl-key-file --ssl-cert-file | --ssl-keyfile --ssl-certfile
--cors-origins --cors-methods --cors-headers --cors-credentials | | {CORS}
--timeout -to | --write-timeout-s --body-timeout-s
--sse-ping-interval | --sse-keep-alive-s
--chat-template --chat-template-file --no-jinja --skip-chat-parsing --prefill-assistant | | {TEMPLATE}
--chat-template-kwargs --reasoning-effort | | {REQUEST}, chat_template_kwargs or reasoning_effort
--reasoning-format | --reasoning-parser | found by itself: leave it out
--reasoning -rea --reasoning-budget --reasoning-budget-message | | {REQUEST}: chat_template_kwargs with
    enable_thinking
--models-dir --models-preset --models-max --models-autoload --no-models-autoload | | a server has one model;
    start one for each
--tools --mcp-servers-config --mcp-servers-json --agent -ag | | clients run tools
--props --no-slots | | a running server cannot be changed
--verbose -v --log-verbose --verbosity -lv --log-verbosity --log-disable --log-file --log-colors --log-prefix
    --log-timestamps --perf --no-perf | | {LOGGING}
--log-jsonl | --log-format | --log-format json
--escape -e --no-escape | | texts are taken as they are
--usage | | octavo serve --help
--cache-list -cl | | hf cache scan, of huggingface-hub, lists what was downloaded
"""

_VARIABLES = """
OLLAMA_HOST | --host --port | 8000 instead of 11434
OLLAMA_CONTEXT_LENGTH | --max-model-len | the model's whole context by default
OLLAMA_NUM_PARALLEL | --max-num-seqs | hundreds by default; they share the cache
OLLAMA_MAX_QUEUE | --max-num-queued-reqs
OLLAMA_KV_CACHE_TYPE | --kv-cache-dtype
OLLAMA_FLASH_ATTENTION | --attention-impl | the fastest is taken by itself
OLLAMA_GPU_OVERHEAD | --memory-fraction
OLLAMA_LOAD_TIMEOUT OLLAMA_KEEP_ALIVE | | the model stays loaded until the server ends
OLLAMA_MAX_LOADED_MODELS | | a server has one model; start one for each
OLLAMA_SCHED_SPREAD | --tensor-parallel-size
OLLAMA_ORIGINS | --allowed-hosts | of the Host header; pages of other origins cannot call the server
OLLAMA_MODELS OLLAMA_NOPRUNE | | models lie where you put them, or in huggingface-hub's cache (HF_HOME)
OLLAMA_DEBUG OLLAMA_DEBUG_LOG_REQUESTS | --access-log | never a prompt
OLLAMA_NOHISTORY | --no-history | of octavo chat
OLLAMA_LLM_LIBRARY | --device
"""

_MODELFILE = """
FROM | --model
SYSTEM | --system | of octavo chat; of a server, the first message
TEMPLATE | | {TEMPLATE}
ADAPTER | | {LORA}
MESSAGE | | messages of each request; in octavo chat, /load FILE
LICENSE REQUIRES | | there is no Modelfile
num_ctx | --max-model-len
num_predict | --max-tokens
temperature | --temperature
top_k | --top-k
top_p | --top-p
min_p | --min-p
seed | --seed
stop | --stop
repeat_penalty | --repetition-penalty
repeat_last_n | | {SAMPLER}
num_gpu num_thread | --device | all layers are on the device; OMP_NUM_THREADS sets threads
draft_num_predict | | {DRAFTS}
"""

_COMMANDS = """
pull | octavo inspect HUB_ID | a hub id is downloaded when it is first used (octavo[hf]); Ollama's library is
    not
run | octavo chat --model MODEL | or octavo generate for one prompt
list ls | | there is no list of models: a model is a folder, a .gguf file or a hub id
ps | | a server has one model; GET /v1/models names it, and / shows what it does
show | octavo inspect MODEL
rm cp | | delete or copy the model's folder or file; hub ids lie in huggingface-hub's cache
stop | | end the server with Ctrl-C or SIGTERM; it finishes its requests first
create | | there is no Modelfile: options are flags, OCTAVO_... variables or octavo.toml
push signin signout login logout | | Octavo has no registry of models
start server api openai | octavo serve MODEL
complete completion cli | octavo generate PROMPT
benchmark llama-bench | octavo bench
download | octavo inspect HUB_ID | a hub id is downloaded when it is first used (octavo[hf])
convert quantize | | --quantization rounds a model while it is loaded
"""


class Row(NamedTuple):
    """Options of another server that have one answer.

    Attributes:
        names: theirs, separated by spaces.
        ours: Octavo's options that do the same, separated by spaces, or "".
        note: how they differ, or why there is none; a phrase.
    """

    names: str
    ours: str
    note: str


def _rows(table: str) -> Iterator[Row]:
    for line in table.replace("\n    ", " ").strip().splitlines():
        names, ours, note = (*(part.strip() for part in line.split("|")), "", "")[:3]
        yield Row(names, names if ours == "=" else ours, note.format_map(_NOTES))


VLLM, LLAMA_CPP, COMMANDS = (tuple(_rows(table)) for table in (_VLLM, _LLAMA_CPP, _COMMANDS))
TABLES: Mapping[str, tuple[Row, ...]] = {
    "vllm serve": VLLM,
    "llama-server": LLAMA_CPP,
    "Ollama's variables": tuple(_rows(_VARIABLES)),
    "Ollama's Modelfile": tuple(_rows(_MODELFILE)),
    "command": COMMANDS,
}
"""The lists of docs/coming-from-a-server.md, by the name of what they list."""
