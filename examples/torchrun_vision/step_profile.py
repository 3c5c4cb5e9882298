"""The profiler, for --profile: what the time of a step goes to, and a trace of it for Perfetto."""

import functools
import json
import os

import torch
import torch.distributed as dist

import plumbing


def make_profiler(args, progress):
    """Return a profiler that records 5 steps, after the first 3, and reports; None without --profile.

    Nor is there one if a resumed run has fewer steps left: it has to end all the same.
    """
    steps = args.epochs * args.steps_per_epoch - progress["step"]
    if not args.profile or (args.resume and steps < 8):
        return None
    if steps < 8:
        plumbing.fail(f"--profile needs 8 steps, and this run has {steps} to do: raise --epochs, or lower --batch-size")
    if not torch.cuda.is_available():
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else it logs an error: no GPU
    schedule = torch.profiler.schedule(wait=1, warmup=2, active=5, repeat=1)
    return torch.profiler.profile(schedule=schedule, on_trace_ready=functools.partial(report_profile, args))


def mark_steps(args, train_loader, profiler):
    """Yield the batches of the loader, and tell the profiler, if there is one, where an optimizer step ends."""
    plumbing.checks.losses["loader"] = train_loader  # whose samples a loss that is not finite is traced back to
    for number, batch in enumerate(train_loader, 1):
        yield batch
        if profiler and number % args.gradient_accumulation_steps == 0:
            profiler.step()


def report_profile(args, profiler):
    """Write this process's trace; print on rank 0 what the time of a step goes to, as a mean over all processes."""
    folder, rank = args.output_dir / "profile", dist.get_rank()
    torch.profiler.tensorboard_trace_handler(str(folder), f"rank{rank}")(profiler)
    found = plumbing.gather(shares_of_a_step(profiler.events()))
    if rank > 0:
        return
    seconds, data, network, computing = (sum(values) / args.world_size for values in zip(*found, strict=True))
    print(f"profile: a step takes {seconds:.3f} s, the mean of 5 steps and of all processes; traces: {folder}")
    other = 1 - data - network - computing
    shares = {"waits for data": data, "waits for the network": network, "computes": computing}
    shares |= {"does other things": other}
    for name, share in shares.items():
        print(f"profile: {name:21} {share:6.1%}")
    path = args.output_dir / "run.json"
    run = json.loads(path.read_text()) | {"profile": {"seconds": seconds, "shares": shares}}
    plumbing.write(path, lambda file: file.write(json.dumps(run, indent=1).encode()))
    advice = "computing takes most of it: more processes, --precision bf16, a smaller model"
    if data > max(network, 0.2):
        advice = "reading data is too slow: more workers or cores, smaller files, a faster disk"
    elif network > 0.2:
        advice = "the network or a slower process is waited for: a larger --batch-size means fewer exchanges"
    elif other > computing:
        advice = "starting the work, evaluation or saving takes most of it: a larger --batch-size"
    print(f"profile: {advice}")


def shares_of_a_step(events):
    """Return the seconds of a step, and its shares that wait for data, wait for the network, and compute.

    What happens at the same time counts once: as computing, else as the network, else as data.
    """
    steps, data, network, computing = [], [], [], []
    gpu = any(event.device_type == torch.autograd.DeviceType.CUDA for event in events)
    for event in events:
        span, name = (event.time_range.start, event.time_range.end), event.name
        if gpu and event.device_type == torch.autograd.DeviceType.CUDA:
            if not event.is_user_annotation:
                (network if "nccl" in name.lower() else computing).append(span)
        elif name.startswith("ProfilerStep"):
            steps.append(span)
        elif name.startswith("enumerate(DataLoader)"):
            data.append(span)
        elif not gpu and name.startswith("gloo:"):
            network.append(span)
        elif not gpu and name.startswith(("aten::", "autograd::", "DistributedDataParallel", "Optimizer.step")):
            computing.append(span)
    total = covered(steps)
    busy = [covered(computing), covered(computing + network), covered(computing + network + data)]
    shares = [(busy[2] - busy[1]) / total, (busy[1] - busy[0]) / total, busy[0] / total]
    return [total / len(steps) / 1e6, *shares]


def covered(spans):
    """Return the length of what is covered by at least one of these (start, end)."""
    length, reached = 0, float("-inf")
    for start, end in sorted(spans):
        length += max(0, end - max(start, reached))
        reached = max(reached, end)
    return length
