"""The plain way in PyTorch: logits in memory, log_softmax, entropy, autograd.

Called by `lmhead bench --baseline 'python3 benchmarks/torch_plain.py'`; prints one JSON object with the
median time in ms and the growth of the peak resident size in MiB during the first call.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F


def status_mib(key):
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(key):
                return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def scores(hidden, weight, targets, entropy):
    """logprob and entropy [N] of softmax(hidden weight^T), as one writes it without a fused operator."""
    logits = F.linear(hidden, weight).float()
    logp = F.log_softmax(logits, dim=-1)
    logprob = logp.gather(1, targets[:, None]).squeeze(1)
    return logprob, -(logp.exp() * logp).sum(-1) if entropy else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=["forward", "forward_backward"], required=True)
    for name in ("tokens", "hidden", "vocab", "threads", "reps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], required=True)
    parser.add_argument("--entropy", choices=["off", "metric", "grad"], required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    backward = args.op == "forward_backward"
    hidden = torch.randn(args.tokens, args.hidden).to(dtype).requires_grad_(backward)
    weight = (torch.randn(args.vocab, args.hidden) * (1.5 / args.hidden**0.5)).to(dtype).requires_grad_(backward)
    targets = torch.randint(args.vocab, (args.tokens,))
    dlogprob, dentropy = torch.randn(2, args.tokens)

    def call():
        with torch.set_grad_enabled(backward):
            logprob, entropy = scores(hidden, weight, targets, args.entropy != "off")
            if not backward:
                return
            loss = (logprob * dlogprob).sum()
            if args.entropy == "grad":
                loss = loss + (entropy * dentropy).sum()
        hidden.grad = weight.grad = None
        loss.backward()

    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status_mib("VmRSS:")
    call()
    # The gradients are outputs; what is left is memory of the call.
    outputs = sum(t.grad.numel() * t.grad.element_size() for t in (hidden, weight) if t.grad is not None) / 2**20
    extra = status_mib("VmHWM:") - before - outputs
    times = []
    for _ in range(args.reps):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    print(json.dumps({"name": f"torch {torch.__version__} plain", "ms": statistics.median(times), "extra_mib": extra}))


if __name__ == "__main__":
    main()
