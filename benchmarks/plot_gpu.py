"""Draw result files of gpu_serving.py as bars: a row of panels for each file, a panel for each workload.

    python benchmarks/plot_gpu.py benchmarks/results/*gpu_serving*.json [--out docs/images/gpu_serving.png]

Draws Hugging Face if it ran beside Octavo, and vLLM if a figure was recorded.
Needs matplotlib: the extra `plot`, which `make test` installs.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from support.gpu_bound import label, run_bound_s
from support.gpu_workloads import WORKLOADS, recorded_vllm

OUT = Path(__file__).parent.parent / "docs" / "images" / "gpu_serving.png"
COLOURS = {
    "Octavo": "#1f77b4",
    "Octavo, sharing off": "#9ecae1",
    "HF transformers": "#ffbf00",
    "vLLM": "#2ca02c",
    "vLLM 0.26 (recorded)": "#98df8a",
    "physical bound": "#c7c7c7",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in arguments.files]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    draw(reports, arguments.out)
    print("drawn", arguments.out)


def bars(report: dict[str, Any], workload: str) -> dict[str, float]:
    """Rates of a workload in its unit, by label; older files without a peer are fine."""
    result = report["results"][workload]
    measured = (result.get("vllm") or {}).get("rate")
    recorded = recorded_vllm(report["model"], workload, report.get("kv_cache_dtype", "auto"))
    rates = {
        "Octavo": result["rate"],
        "Octavo, sharing off": (result.get("unshared") or {}).get("rate"),
        "HF transformers": _whole_run(result.get("hf") or {}),
        "vLLM": measured,
        "vLLM 0.26 (recorded)": recorded if measured is None else None,
        # Computed anew, as older files hold another.
        "physical bound": WORKLOADS[workload]().rate(run_bound_s(report, WORKLOADS[workload]())),
    }
    return {label: rate for label, rate in rates.items() if rate is not None}


def _whole_run(peer: dict[str, Any]) -> float | None:
    """The peer's rate, or None if its run was cut off: such a run is mostly prefill."""
    return None if peer.get("note") else peer.get("rate")


def unit(workload: str, result: dict[str, Any]) -> str:
    """The workload's unit; earlier files do not name it."""
    return result.get("unit", "ms" if workload == "ttft8k" else "tokens/s")


def draw(reports: list[dict[str, Any]], out: Path) -> None:
    """Draw the reports, one below the other."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    from matplotlib.patches import Patch  # pyright: ignore[reportMissingImports]

    num_columns = max(len(report["results"]) for report in reports)
    figure = Figure(figsize=(2.3 * num_columns, 3.2 * len(reports) + 0.5), layout="constrained")
    rows = figure.subplots(len(reports), num_columns, squeeze=False)
    drawn = set()
    for report, row in zip(reports, rows, strict=True):
        for axes, workload in zip(row, report["results"], strict=False):
            drawn |= draw_panel(axes, report, workload)
        for axes in row[len(report["results"]) :]:
            axes.set_axis_off()
    patches = [Patch(color=colour, label=label) for label, colour in COLOURS.items() if label in drawn]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    figure.savefig(out, dpi=120)


def draw_panel(axes: Any, report: dict[str, Any], workload: str) -> set[str]:
    """Draw a workload's bars with their values; returns their labels."""
    rates = bars(report, workload)
    places = axes.bar(range(len(rates)), rates.values(), color=[COLOURS[label] for label in rates])
    axes.bar_label(places, fmt="{:,.0f}", fontsize=7)
    axes.margins(y=0.12)
    axes.set_xticks([])
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7)
    label = unit(workload, report["results"][workload])
    lower = ", lower is better" if label == "ms" else ""
    axes.set_title(f"{describe(report)}, {workload}\n{label}{lower}", fontsize=8)
    return set(rates)


def describe(report: dict[str, Any]) -> str:
    """The model, and the cache's dtype where it is not the model's."""
    cache = report.get("kv_cache_dtype", "auto")
    return label(report["model"]) + ("" if cache == "auto" else f" {cache} KV")


if __name__ == "__main__":
    main()
