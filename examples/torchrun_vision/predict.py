"""Classify all images below a folder, at any depth, with a model that train.py has trained.

Locally:   torchrun --standalone --nproc-per-node=2 predict.py --images images/val
On SLURM:  sbatch minimal.slurm predict.py --images /project/new --model-of output/1234
"""

import argparse
import csv
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset
from torchvision import models

import image_files


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--images", type=Path, required=True, help="folder with images")
    add("--model-of", type=Path, default="output", help="output folder of train.py")
    add("--batch-size", type=int, default=64, help="images per batch of each process")
    add("--workers", type=int, default=2, help="loader workers per process")
    add("--output", type=Path, default="predictions.csv", help="the file to write")
    return parser.parse_args()


@torch.no_grad()
def main(args):
    """Classify as one of the processes that torchrun has started; rank 0 writes the file."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    run = json.loads((args.model_of / "run.json").read_text())["settings"]
    model = models.get_model(run["model"], num_classes=len(run["classes"]))
    weights = torch.load(args.model_of / "model.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(weights)
    model.to(device, torch.float32, memory_format=torch.channels_last).eval()

    images = image_files.Unlabelled(args.images, image_files.test_transform(run["image_size"]))
    own = Subset(images, range(rank, len(images), world_size))  # ddp: each image once
    extra = {"num_workers": args.workers, "worker_init_fn": image_files.start_worker}
    found = []
    for batch, _ in DataLoader(own, args.batch_size, pin_memory=device.type == "cuda", **extra):
        batch = image_files.normalise(batch.to(device, non_blocking=True), torch.float32)
        probabilities, numbers = model(batch).softmax(1).max(1)
        names = [run["classes"][number] for number in numbers]
        found += zip(names, probabilities.tolist(), strict=True)
    parts = [None] * world_size
    dist.gather_object(found, parts if rank == 0 else None)
    if rank == 0:
        temporary = args.output.with_name(f"{args.output.name}.tmp")
        with open(temporary, "w", newline="", errors="surrogateescape") as file:
            writer = csv.writer(file)
            writer.writerow(("path", "class", "probability"))
            for number, (path, _) in enumerate(images.samples):
                row = parts[number % world_size][number // world_size]
                writer.writerow((os.path.relpath(path, args.images), *row))
        os.replace(temporary, args.output)  # the file is complete or not there at all
        print(f"{len(images)} images: {args.output}")
    dist.destroy_process_group()
    os._exit(0)  # skip Python's clean-up, in which Gloo sometimes aborts (PyTorch 2.15)


if __name__ == "__main__":
    main(parse_args())
