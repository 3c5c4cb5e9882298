"""The profiler, for --profile: what the time of a step goes to, and a trace of it for Perfetto."""

import functools
import json
import os

import torch
import torch.distributed as dist

import plumbing


def make_profiler(args, progress):
    """Return a profiler that records 5 steps, after the first 3, and then reports them.

    It is None without --profile, and if a resumed run has fewer steps left, which has to end all
    the same.
    """
    steps = args.epochs * args.steps_per_epoch - progress["step"]
    if not args.profile or (args.resume and steps < 8):
        return None
    if steps < 8:
        wrong = f"--profile needs 8 steps, and this run has {steps} to do"
        plumbing.fail(f"{wrong}: raise --epochs, or lower --batch-size")
    if not torch.cuda.is_available():
        # Otherwise the profiler logs an error, that there is no GPU.
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")
    schedule = torch.profiler.schedule(wait=1, warmup=2, active=5, repeat=1)
    report = functools.partial(report_profile, args)
    return torch.profiler.profile(schedule=schedule, on_trace_ready=report)


def mark_steps(args, train_loader, profiler):
    """Yield the loader's batches, and tell the profiler, if any, where an optimizer step ends."""
    # A loss that is not finite is traced back to the samples of this loader.
    plumbing.checks.losses["loader"] = train_loader
    for number, batch in enumerate(train_loader, 1):
        yield batch
        if profiler and number % args.gradient_accumulation_steps == 0:
            profiler.step()


def report_profile(args, profiler):
    """Write this process's trace; print on rank 0 what the time of a step goes to.

    The figures are means over all processes.
    """
    folder = args.output_dir / "profile"
    rank = dist.get_rank()
    torch.profiler.tensorboard_trace_handler(str(folder), f"rank{rank}")(profiler)
    found = plumbing.gather(shares_of_a_step(profiler.events()))
    if rank > 0:
        return
    means = [sum(values) / args.world_size for values in zip(*found, strict=True)]
    seconds, data, network, computing = means
    other = 1 - data - network - computing
    what = "the mean of 5 steps and of all processes"
    print(f"profile: a step takes {seconds:.3f} s, {what}; traces: {folder}")
    shares = {"waits for data": data, "waits for the network": network, "computes": computing}
    shares["does other things"] = other
    for name, share in shares.items():
        print(f"profile: {name:21} {share:6.1%}")
    path = args.output_dir / "run.json"
    run = json.loads(path.read_text()) | {"profile": {"seconds": seconds, "shares": shares}}
    plumbing.write(path, lambda file: file.write(json.dumps(run, indent=1).encode()))
    advice = "computing takes most of it: more processes, --precision bf16, a smaller model"
    if data > max(network, 0.2):
        advice = "reading data is too slow: more workers or cores, smaller files, a faster disk"
    elif network > 0.2:
        wait = "the network or a slower process is waited for"
        advice = f"{wait}: a larger --batch-size means fewer exchanges"
    elif other > computing:
        advice = "starting the work, evaluation or saving takes most of it: a larger --batch-size"
    print(f"profile: {advice}")


def shares_of_a_step(events):
    """Return the seconds of a step, and its shares that wait for data and network, and compute.

    What happens at the same time counts once: as computing, otherwise as the network, otherwise as
    data.
    """
    steps = []
    data = []
    network = []
    computing = []
    ours = ("aten::", "autograd::", "DistributedDataParallel", "Optimizer.step")
    gpu = any(event.device_type == torch.autograd.DeviceType.CUDA for event in events)
    for event in events:
        name = event.name
        span = (event.time_range.start, event.time_range.end)
        if gpu and event.device_type == torch.autograd.DeviceType.CUDA:
            if not event.is_user_annotation:
                (network if "nccl" in name.lower() else computing).append(span)
        elif name.startswith("ProfilerStep"):
            steps.append(span)
        elif name.startswith("enumerate(DataLoader)"):
            data.append(span)
        elif not gpu and name.startswith("gloo:"):
            network.append(span)
        elif not gpu and name.startswith(ours):
            computing.append(span)
    total = covered(steps)
    computes = covered(computing)
    with_network = covered(computing + network)
    with_data = covered(computing + network + data)
    shares = [(with_data - with_network) / total, (with_network - computes) / total]
    return [total / len(steps) / 1e6, *shares, computes / total]


def covered(spans):
    """Return the length of what is covered by at least one of these (start, end)."""
    length = 0
    reached = float("-inf")
    for start, end in sorted(spans):
        length += max(0, end - max(start, reached))
        reached = max(reached, end)
    return length
