"""What the figures of on_gpu.py train with, made in seconds: `python -m benchmarks.gpu_data KIND FOLDER --tiny`.

jpeg: photographs that are none, smooth noise with the size of a photograph's file. model: a Llama with random weights
and a small tokenizer. data: random images in MNIST's format.
"""

import argparse
import io
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.gpu_figures import FULL, TINY, Sizes
from harness.launchers import ROOT


def write_some(folder: Path, numbers: range, pixels: tuple[int, int]) -> int:
    """Write the images with these numbers; return their bytes: at 500 x 375 pixels a file has about 90 kB."""
    import numpy
    from PIL import Image, ImageFilter

    width, height = pixels
    generator = numpy.random.default_rng(numbers.start)
    size = 0
    for number in numbers:
        coarse = generator.integers(0, 256, (max(2, height // 12), max(2, width // 12), 3), dtype=numpy.uint8)
        image = Image.fromarray(coarse).resize(pixels, Image.Resampling.BICUBIC)
        grain = generator.integers(0, 40, (height, width, 1), dtype=numpy.int16) - 20
        grained = numpy.clip(numpy.asarray(image, dtype=numpy.int16) + grain, 0, 255).astype(numpy.uint8)
        smooth = Image.fromarray(grained).filter(ImageFilter.GaussianBlur(0.5))
        content = io.BytesIO()
        smooth.save(content, "JPEG", quality=93)
        (folder / f"{number:06}.jpg").write_bytes(content.getvalue())
        size += content.tell()
    return size


def jpeg(folder: Path, sizes: dict[str, Sizes]) -> dict[str, object]:
    """Write the distinct images, with all cores."""
    vision = sizes["vision"]
    files, cores = vision["files"], len(os.sched_getaffinity(0))
    folder.mkdir()
    per_part = -(-files // (cores * 2))
    parts = [range(start, min(start + per_part, files)) for start in range(0, files, per_part)]
    with ProcessPoolExecutor(cores) as pool:
        done = [pool.submit(write_some, folder, part, vision["pixels"]) for part in parts]
        size = sum(one.result() for one in done)
    return {"jpeg_files": files, "jpeg_kb": round(size / files / 1000, 1)}


def model(folder: Path, sizes: dict[str, Sizes]) -> dict[str, object]:
    """Write a Llama with random weights in bf16, and the tokenizer of lora's make_model.py."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    example, lora = ROOT / "examples" / "lora", sizes["lora"]
    text = (example / "text.txt").read_text()
    with tempfile.TemporaryDirectory() as small:
        shutil.copy(example / "text.txt", small)
        subprocess.run([sys.executable, example / "make_model.py"], cwd=small, check=True)
        tokenizer = AutoTokenizer.from_pretrained(Path(small) / "model")
    config = LlamaConfig(
        vocab_size=lora["vocabulary"],
        hidden_size=lora["hidden"],
        intermediate_size=lora["intermediate"],
        num_hidden_layers=lora["layers"],
        num_attention_heads=lora["heads"],
        num_key_value_heads=lora["kv_heads"],
        max_position_embeddings=max(256, lora["context"]),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        made = LlamaForCausalLM(config).to(torch.bfloat16)
    part = folder.with_suffix(".part")
    made.cpu().save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(folder)
    return {"model_weights": made.num_parameters(), "tokens": len(tokenizer(text)["input_ids"])}


def data(folder: Path, sizes: dict[str, Sizes]) -> dict[str, object]:
    """Write random 28x28 images as MNIST's files, with a fortieth as many for the test."""
    raw, generator, images = folder.with_suffix(".part") / "MNIST" / "raw", random.Random(0), sizes["small"]["images"]
    raw.mkdir(parents=True)
    for part, count in (("train", images), ("t10k", max(16, images // 40))):
        with open(raw / f"{part}-images-idx3-ubyte", "wb") as file:
            file.write(struct.pack(">IIII", 0x803, count, 28, 28))  # the idx format: bytes in three dimensions
            for start in range(0, count, 10_000):
                file.write(generator.randbytes(min(10_000, count - start) * 28 * 28))
        labels = bytes(generator.choices(range(10), k=count))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + labels)
    folder.with_suffix(".part").rename(folder)
    return {"images": images}


KINDS = {"jpeg": jpeg, "model": model, "data": data}


def main() -> None:
    """Make one kind, and print what was made as one line of JSON."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu_data", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    print(json.dumps(KINDS[args.kind](args.folder, TINY if args.tiny else FULL)), flush=True)


if __name__ == "__main__":
    main()
