"""Options of llama-server, and Octavo's answers."""

from octavo.cli.elsewhere.rows import (
    ALWAYS,
    CORS,
    DRAFTS,
    EMBEDDINGS,
    HUB,
    IMAGES,
    LOGGING,
    LORA,
    MACHINES,
    OFFLOAD,
    OVERRIDE,
    REQUEST,
    ROPE,
    SAMPLER,
    TEMPLATE,
    THREADS,
    TOKEN,
    Row,
)

LLAMA_CPP = (
    Row("--model -m", "--model", "or the first argument: a .gguf file, a folder, or a hub id"),
    Row("--hf-repo -hf -hfr --hf-file -hff --docker-repo -dr --model-url -mu", "--model", HUB),
    Row("--hf-token -hft", "", TOKEN),
    Row("--offline", "", "set HF_HUB_OFFLINE=1"),
    Row("--alias -a", "--served-model-name"),
    Row("--ctx-size -c --kv-unified-per-slot", "--max-model-len", "of each sequence, not of all together"),
    Row("--parallel -np", "--max-num-seqs", "sequences share the cache by blocks; there are no slots"),
    Row("--batch-size -b --ubatch-size -ub", "--max-num-batched-tokens"),
    Row("--gpu-layers --n-gpu-layers -ngl", "--device", "all layers are on the device, cuda or cpu"),
    Row("--device -dev --main-gpu -mg", "--device", "cuda:1 for the second GPU"),
    Row("--split-mode -sm --tensor-split -ts", "--tensor-parallel-size", "equal parts on each GPU"),
    Row(
        "--cpu-moe -cmoe --n-cpu-moe -ncmoe --n-cpu-ffn -ncffn --override-tensor -ot --moe-cache-mib "
        "--no-kv-offload -nkvo --kv-offload -kvo --op-offload --no-op-offload",
        "",
        OFFLOAD,
    ),
    Row("--rpc", "", MACHINES),
    Row("--list-devices", "", "octavo collect-env shows them"),
    Row("--threads -t --threads-batch -tb --threads-http", "", THREADS),
    Row(
        "--cpu-mask -C --cpu-range -Cr --cpu-strict --cpu-mask-batch -Cb --cpu-range-batch -Crb "
        "--cpu-strict-batch --prio --prio-batch --poll --poll-batch --numa",
        "",
        "use taskset, nice or numactl",
    ),
    Row("--cache-type-k -ctk --cache-type-v -ctv", "--kv-cache-dtype", "auto, bf16 or fp8, for both"),
    Row("--flash-attn -fa", "--attention-impl", "the fastest is taken by itself"),
    Row(
        "--fit -fit --fit-target -fitt --fit-ctx -fitc", "--memory-fraction", "octavo inspect shows the plan"
    ),
    Row(
        "--mlock --mmap --no-mmap --load-mode -lm --lazy-mode -lzm --direct-io -dio --check-tensors "
        "--repack --no-repack -nr --no-host",
        "",
        "files are mapped and checked, and weights laid out, by themselves",
    ),
    Row(
        "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor "
        "--yarn-attn-factor --yarn-beta-slow --yarn-beta-fast",
        "",
        ROPE,
    ),
    Row("--override-kv", "", OVERRIDE),
    Row(
        "--lora --lora-scaled --lora-init-without-apply --control-vector --control-vector-scaled "
        "--control-vector-layer-range",
        "",
        LORA,
    ),
    Row(
        "--model-draft -md --draft --draft-max --draft-min --spec-type --lookup-cache-static -lcs "
        "--lookup-cache-dynamic -lcd --spec-draft-n-max --cache-type-k-draft -ctkd -ctvd "
        "--spec-draft-type-k --spec-draft-type-v --gpu-layers-draft -ngld",
        "",
        DRAFTS,
    ),
    Row(
        "--mmproj -mm --mmproj-url -mmu --mmproj-auto --no-mmproj --mmproj-offload --image-min-tokens "
        "--image-max-tokens --media-path --mtmd-batch-max-tokens --video-fps",
        "",
        IMAGES,
    ),
    Row("--embedding --embeddings --rerank --reranking --pooling --embd-normalize", "", EMBEDDINGS),
    Row(
        "--cont-batching -cb --no-cont-batching -nocb --kv-unified -kvu --metrics --slots --jinja", "", ALWAYS
    ),
    Row(
        "--cache-prompt --no-cache-prompt", "--enable-prefix-caching", "on unless --no-enable-prefix-caching"
    ),
    Row(
        "--cache-reuse --cache-ram -cram --ctx-checkpoints -ctxcp --swa-checkpoints --swa-full "
        "--slot-save-path --slot-prompt-similarity -sps --defrag-thold -dt",
        "--enable-prefix-caching",
        "every prompt's blocks stay in the cache until others need the memory",
    ),
    Row(
        "--context-shift --no-context-shift --keep",
        "",
        "an answer ends at the context with finish_reason length",
    ),
    Row("--warmup --no-warmup", "--prepare", "everything is compiled before the server is ready"),
    Row("--temperature --temp", "--temperature"),
    Row("--top-k", "--top-k"),
    Row("--top-p", "--top-p"),
    Row("--min-p", "--min-p"),
    Row("--repeat-penalty", "--repetition-penalty", "over the prompt and the whole answer"),
    Row("--presence-penalty", "--presence-penalty"),
    Row("--frequency-penalty", "--frequency-penalty"),
    Row(
        "--repeat-last-n --samplers --sampling-seq --typical --typical-p --top-nsigma --top-n-sigma "
        "--xtc-probability --xtc-threshold --mirostat --mirostat-lr --mirostat-ent --dynatemp-range "
        "--dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker "
        "--adaptive-target --adaptive-decay --backend-sampling -bs",
        "",
        SAMPLER,
    ),
    Row("--seed -s", "--seed"),
    Row("--predict --n-predict -n", "--max-tokens"),
    Row("--ignore-eos", "--ignore-eos"),
    Row("--logit-bias -l", "--logit-bias", "ID=VALUE"),
    Row("--reverse-prompt -r", "--stop"),
    Row("--grammar --grammar-file", "--grammar", "a file in Lark's form, not GBNF"),
    Row("--json-schema -j --json-schema-file -jf", "--json-schema", "a file"),
    Row("--special -sp", "--no-skip-special-tokens"),
    Row("--host", "--host", "--uds for a socket; another address than this machine's needs a key"),
    Row("--port", "--port", "8000 by default"),
    Row(
        "--path --ui --webui --no-ui --no-webui --ui-config --webui-config --reuse-port --tags",
        "",
        "the page at / comes with the server",
    ),
    Row("--api-prefix", "--root-path"),
    Row("--api-key", "--api-key-file", "or the variable OCTAVO_API_KEY: flags can be seen by others"),
    Row("--api-key-file", "--api-key-file"),
    Row("--ssl-key-file --ssl-cert-file", "--ssl-keyfile --ssl-certfile"),
    Row("--cors-origins --cors-methods --cors-headers --cors-credentials", "", CORS),
    Row("--timeout -to", "--write-timeout-s --body-timeout-s"),
    Row("--sse-ping-interval", "--sse-keep-alive-s"),
    Row(
        "--chat-template --chat-template-file --no-jinja --skip-chat-parsing --prefill-assistant",
        "",
        TEMPLATE,
    ),
    Row(
        "--chat-template-kwargs --reasoning-effort",
        "",
        REQUEST + ", chat_template_kwargs or reasoning_effort",
    ),
    Row("--reasoning-format", "--reasoning-parser", "found by itself: leave it out"),
    Row(
        "--reasoning -rea --reasoning-budget --reasoning-budget-message",
        "",
        REQUEST + ": chat_template_kwargs with enable_thinking",
    ),
    Row(
        "--models-dir --models-preset --models-max --models-autoload --no-models-autoload",
        "",
        "a server has one model; start one for each",
    ),
    Row("--tools --mcp-servers-config --mcp-servers-json --agent -ag", "", "clients run tools"),
    Row("--props --no-slots", "", "a running server cannot be changed"),
    Row(
        "--verbose -v --log-verbose --verbosity -lv --log-verbosity --log-disable --log-file --log-colors "
        "--log-prefix --log-timestamps --perf --no-perf",
        "",
        LOGGING,
    ),
    Row("--log-jsonl", "--log-format", "--log-format json"),
    Row("--escape -e --no-escape", "", "texts are taken as they are"),
    Row("--usage", "", "octavo serve --help"),
    Row("--cache-list -cl", "", "hf cache scan, of huggingface-hub, lists what was downloaded"),
)
