"""octavo.ops on one NVIDIA GPU, beside FlashAttention-3 on the same tensors in the same run.

    python benchmarks/gpu_ops.py [--fa3 PATH|auto] [--page 16,64,256] [--only decode] [--form append]
        [--save MACHINE]

Forms: "paged"; "append", which rotates queries and new keys and stores keys and values in the same call; and
for prefill also "dense" and "ragged" keys without pages. Where the peer's build cannot append, the peer is
FlashAttention-3 after vLLM's two kernels that rotate and store, as vLLM runs it, or after PyTorch's; the
table says so.

"us" are of replays of CUDA graphs, the two operators' in turn, over caches that together exceed the L2
several times. "eager" is one call of many in a loop, until the GPU is done; "host" until the call returns;
"first" the first call of a row, compiling included. The ratio is the peer's time over Octavo's: above 1,
Octavo is faster. Bounds are those of gpu_attention.py. Exits with 1 if Octavo failed or the results differ by
more than 1/64 of the largest. Prints a table, then one line of JSON.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from gpu_attention import WORKLOADS, Workload
from peers.flash_attention_3 import (
    find_flash_attention_3,
    load_flash_attention_3,
    load_vllm_operators,
    store_as_torch,
    store_as_vllm,
)
from support.common import make_parser, publish, table
from support.gpu_timing import copy_rate, matrix_rate
from support.gpu_turns import eager_us, graphs_us
from support.ops_calls import (
    LARGEST_PAGE,
    Attend,
    Inputs,
    Pages,
    apart_call,
    count_caches,
    fa3_call,
    kv_bytes,
    make_inputs,
    make_pages,
    octavo_call,
)
from torch import Tensor

# Figures of a row, and texts: its workload, form, peer and failures.
Row = dict[str, float | int | str | None]

PEER = "fa3"
# Where the peer's build cannot append: what rotates and stores before it.
APART = {"fa3 after vLLM's rotary and store": store_as_vllm, "fa3 after torch's": store_as_torch}
FORMS = ("paged", "append", "dense", "ragged")
_TOLERANCE = 1 / 64


def first_call(attend: Attend, form: str, pages: Pages | None) -> tuple[Tensor, float]:
    """Call for the first time, over keys that are NaN where the call must append; returns (out, seconds)."""
    if form == "append" and pages is not None:
        for cache in (pages.k, pages.v):
            cache.flatten(0, 1)[pages.slots[0]] = torch.nan
    synchronize()
    begun = time.perf_counter()
    out = attend(0)
    synchronize()
    seconds = time.perf_counter() - begun
    return (out if out.dim() == 3 else out.flatten(0, 1)).clone(), seconds


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def try_first(
    name: str, make: Callable[[], Attend], form: str, pages: Pages | None, row: Row
) -> tuple[Attend, Tensor] | None:
    """Return (call, out) of "octavo" or "fa3" if its first call works; else note why not."""
    try:
        attend = make()
        out, seconds = first_call(attend, form, pages)
    except Exception as error:
        note_failure(row, str(row["peer"]) if name == "fa3" else name, error)
        return None
    row[f"{name}_first_ms"] = seconds * 1e3
    return attend, out


def note_failure(row: Row, name: str, error: Exception) -> None:
    """Write down in the row, and say on standard error, why something was not measured."""
    reason = f"{name}: {type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"
    row["failed"] = f"{row['failed']}; {reason}" if "failed" in row else reason
    print(f"{row['workload']} {row['form']} {row['page']}: {reason}", file=sys.stderr, flush=True)


def time_calls(calls: dict[str, Attend], num_caches: int, row: Row) -> None:
    """Add to the row the times of the operators, "octavo" and "fa3"."""
    bound_us = row["bound_us"]
    assert isinstance(bound_us, float)
    for name, us in zip(calls, graphs_us(list(calls.values()), num_caches, bound_us), strict=True):
        row[f"{name}_us"] = us
        row[f"{name}_of_bound"] = bound_us / us
    for name, call in calls.items():
        row[f"{name}_host_us"], row[f"{name}_eager_us"] = eager_us(call, num_caches)


def measure(form: str, inputs: Inputs, page: int, rates: dict[str, float], *, has_peer: bool) -> Row:
    """Check and time a row; page 0: no pages."""
    workload, pages = inputs.workload, make_pages(inputs, page) if page else None
    bound_us = max(kv_bytes(workload) / rates["copy"], workload.flops / rates["matrix"]) * 1e6
    row: Row = {"workload": workload.name, "form": form, "page": page, "peer": None, "bound_us": bound_us}
    ours = try_first("octavo", partial(octavo_call, form, inputs, pages), form, pages, row)
    peer = None
    if has_peer:
        row["peer"] = PEER
        peer = try_first("fa3", partial(fa3_call, form, inputs, pages), form, pages, row)
        for name, store in APART.items():
            if peer is None and form == "append" and pages is not None:
                row["peer"] = name
                peer = try_first("fa3", partial(apart_call, inputs, pages, store), form, pages, row)
    if ours and peer:
        row["error"] = float((ours[1].float() - peer[1].float()).abs().max())
        row["tolerance"] = float(peer[1].float().abs().max()) * _TOLERANCE
    calls = {name: found[0] for name, found in (("octavo", ours), ("fa3", peer)) if found}
    while calls:
        try:
            time_calls(calls, inputs.num_caches, row)
            break
        except Exception as error:
            # Once more without the peer, which may be what cannot be captured.
            last = calls.popitem()[0]
            note_failure(row, f"timing with {last}", error)
    return row


def is_wrong(row: Row) -> bool:
    """Say whether Octavo failed, was not timed, or differs from the peer; NaN differs."""
    error, tolerance = row.get("error"), row.get("tolerance")
    if "octavo_us" not in row:
        return True
    return isinstance(error, float) and isinstance(tolerance, float) and not error <= tolerance


def ratio(row: Row) -> float | None:
    """Return the peer's time over Octavo's."""
    ours, peer = row.get("octavo_us"), row.get("fa3_us")
    return peer / ours if isinstance(ours, float) and isinstance(peer, float) else None


def summarise(rows: Iterable[Row]) -> dict[str, dict[str, float | int | str]]:
    """Return of each kind and form of rows the ratios' geometric mean, the least, and whose that is."""
    groups: dict[str, list[tuple[float, str]]] = {}
    for row in rows:
        if (value := ratio(row)) is not None:
            kind = "decode" if str(row["workload"]).startswith("decode") else "prefill"
            name = f"{row['workload']} {row['form']} {row['page']}"
            for group in (kind, f"{kind} {row['form']}"):
                groups.setdefault(group, []).append((value, name))
    return {
        group: {
            "rows": len(found),
            "geometric_mean": math.exp(sum(math.log(value) for value, _ in found) / len(found)),
            "least": min(found)[0],
            "least_at": min(found)[1],
        }
        for group, found in groups.items()
    }


COLUMNS = {
    **{"workload": "workload", "form": "form", "page": "page", "bound us": "bound_us"},
    **{"us": "octavo_us", "fa3 us": "fa3_us", "ratio": "ratio"},
    **{"of bound": "octavo_of_bound", "fa3 of bound": "fa3_of_bound"},
    **{"eager us": "octavo_eager_us", "fa3 eager us": "fa3_eager_us"},
    **{"host us": "octavo_host_us", "fa3 host us": "fa3_host_us", "first ms": "octavo_first_ms"},
    **{"max error": "error", "tolerance": "tolerance", "peer": "peer"},
}


def line(row: Row) -> str:
    """Format a row as the table's line; what was not measured is -."""
    cells = {**row, "ratio": ratio(row)}
    shown = [
        f"{v:.4g}" if isinstance(v := cells.get(key), float) else "-" if v is None else v
        for key in COLUMNS.values()
    ]
    return table(shown, []).splitlines()[0] + (" WRONG" if is_wrong(row) else "")


def plan(
    only: str, page_sizes: list[int], chosen: str = ""
) -> Iterator[tuple[Workload, list[tuple[str, int]]]]:
    """Yield the workloads whose names contain a text, and the form and page size of each of their rows.

    chosen: the only form; empty: all.
    """
    for workload in WORKLOADS:
        if only in workload.name:
            forms = ("paged", "append") if workload.query_len == 1 else ("paged",)
            rows = [(form, page) for form in forms for page in page_sizes]
            rows += [] if workload.query_len == 1 else [("dense", 0), ("ragged", 0)]
            yield workload, [row for row in rows if chosen in ("", row[0])]


def parse_pages(text: str) -> list[int]:
    """Read page sizes such as 16,64,256.

    Raises:
        ValueError: one is not a number, or does not divide the capacity of a sequence.
    """
    sizes = [int(part) for part in text.split(",")]
    if any(size < 1 or LARGEST_PAGE % size for size in sizes):
        raise ValueError(f"page sizes must divide {LARGEST_PAGE}; got {text}")
    return sizes


def load_peer(path: str) -> None:
    """Load FlashAttention-3 and, if they lie beside it, vLLM's operators."""
    found = find_flash_attention_3() if path == "auto" else Path(path)
    load_flash_attention_3(found)
    try:
        load_vllm_operators(found)
    except OSError as error:
        print(f"vLLM's operators were not loaded: {error}", file=sys.stderr, flush=True)


@torch.inference_mode()
def main() -> int:
    """Measure every row, print each as it is done, and the JSON line."""
    begun = time.perf_counter()
    parser = make_parser(__doc__)
    parser.add_argument(
        "--fa3", metavar="PATH", help="the peer's .so or .so.xz; auto: that of a vLLM on sys.path"
    )
    parser.add_argument("--page", type=parse_pages, default=[16, 64, 256], help="page sizes: 16,64,256")
    parser.add_argument("--only", default="", help="run the workloads whose names contain this")
    parser.add_argument("--form", choices=FORMS, default="", help="run the rows of this form only")
    arguments = parser.parse_args()
    if arguments.fa3:
        load_peer(arguments.fa3)
    rates = {"copy": copy_rate(), "matrix": matrix_rate()}
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    print(table(list(COLUMNS), []), flush=True)
    rows = []
    for workload, todo in plan(arguments.only, arguments.page, arguments.form):
        inputs = make_inputs(workload, count_caches(workload, l2_bytes), "cuda")
        for form, page in todo:
            rows.append(measure(form, inputs, page, rates, has_peer=bool(arguments.fa3)))
            print(line(rows[-1]), flush=True)
    summary = summarise(rows)
    for group, figures in summary.items():
        print(group, figures)
    wrong = [line(row) for row in rows if is_wrong(row)]
    figures = {"rates": rates, "seconds": time.perf_counter() - begun, "wrong": len(wrong)}
    publish("gpu_ops", {**figures, "summary": summary, "results": rows}, arguments)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
