"""Classify all images of a folder with a model that train.py has trained, on any processes.

Locally:   torchrun --standalone --nproc-per-node=2 predict.py --images images/val
On SLURM:  SCRIPT=predict.py sbatch run.slurm --images /project/new --model-of output/1234

predictions.csv, in --output-dir, has a line for each image, in the order of their paths. The images
are divided into parts, and each part is written when it is complete: with --resume those that are
there are not computed again.
"""

import argparse
import csv
import io
import json
import math
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
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    add("--images", type=Path, required=True, help="folder with images, at any depth")
    trained = "output folder of the run that has trained it"
    add("--model-of", type=Path, default="output", help=trained)
    add("--batch-size", type=int, default=64, help="images per batch of each process")
    add("--part", type=int, default=1024, help="images that are written together")
    add("--workers", type=int, help="processes that read images, for each that computes")
    limit = "seconds to wait for other processes before giving up"
    add("--timeout", type=int, default=300, help=limit)
    folder = "folder for everything it writes"
    add("--output-dir", type=Path, default="predictions", help=folder)
    add("--resume", action="store_true", help="continue with the parts that are missing")
    args = parser.parse_args()
    # torchrun: it says how many processes there are on all nodes, and on this one
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))
    args.processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    plumbing.check_args(parser, args)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        command = "torchrun --standalone --nproc-per-node=2 predict.py --images FOLDER"
        parser.error(f"start it with torchrun: {command}")
    args.global_batch = args.world_size * args.batch_size
    return args


def load_model(args, device):
    """Return a run's model and settings, its classes' names, and a checksum of the weights."""
    path = args.model_of / "model.pt"
    run = args.model_of / "run.json"
    advice = "repeat the run's command with --resume, which writes it anew"
    try:
        settings = json.loads(run.read_text())["settings"]
        names = settings.get("classes")
    except FileNotFoundError:
        wrong = f"there is no {run}: --model-of is the output folder of train.py"
        raise image_files.DataError(wrong) from None
    except Exception as error:  # a damaged file can raise almost anything
        wrong = f"{run} cannot be read ({error!r})"
        raise image_files.DataError(f"{wrong}: {advice}") from None
    if not names:
        wrong = f"{run} was made by an older train.py, without the names of the classes"
        raise image_files.DataError(f"{wrong}: {advice}")
    try:
        content = path.read_bytes()
        weights = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except FileNotFoundError:
        wrong = f"there is no {path} yet: train.py writes it after the last epoch"
        raise image_files.DataError(wrong) from None
    except Exception as error:
        wrong = f"{path} cannot be read ({error!r})"
        raise image_files.DataError(f"{wrong}: {advice}") from None
    settings |= {"sync_batchnorm": False, "gradient_checkpointing": False}
    model = train.make_parts(argparse.Namespace(**settings), len(names), device)["model"]
    check_weights(path, model.state_dict(), weights, f"{run} has {len(names)} classes")
    model.load_state_dict(weights, strict=False)  # check_weights has looked for what one lacks
    return model.eval(), settings, names, zlib.crc32(content)


def check_weights(path, own, weights, classes):
    """Raise DataError if the weights in a file are not of the model whose state dict is `own`."""
    different = classifiers.compare(own, weights)
    if different:
        wrong = f"{path} is of another model than train.py makes now ({different})"
        make = "have train.py make the model that the run was trained with"
        raise image_files.DataError(f"{wrong}: {make}, in make_parts and own_classifier.py")
    shapes = classifiers.different_shapes(own, weights)
    if shapes:
        wrong = f"{classes}, the model has {len(weights[shapes[-1]])}"
        raise image_files.DataError(f"{wrong}: the two files are of different runs")


def missing_parts(args, facts):
    """Lock the output folder; return the numbers of the parts that it lacks, or an error."""
    error = plumbing.lock(args.output_dir)
    if error:
        return error
    path = args.output_dir / "inputs.json"
    if path.exists() and not args.resume:
        advice = "add --resume to continue it, or choose another --output-dir"
        return f"{path} is from an earlier run: {advice}"
    if path.exists() and json.loads(path.read_text()) != facts:
        wrong = f"{path} is of other images, another model, --part or --batch-size"
        return f"{wrong}: choose another --output-dir"
    (args.output_dir / "parts").mkdir(exist_ok=True)
    plumbing.write(path, lambda file: file.write(json.dumps(facts).encode()))
    if (args.output_dir / "predictions.csv").exists():
        return []
    count = math.ceil(facts["images"] / args.part)
    return [number for number in range(count) if not part_path(args, number).exists()]


def part_path(args, number):
    """Return the file of a part of the predictions."""
    return args.output_dir / "parts" / f"{number:08}.csv"


def as_lines(rows):
    """Return the lines of a CSV file."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode(errors="surrogateescape")


def batches_of(args, number, count):
    """Return the indices of the images of a part, out of so many images, in batches."""
    part = range(number * args.part, min((number + 1) * args.part, count))
    return list(BatchSampler(part, args.batch_size, drop_last=False))


def load_batches(args, settings, paths, batches, device):
    """Return an iterator over batches of images, each of which has the images of these indices."""
    files = image_files.as_arrays([(path, 0, 0, 0) for path in paths])
    transform = image_files.test_transform(settings["image_size"])
    image_set = image_files.Images(args.images, files, transform)
    loading = {"num_workers": args.workers, "worker_init_fn": image_files.prepare_worker}
    loading["pin_memory"] = device.type == "cuda"
    return iter(DataLoader(image_set, batch_sampler=batches, **loading))


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
@image_files.errors_to(plumbing.fail)  # what does not fit, or cannot be read, is one line
def main(args):
    """Predict as one process of args.world_size."""
    plumbing.prepare_process(args)
    plumbing.end_with_loader_workers()
    device = train.setup(args)
    rank = dist.get_rank()
    model, settings, names, checksum = load_model(args, device)

    # Rank 0 looks what there is, so that all processes see the same images and missing parts.
    paths, left_out = image_files.from_rank_0(lambda: image_files.find_images(args.images))
    in_one = "\n".join(paths).encode(errors="surrogateescape")
    facts = {"images": len(paths), "paths": zlib.crc32(in_one)}
    facts |= {"model": checksum, "part": args.part, "batch_size": args.batch_size}
    found = [missing_parts(args, facts) if rank == 0 else None]
    dist.broadcast_object_list(found)
    missing = plumbing.accept(found[0])
    progress = {"step": 0, "history": []}
    what = f"{settings['model']} of {args.model_of} on {args.images}"
    plumbing.print_header(args, what, device, progress)
    count = math.ceil(len(paths) / args.part)
    if rank == 0:
        done = f"{count - len(missing)} of them done before"
        print(f"{len(paths)} images in {count} parts, {done}{left_out}")

    # ddp: each process takes other parts, so that no image is done twice, and none is left out
    mine = missing[rank :: args.world_size]
    batches = {number: batches_of(args, number, len(paths)) for number in mine}
    in_turn = [batch for number in mine for batch in batches[number]]
    loader = load_batches(args, settings, paths, in_turn, device)

    patient = plumbing.patient_group()  # a process without a part waits for those of the others
    rounds = math.ceil(len(missing) / args.world_size)
    for turn in range(rounds):
        vote = torch.tensor([int(plumbing.stop_requested())])
        # stop: all stop after the same round
        dist.all_reduce(vote, dist.ReduceOp.MAX, group=patient)
        if vote.item():
            if rank == 0:
                (args.output_dir / "stopped").touch()
            message = f"stopped by a signal after round {turn} of {rounds}: use --resume"
            plumbing.finish(args, progress, message)
        if turn < len(mine):
            rows = []
            for batch in batches[mine[turn]]:
                images, _ = next(loader)
                answers = predict(model, images, settings, device)
                for index, (number, probability) in zip(batch, answers, strict=True):
                    rows.append((paths[index], names[number], f"{probability:.6f}"))
            lines = as_lines(rows)
            plumbing.write(part_path(args, mine[turn]), lambda file, lines=lines: file.write(lines))
        progress["step"] += 1

    dist.barrier(group=patient)  # ddp: until all parts are there
    if rank == 0:
        join_parts(args, count)
    message = f"finished: {len(paths)} images, {args.output_dir / 'predictions.csv'}"
    plumbing.finish(args, progress, message)


if __name__ == "__main__":
    main(parse_args())
