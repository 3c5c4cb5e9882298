"""The public scripts that peers.py runs, and the edits that give each the work of the examples beside it.

The edits set device and backend, data folder, model, optimizer and batch, and print the time: see peers.py.
They are keyed by line and column of the published file, and so by its checksum: see edits.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.edits import Edit, Source
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
    files: Mapping[str, Source]  # that it needs, the script first, with the edits of each

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

FSDP_IMPORTS = "import torch.nn.functional as F\n\nfrom tiny_gpt import TinyGPT\n"
FSDP_IMPORTS += "from token_data import Tokens, random_tokens\n"
FSDP_SAMPLES = f"samples = Tokens(random_tokens({TOKENS}, 256)[:{TOKENS * 9 // 10}], {CONTEXT})\n"
FSDP_MODEL = f"TinyGPT(context={CONTEXT}, width={WIDTH}, layers={LAYERS})"

PEERS = {
    "csc_ddp": Peer(
        *CSC,
        ours=("ddp_spawn", "torchrun_multinode"),
        command="torchrun --standalone --nproc-per-node={n} mnist_ddp.py --epochs={epochs}",
        files={
            "mnist_ddp.py": Source(
                "083444839aed65bae973be8b14de68a4334551a8d2a42c983af43daab0ce1749",
                [
                    Edit(41, 37, 4, "gloo"),
                    Edit(45, 0, 38, ""),
                    Edit(68, 27, 24, ""),
                    Edit(69, 27, 24, ""),
                    Edit(52, 37, 7, ""),
                    Edit(55, 41, 25, ""),
                    Edit(49, 0, 0, f"    {OUR_MODEL}"),
                    Edit(49, 21, 7, ""),
                    Edit(53, 16, 41, ADAMW),
                    Edit(50, 17, 3, f"{BATCH}"),
                    Edit(66, 0, 0, f"        {CSC_CLOCK}"),
                    Edit(80, 0, 0, f"        {CSC_CLOCK}"),
                ],
            )
        },
    ),
    "csc_lightning": Peer(
        *CSC,
        ours=("lightning",),
        command="python mnist_lightning_ddp.py --gpus={n} --epochs={epochs}",
        files={
            "mnist_lightning_ddp.py": Source(
                "18633dccbc6f900befbb151e2b94ccc766c4b209b3dd22e8af3069a1f96c3abc",
                [
                    Edit(11, 0, 14, OUR_MODEL),
                    Edit(57, 0, 21, ""),  # it would make the script slower, and needs a server or a folder
                    Edit(72, 37, 3, "cpu"),
                    Edit(62, 20, 11, '"data"'),
                    # The other layers stay as steps that do nothing.
                    Edit(26, 8, 0, "self.layer1, self.layer2, "),
                    Edit(26, 18, 30, "LAYERS"),
                    Edit(13, 0, 0, "LAYERS = ConvNet(), nn.Identity(), nn.Identity()\n\n\n"),
                    Edit(43, 20, 40, ADAMW.replace("model", "self")),
                    Edit(61, 17, 3, f"{BATCH}"),
                    Edit(
                        42,
                        0,
                        0,
                        "    def on_train_epoch_start(self):\n"
                        f"        {LIGHTNING_CLOCK}\n"
                        "    def on_train_epoch_end(self):\n"
                        f"        {LIGHTNING_CLOCK}\n",
                    ),
                ],
            )
        },
    ),
    "csc_deepspeed": Peer(
        *CSC,
        ours=("deepspeed",),
        command="torchrun --standalone --nproc-per-node={n} mnist_deepspeed.py --epochs={epochs} --deepspeed "
        "--deepspeed_config=ds_config.json",
        files={
            "mnist_deepspeed.py": Source(
                "c4525217da7694c475f88aaba3854a509ca90dd528d1c0f9ab2c0b7a304f664e",
                [
                    Edit(44, 31, 0, '"gloo", '),
                    Edit(49, 37, 7, ""),
                    Edit(62, 45, 10, "device"),
                    Edit(63, 45, 10, "device"),
                    Edit(47, 0, 0, f"    {OUR_MODEL}"),
                    Edit(60, 0, 0, f"        {DEEPSPEED_CLOCK}"),
                    Edit(73, 0, 0, f"        {DEEPSPEED_CLOCK}"),
                ],
            ),
            "ds_config.json": Source(
                "1b3ca290fa960fe63c096cd2e94817f58ec9bd1cdf07d9fc9054030d962f073f",
                [
                    Edit(2, 2, 23, f'"train_micro_batch_size_per_gpu": {BATCH}'),
                    Edit(5, 13, 4, "AdamW"),
                    Edit(9, 10, 1, "9"),
                    Edit(13, 22, 4, '0.01, "torch_adam": true'),
                ],
            ),
        },
    ),
    "horovod": Peer(
        *HOROVOD,
        ours=("horovod_cpu",),
        command="horovodrun --gloo -np {n} python pytorch_mnist.py --no-cuda --data-dir=data --epochs={epochs} "
        f"--batch-size={BATCH}",
        files={
            "examples/pytorch/pytorch_mnist.py": Source(
                "60092fbb844fcdb83cf894f6be6d91caa61a596797b19f143e4b1625bf0f07f8",
                [
                    Edit(180, 18, 22, '"'),
                    Edit(180, 54, 1, ""),
                    # It has the logarithm of the softmax in its model, and so has this.
                    Edit(205, 0, 0, f"    {OUR_MODEL}"),
                    Edit(205, 12, 5, "nn.Sequential(ConvNet(), nn.LogSoftmax(1))"),
                    Edit(218, 22, 3, "AdamW"),
                    Edit(218, 49, 69, "1e-3"),
                    Edit(243, 0, 0, f"            {HOROVOD_CLOCK}"),
                    Edit(244, 0, 0, f"            {HOROVOD_CLOCK}"),
                ],
            )
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
            "distributed/ddp-tutorial-series/multigpu_torchrun.py": Source(
                "6b0a1568337fe206fa74e971cfeec42317f40b82122475327d50f0a0d37e1ba7",
                [
                    Edit(14, 0, 57, ""),
                    Edit(15, 32, 4, "gloo"),
                    Edit(27, 26, 16, ""),
                    Edit(58, 27, 16, ""),
                    Edit(59, 29, 16, ""),
                    Edit(37, 35, 26, ""),
                    Edit(
                        4,
                        0,
                        37,
                        "from torchvision.datasets import MNIST\nfrom torchvision.transforms import ToTensor\n"
                        + OUR_MODEL,
                    ),
                    Edit(78, 16, 20, 'list(MNIST("data", transform=ToTensor()))'),
                    Edit(79, 12, 22, "ConvNet()"),
                    Edit(80, 16, 44, ADAMW),
                    Edit(72, 0, 0, f"            {PYTORCH_CLOCK}"),
                    Edit(73, 0, 0, f"            {PYTORCH_CLOCK}"),
                ],
            )
        },
    ),
    "mila": Peer(
        *MILA,
        ours=("torchrun_multinode",),
        command="torchrun --standalone --nproc-per-node={n} main.py --epochs={epochs} "
        f"--batch-size={BATCH} --learning-rate=1e-3 --weight-decay=0.01",
        files={
            "docs/examples/distributed/multi_gpu/main.py": Source(
                "6bc520f379328cffdc96bf02b5e98f0bbdd0bd54ba31dc3812b7eceb4ff3efc5",
                [
                    Edit(60, 0, 71, ""),
                    Edit(65, 26, 9, '"cpu"'),
                    Edit(94, 15, 31, ""),
                    Edit(269, 17, 4, "gloo"),
                    Edit(259, 27, 12, "RANK"),
                    Edit(260, 33, 12, "WORLD_SIZE"),
                    Edit(323, 8, 19, "OMP_NUM_THREADS"),
                    Edit(324, 31, 19, "OMP_NUM_THREADS"),  # its loader workers: the cores of a process
                    Edit(21, 32, 0, " MNIST as"),
                    Edit(22, 0, 40, OUR_MODEL),
                    Edit(87, 12, 24, "ConvNet()"),
                    Edit(160, 8, 16, MILA_CLOCK),
                    Edit(207, 0, 0, f"        {MILA_CLOCK}"),
                ],
            )
        },
    ),
    "fabric": Peer(
        "Lightning-AI/pytorch-lightning",
        "7f0c3436cd3f6ad3753125672024fc415cbcb414",
        ours=("ddp_spawn",),
        command="fabric run train_fabric.py --accelerator=cpu --strategy=ddp --devices={n} --epochs={epochs} "
        f"--batch-size={BATCH}",
        files={
            "examples/fabric/image_classifier/train_fabric.py": Source(
                "4b9430c1975b705826557aa7b108e8a210ef789cd015c006dfbb8ee075ff0b93",
                [
                    Edit(45, 16, 63, '"data"'),
                    Edit(84, 54, 21, "False"),
                    Edit(85, 53, 21, "False"),
                    Edit(48, 0, 0, f"{OUR_MODEL}\n\n"),
                    Edit(96, 12, 5, "nn.Sequential(ConvNet(), nn.LogSoftmax(1))"),
                    Edit(97, 16, 49, ADAMW),
                    Edit(110, 8, 16, FABRIC_CLOCK),
                    # Else one run in some ends with an abort in Gloo's threads, after all its work.
                    Edit(160, 0, 0, "    torch.distributed.destroy_process_group()\n"),
                    Edit(128, 0, 0, f"        {FABRIC_CLOCK}"),
                ],
            )
        },
    ),
    # Its images are files; here MNIST has them as PIL images already. It has no argument for the number of epochs.
    "accelerate": Peer(
        *ACCELERATE,
        ours=("ddp_spawn",),
        command="torchrun --standalone --nproc-per-node={n} cv_example.py --cpu --data_dir=data",
        files={
            "examples/cv_example.py": Source(
                "1837df7031a8f30f044f9d440695ce33e070737f73b3ef3ff6a0d1220cc642b0",
                [
                    Edit(21, 5, 4, "torchvision.datasets"),
                    Edit(21, 17, 12, "MNIST"),
                    Edit(22, 0, 0, OUR_MODEL),
                    Edit(49, 0, 40, ""),
                    Edit(50, 11, 47, "fname[1]"),
                    Edit(64, 20, 15, ""),
                    Edit(64, 40, 1, ""),
                    Edit(65, 16, 24, "fname[0]"),
                    Edit(88, 17, 59, "list(MNIST"),
                    Edit(88, 91, 27, ")"),
                    Edit(119, 12, 72, "ConvNet()"),
                    Edit(128, 0, 90, ""),
                    Edit(133, 24, 25, "[0.1307]"),
                    Edit(134, 23, 24, "[0.3081]"),
                    Edit(137, 16, 55, ADAMW),
                    Edit(198, 20, 4, "1e-3"),
                    Edit(198, 40, 1, EPOCHS),
                    Edit(198, 69, 2, f"{BATCH}"),
                    Edit(198, 87, 3, "28"),
                    Edit(151, 0, 0, f"        {ACCELERATE_CLOCK}"),
                    Edit(163, 0, 0, f"        {ACCELERATE_CLOCK}"),
                ],
            )
        },
    ),
    # It has no epochs: an epoch is as many steps as the images are batches.
    "horovod_tensorflow2": Peer(
        *HOROVOD,
        ours=("horovod_tensorflow",),
        command="horovodrun --gloo -np {n} python tensorflow2_mnist.py",
        files={
            "examples/tensorflow2/tensorflow2_mnist.py": Source(
                "03e4ee433b240d67b075065c5dea7a33516cb555d59ad03c56fa8159de44b14d",
                [
                    Edit(34, 4, 35, "import numpy\n    raw = 'data/MNIST/raw/train-'"),
                    Edit(
                        35,
                        0,
                        63,
                        "    mnist_images = numpy.fromfile(raw + 'images-idx3-ubyte', 'u1', offset=16)\n"
                        "    mnist_images = mnist_images.reshape(-1, 28, 28)\n"
                        "    mnist_labels = numpy.fromfile(raw + 'labels-idx1-ubyte', 'u1', offset=8)\n"
                        f"    size = len(mnist_images) // ({BATCH} *",
                    ),
                    Edit(35, 68, 7, f"size()) * {BATCH}"),
                    Edit(41, 52, 3, f"{BATCH}"),
                    Edit(47, 0, 39, ""),
                    Edit(50, 0, 38, ""),
                    Edit(56, 12, 0, ".keras"),
                    Edit(56, 24, 24, "AdamW(1e-3, weight_decay=0.01, epsilon=1e-8)"),
                    # A variable of Keras 3 holds the one of TensorFlow in `value`.
                    Edit(70, 42, 0, "[v.value for v in "),
                    Edit(70, 73, 0, "]"),
                    Edit(80, 36, 0, "[v.value for v in "),
                    Edit(80, 57, 0, "]"),
                    Edit(81, 36, 0, "[v.value for v in "),
                    Edit(81, 49, 2, "]"),
                    Edit(86, 57, 21, f"({EPOCHS} * size // {BATCH})"),
                    Edit(87, 0, 0, f"        {TENSORFLOW_STEP}"),
                    Edit(92, 0, 0, f"    {TENSORFLOW_CLOCK}"),
                ],
            )
        },
    ),
    # The only one beside fsdp: accelerate refuses its ParallelismConfig on CPUs and leaves FSDP out there. The model of
    # this script is a GPT of the same kind; its tokens are random numbers, new in each step, and its loss is a sum.
    "pytorch_fsdp2": Peer(
        *PYTORCH,
        ours=("fsdp",),
        command="torchrun --standalone --nproc-per-node={n} example.py",
        files={
            "distributed/FSDP2/example.py": Source(
                "f84fb0503517ee5c6a6100c69bd0ccc55431e141643a32de88fadfb3407ecc6c",
                [
                    Edit(38, 7, 49, "False"),
                    Edit(6, 0, 41, FSDP_IMPORTS),
                    Edit(8, 0, 57, ""),
                    Edit(52, 56, 18, ""),
                    Edit(55, 0, 22, ""),
                    Edit(56, 17, 2, f"{WORKS['fsdp'].batch}"),
                    Edit(
                        58,
                        4,
                        150,
                        f"{FSDP_SAMPLES}    count = len(samples) // batch_size // torch.distributed.get_world_size()",
                    ),
                    Edit(66, 16, 23, FSDP_MODEL),
                    Edit(73, 23, 6, "blocks"),
                    Edit(77, 0, 25, ""),
                    Edit(86, 8, 0, "[torch.nn.init.normal_(weight, std=0.02) for weight in "),
                    Edit(86, 14, 18, "parameters()]"),
                    Edit(93, 12, 45, ADAMW),
                    Edit(97, 8, 1, "step"),
                    Edit(97, 19, 2, f"{EPOCHS} * count"),
                    Edit(98, 0, 0, f"        {FSDP2_STEP}"),
                    Edit(100, 9, 3, ", y = samples.__getitems__("),
                    Edit(100, 26, 13, "len(samples)"),
                    Edit(100, 53, 25, ")))"),
                    Edit(101, 15, 0, "F.cross_entropy("),
                    Edit(101, 24, 5, "flatten(0, 1), y.flatten())"),
                    Edit(103, 0, 73, ""),
                    Edit(107, 0, 0, f"    {FSDP2_CLOCK}"),
                ],
            ),
            "distributed/FSDP2/checkpoint.py": Source(
                "1853b455639d6b761a695ca2140f104602b1a61d1a96afce2ae3959b20058ad6"
            ),
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
            "examples/olora_finetuning/olora_finetuning.py": Source(
                "320cdec89fc2babbb00db8d2e92fd895a55d7c9f9543e09ad5598cc8c687f8cb",
                [
                    Edit(107, 26, 17, "True"),
                    Edit(96, 0, 101, ""),
                    Edit(98, 15, 21, 'example | {"labels": example["input_ids"]}'),
                    Edit(127, 31, 0, ", weight_decay=0.01, use_cpu=True"),
                    Edit(
                        141,
                        0,
                        0,
                        "    class Clock(transformers.TrainerCallback):\n"
                        "        def on_epoch_begin(self, args, *_, **__):\n"
                        f"            {TRAINER_CLOCK}        def on_epoch_end(self, args, *_, **__):\n"
                        f"            {TRAINER_CLOCK}    trainer.add_callback(Clock)\n",
                    ),
                ],
            )
        },
    ),
    "torchvision": Peer(
        "pytorch/vision",
        "7af698794eded568735f9519593603c1ec889eba",
        ours=("torchrun_vision",),
        command="torchrun --standalone --nproc-per-node={n} train.py --device=cpu --data-path=data/images --workers=1 "
        f"--batch-size={WORKS['torchrun_vision'].batch} --epochs={{epochs}} --opt=adamw --lr=5e-4 --weight-decay=0.01 "
        "--train-crop-size=32 --val-resize-size=36 --val-crop-size=32",
        files={
            "references/classification/train.py": Source(
                "50e351e18f825fe8c87ba1cf0182c93b66f7351dab4588d20acdd5962a1076b9",
                [
                    Edit(325, 65, 21, ""),
                    Edit(368, 0, 0, f"        {TORCHVISION_CLOCK}"),
                    Edit(369, 0, 0, f"        {TORCHVISION_CLOCK}"),
                ],
            ),
            "references/classification/utils.py": Source(
                "8f891cd8e2b948c484cb45764a4a517bb1b103470f10b7646330824fd8ef279f",
                [
                    Edit(262, 0, 36, ""),
                    Edit(263, 25, 4, "gloo"),
                    Edit(399, 24, 15, ""),
                ],
            ),
            "references/classification/presets.py": Source(
                "99e2fcea703726c31d3621806b895a56010d1501bc312b56a05401b0cc177a4e"
            ),
            "references/classification/sampler.py": Source(
                "2f1a5540a2b4c44ae45f1c0cd3a52c101e79d51a5b7b25f37b388f6b8cea4d24"
            ),
            "references/classification/transforms.py": Source(
                "8827fd2ca0d1222018f4590e0fa51a8c156b27a1703094fa80c74d147a309233"
            ),
        },
    ),
    "mila_imagenet": Peer(
        *MILA,
        ours=("torchrun_vision",),
        command="env SLURM_JOB_ID=1 SLURM_CPUS_PER_TASK=1 SCRATCH=. torchrun --standalone --nproc-per-node={n} main.py "
        f"--batch_size={WORKS['torchrun_vision'].batch} --epochs={{epochs}} --learning_rate=5e-4 --weight_decay=0.01 "
        "--model_name=resnet18 --dataset_path=data/images",
        files={
            "docs/examples/advanced/imagenet/main.py": Source(
                "14326172319cf768b819cc1aba6d9d771783e4b6a9602c95017f33371d11adff",
                [
                    Edit(250, 0, 71, ""),
                    Edit(257, 0, 38, ""),
                    # Its log in the web, which an argument of it switches off, too.
                    Edit(46, 0, 0, "from unittest.mock "),
                    Edit(46, 7, 0, "MagicMock\n\n"),
                    Edit(46, 12, 0, " = MagicMock()"),
                    Edit(259, 17, 4, "gloo"),
                    Edit(266, 26, 18, '"cpu"'),
                    Edit(299, 15, 49, ""),
                    Edit(866, 45, 25, ""),
                    Edit(868, 45, 25, ""),
                    Edit(600, 54, 3, "SUM"),  # which Gloo has
                    # Its processes would race for a link.
                    Edit(237, 7, 55, "False:"),
                    Edit(291, 0, 65, ""),  # it is for GPUs only
                    Edit(453, 36, 32, "contextlib.nullcontext()"),
                    Edit(462, 17, 18, ""),
                    Edit(462, 60, 1, ""),
                    Edit(53, 33, 0, "ImageFolder\n\n\ndef "),
                    Edit(53, 41, 0, "(root, transform, split):"),
                    Edit(54, 0, 0, "    return ImageFolder(root / split, transform)\n\n\n"),
                    Edit(785, 0, 50, ""),
                    Edit(788, 0, 31, ""),
                    Edit(767, 37, 3, "32"),
                    Edit(774, 26, 3, "36"),
                    Edit(775, 30, 3, "32"),
                    Edit(288, 52, 4, "6"),
                    Edit(454, 0, 0, f"        {MILA_CLOCK}"),
                    Edit(512, 0, 0, f"        {MILA_CLOCK}"),
                ],
            )
        },
    ),
}
