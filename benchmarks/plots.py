"""Plots of docs/performance.md from the records under benchmarks/results.

    python benchmarks/plots.py            # needs matplotlib; writes docs/images/*.svg
    python benchmarks/plots.py --figures  # prints the medians that the page quotes, without matplotlib

Same records, same bytes: no date, fixed ids.
"""

import argparse
import json
import pathlib
import statistics

try:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
except ImportError:
    plt = None

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
SWEEP, CURVES, CPU = "sweep-nvidia-h200.jsonl", "curves.jsonl", "cpu.jsonl"
TUNED = "tuned-nvidia-h200.jsonl"
HEADS = {
    "nemotron-super": (4096, 131072),
    "nemotron-ultra": (8192, 131072),
    "glm-flash": (4096, 154880),
    "kimi-k2": (7168, 163840),
}
# One colour and marker a way, in every plot; told apart without colour too.
STYLE = {
    "ours": ("#0b5fa5", "o", "lmhead"),
    "combined": ("#d55e00", "s", "SkyRL combined (Triton)"),
    "two_pass": ("#7b3f98", "^", "SkyRL log-prob, then entropy"),
    "two_pass_triton": ("#7b3f98", "^", "SkyRL log-prob (Triton), then entropy"),
    "two_pass_torch": ("#b58900", "v", "SkyRL log-prob (torch), then entropy"),
    "torch_bf16": ("#555555", "D", "torch, bf16 logits in memory"),
    "torch_fp32": ("#2e8b57", "x", "torch, fp32 logits in memory"),
}


def read(name: str) -> list[dict]:
    path = RESULTS / name
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


def thousands(tokens: float, _=None) -> str:
    return f"{tokens / 1024:g}K" if tokens >= 1024 else f"{tokens:g}"


def log_axis(axis, values, format_value) -> None:
    axis.set_major_locator(LogLocator(2, numticks=20))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(format_value))
    axis.set_ticks(sorted(set(values)))


def draw(ax, way: str, xs, ys) -> None:
    """A line, in the order of x; points without a value are left out."""
    color, marker, label = STYLE[way]
    points = sorted((x, y) for x, y in zip(xs, ys) if y is not None)
    ax.plot(*zip(*points), color=color, marker=marker, label=label, markersize=4, linewidth=1.4)


def save(figure, name: str, note: str) -> None:
    figure.text(0.995, 0.005, note, ha="right", va="bottom", fontsize=6.5, color="#666666")
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)


def source(records: list[dict]) -> str:
    """Device and commits that the records carry."""
    devices = sorted({r["device"] for r in records})
    return f"{', '.join(devices)}; commit {', '.join(sorted({r['commit'][:7] for r in records}))}"


def below(figure, axes, columns: int) -> None:
    """One legend under all panels."""
    seen = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels()):
            seen.setdefault(label, handle)
    figure.legend(seen.values(), seen.keys(), loc="lower center", ncol=columns, frameon=False, bbox_to_anchor=(0.5, 0.03))


def whole_heads(records: list[dict]) -> dict[str, list[dict]]:
    """Forward records of a whole vocabulary, by head."""
    return {
        head: [r for r in records if r["op"] == "sweep_forward" and (r["h"], r["v"]) == shape]
        for head, shape in HEADS.items()
    }


def speed_against_tokens(records: list[dict]) -> None:
    figure, axes = plt.subplots(1, 4, figsize=(11, 3.5), sharey=True)
    for ax, (head, group) in zip(axes, whole_heads(records).items()):
        n = [r["n"] for r in group]
        draw(ax, "ours", n, [r["units"] for r in group])
        draw(ax, "combined", n, [r["combined_ms"] and r["combined_ms"] / r["gemm_ms"] for r in group])
        draw(ax, "two_pass", n, [r["two_pass_ms"] and r["two_pass_ms"] / r["gemm_ms"] for r in group])
        ax.axhline(1, color="#999999", linewidth=0.8, linestyle=":")
        ax.set_xscale("log", base=2)
        log_axis(ax.xaxis, n, thousands)
        ax.tick_params(axis="x", labelsize=7)
        ax.set_title(f"{head}\nH = {HEADS[head][0]}, V = {HEADS[head][1]}", fontsize=9)
        ax.set_xlabel("tokens")
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("time, in cuBLAS products [N, H] x [H, V]")
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    below(figure, axes, 3)
    forward = [r for r in records if r["op"] == "sweep_forward"]
    save(figure, "speed-tokens-h200", f"log-prob + entropy, bf16; {source(forward)}")


def speedups(records: list[dict]) -> None:
    """Every logical point, sorted: the whole distribution."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    colors = ["#0b5fa5", "#d55e00", "#2e8b57", "#7b3f98"]
    fields = (("speedup_two_pass", "SkyRL log-prob, then entropy"), ("speedup_combined", "SkyRL combined (Triton)"))
    for ax, (field, title) in zip(axes, fields):
        for color, head in zip(colors, HEADS):
            values = sorted(
                r[field]
                for r in records
                for point in r["logical"]
                if r["op"] == "sweep_forward" and point["head"] == head and r[field] is not None
            )
            shares = [(i + 0.5) / len(values) for i in range(len(values))]
            ax.plot(values, shares, drawstyle="steps-mid", color=color, label=f"{head} ({len(values)} points)")
        ax.axvline(1, color="#999999", linewidth=0.8, linestyle=":")
        ax.set_xlim(left=0)
        ax.set_ylim(0, 1)
        ax.set_title(f"against {title}", fontsize=9)
        ax.set_xlabel("times faster")
    axes[0].set_ylabel("share of points below")
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    below(figure, axes, 4)
    forward = [r for r in records if r["op"] == "sweep_forward"]
    save(figure, "speedup-h200", f"log-prob + entropy, bf16; {source(forward)}")


def memory_against_tokens(sweep: list[dict], curves: list[dict]) -> None:
    tokens = [r for r in curves if r["op"] == "tokens"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
    group = whole_heads(sweep)["nemotron-super"]
    n = [r["n"] for r in group]
    draw(axes[0], "ours", n, [r["extra_mib"] for r in group])
    draw(axes[0], "combined", n, [r["baselines"]["combined"].get("extra_mib") for r in group])
    for backend in ("triton", "torch"):
        passes = [[r["baselines"][name].get("extra_mib") for name in (f"logprob_{backend}", "entropy")] for r in group]
        draw(axes[0], f"two_pass_{backend}", n, [None if None in pair else max(pair) for pair in passes])
    axes[0].set_title("forward: log-prob + entropy", fontsize=9)
    for way in dict.fromkeys(r["way"] for r in tokens):
        of_way = [r for r in tokens if r["way"] == way]
        draw(axes[1], way, [r["n"] for r in of_way], [r["extra_mib"] for r in of_way])
    axes[1].set_title("forward + backward, differentiable entropy", fontsize=9)
    for ax, counts in zip(axes, (n, [r["n"] for r in tokens])):
        counts = sorted(set(counts))
        ax.plot(counts, [c * 131072 * 4 / 2**20 for c in counts], ":", color="#999999", label="one copy of fp32 logits")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        log_axis(ax.xaxis, counts, thousands)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda mib, _: f"{mib:g}"))
        ax.set_xlabel("tokens")
    axes[0].set_ylabel("MiB beside inputs and results")
    figure.suptitle("H = 4096, V = 131072", fontsize=9)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    below(figure, axes, 3)
    save(figure, "memory-tokens-h200", source(group + tokens))


def gradients_against_tokens(curves: list[dict]) -> None:
    tokens = [r for r in curves if r["op"] == "tokens"]
    figure, ax = plt.subplots(figsize=(5.5, 3.8))
    for way in dict.fromkeys(r["way"] for r in tokens):
        of_way = [r for r in tokens if r["way"] == way]
        draw(ax, way, [r["n"] for r in of_way], [r["units"] for r in of_way])
    ax.axhline(4, color="#999999", linewidth=0.8, linestyle=":")
    ax.set_xscale("log", base=2)
    log_axis(ax.xaxis, [r["n"] for r in tokens], thousands)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("tokens")
    ax.set_ylabel("time, in cuBLAS products")
    ax.set_title("forward + backward, differentiable entropy\nH = 4096, V = 131072", fontsize=9)
    figure.tight_layout(rect=(0, 0.17, 1, 1))
    below(figure, [ax], 2)
    save(figure, "gradients-tokens-h200", source(tokens))


def errors_against_spread(curves: list[dict]) -> None:
    spread = [r for r in curves if r["op"] == "spread"]
    devices = list(dict.fromkeys(r["device"] for r in spread))
    figure, axes = plt.subplots(len(devices), 2, figsize=(9, 3.2 * len(devices) + 0.6), sharex=True, squeeze=False)
    for row, device in zip(axes, devices):
        group = [r for r in spread if r["device"] == device]
        first = group[0]
        for ax, (field, name) in zip(row, (("logprob_err", "log-prob"), ("entropy_err", "entropy"))):
            for way in dict.fromkeys(r["way"] for r in group):
                of_way = [r for r in group if r["way"] == way]
                # An error of 0 has no place on a logarithmic axis.
                draw(ax, way, [r["spread"] for r in of_way], [max(r[field], 1e-8) for r in of_way])
            ax.set_xscale("log")
            ax.set_yscale("log")
            ax.xaxis.set_minor_locator(NullLocator())
            ax.set_xticks(sorted({r["spread"] for r in group}), [f"{s:g}" for s in sorted({r["spread"] for r in group})])
            ax.tick_params(axis="x", labelsize=7)
            ax.set_title(f"{name}: {device}, {first['n']} x {first['h']} x {first['v']}", fontsize=8)
        row[0].set_ylabel("largest error over rows, nats")
    for ax in axes[-1]:
        ax.set_xlabel("standard deviation of the logits")
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    below(figure, axes.flat, 3)
    save(figure, "error-spread", f"bf16 inputs, fp64 as the truth; {source(spread)}")


def active_rows(sweep: list[dict], cpu: list[dict]) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8))
    gradients = [r for r in sweep if r["op"] == "sweep_forward_backward"]
    for way, field in (("ours", "units"), ("combined", "combined_ms"), ("two_pass", "two_pass_ms")):
        values = {}
        for r in gradients:
            values.setdefault(r["active"], []).append(r[field] if way == "ours" else r[field] / r["gemm_ms"])
        draw(axes[0], way, values, [statistics.median(v) for v in values.values()])
    axes[0].set_title("H200: forward + backward at TP 4, CP 2, 16K tokens\n(median over four heads)", fontsize=9)
    axes[0].set_ylabel("time, in cuBLAS products")
    styles = {"suffix": ("-", "o"), "runs": ("--", "s"), "scattered": (":", "^")}
    for color, device in zip(("#0b5fa5", "#d55e00"), dict.fromkeys(r["device"] for r in cpu)):
        group = [r for r in cpu if r["device"] == device and r["of_dense"] is not None and r["entropy"] == "grad"]
        group = sorted((r for r in group if r["op"] == "forward_backward"), key=lambda r: r["reps"])  # the most last
        for pattern, (line, marker) in styles.items():
            of_dense = {r["active"]: r["of_dense"] for r in group if r["pattern"] == pattern} | {1.0: 1.0}
            xs, ys = zip(*sorted(of_dense.items()))
            axes[1].plot(xs, ys, line, color=color, marker=marker, markersize=4, label=f"{device.split(',')[0]}, {pattern}")
    axes[1].plot([0, 1], [0, 1], color="#999999", linewidth=0.8, linestyle=":")
    axes[1].set_title("CPU: forward + backward, 4096 x 576 x 49152", fontsize=9)
    axes[1].set_ylabel("share of the dense time")
    axes[1].legend(fontsize=6.5, frameon=False)
    for ax in axes:
        ax.set_xlim(0, 1.05)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("share of rows that the loss looks at")
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    below(figure, axes[:1], 3)
    save(figure, "active-rows", source(gradients))


def cpu_plot(cpu: list[dict]) -> None:
    """Units of every dense bf16 shape, and memory against tokens beside plain torch."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), width_ratios=(3, 2))
    shapes = [(4096, 576, 49152), (512, 640, 262144), (512, 2048, 151936), (512, 4096, 131072)]
    devices = list(dict.fromkeys(r["device"] for r in cpu))
    for k, (device, color) in enumerate(zip(devices, ("#0b5fa5", "#d55e00"))):
        for op, entropies, hatch, name in (
            ("forward", ("metric", "grad"), "", "forward, log-prob + entropy"),
            ("forward_backward", ("grad",), "///", "forward + backward, entropy gradient"),
        ):
            bars = []
            for shape in shapes:
                found = [
                    r["units"]
                    for r in cpu
                    if (r["device"], r["op"], r["dtype"]) == (device, op, "bfloat16")
                    and r["entropy"] in entropies
                    and (r["n"], r["h"], r["v"]) == shape
                    and r["active"] == 1
                    and r["reps"] > 1
                ]
                bars.append(statistics.median(found))
            place = [i + 0.4 * k - 0.3 + 0.2 * (op == "forward_backward") for i in range(len(shapes))]
            label = f"{device.split(',')[1].strip()}: {name}"
            axes[0].bar(place, bars, 0.18, color=color, hatch=hatch, edgecolor="white", label=label)
    axes[0].set_xticks(range(len(shapes)), [f"{n} tokens\n{h} x {v}" for n, h, v in shapes], fontsize=7)
    axes[0].set_ylabel("time, in oneDNN products [N, H] x [H, V]")
    axes[0].set_title("two cores, bf16", fontsize=9)
    axes[0].legend(fontsize=6.5, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=2)
    tokens = [r for r in cpu if r["op"] == "forward_backward" and r["baseline_extra_mib"] is not None]
    counts = sorted({r["n"] for r in tokens})
    for way, field in (("ours", "extra_mib"), ("torch_bf16", "baseline_extra_mib")):
        draw(axes[1], way, counts, [statistics.median(r[field] for r in tokens if r["n"] == n) for n in counts])
    axes[1].set_xscale("log", base=2)
    axes[1].set_yscale("log")
    log_axis(axes[1].xaxis, counts, thousands)
    axes[1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes[1].set_xlabel("tokens")
    axes[1].set_ylabel("MiB beside inputs and gradients")
    axes[1].set_title("forward + backward, H = 576, V = 49152", fontsize=9)
    axes[1].legend(fontsize=6.5, frameon=False)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    save(figure, "cpu", source([r for r in cpu if r["dtype"] == "bfloat16"]))


def figures(sweep: list[dict]) -> None:
    """Medians over logical points, and the first calls, as Markdown rows."""
    forward = [(p, r) for r in sweep if r["op"] == "sweep_forward" for p in r["logical"]]
    print(f"{len(forward)} logical points, {sum(r['op'] == 'sweep_forward' for r in sweep)} local shapes")
    for head in ("all", *HEADS):
        group = [r for p, r in forward if head in ("all", p["head"])]
        cells = []
        for field in ("units", "speedup_two_pass", "speedup_combined"):
            values = sorted(r[field] for r in group if r[field] is not None)
            cells.append(f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})")
        errors = [max(r[f"{e}_err"] for r in group) for e in ("logprob", "entropy")]
        first = statistics.median(r["first_call_ms"] / r["ms"] for r in group)
        memory = max(r["extra_mib"] for r in group)
        print(f"| {head} | {' | '.join(cells)} | {errors[0]:.1e}, {errors[1]:.1e} | {memory:.0f} | {first:.2f} |")
    for active in sorted({r["active"] for r in sweep if r["op"] == "sweep_forward_backward"}, reverse=True):
        group = [r for r in sweep if r["op"] == "sweep_forward_backward" and r["active"] == active]
        group.sort(key=lambda r: list(HEADS).index(r["logical"][0]["head"]))
        cells = []
        for field in ("units", "speedup_two_pass", "speedup_combined"):
            values = [r[field] for r in group]
            cells.append(f"{', '.join(f'{v:.2f}' for v in values)}: {statistics.median(values):.2f}")
        print(f"| {active} | {' | '.join(cells)} |")


def tuned_figures(tuned: list[dict]) -> None:
    """Time of the best configuration as part of the default's, over local shapes, as Markdown rows."""
    for op, entropy in sorted({(r["op"], r["entropy"]) for r in tuned if r["op"] != "tune_head"}):
        best = sorted(r["of_default"] for r in tuned if (r["op"], r.get("entropy")) == (op, entropy))
        within = ", ".join(str(sum(value >= 1 - share for value in best)) for share in (0.01, 0.02, 0.03))
        print(f"| {op}, {entropy} | {len(best)} | {statistics.median(best):.3f} | {best[0]:.3f} | {within} |")
    for r in tuned:
        if r["op"] == "tune_head":
            print(f"tune of {r['head']} at {r['tokens']} tokens: {r['seconds']:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figures", action="store_true", help="print the medians and draw nothing")
    args = parser.parse_args()
    sweep, curves, cpu = read(SWEEP), read(CURVES), read(CPU)
    if args.figures:
        figures(sweep)
        return tuned_figures(read(TUNED))
    if plt is None:
        raise SystemExit("plots: the Python package matplotlib is missing: pip install matplotlib")
    plt.rcParams.update({"svg.hashsalt": "lmhead", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 8})
    plt.rcParams.update({"axes.grid": True, "grid.color": "#e5e5e5", "axes.axisbelow": True})
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    IMAGES.mkdir(exist_ok=True)
    speed_against_tokens(sweep)
    speedups(sweep)
    memory_against_tokens(sweep, curves)
    gradients_against_tokens(curves)
    errors_against_spread(curves)
    active_rows(sweep, cpu)
    cpu_plot(cpu)


if __name__ == "__main__":
    main()
