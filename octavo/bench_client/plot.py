"""Draws a run: when requests waited how long, and how the times are distributed."""

from pathlib import Path

from octavo.bench_client.load import Load
from octavo.bench_client.summary import itl_s, ttft_s


def plot(load: Load, title: str, path: Path) -> None:
    """Write a picture of time to first token and of the time between tokens; needs matplotlib."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    good = sorted((a for a in load.answers if a.error is None), key=lambda answer: answer.sent_s)
    begun = good[0].sent_s if good else 0.0
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    over_time, shares = figure.subplots(1, 2)
    ttft_ms = [ttft_s(answer) * 1e3 for answer in good]
    over_time.plot([answer.sent_s - begun for answer in good], ttft_ms, ".")
    over_time.set_xlabel("sent after, s")
    over_time.set_ylabel("time to first token, ms")
    gaps_ms = [gap * 1e3 for answer in good for gap in itl_s(answer)]
    for values, label in ((ttft_ms, "time to first token"), (gaps_ms, "between tokens")):
        ordered = sorted(values)
        shares.plot(ordered, [100 * (i + 1) / len(ordered) for i in range(len(ordered))], label=label)
    shares.set_xscale("log")
    shares.set_xlabel("ms")
    shares.set_ylabel("share at most as long, %")
    shares.legend()
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)
