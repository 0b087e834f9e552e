"""What skipping by tiles could save: the rows that a kernel still computes when it leaves out a 128-row tile only if all
of its rows are inactive, beside the active rows themselves. A model of the masks, no measurement.

    python benchmarks/tile_skipping.py
"""

import argparse
import pathlib
import random

SHAPES = pathlib.Path(__file__).parents[1] / "shapes" / "lengths.tsv"
ACTIVE = (0.95, 0.73, 0.64, 0.23, 0.10)


def lengths(name: str, rng: random.Random):
    """Sequence lengths drawn from a row of quantiles."""
    table = [line.rstrip("\n").split("\t") for line in SHAPES.read_text().splitlines() if not line.startswith("#")]
    at = [{"min": 0.0, "max": 1.0}.get(c) if c in ("min", "max") else float(c[1:]) / 100 for c in table[0][3:]]
    sizes = [float(c) for c in next(row for row in table if row[0] == name)[3:]]
    while True:
        u = rng.random()
        k = next(i for i in range(1, len(at)) if u <= at[i])
        yield round(sizes[k - 1] + (sizes[k] - sizes[k - 1]) * (u - at[k - 1]) / (at[k] - at[k - 1]))


def mask(pattern: str, rows: int, active: float, name: str) -> list[bool]:
    rng = random.Random(1)
    if pattern == "suffix":
        return [i >= rows - round(active * rows) for i in range(rows)]
    if pattern == "scattered":
        chosen = set(rng.sample(range(rows), round(active * rows)))
        return [i in chosen for i in range(rows)]
    result: list[bool] = []
    for length in lengths(name, rng):  # runs: the first part of each sequence, its prompt, is inactive
        prompt = round((1 - active) * length)
        result += [False] * prompt + [True] * (length - prompt)
        if len(result) >= rows:
            return result[:rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--tile", type=int, default=128)
    parser.add_argument("--lengths", default="gsm8k_train", help="row of shapes/lengths.tsv")
    a = parser.parse_args()
    print(f"computed share of {a.rows} rows in tiles of {a.tile}; runs of {a.lengths}")
    print(f"{'active':>8}" + "".join(f"{p:>22}" for p in ("suffix", "runs", "scattered")))
    for active in ACTIVE:
        cells = []
        for pattern in ("suffix", "runs", "scattered"):
            m = mask(pattern, a.rows, active, a.lengths)
            tiles = [any(m[i : i + a.tile]) for i in range(0, a.rows, a.tile)]
            cells.append(f"{sum(m) / a.rows:12.3f} -> {sum(tiles) / len(tiles):6.3f}")
        print(f"{active:8.2f}" + "".join(f"{c:>22}" for c in cells))


if __name__ == "__main__":
    main()
