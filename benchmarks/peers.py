"""Public scripts beside our examples, in one run: `nox -s bench -- --peers`, or `python -m benchmarks.peers`.

    python -m benchmarks.peers                           # fetches the scripts from GitHub, once, into results/sources
    python -m benchmarks.peers --sources FOLDER          # there is no internet: FOLDER has clones of the repositories
    python -m benchmarks.peers --only csc_ddp pytorch    # some of them, and the examples that belong to these
    python -m benchmarks.peers --precisions fp32 bf16    # ours in bf16, too, relative to the public script in fp32

For figures that can be kept, run it on an idle machine. It writes peers.csv (a row for each run) and peers.md (the
table) to the folder --output, and the log of a run that fails: peers-NAME.log. A script that fails, or that is not what
our edits were written for, has a row in the table that says so; the others are measured all the same.

The clone of OWNER/NAME is FOLDER/OWNER+NAME or FOLDER/OWNER+NAME/repo, with a work tree or without.

The same for all: the ConvNet of common/, torch.optim.AdamW at 1e-3, batch 64 per process, fp32, --processes processes
on this machine over Gloo, the same files in MNIST's format with random images, OMP_NUM_THREADS = cores // processes (by
default a process uses all cores, under torchrun one; Horovod's script sets 1 by itself). PEERS has the edits that make
it so. All else is as published: how images are read and transformed, loader workers,
`loss.item()`, logging, settings of the framework. Speed is that of all processes in the training part of an epoch,
evaluation not counted, the median of all epochs but the first. In a round each script runs once, ours and theirs in
turn; a ratio is the median of those of the rounds. Loader workers start anew in each epoch, so that they cost more with
the default --images than with the 60,000 of MNIST.

They run in one environment with the requirements of the examples and of tests/. Mila's script needs rich and tqdm, too,
which the requirements of lora and lightning bring along. Where rich is installed, Lightning draws CSC's progress bar
with it.
"""

import argparse
import os
import random
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.measure import BATCH, machine, positive, read_metrics, speed
from harness.launchers import LAUNCHERS, ROOT, copy_example
from harness.runs import Run

GITHUB, CACHE = "https://github.com", ROOT / "results" / "sources"
ADAMW = "torch.optim.AdamW(model.parameters(), lr=1e-3)"
OUR_MODEL = "from common.models import ConvNet\n"
SECONDS = 3600  # that one run may take
Way = tuple[str, str]  # what is run, a public script or an example, and its precision


class CannotRun(Exception):
    """A script gives no figure; the message is one line that says why."""


def clock(rank_0: str, images: str) -> str:
    """Return a statement that prints, where `rank_0` holds, the time and how many images a process has an epoch."""
    line = f"clock: {{__import__('time').perf_counter()}} {{{images}}} images"  # one argument: it is written as a whole
    return f'print(f"{line}", flush=True) if {rank_0} else 0\n'


@dataclass(frozen=True)
class Peer:
    """A public script."""

    repository: str  # on GitHub
    commit: str
    ours: tuple[str, ...]  # the examples that it is compared with
    command: str  # with {n} for the number of processes, and {epochs}
    # The files that it needs, the script first, and the edits of each: how often the old text occurs, the old, the new.
    files: Mapping[str, Sequence[tuple[int, str, str]]]

    @property
    def title(self) -> str:
        """The script as the table names it."""
        return f"{self.repository}@{self.commit[:7]}: {Path(next(iter(self.files))).name}"


CSC = ("CSCfi/pytorch-ddp-examples", "4467e84197ea364e4b4629e96f78e19e3c3a5907")
CSC_CLOCK = clock("verbose", "len(train_sampler)")
HOROVOD_CLOCK = clock("hvd.rank() == 0", "len(train_sampler)")
LIGHTNING_CLOCK = clock("self.global_rank == 0", "len(self.trainer.train_dataloader.sampler)")
DEEPSPEED_CLOCK = clock("model_engine.global_rank == 0", "len(train_loader.data_sampler)")
PYTORCH_CLOCK = clock("self.gpu_id == 0", "len(self.train_data.sampler)")
MILA_CLOCK = clock("is_master", "len(train_sampler)")

PEERS = {
    "csc_ddp": Peer(
        *CSC,
        ours=("ddp_spawn", "torchrun_multinode"),
        command="torchrun --standalone --nproc-per-node={n} mnist_ddp.py --epochs={epochs}",
        files={
            "mnist_ddp.py": [
                (1, "backend='nccl'", "backend='gloo'"),
                (1, "    torch.cuda.set_device(local_rank)\n", ""),
                (2, ".cuda(non_blocking=True)", ""),
                (1, "CrossEntropyLoss().cuda()", "CrossEntropyLoss()"),
                (1, ", device_ids=[local_rank]", ""),
                (1, "    model = ConvNet().cuda()\n", f"    {OUR_MODEL}    model = ConvNet()\n"),
                (1, "torch.optim.SGD(model.parameters(), 1e-4)", ADAMW),
                (1, "batch_size = 100", f"batch_size = {BATCH}"),
                (1, "        tot_loss = 0\n", f"        {CSC_CLOCK}        tot_loss = 0\n"),
                (1, "        if verbose:\n", f"        {CSC_CLOCK}        if verbose:\n"),
            ]
        },
    ),
    "csc_lightning": Peer(
        *CSC,
        ours=("lightning",),
        command="python mnist_lightning_ddp.py --gpus={n} --epochs={epochs}",
        files={
            "mnist_lightning_ddp.py": [
                (1, "import mlflow\n", OUR_MODEL),
                (1, "    mlflow.autolog()\n", ""),  # it would make the script slower, and needs a server or a folder
                (1, "accelerator='gpu'", "accelerator='cpu'"),
                (1, "MNIST(os.getcwd(), ", 'MNIST("data", '),
                # The other layers stay as steps that do nothing.
                (1, "self.fc = nn.Linear(7*7*32, num_classes)", "self.layer1, self.layer2, self.fc = LAYERS"),
                (1, "class LitConvNet", "LAYERS = ConvNet(), nn.Identity(), nn.Identity()\n\n\nclass LitConvNet"),
                (1, "torch.optim.SGD(self.parameters(), 1e-4)", ADAMW.replace("model", "self")),
                (1, "batch_size = 100", f"batch_size = {BATCH}"),
                (
                    1,
                    "    def configure_optimizers(self):\n",
                    f"    def on_train_epoch_start(self):\n        {LIGHTNING_CLOCK}\n"
                    f"    def on_train_epoch_end(self):\n        {LIGHTNING_CLOCK}\n"
                    "    def configure_optimizers(self):\n",
                ),
            ]
        },
    ),
    "csc_deepspeed": Peer(
        *CSC,
        ours=("deepspeed",),
        command="torchrun --standalone --nproc-per-node={n} mnist_deepspeed.py --epochs={epochs} --deepspeed "
        "--deepspeed_config=ds_config.json",
        files={
            "mnist_deepspeed.py": [
                (1, "init_distributed(", 'init_distributed("gloo", '),
                (1, "CrossEntropyLoss().cuda()", "CrossEntropyLoss()"),
                (2, ".to(model_engine.local_rank)", ".to(model_engine.device)"),
                (1, "    model = ConvNet()\n", f"    {OUR_MODEL}    model = ConvNet()\n"),
                (1, "        tot_loss = 0\n", f"        {DEEPSPEED_CLOCK}        tot_loss = 0\n"),
                (1, "        if local_rank == 0:\n", f"        {DEEPSPEED_CLOCK}        if local_rank == 0:\n"),
            ],
            "ds_config.json": [
                (1, '"train_batch_size": 400', f'"train_micro_batch_size_per_gpu": {BATCH}'),
                (1, '"type": "Adam"', '"type": "AdamW"'),
                (1, "0.8,", "0.9,"),
                (1, '"weight_decay": 3e-7', '"weight_decay": 0.01, "torch_adam": true'),
            ],
        },
    ),
    "horovod": Peer(
        "horovod/horovod",
        "2626dc87a3a8eb8fb7d2216198ce45bce0f9e65a",
        ours=("horovod_cpu",),
        command="horovodrun --gloo -np {n} python pytorch_mnist.py --no-cuda --data-dir=data --epochs={epochs} "
        f"--batch-size={BATCH}",
        files={
            "examples/pytorch/pytorch_mnist.py": [
                (1, 'os.path.expanduser("~/.horovod_lock")', '".horovod_lock"'),
                # It has the logarithm of the softmax in its model, and so has this.
                (1, "    model = Net()\n", f"    {OUR_MODEL}    model = nn.Sequential(ConvNet(), nn.LogSoftmax(1))\n"),
                (1, "optim.SGD(", "optim.AdamW("),
                (1, f"lr=args.lr * lr_scaler,\n{26 * ' '}momentum=args.momentum)", "lr=1e-3)"),
                (
                    1,
                    "            train_epoch(epoch)\n",
                    f"            {HOROVOD_CLOCK}            train_epoch(epoch)\n            {HOROVOD_CLOCK}",
                ),
            ]
        },
    ),
    # Of PyTorch's own examples the one that trains with DDP under torchrun, by processes that torchrun starts on this
    # node, and saves snapshots. Its data set is random and in memory, a tensor for each sample: so are the images here.
    "pytorch": Peer(
        "pytorch/examples",
        "77f55b912142e11fcfdf5b530231fb9c52f181e8",
        ours=("torchrun_multinode",),
        command="torchrun --standalone --nproc-per-node={n} multigpu_torchrun.py {epochs} {epochs} "
        f"--batch_size={BATCH}",
        files={
            "distributed/ddp-tutorial-series/multigpu_torchrun.py": [
                (1, '    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n', ""),
                (1, 'backend="nccl"', 'backend="gloo"'),
                (3, ".to(self.gpu_id)", ""),
                (1, ", device_ids=[self.gpu_id]", ""),
                (
                    1,
                    "from datautils import MyTrainDataset\n",
                    "from torchvision.datasets import MNIST\nfrom torchvision.transforms import ToTensor\n" + OUR_MODEL,
                ),
                (1, "MyTrainDataset(2048)", 'list(MNIST("data", transform=ToTensor()))'),
                (1, "torch.nn.Linear(20, 1)", "ConvNet()"),
                (1, "torch.optim.SGD(model.parameters(), lr=1e-3)", ADAMW),
                (
                    1,
                    "            self._run_epoch(epoch)\n",
                    f"            {PYTORCH_CLOCK}            self._run_epoch(epoch)\n            {PYTORCH_CLOCK}",
                ),
            ]
        },
    ),
    "mila": Peer(
        "mila-iqia/mila-docs",
        "12229ef44970bc65d1f878217e1953bcb946af6e",
        ours=("torchrun_multinode",),
        command="torchrun --standalone --nproc-per-node={n} main.py --epochs={epochs} "
        f"--batch-size={BATCH} --learning-rate=1e-3 --weight-decay=0.01",
        files={
            "docs/examples/distributed/multi_gpu/main.py": [
                (1, "    assert torch.cuda.is_available() and torch.cuda.device_count() > 0\n", ""),
                (1, 'torch.device("cuda", 0)', 'torch.device("cpu")'),
                (1, "device_ids=[0], output_device=0", ""),
                (1, 'backend="nccl"', 'backend="gloo"'),
                (1, 'os.environ["SLURM_PROCID"]', 'os.environ["RANK"]'),
                (1, 'os.environ["SLURM_NTASKS"]', 'os.environ["WORLD_SIZE"]'),
                (2, '"SLURM_CPUS_PER_TASK"', '"OMP_NUM_THREADS"'),  # its loader workers: the cores of a process
                (1, "import CIFAR10\n", "import MNIST as CIFAR10\n"),
                (1, "from torchvision.models import resnet18\n", OUR_MODEL),
                (1, "resnet18(num_classes=10)", "ConvNet()"),
                (1, "        # Training loop\n", f"        {MILA_CLOCK}"),
                (1, "        progress_bar.close()\n", f"        {MILA_CLOCK}        progress_bar.close()\n"),
            ]
        },
    ),
}


def git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run git in a folder that is a repository; it does not look for one in the folders above."""
    variables = {"GIT_CEILING_DIRECTORIES": str(folder.parent.resolve()), "GIT_TERMINAL_PROMPT": "0"}
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)


def find_clone(peer: Peer, sources: Path) -> Path | None:
    """Return the folder of the clone that has the peer's commit, if there is one."""
    name = peer.repository.replace("/", "+")
    for folder in (sources / name, sources / name / "repo"):
        if folder.is_dir() and git(folder, "cat-file", "-e", f"{peer.commit}^{{commit}}").returncode == 0:
            return folder
    return None


def fetch(peer: Peer, sources: Path) -> Path:
    """Fetch the peer's commit, and no other, into a repository without a work tree; end with one line if it fails."""
    folder = sources / peer.repository.replace("/", "+")
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--bare")
    words = ["fetch", "--depth=1", f"{GITHUB}/{peer.repository}", f"{peer.commit}:refs/heads/{peer.commit[:7]}"]
    done = git(folder, *words)
    if done.returncode:
        why = " ".join(done.stderr.split())
        sys.exit(f"peers.py: error: cannot fetch {words[2]} ({why}): without internet use --sources, see --help")
    return folder


def find_clones(names: Sequence[str], sources: Path | None) -> dict[str, Path]:
    """Return the clones of these peers: those in `sources`, or those that are, or are now, in results/sources."""
    clones = {}
    for name in names:
        peer = PEERS[name]
        clone = find_clone(peer, sources or CACHE)
        if sources and not clone:
            place = f"{sources}/{peer.repository.replace('/', '+')}"
            sys.exit(f"peers.py: error: no clone in {place} that has the commit {peer.commit}: git clone it there")
        clones[name] = clone or fetch(peer, CACHE)
    return clones


def write_images(folder: Path, images: int) -> None:
    """Write random 28x28 images as MNIST's files, with a sixth as many for the test."""
    raw, generator = folder / "MNIST" / "raw", random.Random(0)
    raw.mkdir(parents=True)
    for part, size in (("train", images), ("t10k", images // 6)):
        header = struct.pack(">IIII", 0x803, size, 28, 28)  # the idx format: bytes in three dimensions
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + generator.randbytes(size * 28 * 28))
        labels = bytes(generator.choices(range(10), k=size))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, size) + labels)


def edited(text: str, edits: Sequence[tuple[int, str, str]]) -> str:
    """Return a script's text after the edits; raise CannotRun if it is not the one that they were written for."""
    for times, old, new in edits:
        if text.count(old) != times:
            where = f"{old.strip()!r} {text.count(old)} times, not {times}"
            raise CannotRun(f"cannot run: the script is not the one that this edit was written for: it says {where}")
        text = text.replace(old, new)
    return text


def last_words(stderr: str) -> str:
    """Return the line of stderr that says why a run failed: the last error, else the last line that has a word."""
    lines = [line.strip() for line in stderr.splitlines() if re.search(r"\w", line)]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception): \S", line)]
    return (errors or lines or ["nothing"])[-1]


def run(name: str, command: list[str], folder: Path, args: argparse.Namespace, **variables: str) -> str:
    """Run a script to its end and return what it has printed; if it fails, keep its log and raise CannotRun."""
    threads = max(1, len(os.sched_getaffinity(0)) // args.processes)
    try:
        done = Run(command, folder, {"OMP_NUM_THREADS": f"{threads}", **variables}).wait(SECONDS)
    except OSError as error:  # the program is not there
        raise CannotRun(f"cannot run: {error}") from error
    except AssertionError as error:
        raise CannotRun(f"failed: {str(error).partition(':')[0]}") from error
    if done.status:
        log = args.output / f"peers-{name}.log"
        log.write_text(done.stdout + done.stderr)
        raise CannotRun(f"failed: {last_words(done.stderr)} (see {log.name})")
    return done.stdout


def clocked(printed: str, args: argparse.Namespace) -> float:
    """Return the images/s of all processes, the median of all epochs but the first, from what `clock` has printed."""
    ticks = [(float(time), int(size)) for time, size in re.findall(r"clock: ([\d.]+) (\d+) images", printed)]
    if len(ticks) != 2 * args.epochs:
        raise CannotRun(f"failed: it printed the time {len(ticks)} times in {args.epochs} epochs")
    pairs = list(zip(ticks[::2], ticks[1::2], strict=True))[1:]
    return statistics.median(size * args.processes / (end - start) for (start, size), (end, _) in pairs)


def run_peer(name: str, clone: Path, folder: Path, args: argparse.Namespace) -> float:
    """Run a public script in a new folder beside `data`; return its images/s."""
    peer = PEERS[name]
    for path, edits in peer.files.items():
        text = git(clone, "show", f"{peer.commit}:{path}").stdout
        (folder / Path(path).name).write_text(edited(text, edits))
    command = peer.command.format(n=args.processes, epochs=args.epochs).split()
    variables = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}  # our model; works with any host name, as ours do
    return clocked(run(name, command, folder, args, **variables), args)


def run_ours(name: str, precision: str, folder: Path, args: argparse.Namespace) -> float:
    """Run one of our examples in a new folder beside `data`; return its images/s."""
    copy_example(ROOT / "examples" / name, folder / name)
    words = ["--dataset=mnist", "--data-dir=../data", f"--epochs={args.epochs}", f"--batch-size={BATCH}"]
    command = [*LAUNCHERS[name].command(args.processes), *words, f"--precision={precision}"]
    run(name, command, folder / name, args)
    return speed(read_metrics(folder / name / "output"))


def cells(args: argparse.Namespace, speeds: Sequence[report.Speed], failed: Mapping[Way, str]) -> list[dict[str, str]]:
    """Return the rows of the table: one for each public script, each example beside it, and its precision."""
    rates: dict[Way, dict[int, float]] = {}  # images/s by the number of the round
    for one in speeds:
        rates.setdefault((one.name, one.precision), {})[one.round] = one.samples_per_second
    rows = []
    for name in args.only:
        for way in ours_beside(name, args.precisions):
            theirs, ours = rates.get((name, "fp32"), {}), rates.get(way, {})
            ratios = [ours[number] / theirs[number] for number in sorted(theirs.keys() & ours.keys())]
            remarks = [f"{key[0]} {failed[key]}" for key in ((name, "fp32"), way) if key in failed]
            rows.append(
                {
                    "public script": PEERS[name].title,
                    "images/s": f"{statistics.median(theirs.values()):.0f}" if theirs else "",
                    "ours": f"{way[0]}, {way[1]}",
                    "images/s of ours": f"{statistics.median(ours.values()):.0f}" if ours else "",
                    "ours / theirs": report.spread(ratios) if ratios else "",
                    "remark": "; ".join(remarks).replace("|", "/"),
                }
            )
    return rows


def ours_beside(name: str, precisions: Sequence[str]) -> list[Way]:
    """Return the examples that a public script is compared with, in each precision."""
    return [(ours, precision) for ours in PEERS[name].ours for precision in precisions]


def measure(args: argparse.Namespace, clones: Mapping[str, Path]) -> None:
    """Run each public script and our examples in turn, as often as --rounds says, and write what was measured."""
    caption = (
        f"{time.strftime('%d %B %Y')}, {machine()}, {args.processes} processes, {args.images} images, batch {BATCH} "
        f"per process, median of {args.rounds} rounds, in each the median of the epochs from 2 to {args.epochs}"
    )
    print(caption, flush=True)
    ways = dict.fromkeys(way for name in args.only for way in [(name, "fp32"), *ours_beside(name, args.precisions)])
    speeds: list[report.Speed] = []
    failed: dict[Way, str] = {}
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="peers-") as temporary:
        write_images(Path(temporary, "data"), args.images)
        for number in range(args.rounds):
            for name, precision in ways:
                if (name, precision) in failed:
                    continue
                folder = Path(temporary, "run")
                folder.mkdir()
                (folder / "data").symlink_to("../data")
                try:
                    if name in PEERS:
                        rate = run_peer(name, clones[name], folder, args)
                    else:
                        rate = run_ours(name, precision, folder, args)
                except CannotRun as error:
                    failed[name, precision] = str(error)
                    print(f"{name} {error}", flush=True)
                else:
                    speeds.append(report.Speed(name, "", 1, args.processes, BATCH, precision, number, rate))
                    print(speeds[-1], flush=True)
                    report.write_csv(speeds, args.output / "peers.csv")
                shutil.rmtree(folder)
    report.finish(cells(args, speeds, failed), None, args.output / "peers.csv", caption)


def main() -> None:
    """Read the command line, find or fetch the scripts, and measure them."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.peers", description=__doc__, formatter_class=layout)
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS), help="public scripts (default: all)")
    parser.add_argument("--sources", type=Path, metavar="FOLDER", help="folder of clones; default: fetch from GitHub")
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32"], help="of our examples")
    parser.add_argument("--processes", type=positive, default=2)
    parser.add_argument("--images", type=positive, default=6000, help="for training")
    parser.add_argument("--epochs", type=positive, default=3, help="2 or more: the first does not count")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="folder for what is written")
    args = parser.parse_args()
    if args.epochs < 2:
        parser.error("--epochs 1: the first epoch does not count, so there must be a second")
    if args.images < args.processes * BATCH:
        parser.error(
            f"--images {args.images} are too few for a batch of {BATCH} for each of {args.processes} processes"
        )
    if args.sources and not args.sources.is_dir():
        parser.error(f"--sources {args.sources}: there is no such folder")
    measure(args, find_clones(args.only, args.sources))


if __name__ == "__main__":
    main()
