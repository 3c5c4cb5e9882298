"""An example's train.py with its batches in memory, or under PyTorch's profiler: on_gpu.py copies this file beside it.

BATCHES_IN_MEMORY=4 has torchrun_vision read so many batches once, and train with them again and again, so that no
loader is part of what is measured. PROFILE=FILE has a few steps of the first epoch profiled, and writes which kernels
took how long, and how long there was none; then a few more, of which it writes what Python's time went to in the main
thread (the backward pass has a thread of its own). All else is train.py's own.
"""

import cProfile
import itertools
import json
import os
import pstats

import torch

import train

FIRST, COUNT = 6, 5  # steps: the profiler begins after so many, and takes so many


def keep_batches(number):
    """Have train.py read `number` batches for training once, and train with these in each epoch."""
    loader, kept = train.DataLoader, []

    def replacement(data_set, batch_size, sampler=None, **words):
        if sampler is None:  # for the test
            return loader(data_set, batch_size, **words)
        if not kept:
            first = sampler[: number * batch_size]
            kept.extend(loader(data_set, batch_size, sampler=first, **words))
        return itertools.islice(itertools.cycle(kept), len(sampler) // batch_size)

    train.DataLoader = replacement


def profile_steps(path):
    """Have some steps of the first epoch profiled; the process with rank 0 writes what was found to `path`."""
    train_one_epoch = train.train_one_epoch
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    def steps(loader, profiler):
        python = cProfile.Profile()
        for number, batch in enumerate(loader):
            if number == FIRST:
                profiler.start()
            if number == FIRST + COUNT:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                profiler.stop()
            if number == FIRST + COUNT + 1:
                python.enable()
            if number == FIRST + 2 * COUNT + 1:
                python.disable()
                if os.environ["RANK"] == "0":
                    write(profiler, python, path)
            yield batch

    def replacement(args, model, loader, *others):
        train.train_one_epoch = train_one_epoch
        return train_one_epoch(args, model, steps(loader, torch.profiler.profile(activities=activities)), *others)

    train.train_one_epoch = replacement


def write(profiler, python, path):
    """Write the most expensive kernels (on the CPU: operators), and the share of the time in which there was none."""
    on_gpu = torch.cuda.is_available()
    cuda = torch.autograd.DeviceType.CUDA
    times, spans = {}, []
    for event in profiler.events():
        if on_gpu and event.device_type == cuda and not event.is_user_annotation:
            spans.append((event.time_range.start, event.time_range.end))
            total, count = times.get(event.name, (0, 0))
            times[event.name] = total + event.time_range.end - event.time_range.start, count + 1
    if not on_gpu:
        times = {event.key: (event.self_cpu_time_total, event.count) for event in profiler.key_averages()}
    found = {"steps": COUNT, "gpu": on_gpu}
    if spans:
        whole = max(end for _, end in spans) - min(start for start, _ in spans)
        found |= {"step_ms": whole / COUNT / 1e3, "idle_share": 1 - covered(spans) / whole}
    everything = sum(total for total, _ in times.values()) or 1
    largest = sorted(times.items(), key=lambda item: -item[1][0])[:15]
    found["kernels"] = [
        {"name": name[:160], "ms": total / COUNT / 1e3, "share": total / everything, "count": count / COUNT}
        for name, (total, count) in largest
    ]
    found["operators"] = [
        entry(event.key, event.cpu_time_total / 1e3, event.self_cpu_time_total / 1e3, event.count)
        for event in sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)[:25]
    ]
    functions = sorted(vars(pstats.Stats(python))["stats"].items(), key=lambda item: -item[1][3])[:60]
    found["python"] = [
        entry(f"{file.rpartition('/')[2]}:{line} {name}", cumulative * 1e3, own * 1e3, count)
        for (file, line, name), (_, count, own, cumulative, _) in functions
    ]
    with open(path, "w") as file:
        json.dump(found, file, indent=1)


def entry(name, milliseconds, own, count):
    """Return a line of a profile, for one step."""
    return {"name": name[:160], "ms": milliseconds / COUNT, "own_ms": own / COUNT, "count": count / COUNT}


def covered(spans):
    """Return the length of what is covered by at least one of these (start, end)."""
    length, reached = 0, float("-inf")
    for start, end in sorted(spans):
        length += max(0, end - max(start, reached))
        reached = max(reached, end)
    return length


if __name__ == "__main__":
    if "BATCHES_IN_MEMORY" in os.environ:
        keep_batches(int(os.environ["BATCHES_IN_MEMORY"]))
    if "PROFILE" in os.environ:
        profile_steps(os.environ["PROFILE"])
    train.main(train.parse_args())
