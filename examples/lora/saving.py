"""The Trainer calls the methods of LongRun, which decide when to save and stop, and write files."""

import math
import os
import shutil
import time
import zlib

import numpy as np
import torch
import torch.distributed as dist
from transformers import TrainerCallback

import longrun


def checksums(folder):
    return {path.name: zlib.crc32(np.memmap(path, mode="r")) for path in folder.glob("*")}


def find_folder(args, progress):
    """Return the Trainer's folder that checkpoint.pt names, after rank 0 has checked its files."""
    folder = args.output_dir / progress["folder"]
    damaged = longrun.rank == 0 and checksums(folder) != progress["files"]
    other = f"{folder} is damaged: restore a copy, or choose another --output-dir"
    longrun.agree(other if damaged else None)
    return str(folder)


class LongRun(TrainerCallback):
    def __init__(self, args, trainer, sampler, evaluate, stateful, progress):
        self.args, self.trainer, self.sampler, self.evaluate = args, trainer, sampler, evaluate
        self.stateful, self.progress = stateful, progress
        self.saving = self.stopping = False

    def on_train_begin(self, config, state, control, optimizer, lr_scheduler, **_):
        # The Trainer has loaded the saved learning rates. Scale them if --lr is another one.
        factor = self.args.lr / self.progress["lr"] if self.progress["lr"] else 1
        self.progress["lr"] = self.args.lr
        for group in optimizer.param_groups:
            group |= {name: group[name] * factor for name in longrun.RATES if name in group}
        lr_scheduler.base_lrs = [rate * factor for rate in lr_scheduler.base_lrs]

    def on_epoch_begin(self, config, state, control, **_):
        self.sampler.set_epoch(len(self.progress["history"]))  # another order in each epoch
        self.first, self.start = state.global_step, time.perf_counter()

    def on_step_begin(self, config, state, control, **_):
        # Each process gets its own random numbers (dropout), also after a resume.
        longrun.seed(self.args.seed, state.global_step, longrun.rank)

    def on_step_end(self, config, state, control, **_):
        longrun.alive(self.args.timeout)  # ends the process if the next call comes too late
        self.progress["step"] = state.global_step
        self.progress["epoch_step"] = state.global_step % self.sampler.steps
        # on_epoch_end saves the end of an epoch, after the test.
        if self.progress["epoch_step"] and self.ask() != longrun.GO_ON:
            self.save(control)

    def on_epoch_end(self, config, state, control, **_):
        """Add a row to metrics.csv, and save."""
        seconds = time.perf_counter() - self.start
        dist.all_reduce(self.trainer.sums)  # ddp: sum over all processes
        row = {"epoch": len(self.progress["history"]) + 1}
        row["train_loss"] = self.trainer.sums.item() / self.sampler.steps
        row["test_loss"] = self.evaluate()
        row["perplexity"] = math.exp(min(row["test_loss"], 700))
        speed = (state.global_step - self.first) * self.args.global_batch / seconds
        row |= {"samples_per_second": speed, "seconds": seconds, "world_size": longrun.size}
        self.progress["history"].append(row)
        self.trainer.sums.zero_()
        self.save(control)

    def ask(self):
        answer = torch.tensor(longrun.wish(self.args))
        dist.broadcast(answer, src=0)  # stop: rank 0 decides, and all stop after the same step
        self.stopping = answer == longrun.STOP
        return answer

    def save(self, control):
        """Have the Trainer save, unless losses or weights are wrong, which ends the run here."""
        trained = [weight for weight in self.trainer.model.parameters() if weight.requires_grad]
        longrun.check(trained, self.progress)
        control.should_save = self.saving = True
        longrun.alive(None)  # a save may take longer than a step

    def on_save(self, config, state, control, **_):
        """Write checkpoint.pt, which names the folder that the Trainer has just written."""
        folder = self.args.output_dir / f"checkpoint-{state.global_step}"
        os.sync()  # the files are on the disk before checkpoint.pt names them
        sums = self.trainer.sums.clone()
        dist.all_reduce(sums)  # ddp: waits for all processes; the checkpoint has the sum over all
        self.progress["folder"] = folder.name
        self.progress["files"] = checksums(folder) if longrun.rank == 0 else {}
        longrun.save_checkpoint(self.args, self.stateful, self.progress | {"sums": sums})
        self.saving = False
        if longrun.rank == 0:
            for old in set(self.args.output_dir.glob("checkpoint-*")) - {folder}:
                shutil.rmtree(old, ignore_errors=True)
        if not self.progress["epoch_step"] and len(self.progress["history"]) < self.args.epochs:
            self.ask()
        if self.stopping:
            longrun.end(self.args, self.progress, "stopped")  # exits; job.sh requeues the job
