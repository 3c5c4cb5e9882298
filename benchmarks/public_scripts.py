"""The public scripts that peers.py runs, and the edits that give each the work of the examples beside it.

The edits set device and backend, data folder, model, optimizer and batch, and print the time: see peers.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import BATCH

ADAMW = "torch.optim.AdamW(model.parameters(), lr=1e-3)"
OUR_MODEL = "from common.models import ConvNet\n"
EPOCHS = "int(__import__('os').environ['EPOCHS'])"  # which peers.py sets, for scripts that have no argument for it


@dataclass(frozen=True)
class Work:
    """What an example and the public scripts beside it train."""

    words: tuple[str, ...] = ("--dataset=mnist", "--data-dir=../data")  # that our train.py gets
    batch: int = BATCH  # samples of a batch of each process
    unit: str = "images"  # what the speed counts
    size: int = 1  # units of a sample


TOKENS, CONTEXT, WIDTH, LAYERS = 20_000, 64, 256, 4  # of fsdp's random source and model: 3.2 million weights
LORA = {"context": 32, "rank": 4, "alpha": 8, "repeats": 3}  # "repeats": of its text, so that an epoch is not too short
WORKS = {
    "fsdp": Work(
        (f"--tokens={TOKENS}", f"--context={CONTEXT}", f"--width={WIDTH}", f"--layers={LAYERS}"),
        batch=8,
        unit="tokens",
        size=CONTEXT,
    ),
    "lora": Work(
        ("--model-dir=../data/model", "--text-file=../data/text.txt"), batch=4, unit="tokens", size=LORA["context"]
    ),
    "torchrun_vision": Work(("--data-dir=../data/images", "--workers=1"), batch=16),
}


def clock(rank_0: str, samples: str, step: str = "", steps: str = "") -> str:
    """Return a statement that prints, where `rank_0` holds, the time and how many samples a process has an epoch.

    It stands where an epoch begins and where it ends. With `step` and `steps` it stands in a loop over the steps of all
    epochs, of which each has so many: there it prints at the beginning of each, which is the end of the one before.
    """
    line = f"clock: {{__import__('time').perf_counter()}} {{{samples}}} samples "  # one argument: written as a whole
    times, now = (f" * (1 + ({step} > 0))", f" and {step} % ({steps}) == 0") if step else ("", "")
    return f'print(f"{line}"{times}, flush=True) if {rank_0}{now} else 0\n'


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
        return f"{self.repository}@{self.commit[:7]}: {'/'.join(Path(next(iter(self.files))).parts[-2:])}"


CSC = ("CSCfi/pytorch-ddp-examples", "4467e84197ea364e4b4629e96f78e19e3c3a5907")
HOROVOD = ("horovod/horovod", "2626dc87a3a8eb8fb7d2216198ce45bce0f9e65a")
PYTORCH = ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8")
MILA = ("mila-iqia/mila-docs", "12229ef44970bc65d1f878217e1953bcb946af6e")
ACCELERATE = ("huggingface/accelerate", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83")
CSC_CLOCK = clock("verbose", "len(train_sampler)")
HOROVOD_CLOCK = clock("hvd.rank() == 0", "len(train_sampler)")
LIGHTNING_CLOCK = clock("self.global_rank == 0", "len(self.trainer.train_dataloader.sampler)")
DEEPSPEED_CLOCK = clock("model_engine.global_rank == 0", "len(train_loader.data_sampler)")
PYTORCH_CLOCK = clock("self.gpu_id == 0", "len(self.train_data.sampler)")
MILA_CLOCK = clock("is_master", "len(train_sampler)")
FABRIC_CLOCK = clock("fabric.is_global_zero", "len(train_dataset) // fabric.world_size")
ACCELERATE_CLOCK = clock("accelerator.is_main_process", "len(train_dataset) // accelerator.num_processes")
TENSORFLOW, FSDP2 = ("hvd.rank() == 0", "size"), ("rank == 0", "count * batch_size")
TENSORFLOW_CLOCK, TENSORFLOW_STEP = clock(*TENSORFLOW), clock(*TENSORFLOW, "batch", f"size // {BATCH}")
FSDP2_CLOCK, FSDP2_STEP = clock(*FSDP2), clock(*FSDP2, "step", "count")
TRAINER_CLOCK = clock("args.process_index == 0", "len(train_data) // args.world_size")
TORCHVISION_CLOCK = clock("utils.is_main_process()", "len(train_sampler)")

FSDP_IMPORTS = "import torch.nn.functional as F\n\nfrom common.data import Tokens, markov_tokens\n"
FSDP_IMPORTS += "from common.models import TinyGPT\n"
FSDP_SAMPLES = f"samples = Tokens(markov_tokens({TOKENS})[0][:{TOKENS * 9 // 10}], {CONTEXT})\n"
FSDP_MODEL = f"TinyGPT(context={CONTEXT}, width={WIDTH}, layers={LAYERS})"

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
        *HOROVOD,
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
        *PYTORCH,
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
        *MILA,
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
    "fabric": Peer(
        "Lightning-AI/pytorch-lightning",
        "7f0c3436cd3f6ad3753125672024fc415cbcb414",
        ours=("ddp_spawn",),
        command="fabric run train_fabric.py --accelerator=cpu --strategy=ddp --devices={n} --epochs={epochs} "
        f"--batch-size={BATCH}",
        files={
            "examples/fabric/image_classifier/train_fabric.py": [
                (1, 'path.join(path.dirname(__file__), "..", "..", "..", "Datasets")', '"data"'),
                (2, "download=fabric.is_global_zero", "download=False"),
                (1, "class Net(nn.Module)", f"{OUR_MODEL}\n\nclass Net(nn.Module)"),
                (1, "model = Net()", "model = nn.Sequential(ConvNet(), nn.LogSoftmax(1))"),
                (1, "optim.Adadelta(model.parameters(), lr=hparams.lr)", ADAMW),
                (1, "        # TRAINING LOOP\n", f"        {FABRIC_CLOCK}"),
                # Else one run in some ends with an abort in Gloo's threads, after all its work.
                (
                    1,
                    "    if hparams.save_model:\n",
                    "    torch.distributed.destroy_process_group()\n    if hparams.save_model:\n",
                ),
                (1, "        scheduler.step()\n", f"        {FABRIC_CLOCK}        scheduler.step()\n"),
            ]
        },
    ),
    # Its images are files; here MNIST has them as PIL images already. It has no argument for the number of epochs.
    "accelerate": Peer(
        *ACCELERATE,
        ours=("ddp_spawn",),
        command="torchrun --standalone --nproc-per-node={n} cv_example.py --cpu --data_dir=data",
        files={
            "examples/cv_example.py": [
                (1, "from timm import create_model\n", f"from torchvision.datasets import MNIST\n{OUR_MODEL}"),
                (
                    1,
                    "    stem = fname.split(os.path.sep)[-1]\n"
                    '    return re.search(r"^(.*)_\\d+\\.jpg$", stem).groups()[0]',
                    "    return fname[1]",
                ),
                (
                    1,
                    'PIL.Image.open(fname)\n        image = raw_image.convert("RGB")',
                    "fname\n        image = fname[0]",
                ),
                (
                    1,
                    "[os.path.join(args.data_dir, fname) for fname in os.listdir(args.data_dir) "
                    'if fname.endswith(".jpg")]',
                    "list(MNIST(args.data_dir))",
                ),
                (1, 'create_model("resnet50d", pretrained=True, num_classes=len(label_to_id))', "ConvNet()"),
                (1, "        param.requires_grad = False\n    for param in model.get_classifier().parameters():\n", ""),
                (1, 'model.default_cfg["mean"]', "[0.1307]"),
                (1, 'model.default_cfg["std"]', "[0.3081]"),
                (1, "torch.optim.Adam(params=model.parameters(), lr=lr / 25)", ADAMW),
                (1, '"lr": 3e-2, "num_epochs": 3', f'"lr": 1e-3, "num_epochs": {EPOCHS}'),
                (1, '"batch_size": 64, "image_size": 224', f'"batch_size": {BATCH}, "image_size": 28'),
                (1, "        model.train()\n", f"        {ACCELERATE_CLOCK}        model.train()\n"),
                (1, "        model.eval()\n", f"        {ACCELERATE_CLOCK}        model.eval()\n"),
            ]
        },
    ),
    # It has no epochs: an epoch is as many steps as the images are batches.
    "horovod_tensorflow2": Peer(
        *HOROVOD,
        ours=("horovod_tensorflow",),
        command="horovodrun --gloo -np {n} python tensorflow2_mnist.py",
        files={
            "examples/tensorflow2/tensorflow2_mnist.py": [
                (
                    1,
                    "    (mnist_images, mnist_labels), _ = \\\n"
                    "        tf.keras.datasets.mnist.load_data(path='mnist-%d.npz' % hvd.rank())\n",
                    "    import numpy\n"
                    "    raw = 'data/MNIST/raw/train-'\n"
                    "    mnist_images = numpy.fromfile(raw + 'images-idx3-ubyte', 'u1', offset=16)\n"
                    "    mnist_images = mnist_images.reshape(-1, 28, 28)\n"
                    "    mnist_labels = numpy.fromfile(raw + 'labels-idx1-ubyte', 'u1', offset=8)\n"
                    f"    size = len(mnist_images) // ({BATCH} * hvd.size()) * {BATCH}\n",
                ),
                (1, "batch(128)", f"batch({BATCH})"),
                (1, "        tf.keras.layers.Dropout(0.25),\n", ""),
                (1, "        tf.keras.layers.Dropout(0.5),\n", ""),
                (
                    1,
                    "tf.optimizers.Adam(0.001 * hvd.size())",
                    "tf.keras.optimizers.AdamW(1e-3, weight_decay=0.01, epsilon=1e-8)",
                ),
                # A variable of Keras 3 holds the one of TensorFlow in `value`.
                (
                    1,
                    "tape.gradient(loss_value, mnist_model.trainable_variables)",
                    "tape.gradient(loss_value, [v.value for v in mnist_model.trainable_variables])",
                ),
                (1, "(mnist_model.variables, root_rank", "([v.value for v in mnist_model.variables], root_rank"),
                (1, "(opt.variables(), root_rank", "([v.value for v in opt.variables], root_rank"),
                (1, "dataset.take(10000 // hvd.size())", f"dataset.take({EPOCHS} * size // {BATCH})"),
                (
                    1,
                    "        loss_value = training_step(",
                    f"        {TENSORFLOW_STEP}        loss_value = training_step(",
                ),
                (
                    1,
                    "    # Horovod: save checkpoints only on",
                    f"    {TENSORFLOW_CLOCK}    # Horovod: save checkpoints only on",
                ),
            ]
        },
    ),
    # The only one beside fsdp: accelerate refuses its ParallelismConfig on CPUs and leaves FSDP out there. The model of
    # this script is a GPT of the same kind; its tokens are random numbers, new in each step, and its loss is a sum.
    "pytorch_fsdp2": Peer(
        *PYTORCH,
        ours=("fsdp",),
        command="torchrun --standalone --nproc-per-node={n} example.py",
        files={
            "distributed/FSDP2/example.py": [
                (1, "    if not verify_min_gpu_count(min_gpus=_min_gpu_count):\n", "    if False:\n"),
                (1, "from model import ModelArgs, Transformer\n", FSDP_IMPORTS),
                (1, "from utils import inspect_mixed_precision, inspect_model\n", ""),
                (1, ", device_id=device)", ")"),
                (1, "    vocab_size = 1024\n    batch_size = 32\n", f"    batch_size = {WORKS['fsdp'].batch}\n"),
                (
                    1,
                    "    model_args = ModelArgs(\n        n_layers=10,\n        n_heads=4,\n"
                    "        vocab_size=vocab_size,\n        max_seq_len=seq_len,\n        dropout_p=0,\n    )\n",
                    f"    {FSDP_SAMPLES}    count = len(samples) // batch_size // torch.distributed.get_world_size()\n",
                ),
                (1, "Transformer(model_args)", FSDP_MODEL),
                (1, "    for layer in model.layers:\n", "    for layer in model.blocks:\n"),
                (1, "    inspect_model(model)\n", ""),
                (
                    1,
                    "        model.reset_parameters()\n",
                    "        [torch.nn.init.normal_(weight, std=0.02) for weight in model.parameters()]\n",
                ),
                (1, "torch.optim.Adam(model.parameters(), lr=1e-2)", ADAMW),
                (
                    1,
                    "    for _ in range(10):\n",
                    f"    for step in range({EPOCHS} * count):\n        {FSDP2_STEP}",
                ),
                (
                    1,
                    "x = torch.randint(0, vocab_size, (batch_size, seq_len), device=device)",
                    "x, y = samples[torch.randint(len(samples), (batch_size,))]",
                ),
                (1, "model(x).sum()", "F.cross_entropy(model(x).flatten(0, 1), y.flatten())"),
                (1, "        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)\n", ""),
                (1, "    checkpointer.save(model, optim)\n", f"    {FSDP2_CLOCK}    checkpointer.save(model, optim)\n"),
            ],
            "distributed/FSDP2/checkpoint.py": [],
        },
    ),
    # peft's example of transformers' Trainer; the other examples of peft with Trainer have the same lines.
    "peft": Peer(
        "huggingface/peft",
        "5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40",
        ours=("lora",),
        command="torchrun --standalone --nproc-per-node={n} olora_finetuning.py --base_model=data/model "
        "--data_path=data/samples --num_epochs={epochs} --device_map=cpu --dtype=float32 --lora_dropout=0 "
        f"--batch_size={WORKS['lora'].batch} --lora_r={LORA['rank']} --lora_alpha={LORA['alpha']} "
        "--lora_target_modules=all-linear --learning_rate=5e-3 --eval_step=1000000 --save_step=1000000",
        files={
            "examples/olora_finetuning/olora_finetuning.py": [
                (1, "init_lora_weights=init_lora_weights", "init_lora_weights=True"),
                (
                    1,
                    "        full_prompt = generate_prompt(example)\n"
                    "        tokenized_full_prompt = tokenize(full_prompt)\n        return tokenized_full_prompt\n",
                    '        return example | {"labels": example["input_ids"]}\n',
                ),
                (1, 'optim="adamw_torch"', 'optim="adamw_torch", weight_decay=0.01, use_cpu=True'),
                (
                    1,
                    "    trainer.train()\n",
                    "    class Clock(transformers.TrainerCallback):\n"
                    f"        def on_epoch_begin(self, args, *_, **__):\n            {TRAINER_CLOCK}"
                    f"        def on_epoch_end(self, args, *_, **__):\n            {TRAINER_CLOCK}"
                    "    trainer.add_callback(Clock)\n    trainer.train()\n",
                ),
            ]
        },
    ),
    "torchvision": Peer(
        "pytorch/vision",
        "428a54c96e82226c0d2d8522e9cbfdca64283da0",
        ours=("torchrun_vision",),
        command="torchrun --standalone --nproc-per-node={n} train.py --device=cpu --data-path=data/images --workers=1 "
        f"--batch-size={WORKS['torchrun_vision'].batch} --epochs={{epochs}} --opt=adamw --lr=5e-4 --weight-decay=0.01 "
        "--train-crop-size=32 --val-resize-size=36 --val-crop-size=32",
        files={
            "references/classification/train.py": [
                (1, "device_ids=[args.gpu]", ""),
                (
                    1,
                    "        train_one_epoch(model,",
                    f"        {TORCHVISION_CLOCK}        train_one_epoch(model,",
                ),
                (1, "        lr_scheduler.step()\n", f"        {TORCHVISION_CLOCK}        lr_scheduler.step()\n"),
            ],
            "references/classification/utils.py": [
                (1, "    torch.cuda.set_device(args.gpu)\n", ""),
                (1, '"nccl"', '"gloo"'),
                (1, ', device="cuda")', ")"),
            ],
            "references/classification/presets.py": [],
            "references/classification/sampler.py": [],
            "references/classification/transforms.py": [],
        },
    ),
    "mila_imagenet": Peer(
        *MILA,
        ours=("torchrun_vision",),
        command="env SLURM_JOB_ID=1 SLURM_CPUS_PER_TASK=1 SCRATCH=. torchrun --standalone --nproc-per-node={n} main.py "
        f"--batch_size={WORKS['torchrun_vision'].batch} --epochs={{epochs}} --learning_rate=5e-4 --weight_decay=0.01 "
        "--model_name=resnet18 --dataset_path=data/images",
        files={
            "docs/examples/advanced/imagenet/main.py": [
                (1, "    assert torch.cuda.is_available() and torch.cuda.device_count() > 0\n", ""),
                (1, "    torch.cuda.set_device(LOCAL_RANK)\n", ""),
                # Its log in the web, which an argument of it switches off, too.
                (1, "import wandb\n", "from unittest.mock import MagicMock\n\nwandb = MagicMock()\n"),
                (1, 'backend="nccl"', 'backend="gloo"'),
                (1, 'torch.device("cuda", LOCAL_RANK)', 'torch.device("cpu")'),
                (1, "device_ids=[LOCAL_RANK], output_device=LOCAL_RANK", ""),
                (2, ", device_ids=[LOCAL_RANK]", ""),
                (1, "op=ReduceOp.AVG", "op=ReduceOp.SUM"),  # which Gloo has
                # Its processes would race for a link.
                (1, 'if not (_checkpoints_dir := Path("checkpoints")).exists():', "if False:"),
                (1, "    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)\n", ""),  # it is for GPUs only
                (1, "torch.cuda.Stream(device=device)", "contextlib.nullcontext()"),
                (1, "torch.cuda.stream(data_transfer_cuda_stream)", "data_transfer_cuda_stream"),
                (
                    1,
                    "from torchvision.datasets import ImageNet\n",
                    "from torchvision.datasets import ImageFolder\n\n\ndef ImageNet(root, transform, split):\n"
                    "    return ImageFolder(root / split, transform)\n\n\n",
                ),
                (1, "        from prepare_data import prepare_imagenet\n", ""),
                (1, "        prepare_imagenet(path)\n", ""),
                (1, "RandomResizedCrop(224)", "RandomResizedCrop(32)"),
                (1, "Resize(256)", "Resize(36)"),
                (1, "CenterCrop(224)", "CenterCrop(32)"),
                (1, "num_classes=1000, **kwargs", "num_classes=6, **kwargs"),
                (1, "        epoch_loss = 0.0\n", f"        {MILA_CLOCK}        epoch_loss = 0.0\n"),
                (1, "        progress_bar.close()\n", f"        {MILA_CLOCK}        progress_bar.close()\n"),
            ]
        },
    ),
}
