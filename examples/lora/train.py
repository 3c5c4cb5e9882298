"""Fine-tune a language model with LoRA on several processes: TRL's SFTTrainer, started by torchrun.

Once:      python make_model.py     (writes a small model; your own: --model-dir FOLDER)
Locally:   torchrun --standalone --nproc-per-node=2 train.py
On SLURM:  sbatch run.slurm --epochs 10

LoRA freezes the model and trains adapters, two small matrices beside each of its linear layers.
Comments with a tag, such as "ddp:", mark what one process that trains all weights does not need.
"""

import argparse
import os
import warnings
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path

import datasets
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset
from transformers import PrinterCallback
from trl import SFTConfig, SFTTrainer

import inputs
import longrun
import saving


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = longrun.fail  # print the error as one line, without the usage
    add, positive = parser.add_argument, longrun.positive
    add("--model-dir", type=Path, default="model", help="model in Hugging Face's format")
    add("--text-file", type=Path, default="text.txt", help="a text, or JSON lines: NAME.jsonl")
    add("--context", type=lambda n: positive(n, 2), default=32, help="maximum tokens per sample")
    add("--full", action="store_true", help="train all weights, without adapters")
    add("--lora-rank", type=positive, default=4, help="rows of an adapter's matrix, often 8 to 64")
    add("--lora-alpha", type=float, default=8, help="adapters are scaled by alpha / rank")
    add("--lora-dropout", type=float, default=0.0, help="share of adapter inputs set to 0")
    add("--shard", action="store_true", help="each process keeps a part of the frozen model")
    add("--epochs", type=positive, default=5, help="total number, including those before a resume")
    add("--batch-size", type=positive, default=4, help="samples per batch of each process")
    add("--global-batch", type=positive, help="samples per step; sets --batch-size")
    add("--gradient-accumulation-steps", type=positive, default=1, help="batches per step")
    add("--gradient-checkpointing", action="store_true", help="less memory, a third more computing")
    add("--lr", type=float, default=5e-3, help="learning rate; for a pretrained model often 1e-4")
    add("--warmup-steps", type=lambda n: positive(n, 0), default=0, help="steps to reach --lr")
    add("--max-grad-norm", type=float, default=0.0, help="clip the gradients' norm; 0: do not")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16 is mixed")
    add("--seed", type=int, default=0, help="for initial adapters, shuffling and dropout")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    add("--timeout", type=positive, default=300, help="seconds per batch; 10 times that for a save")
    add("--checkpoint-every", type=float, metavar="MINUTES", help="also save within an epoch")
    add("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    add("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    add("--limit-steps", type=positive, help="steps and test batches per epoch, for a short trial")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node=2 train.py")
    if args.shard and args.full:
        parser.error("--shard divides a frozen model: for --full see the example fsdp")
    batches = int(os.environ["WORLD_SIZE"]) * args.gradient_accumulation_steps  # of all, per step
    args.global_batch = args.global_batch or args.batch_size * batches
    args.batch_size, rest = divmod(args.global_batch, batches)
    if rest or not args.batch_size:
        parser.error(f"--global-batch {args.global_batch} must be a multiple of {batches}")
    return args


def setup(args):
    """Join the process group; return this process's rank and the world size."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    longrun.prepare(args, rank, world_size, dist.all_gather_object, dist.destroy_process_group)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # torchrun: the number on this node
        torch.set_float32_matmul_precision("high")  # TF32: faster, less exact fp32 matrix products
        # ddp: NCCL for tensors on GPUs; Gloo for tensors on the CPU, such as the request to stop
        backend = "cpu:gloo,cuda:nccl"
    # torchrun: sets MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, which init_process_group reads
    dist.init_process_group(backend, timeout=timedelta(seconds=10 * args.timeout))
    warnings.simplefilter("ignore", FutureWarning)  # these packages warn about each other
    transformers.logging.disable_progress_bar()  # bars would fill a log file
    datasets.disable_progress_bars()
    longrun.alive(None)  # the first step has no time limit: it may compile kernels
    return rank, world_size


class WholeSteps(DistributedSampler):
    """The shuffled indices of this process, without those of an incomplete last step."""

    def __init__(self, args, data_set):
        # ddp: parts of equal length; a process with one more step would hang in backward()
        super().__init__(data_set, seed=args.seed, drop_last=True)
        steps = len(data_set) // args.global_batch
        if not steps:
            longrun.fail(f"the {len(data_set)} training samples are too few for one step")
        self.args, self.steps = args, min(steps, args.limit_steps or steps)

    def __len__(self):
        return self.steps * self.args.gradient_accumulation_steps * self.args.batch_size

    def __iter__(self):
        return islice(super().__iter__(), len(self))


class Trainer(SFTTrainer):
    """TRL's trainer, which has the loop over steps, and wraps the model in DDP."""

    def get_train_dataloader(self):
        return self.train_loader  # trl: its own loader would train on an incomplete last step

    def training_step(self, *args):
        # trl: the loss is the sum over this batch, divided by the number of targets in all batches
        # of this step, so that all targets have the same weight. ddp: averages the gradients
        loss = super().training_step(*args)
        self.sums += loss / dist.get_world_size()  # trl: multiplies by it, because DDP averages
        return loss

    def save_model(self, output_dir=None, *args, **kwargs):
        if not hasattr(self.model, "peft_config"):
            return super().save_model(output_dir, *args, **kwargs)
        # shard: save only the adapters; peft would gather the frozen model, too
        state = {n: w for n, w in self.model.named_parameters() if w.requires_grad}
        self.model.save_pretrained(output_dir, state_dict=state, is_main_process=longrun.rank == 0)


@torch.no_grad()
def evaluate(args, trainer, test_loader):
    """Return the mean loss over the targets of all processes."""
    model, first = trainer.model.eval(), trainer.data_collator([trainer.eval_dataset[0]])
    count = -(-len(trainer.eval_dataset) // (dist.get_world_size() * args.batch_size))
    batches, sums = iter(test_loader), torch.zeros(2).double().to(trainer.args.device)
    for _ in range(min(count, args.limit_steps or count)):
        batch = next(batches, None)
        # shard: all must call the model equally often; `first` is used when no batch is left
        named = {name: part.to(sums.device) for name, part in (batch or first).items()}
        labels = named.pop("labels")[:, 1:].flatten()  # cross_entropy ignores -100
        logits = model(**named, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        if batch:
            sums[0] += F.cross_entropy(logits, labels, reduction="sum")
            sums[1] += (labels != -100).sum()
        longrun.alive(args.timeout)
    dist.all_reduce(sums)  # ddp: sum over all processes; each must call this, or the others hang
    return (sums[0] / sums[1]).item()


def main(args):
    """Train as one of the processes that torchrun has started."""
    rank, world_size = setup(args)
    # Data and model: inputs.py reads them with the libraries transformers and datasets.
    tokenizer, model, shapes = inputs.load_model(args)
    train_set, test_set = inputs.load_data(args, tokenizer)
    # lora: W x becomes W x + (alpha / rank) B A x, and only A and B are trained. A is random, and B
    # is 0, so that training starts from the model as it was
    lora = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    # checkpoint.pt has only names and shapes of the model. The Trainer's own folder has the weights
    # that are trained, the optimizer's state and the rest.
    stateful = {"model": shapes if args.full else get_peft_model(shapes, lora)}
    # step: of the run; epoch_step: of the epoch; history: rows of metrics.csv; sums: of the losses.
    progress = {"step": 0, "epoch_step": 0, "history": [], "lr": args.lr}
    progress["sums"] = torch.zeros(1, dtype=torch.float64)
    what = f"{type(model).__name__} in {args.model_dir} on {args.text_file}"
    where = "nccl on cuda" if torch.cuda.is_available() else "gloo on cpu"
    progress = longrun.start(args, what, where, (train_set, test_set), stateful, progress)  # resume
    config = SFTConfig(
        str(args.output_dir),
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        activation_checkpointing=args.gradient_checkpointing,
        num_train_epochs=args.epochs,
        learning_rate=args.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=args.warmup_steps,
        weight_decay=0.01,
        max_grad_norm=args.max_grad_norm,
        max_length=args.context,
        seed=args.seed,
        bf16=args.precision == "bf16",
        torch_compile=args.compile,
        use_cpu=not torch.cuda.is_available(),  # trl: without this each process would train alone
        ddp_find_unused_parameters=False,
        save_strategy="no",  # saving.py decides when to save
        logging_strategy="no",
        disable_tqdm=True,
    )
    data = {"train_dataset": train_set, "eval_dataset": test_set, "processing_class": tokenizer}
    trainer = Trainer(model, config, peft_config=None if args.full else lora, **data)
    trainer.remove_callback(PrinterCallback)
    train_set, test_set = trainer.train_dataset, trainer.eval_dataset  # as tokens
    # ddp: a checkpoint has the sums of all processes: rank 0 takes them, the others start at 0
    trainer.sums = progress["sums"] = progress["sums"].to(config.device) * (rank == 0)
    sampler = WholeSteps(args, train_set)
    extra = {"collate_fn": trainer.data_collator, "pin_memory": torch.cuda.is_available()}
    trainer.train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, **extra)
    # ddp: reads each test sample once; DistributedSampler would repeat or leave out some
    test_part = Subset(test_set, range(rank, len(test_set), world_size))
    test = partial(evaluate, args, trainer, DataLoader(test_part, args.batch_size, **extra))
    run = saving.LongRun(args, trainer, sampler, test, stateful, progress)
    trainer.add_callback(run)
    try:
        before = saving.find_folder(args, progress) if progress["step"] else None
        trainer.train(resume_from_checkpoint=before)
        run.saving, name = True, "model" if args.full else "adapter"
        longrun.alive(None)
        trainer.save_model(str(args.output_dir / name))
    except Exception as error:
        if not run.saving:
            raise
        wrong = f"cannot write {args.output_dir}/checkpoint-{progress['step']} ({error})"
        longrun.fail(f"{wrong}: is the disk full? Free some space, then --resume")
    longrun.end(args, progress, "finished", name)


if __name__ == "__main__":
    main(parse_args())
