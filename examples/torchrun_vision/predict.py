"""Classify all images of a folder with a model that train.py has trained, on any number of processes.

Locally:   torchrun --standalone --nproc-per-node=2 predict.py --images images/val
On SLURM:  SCRIPT=predict.py sbatch run.slurm --images /project/new --model-of output/1234

predictions.csv, in --output-dir, has a line for each image, in the order of their paths. The images are divided into
parts, and each part is written when it is complete: with --resume those that are there are not computed again.
"""

import argparse
import csv
import io
import json
import os
import shutil
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import BatchSampler, DataLoader

import classifiers
import image_files
import plumbing
import train


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="folder with images, at any depth")
    parser.add_argument("--model-of", type=Path, default="output", help="output folder of the run that has trained it")
    parser.add_argument("--data-dir", type=Path, help="what that run was trained on, if run.json lacks its classes")
    parser.add_argument("--batch-size", type=int, default=64, help="images per batch of each process")
    parser.add_argument("--part", type=int, default=1024, help="images that are written together")
    parser.add_argument("--workers", type=int, help="processes that read images, for each that computes")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for other processes before giving up")
    parser.add_argument("--output-dir", type=Path, default="predictions", help="folder for everything it writes")
    parser.add_argument("--resume", action="store_true", help="continue with the parts that are missing")
    args = parser.parse_args()
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))  # torchrun: number of processes on all nodes
    args.processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun: number of processes on this node
    plumbing.check_args(parser, args)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node=2 predict.py --images FOLDER")
    args.global_batch = args.world_size * args.batch_size
    return args


def class_names(path):
    """Return the names of the classes in what a run was trained on, for one whose run.json does not have them yet."""

    def find():
        _, listing = image_files.find(path, image_files.open_in_place)
        return image_files.class_names(path, listing)

    return image_files.from_rank_0(find)


def load_model(args, device):
    """Return the model of a run, what train.py was told, the names of the classes, and a checksum of the weights."""
    path, run = args.model_of / "model.pt", args.model_of / "run.json"
    try:
        settings = json.loads(run.read_text())["settings"]
        data = args.data_dir or Path(settings["data_dir"])
    except FileNotFoundError:
        text = f"there is no {run}: --model-of is the output folder of train.py"
        raise image_files.DataError(text) from None
    except Exception as error:  # a damaged file can raise almost anything
        text = f"{run} cannot be read ({error!r}): repeat the run's command with --resume, which writes it anew"
        raise image_files.DataError(text) from None
    try:
        content = path.read_bytes()
        weights = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise image_files.DataError(f"there is no {path} yet: train.py writes it after the last epoch") from None
    except Exception as error:
        text = f"{path} cannot be read ({error!r}): repeat the run's command with --resume, which writes it anew"
        raise image_files.DataError(text) from None
    settings |= {"sync_batchnorm": False, "gradient_checkpointing": False}
    names, source = settings.get("classes"), run
    if not names or args.data_dir:
        try:
            names, source = check_names(names, class_names(data), data), data
        except image_files.DataError as error:
            text = "for the names of the classes, name what it was trained on with --data-dir"
            raise image_files.DataError(f"{error}; {text}") from None
    model = train.make_parts(argparse.Namespace(**settings), len(names), device)["model"]
    own = model.state_dict()
    shapes = [key for key in own if key in weights and own[key].shape != weights[key].shape]
    if text := classifiers.compare(own, weights):
        remedy = "have train.py make the model that the run was trained with, in make_parts and own_model.py"
        raise image_files.DataError(f"{path} is of another model than train.py makes now ({text}): {remedy}")
    if shapes:
        text = f"{source} has {len(names)} classes, the model has {len(weights[shapes[-1]])}"
        raise image_files.DataError(f"{text}: name its data with --data-dir")
    model.load_state_dict(weights, strict=False)  # what is in one of them only was looked for above
    return model.eval(), settings, names, zlib.crc32(content)


def check_names(recorded, names, data):
    """Return the names of the classes in the data; raise DataError if others were recorded."""
    if recorded and recorded != names:
        only = sorted(set(recorded) ^ set(names))[0]
        text = f"{len(recorded)} classes, {data} has {len(names)}, and only one of them has {only!r}"
        raise image_files.DataError(f"the run was trained on {text}")
    return names


def missing_parts(args, facts):
    """Lock the output folder; return the numbers of the parts that it lacks, or an error message."""
    if error := plumbing.lock(args.output_dir):
        return error
    path, count = args.output_dir / "inputs.json", -(-facts["images"] // args.part)
    if path.exists() and not args.resume:
        return f"{path} is from an earlier run: add --resume to continue it, or choose another --output-dir"
    if path.exists() and json.loads(path.read_text()) != facts:
        return f"{path} is of other images, another model, --part or --batch-size: choose another --output-dir"
    (args.output_dir / "parts").mkdir(exist_ok=True)
    plumbing.write(path, lambda file: file.write(json.dumps(facts).encode()))
    if (args.output_dir / "predictions.csv").exists():
        return []
    return [number for number in range(count) if not part_path(args, number).exists()]


def part_path(args, number):
    """Return the file of a part of the predictions."""
    return args.output_dir / "parts" / f"{number:08}.csv"


def as_lines(rows):
    """Return the lines of a CSV file."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode(errors="surrogateescape")


@torch.no_grad()
def predict(model, images, settings, device):
    """Return the number of the likeliest class of each image, and its probability."""
    precision = settings["precision"]
    images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
    dtype = train.AUTOCAST.get(precision)
    with torch.autocast(device.type, dtype, enabled=dtype is not None):
        logits = model(image_files.normalise(images, train.WEIGHT_DTYPES[precision]))
    probabilities, numbers = logits.double().softmax(1).max(1)
    return zip(numbers.tolist(), probabilities.tolist(), strict=True)


def join_parts(args, count):
    """Write predictions.csv, which has all parts in their order, and remove these."""

    def join(file):
        file.write(as_lines([("path", "class", "probability")]))
        for number in range(count):
            file.write(part_path(args, number).read_bytes())

    if not (args.output_dir / "predictions.csv").exists():
        plumbing.write(args.output_dir / "predictions.csv", join)
    shutil.rmtree(args.output_dir / "parts")


@record  # torchrun: reports the traceback of the process that failed first
@image_files.errors_to(plumbing.fail)  # images that cannot be read, a model that does not fit: one line
def main(args):
    """Predict as one process of args.world_size."""
    plumbing.prepare_process(args)
    plumbing.end_with_loader_workers()
    device, rank = train.setup(args), dist.get_rank()
    model, settings, names, checksum = load_model(args, device)

    # Who does what: rank 0 looks what there is, so that all processes see the same images and the same missing parts.
    paths, left_out = image_files.from_rank_0(lambda: image_files.find_images(args.images))
    facts = {"images": len(paths), "paths": zlib.crc32("\n".join(paths).encode(errors="surrogateescape"))}
    facts |= {"model": checksum, "part": args.part, "batch_size": args.batch_size}
    found = [missing_parts(args, facts) if rank == 0 else None]
    dist.broadcast_object_list(found)
    missing = plumbing.accept(found[0])
    count, progress = -(-len(paths) // args.part), {"step": 0, "history": []}
    plumbing.print_header(args, f"{settings['model']} of {args.model_of} on {args.images}", device, progress)
    if rank == 0:
        print(f"{len(paths)} images in {count} parts, {count - len(missing)} of them done before{left_out}")

    # ddp: process r takes each world_size-th of the missing parts, from the r-th on: no image twice, none left out
    mine = missing[rank :: args.world_size]
    parts = {number: range(number * args.part, min((number + 1) * args.part, len(paths))) for number in mine}
    batches = {number: list(BatchSampler(part, args.batch_size, drop_last=False)) for number, part in parts.items()}
    files = image_files.as_arrays([(path, 0, 0, 0) for path in paths])
    image_set = image_files.Images(args.images, files, image_files.test_transform(settings["image_size"]))
    loading = {"num_workers": args.workers, "worker_init_fn": image_files.prepare_worker}
    sampler = [batch for number in mine for batch in batches[number]]
    loader = iter(DataLoader(image_set, batch_sampler=sampler, pin_memory=device.type == "cuda", **loading))

    rounds = -(-len(missing) // args.world_size)
    for turn in range(rounds):
        vote = torch.tensor([int(plumbing.stop_requested())])
        dist.all_reduce(vote, dist.ReduceOp.MAX)  # stop: one process is asked to, and all stop after the same round
        if vote:
            if rank == 0:
                (args.output_dir / "stopped").touch()
            plumbing.finish(args, progress, f"stopped by a signal after round {turn} of {rounds}: use --resume")
        if turn < len(mine):
            rows = []
            for batch in batches[mine[turn]]:
                answers = predict(model, next(loader)[0], settings, device)
                rows += [(paths[i], names[n], f"{p:.6f}") for i, (n, p) in zip(batch, answers, strict=True)]
            lines = as_lines(rows)
            plumbing.write(part_path(args, mine[turn]), lambda file, lines=lines: file.write(lines))
        progress["step"] += 1

    dist.barrier()  # ddp: until all parts are there
    if rank == 0:
        join_parts(args, count)
    plumbing.finish(args, progress, f"finished: {len(paths)} images, {args.output_dir / 'predictions.csv'}")


if __name__ == "__main__":
    main(parse_args())
