"""Say what data and model a run has, and stop it where what it computes cannot be right. plumbing.py calls this.

What a run is goes into its checkpoint and into run.json, and a resumed run is compared with it. No step waits for this:
the losses are looked at before a checkpoint, and at an epoch's end.
"""

import contextlib
import copy
import functools
import math
import os
import random
import re
import sys
import time
import zlib
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import numpy as np

SAMPLES, SECONDS = 64, 0.4  # of each data set: how many samples are read at most, and for how long
LARGEST = 2**24  # elements of labels that are looked at; of more, every second, third, ...
CROSS_ENTROPY = r"(?<!binary_)cross_entropy\(|token_loss\(|CrossEntropyLoss\(|sparse_softmax_cross_entropy_with_logits\("
facts = {}  # "data" and "model": what they are, on rank 0; what a checkpoint is compared with
labels_of_all = {}  # "least" and "most" of the labels, one whole number for each sample, on each rank
losses = {
    "batches": 0,
    "before": 0,
    "finite": True,
    "loader": None,
}  # of this epoch, see note_loss()


# What the data are


def look_at_data(args, train_set, test_set, first):
    """Note what the data are; return their name. The process that is `first` reads samples, which changes no run."""
    labels_of_all.clear()
    for part in (train_set, test_set):
        labels = labels_in_memory(part)
        labels = (
            labels[labels != -100] if labels is not None and labels.dtype.kind in "iu" else None
        )
        if labels is not None and labels.ndim == 1 and len(labels):  # cross_entropy leaves out -100
            found = int(labels.min()), int(labels.max())
            labels_of_all["least"] = min(found[0], labels_of_all.get("least", found[0]))
            labels_of_all["most"] = max(found[1], labels_of_all.get("most", found[1]))
    if first:
        facts["data"] = {"training": describe_set(train_set), "test": describe_set(test_set)}
    return name_of_data(args, train_set)


def name_of_data(args, train_set):
    """Return --dataset or --text-file where that says what the data are, and of yours the class and the folder."""
    while hasattr(train_set, "dataset") and hasattr(train_set, "indices"):  # a part of another one
        train_set = train_set.dataset
    if type(train_set).__module__ in ("common.data", "numpy_data"):
        return (
            getattr(args, "dataset", None) or getattr(args, "text_file", None) or "a random source"
        )
    folder = f" ({args.data_dir})" if hasattr(args, "data_dir") else ""
    return f"{type(train_set).__name__}{folder}"


def describe_set(dataset):
    """Return what has to be the same in a resumed run: how many samples, their form, and what some of them hold."""
    labels, found = (
        labels_in_memory(dataset),
        {"name": type(dataset).__name__, "samples": len(dataset)},
    )
    found["labels"] = None if labels is None else signature(labels)
    found["form"], found["label"], found["read"] = None, None, []
    with same_random_numbers():
        try:
            read = reader(own_copy(dataset))
            deadline = time.monotonic() + SECONDS
            for index in spread(len(dataset)):
                if found["read"] and time.monotonic() > deadline:
                    break
                one, two = read(index), read(index)
                found["form"], found["label"] = (
                    found["form"] or form(one[0]),
                    found["label"] or form(one[1]),
                )
                content, again = (
                    [signature(leaf) for leaf in leaves(sample)] for sample in (one, two)
                )
                found["read"].append(
                    content if same(content, again) else None
                )  # None: augmented at random
            if (
                None in found["read"]
            ):  # then all are: one that is mirrored every other time is often the same twice
                found["read"] = [None] * len(found["read"])
        except (
            Exception
        ) as error:  # whatever a data set raises: training will, too, if it is an error
            found["unread"] = f"{type(error).__name__}: {first_line(str(error))}"[:200]
    return found


def labels_in_memory(dataset):
    """Return the labels of all samples as an array, if the data set has them, or else None."""
    try:
        if hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
            labels = labels_in_memory(dataset.dataset)
            return None if labels is None else labels[np.asarray(dataset.indices)]
        labels = getattr(dataset, "labels", None)
        labels = getattr(dataset, "targets", None) if labels is None else labels
        if labels is None or len(labels) != len(dataset):
            return None
        labels = array(labels)
        each = max(1, -(-labels.size // LARGEST))
        return labels[::each] if labels.dtype.kind in "biuf" and labels.size else None
    except Exception:  # it is something else that has this name
        return None


def own_copy(dataset):
    """Return a copy that shares the data: a file that it opens is not open in the data set, which workers inherit."""
    dataset = copy.copy(dataset)
    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        if isinstance(value, (np.random.Generator, np.random.RandomState, random.Random)):
            setattr(dataset, name, copy.deepcopy(value))
        elif type(value).__name__ == "Generator" and hasattr(value, "clone_state"):  # PyTorch's
            setattr(dataset, name, value.clone_state())
        elif name == "dataset":
            setattr(dataset, name, own_copy(value))
        elif name == "datasets" and isinstance(value, list):
            setattr(dataset, name, [own_copy(part) for part in value])
    return dataset


@contextlib.contextmanager
def same_random_numbers():
    """Have what is done in this context see fixed random numbers, and what comes after it those as if it was not."""
    torch, before = sys.modules.get("torch"), (random.getstate(), np.random.get_state())
    state = torch.get_rng_state() if torch else None
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        if torch:
            torch.set_rng_state(state)


def seed(number):
    """Seed the random numbers that a data set may augment with; not those of GPUs."""
    random.seed(number)
    np.random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(number)


def spread(count):
    """Return up to SAMPLES indices, of which any first ones are spread over the data set."""
    bits = SAMPLES.bit_length() - 1
    places = [
        int(f"{number:0{bits}b}"[::-1], 2) for number in range(SAMPLES)
    ]  # 0, 1/2, 1/4, 3/4, 1/8, ...
    return list(dict.fromkeys(place * count // SAMPLES for place in places))


def reader(dataset):
    """Return a function that reads the inputs and the label of a sample, whether an index or a list of them does so."""

    def read(key):
        seed(0)
        sample = dataset[key]
        parts = sample if isinstance(sample, (tuple, list)) and len(sample) > 1 else (sample, ())
        return parts[0], parts[-1]

    try:
        parts = [leaf for part in read([0]) for leaf in leaves(part)]
        lists = bool(parts) and all(np.ndim(leaf) and len(leaf) == 1 for leaf in parts)
    except Exception:  # it takes an index
        lists = False
    return lambda index: [first(part) for part in read([index])] if lists else read(index)


def first(part):
    """Return the only sample of a batch."""
    if isinstance(part, Mapping):
        return {key: first(value) for key, value in part.items()}
    return [first(value) for value in part] if isinstance(part, (tuple, list)) else part[0]


def leaves(part):
    """Return what is in a sample, or in a part of one, as a list of arrays."""
    if isinstance(part, Mapping):
        return [leaf for key in sorted(part, key=str) for leaf in leaves(part[key])]
    if isinstance(part, (tuple, list)) and not all(
        isinstance(value, (int, float)) for value in part
    ):
        return [leaf for value in part for leaf in leaves(value)]
    return [array(part)] if not isinstance(part, (tuple, list)) or len(part) else []


def array(value):
    """Return a value, such as a tensor on any device, as an array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    return np.asarray(value)


def form(part):
    """Return the shape and the type of a part of a sample, in words."""
    if isinstance(part, Mapping):
        return "{" + ", ".join(f"{key}: {form(part[key])}" for key in sorted(part, key=str)) + "}"
    found = [f"{leaf.shape} {leaf.dtype}" for leaf in leaves(part)]
    return ", ".join(found)


def signature(leaf):
    """Return numbers that say what is in an array: of whole numbers a checksum, of others and of pixels two.

    These two, a sum with random signs and sizes and the root of the mean square, bear the rounding of another CPU.
    """
    if leaf.dtype.kind in "bi" or (leaf.dtype.kind == "u" and leaf.dtype.itemsize > 1):
        return [zlib.crc32(np.ascontiguousarray(leaf).astype("int64").tobytes())]
    if leaf.dtype.kind not in "uf":
        return [zlib.crc32(repr(leaf.tolist()).encode())]
    flat = leaf.ravel()[:: max(1, leaf.size // 2**18)].astype("float64")
    flat = np.nan_to_num(flat, posinf=0, neginf=0)
    size = math.sqrt(float(flat @ flat) / max(1, flat.size))
    return [
        float(f"{value:.5g}")
        for value in (flat @ factors(flat.size) / math.sqrt(max(1, flat.size)), size)
    ]


@functools.lru_cache(4)
def factors(count):
    """Return the same random factors in each process."""
    return np.random.RandomState(0).standard_normal(count)


def same(one, other):
    """Return whether two lists of signatures are of the same samples; None matches anything."""
    if one is None or other is None:
        return True
    if len(one) != len(other) or any(len(a) != len(b) for a, b in zip(one, other, strict=True)):
        return False
    for a, b in zip(one, other, strict=True):
        bound = 0 if len(a) == 1 else 0.02 * max(abs(a[1]), abs(b[1]))
        if any(abs(x - y) > bound for x, y in zip(a, b, strict=True)):
            return False
    return True


# What the model is


def look_at_model(args, model):
    """Note what the model is: its name, and the names, shapes and types of its weights. One process calls this."""
    if hasattr(model, "state_dict"):
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        weights = {
            name: value
            for name, value in model.state_dict(keep_vars=True).items()
            if hasattr(value, "shape")
        }
        count = sum(math.prod(shape_of(weight)) for weight in model.parameters())
    else:  # Keras
        weights = {f"{number} {value.path}": value for number, value in enumerate(model.variables)}
        count = sum(math.prod(shape_of(value)) for value in model.trainable_variables)
    text = "\n".join(f"{name} {shape_of(value)} {value.dtype}" for name, value in weights.items())
    facts["model"] = {"name": name_of_model(args, model), "weights": count, "tensors": len(weights)}
    facts["model"]["checksum"] = zlib.crc32(text.encode())


def shape_of(weight):
    """Return the shape of a weight, also of one that DeepSpeed has divided."""
    return tuple(getattr(weight, "ds_shape", weight.shape))


def name_of_model(args, model):
    """Return the name of a model's class, or that of torchvision's or Keras's which was asked for."""
    if type(model).__module__.startswith("torchvision.") and hasattr(args, "model"):
        return args.model
    if not hasattr(model, "state_dict"):
        return model.name
    return next(
        kind for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP")
    ).__name__


def differences(old, path):
    """Return in which ways the data and the model of a checkpoint are others than those of this run."""
    if old is None:
        print(
            f"{path} is from an older train.py, which did not note what its data and model were: not compared"
        )
        return []
    changed = []
    for part, now in facts.get("data", {}).items():
        then = old.get("data", {}).get(part)
        if not then:
            continue
        pairs = [
            (then["read"][i], now["read"][i])
            for i in range(min(len(then["read"]), len(now["read"])))
        ]
        other = sum(not same(a, b) for a, b in pairs)
        if then["samples"] != now["samples"]:
            changed.append(f"{then['samples']} {part} samples, now {now['samples']}")
        elif None not in (then["form"], now["form"]) and (then["form"], then["label"]) != (
            now["form"],
            now["label"],
        ):
            words = [f"{found['form']} with labels {found['label']}" for found in (then, now)]
            changed.append(f"{part} samples of {words[0]}, now {words[1]}")
        elif None not in (then["labels"], now["labels"]) and not same(
            [then["labels"]], [now["labels"]]
        ):
            changed.append(f"other labels of the {now['samples']} {part} samples")
        elif other:
            changed.append(
                f"other {part} samples: {other} of {len(pairs)} that were compared differ"
            )
        elif not pairs and then["name"] != now["name"]:
            changed.append(f"{part} samples of {then['name']}, now {now['name']}")
    then, now = old.get("model"), facts.get("model")
    if then and now and then["name"] != now["name"]:
        changed.append(f"the model {then['name']}, now {now['name']}")
    elif then and now and then["checksum"] != now["checksum"]:
        words = [
            f"{model['weights']:,} weights in {model['tensors']} tensors" for model in (then, now)
        ]
        words = words if words[0] != words[1] else ["weights", "others in name, shape or type"]
        changed.append(f"a model {now['name']} of {words[0]}, now {words[1]}")
    return changed


def for_run_json():
    """Return what run.json says of data and model: all but the content of samples."""
    data = {
        part: {k: v for k, v in found.items() if k != "read"}
        for part, found in facts.get("data", {}).items()
    }
    return {"data": data, "model": facts.get("model")}


def long_warmup(args):
    """Return one line that says that the learning rate never reaches --lr, or nothing where it does."""
    warmup = (
        0 if getattr(args, "has_scheduler", False) else getattr(args, "warmup_steps", 0)
    )  # predict.py has none
    steps = args.epochs * args.steps_per_epoch if warmup else 0
    if warmup <= steps:
        return ""
    wrong = f"--warmup-steps {warmup} is above the {steps} steps of this run"
    return f"{wrong}: its learning rate rises to {100 * steps / (warmup + 1):.3g}% of what was asked for"


def summary():
    """Return one line that says what data and model are, or nothing where no run trains."""
    if "data" not in facts:
        return ""
    train, test = (facts["data"][part] for part in ("training", "test"))
    words = f"samples: {train['samples']} for training and {test['samples']} for testing"
    if train["form"]:
        words += f", {train['form']}"
    if "least" in labels_of_all:
        words += f", labels {labels_of_all['least']} to {labels_of_all['most']}"
    elif train["label"]:
        words += f", labels {train['label']}"
    if "unread" in train and not train["read"]:
        words += (
            f" (a resume compares no more of them, since none could be read: {train['unread']})"
        )
    return f"{words}; model: {facts['model']['weights']:,} weights"


# What cannot be right


def program():
    """Return the lines of train.py."""
    with contextlib.suppress(OSError):
        return Path(sys.argv[0]).read_text(errors="replace").splitlines()
    return []


def lines_with(pattern):
    """Return where in train.py a pattern is found, as train.py:84 and so on, or nothing."""
    name = Path(sys.argv[0]).name
    code = [line.partition("#")[0] for line in program()]
    return ", ".join(
        f"{name}:{number}" for number, line in enumerate(code, 1) if re.search(pattern, line)
    )


def wrong_labels(output):
    """Return an error message if labels are outside of the classes for which the model has an output, or None."""
    shape = tuple(getattr(output, "shape", ()))
    loss = lines_with(CROSS_ENTROPY)
    if len(shape) != 2 or "least" not in labels_of_all or not loss or lines_with("ignore_index"):
        return None
    least, most = labels_of_all["least"], labels_of_all["most"]
    if least >= 0 and most < shape[1]:
        return None
    need = f"cross_entropy ({loss}) needs labels from 0 to {shape[1] - 1}"
    return (
        f"labels are from {least} to {most}, and the model has {shape[1]} outputs: {need}. Change the labels where the "
        "data are read, or the number of the model's outputs"
    )


def explain(error):
    """Return an error message for an exception that says too little to a beginner, or None."""
    text = str(error).strip()
    last = text.rpartition("\n")[2]  # of a loader worker's traceback the error itself
    if type(error).__name__ == "DataError":
        return re.sub(r"^[\w.]*DataError: ", "", last)
    if last.startswith("Expected more than 1 value per channel"):
        return f"BatchNorm needs batches of 2 or more samples ({last}): use a larger --batch-size"
    if found := re.search(
        r"Target (-?\d+) is out of bounds|label value of (-?\d+) which is outside", text
    ):
        label = found[1] or found[2]
        return (
            f"the label {label} is outside of the classes for which the model has an output, which count from 0 "
            f"({first_line(text)}): change the labels where the data are read, or the model"
        )
    if (
        type(error).__module__ in ("torch._inductor.exc", "torch._dynamo.exc")
        and "--compile" in sys.argv
    ):
        lines = [
            line.strip()
            for line in text.splitlines()
            if line.strip() and not line.endswith("raised:")
        ]
        errors = [*lines[:1], *(line for line in lines if "error: " in line)]
        return (
            f"--compile: PyTorch cannot compile the model ({': '.join(errors[:2])[:400]}). A CPU needs g++, a GPU "
            "gcc and Triton, both need Python.h and a folder to write to: see docs/compile.md, or leave it out"
        )
    if "device-side assert" in text:
        return (
            "a GPU met an index that is out of range, most often a label outside of the model's classes: the line "
            f"`Assertion` above says more, and CUDA_LAUNCH_BLOCKING=1 shows where it is ({first_line(text)})"
        )
    return None


def first_line(text):
    """Return the first line of a message."""
    return text.strip().partition("\n")[0]


def note_loss(loader, loss):
    """Count the batches before the first one whose loss is not finite: on the device, so that no step waits for it."""
    finite = loss.detach() * 0 == 0 if hasattr(loss, "detach") else math.isfinite(float(loss))
    losses["finite"] = finite & losses["finite"]
    losses["before"] = losses["before"] + losses["finite"]
    losses["batches"] += 1
    if losses["loader"] is None:
        losses["loader"] = loader


def own_report(args, model):
    """Return what this process knows: whether its weights are finite, and the first batch whose loss is not."""
    batches, before = losses["batches"], int(losses["before"])
    report = {"weights": finite_weights(model)}
    if before < batches:
        back = (batches - before - 1) // getattr(args, "gradient_accumulation_steps", 1)
        report |= {"steps_ago": back, "samples": samples_of(losses["loader"], before)}
    return report


def forget_losses():
    """Begin to count anew, with the first batch of an epoch."""
    losses.update(batches=0, before=0, finite=True, loader=None)


def finite_weights(model):
    """Return whether all weights that this process trains are finite numbers; it waits once for each of its devices."""
    if not hasattr(model, "state_dict"):
        return all(np.isfinite(variable.numpy()).all() for variable in model.trainable_variables)
    torch, bounds = sys.modules["torch"], {}  # by device: some weights may be offloaded to the CPU
    for weight in model.parameters():
        if weight.requires_grad:
            weight = getattr(weight, "ds_tensor", weight).detach()
            weight = weight.to_local() if hasattr(weight, "to_local") else weight
            weight = torch.view_as_real(weight) if weight.is_complex() else weight
            if weight.numel():
                bounds.setdefault(weight.device, []).extend(
                    bound.double() for bound in weight.aminmax()
                )
    return all(bool(torch.stack(found).isfinite().all()) for found in bounds.values())


def samples_of(loader, number):
    """Return the indices of a loader's batch, or the files' names, where the loader's order can be repeated."""
    source = getattr(loader, "batch_sampler", None)
    source = getattr(loader, "sampler", loader) if source is None else source
    try:
        with same_random_numbers():
            one, two = (next(islice(iter(source), number, None)) for _ in range(2))
        indices = [int(index[0] if isinstance(index, tuple) else index) for index in one]
        if indices != [int(index[0] if isinstance(index, tuple) else index) for index in two]:
            return "unknown samples"
        names = getattr(getattr(loader, "dataset", None), "paths", None)
        found = [str(index) if names is None else os.fsdecode(names[index]) for index in indices]
        more = f" and {len(found) - SAMPLES} more" if len(found) > SAMPLES else ""
        return f"{'samples' if names is None else 'files'} {', '.join(found[:SAMPLES])}{more}"
    except Exception:  # a loader of another kind
        return "unknown samples"


def judge(args, progress, place, reports):
    """Return why the run cannot be right, and the variable that lets it go on all the same, or None for either."""
    (epochs, step), history = place, progress["history"]
    on = f"a checkpoint in {args.output_dir} is from before that. ALLOW_NAN=1 in the environment goes on"
    if bad := {
        rank: report["steps_ago"] for rank, report in enumerate(reports) if "steps_ago" in report
    }:
        ranks = [rank for rank, ago in bad.items() if ago == max(bad.values())]
        number = progress["step"] - max(bad.values()) - 1
        where = f"step {number % args.steps_per_epoch + 1} of epoch {number // args.steps_per_epoch + 1}"
        others = f" and {len(ranks) - 1} other ranks" if len(ranks) > 1 else ""
        what = f"the loss of rank {ranks[0]}{others} is not finite in {where}, {reports[ranks[0]]['samples']}"
        return f"{what}: look at these samples, or lower --lr; {on}", "ALLOW_NAN"
    if not all(report["weights"] for report in reports):
        return (
            f"weights are not finite after step {progress['step']} of the run: lower --lr; {on}",
            "ALLOW_NAN",
        )
    if step < 0:
        steps = args.steps_per_epoch
        return (
            f"epoch {epochs} has taken {steps + step} of {steps} steps: does a loader end too early?",
            None,
        )
    if step > 0 or not history:
        return None, None
    for name, value in history[-1].items():
        if name.endswith("loss") and not math.isfinite(value):
            return (
                f"{name} of epoch {epochs} is {value}: look at the data, or lower --lr; {on}",
                "ALLOW_NAN",
            )
        if "accuracy" in name and not -1e-9 <= value <= 1 + 1e-9:
            return (
                f"{name} of epoch {epochs} is {value:.2f}, and has to be from 0 to 1: {count_advice()}",
                None,
            )
    if history[0].get("train_loss") == 0 and (loss := lines_with(CROSS_ENTROPY)):
        advice = "to predict numbers take F.mse_loss there, and for two classes give the model two outputs"
        return (
            f"train_loss of epoch 1 is exactly 0, as that of one output always is in {loss}: {advice}",
            None,
        )
    return None, None


def count_advice():
    """Return which lines of train.py most likely count samples where they have to count predictions."""
    where = lines_with(r"\+= len\(labels\)|\blen\(labels\)\]|\.dataset\)$")
    advice = "where there is a prediction for each pixel, or token, divide by the number of these: labels.numel() in the"
    return f"{advice} place of len(labels)" + f", see {where}" * bool(where)
