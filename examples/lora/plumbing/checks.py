"""What data and model a run has, and which of its results cannot be right.

Checkpoints and run.json keep what is noted here, so that a resumed run can be compared with the
run that it continues. No step waits for this: the losses are looked at before a checkpoint is
written, and at the end of an epoch.
"""

import contextlib
import copy
import functools
import math
import os
import pickle
import random
import re
import sys
import time
import traceback
import zlib
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import numpy as np

# At most so many samples of each data set are read, for at most so many seconds.
SAMPLES = 64
SECONDS = 0.4
# Of labels with more elements than this, some in between are not looked at.
LARGEST = 2**24
# PyTorch's cross_entropy leaves out samples with this label.
IGNORED = -100
# These losses need class labels. lines_with() looks for their calls in train.py.
CROSS_ENTROPY = "|".join(
    (
        r"(?<!binary_)cross_entropy\(",
        r"token_loss\(",
        r"CrossEntropyLoss\(",
        r"sparse_softmax_cross_entropy_with_logits\(",
    )
)
# Rank 0 notes here what "data" and "model" are. A checkpoint keeps it, and is compared with it.
facts = {}
# Each rank notes here the "least" and the "most" of the labels, where these are whole numbers.
labels_of_all = {}
# Each rank notes here what it has: "sets" are the length of each data set and its labels, or those
# of some samples, and "draws" what the others must not have, too: see note_own_draws().
own = {"sets": {}, "draws": {}}
# note_loss() notes here what the losses of this epoch were.
losses = {"batches": 0, "before": 0, "finite": True, "loader": None}
# note_saved() notes here how far the last checkpoint is.
last_saved = {"step": None, "epochs": None}
# count_gradients() has counted here how many gradients a weight has got, by its name behind COUNT.
gradients = {}
COUNT = "the number of gradients of "


# What the data are


def look_at_data(args, train_set, test_set, first):
    """Note what the data are, and return their name.

    The process that is `first` also reads some samples, which changes no random number of the run.
    """
    labels_of_all.clear()
    own["draws"].clear()
    note_own_draws(train_set)
    described = {}
    for name, part in (("training", train_set), ("test", test_set)):
        labels = labels_in_memory(part)
        found = None if labels is None else signature(labels)
        own["sets"][name] = (len(part), {"all": found} if found else some_labels(part))
        note_labels(part, labels)
        if first:
            described[name] = describe_set(part, found)
    if first:
        facts["data"] = described
    return name_of_data(args, train_set)


def note_labels(dataset, labels):
    """Note the least and the most of a data set's labels, if these are whole numbers.

    A data set may change what is in memory when a sample is read, as torchvision's do with their
    target_transform. Then nothing is noted.
    """
    if labels is None or labels.dtype.kind not in "iu" or labels.ndim != 1:
        return
    known = labels[labels != IGNORED]
    if not len(known):
        return
    least = int(known.min())
    most = int(known.max())
    each = stride(len(dataset))
    places = [each * int((labels == label).argmax()) for label in (least, most)]
    with same_random_numbers():
        try:
            read = reader(own_copy(dataset))
            found = [array(label).tolist() for _, label in map(read, places)]
        except Exception:  # if it is an error, training will raise it as well
            return
    if found != [least, most]:
        return
    labels_of_all["least"] = min(least, labels_of_all.get("least", least))
    labels_of_all["most"] = max(most, labels_of_all.get("most", most))


def note_own_draws(dataset):
    """Note the first samples of a stream, or the random generators that a data set goes on with.

    Equal ones in all processes are a mistake, see repeated(). A generator that is seeded anew for
    each sample is none.
    """
    while hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        dataset = dataset.dataset  # this one is a part of another one
    with same_random_numbers(), contextlib.suppress(Exception):  # training will raise it as well
        dataset = own_copy(dataset)
        if "IterableDataset" in [kind.__name__ for kind in type(dataset).__mro__]:
            found = first_samples(dataset)
            if found:
                own["draws"][f"{type(dataset).__name__} is a stream"] = found
        elif generators(dataset):
            read = reader(dataset)
            read(0)
            once = generators(dataset)
            read(0)
            for name, state in generators(dataset).items():
                if state != once[name]:
                    own["draws"][f"{type(dataset).__name__} keeps the generator {name}"] = state


def first_samples(stream):
    """Return what is in the first samples of a stream; nothing if they are drawn at random."""
    if any(hasattr(value, "__next__") for value in vars(stream).values()):
        return []  # they would be missing in training
    found = []
    for number in range(2):
        seed(number)
        found.append([signature(leaf) for leaf in leaves(list(islice(stream, 4)))])
    return found[0] if found[0] == found[1] else []


def other_sets(sets):
    """Return an error message if not all processes have the same data sets, or None."""
    for rank, found in enumerate(sets):
        for name, (count, labels) in found.items():
            first_count, first_labels = sets[0][name]
            # One of the two processes may have had time for fewer samples.
            both = labels.keys() & first_labels.keys()
            if count != first_count:
                what = f"{count} {name} samples, and rank 0 {first_count}"
            elif not all(same([labels[key]], [first_labels[key]]) for key in both):
                what = f"other {name} samples than rank 0, or in another order"
            else:
                continue
            need = "so some are read twice, or never: seed what divides or shuffles them"
            return f"rank {rank} has {what}, {need}, and sort lists of files"
    return None


def repeated(args, draws):
    """Return an error message if all processes have noted equal draws, or None."""
    if getattr(args, "groups", args.world_size) == 1:
        return None  # the only process, or all of them compute one model with the same samples
    for name, state in draws[0].items():
        if any(other.get(name) != state for other in draws):
            continue
        advice = "draw from torch, random or np.random, or seed it for each sample or worker"
        what = f"with which all processes and loader workers draw the same numbers: {advice}"
        if name.endswith("stream"):
            advice = "see docs/sequences-and-streams.md of the repository"
            what = f"of which all processes read the same samples: {advice}"
        return f"{name}, {what}"
    return None


def name_of_data(args, train_set):
    """Return the name of the data that a run trains with.

    It is what --dataset or --text-file says where that names the data, and otherwise the name of
    the data set's class, with the folder.
    """
    while hasattr(train_set, "dataset") and hasattr(train_set, "indices"):
        train_set = train_set.dataset  # this one is a part of another one
    if type(train_set).__module__ in ("common.data", "numpy_data"):
        name = getattr(args, "dataset", None) or getattr(args, "text_file", None)
        return name or "a random source"
    folder = f" ({args.data_dir})" if hasattr(args, "data_dir") else ""
    return f"{type(train_set).__name__}{folder}"


def describe_set(dataset, labels):
    """Return what has to be the same in a resumed run, with the signature of all labels.

    That is how many samples there are, their form, and what some of them hold.
    """
    found = {"name": type(dataset).__name__, "samples": len(dataset), "labels": labels}
    found |= {"form": None, "label": None, "read": []}
    with same_random_numbers():
        try:
            note_samples(dataset, found)
        except Exception as error:
            # A data set may raise anything. If it is an error, training will raise it as well.
            found["unread"] = f"{type(error).__name__}: {first_line(str(error))}"[:200]
    return found


def note_samples(dataset, found):
    """Read some samples, and note their form and their content in `found`.

    The content is None where samples are augmented at random: they cannot be compared.
    """
    read = reader(own_copy(dataset))
    deadline = time.monotonic() + SECONDS
    for index in spread(len(dataset)):
        if found["read"] and time.monotonic() > deadline:
            break
        sample = read(index)
        again = read(index)
        inputs, label = sample
        found.update(form=found["form"] or form(inputs), label=found["label"] or form(label))
        content = [signature(leaf) for leaf in leaves(sample)]
        content_again = [signature(leaf) for leaf in leaves(again)]
        found["read"].append(content if same(content, content_again) else None)
    # A sample that is mirrored at random is often the same twice. One that differs is therefore
    # enough to say that all are augmented.
    if None in found["read"]:
        found["read"] = [None] * len(found["read"])


def labels_in_memory(dataset):
    """Return the labels of all samples as an array if the data set has them, otherwise None."""
    try:
        if hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
            labels = labels_in_memory(dataset.dataset)
            return None if labels is None else labels[np.asarray(dataset.indices)]
        labels = getattr(dataset, "labels", None)
        if labels is None:
            labels = getattr(dataset, "targets", None)
        if labels is None or len(labels) != len(dataset):
            return None
        if hasattr(labels, "chunks"):
            return None  # h5py, zarr and dask read it from the disk
        labels = labels if hasattr(labels, "shape") else array(labels)
        labels = array(labels[:: stride(math.prod(labels.shape))])
        return labels if labels.dtype.kind in "biuf" and labels.size else None
    except Exception:  # something else has this name
        return None


def some_labels(dataset):
    """Return signatures of some samples' labels, by index, where not all labels are in memory.

    A label of several numbers, such as a mask, may be augmented with its image: then there is none.
    """
    found = {}
    deadline = time.monotonic() + SECONDS / 2
    with same_random_numbers(), contextlib.suppress(Exception):  # training will raise it as well
        read = reader(own_copy(dataset))
        for index in spread(len(dataset))[:8]:
            if time.monotonic() > deadline:
                break
            label, again = (array(read(index)[1]) for _ in range(2))
            if label.size != 1 or label != again:
                return {}
            found[index] = signature(label)
    return found


def stride(count):
    """Return at which distance `count` elements are looked at."""
    return max(1, -(-count // LARGEST))


def own_copy(dataset):
    """Return a copy of a data set that shares its data, and has random generators of its own.

    A file that the copy opens is not open in the data set: workers would inherit it.
    """
    dataset = copy.copy(dataset)
    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        if is_generator(value):
            # PyTorch's class has a method to copy it.
            clone = getattr(value, "clone_state", None)
            setattr(dataset, name, clone() if clone else copy.deepcopy(value))
        elif name == "dataset":
            setattr(dataset, name, own_copy(value))
        elif name == "datasets" and isinstance(value, list):
            setattr(dataset, name, [own_copy(part) for part in value])
    return dataset


def is_generator(value):
    """Return whether a value is a random generator of NumPy, Python or PyTorch."""
    if isinstance(value, (np.random.Generator, np.random.RandomState, random.Random)):
        return True
    return type(value).__name__ == "Generator" and hasattr(value, "clone_state")


def generators(dataset):
    """Return the states of the random generators that a data set keeps, by their names."""
    kept = getattr(dataset, "__dict__", {}).items()
    states = {name: value for name, value in kept if is_generator(value)}
    return {name: state_of(value) for name, value in states.items()}


def state_of(generator):
    """Return the state of a random generator as bytes."""
    state = generator.get_state().numpy() if hasattr(generator, "clone_state") else generator
    return pickle.dumps(state)


@contextlib.contextmanager
def same_random_numbers():
    """Leave the random numbers after this context as if nothing had been drawn within it."""
    torch = sys.modules.get("torch")
    state = random.getstate()
    state_of_numpy = np.random.get_state()
    state_of_torch = torch.get_rng_state() if torch else None
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(state_of_numpy)
        if torch:
            torch.set_rng_state(state_of_torch)


def draw_apart(number):
    """Have process `number` draw other numbers from random and np.random than each other process.

    A program that has seeded them, such as to divide its data, has given all the same, and all
    would augment alike.
    """
    if number:
        random.seed(random.getrandbits(64) + number)
        np.random.seed((np.random.randint(2**31) + number) % 2**32)


def seed(number):
    """Seed the random numbers that a data set may augment with, but not those of GPUs."""
    random.seed(number)
    np.random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(number)


def spread(count):
    """Return up to SAMPLES indices, of which any first ones are spread over the data set."""
    bits = SAMPLES.bit_length() - 1
    # Reversed bits give the order 0, 1/2, 1/4, 3/4, 1/8 and so on.
    places = [int(f"{number:0{bits}b}"[::-1], 2) for number in range(SAMPLES)]
    return list(dict.fromkeys(place * count // SAMPLES for place in places))


def reader(dataset):
    """Return a function that reads the inputs and the label of the sample with an index.

    Some data sets take an index, and others a list of indices, for which they return a batch.
    """

    def read(key):
        seed(0)
        sample = dataset[key]
        parts = sample if isinstance(sample, (tuple, list)) and len(sample) > 1 else (sample, ())
        return parts[0], parts[-1]

    def read_batch_of_one(index):
        return [first(part) for part in read([index])]

    try:
        parts = [leaf for part in read([0]) for leaf in leaves(part)]
    except Exception:  # it takes an index
        return read
    if parts and all(np.ndim(leaf) and len(leaf) == 1 for leaf in parts):
        return read_batch_of_one
    try:
        read(0)
    except Exception:  # its batches are lists, such as of images of different sizes
        return lambda index: read([index])
    return read


def first(part):
    """Return the only sample of a batch."""
    if isinstance(part, Mapping):
        return {key: first(value) for key, value in part.items()}
    return [first(value) for value in part] if isinstance(part, (tuple, list)) else part[0]


def leaves(part):
    """Return what is in a sample, or in a part of one, as a list of arrays."""
    if isinstance(part, Mapping):
        return [leaf for key in sorted(part, key=str) for leaf in leaves(part[key])]
    if not isinstance(part, (tuple, list)):
        return [array(part)]
    if all(isinstance(value, (int, float)) for value in part):
        return [array(part)] if len(part) else []
    return [leaf for value in part for leaf in leaves(value)]


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
    return ", ".join(f"{leaf.shape} {leaf.dtype}" for leaf in leaves(part))


def signature(leaf):
    """Return a list of one or two numbers that say what is in an array.

    Whole numbers and text have a checksum, which has to be the same. Real numbers and pixels have a
    sum with random factors and the root of their mean square: another CPU may round these
    otherwise.
    """
    if leaf.dtype.kind in "bi" or (leaf.dtype.kind == "u" and leaf.dtype.itemsize > 1):
        return [zlib.crc32(np.ascontiguousarray(leaf).astype("int64").tobytes())]
    if leaf.dtype.kind not in "uf":
        return [zlib.crc32(repr(leaf.tolist()).encode())]
    flat = leaf.ravel()[:: max(1, leaf.size // 2**18)].astype("float64")
    flat = np.nan_to_num(flat, posinf=0, neginf=0)
    count = max(1, flat.size)
    size = math.sqrt(float(flat @ flat) / count)
    total = flat @ factors(flat.size) / math.sqrt(count)
    return [float(f"{value:.5g}") for value in (total, size)]


@functools.lru_cache(4)
def factors(count):
    """Return random factors that are the same in each process."""
    return np.random.RandomState(0).standard_normal(count)


def same(one, other):
    """Return whether two lists of signatures are of the same samples; None matches anything."""
    if one is None or other is None:
        return True
    if [len(numbers) for numbers in one] != [len(numbers) for numbers in other]:
        return False
    return all(same_signature(a, b) for a, b in zip(one, other, strict=True))


def same_signature(one, other):
    """Return whether two signatures of the same length are equal, but for rounding."""
    bound = 0
    if len(one) > 1:
        _, size = one
        _, other_size = other
        bound = 0.02 * max(abs(size), abs(other_size))
    return not any(abs(a - b) > bound for a, b in zip(one, other, strict=True))


# What the model is


def look_at_model(args, model):
    """Note what the model is: its name, and the names, shapes and types of its weights.

    One process calls this.
    """
    if hasattr(model, "state_dict"):
        model = getattr(model, "_orig_mod", model)  # torch.compile may have wrapped it
        state = model.state_dict(keep_vars=True)
        weights = {name: value for name, value in state.items() if hasattr(value, "shape")}
        trained = model.parameters()
    else:  # it is a model of Keras
        weights = {f"{number} {value.path}": value for number, value in enumerate(model.variables)}
        trained = model.trainable_variables
    count = sum(math.prod(shape_of(weight)) for weight in trained)
    text = "\n".join(f"{name} {shape_of(value)} {value.dtype}" for name, value in weights.items())
    facts["model"] = {"name": name_of_model(args, model), "weights": count, "tensors": len(weights)}
    facts["model"]["checksum"] = zlib.crc32(text.encode())


def shape_of(weight):
    """Return the shape of a weight, also of one that DeepSpeed has divided."""
    return tuple(getattr(weight, "ds_shape", weight.shape))


def name_of_model(args, model):
    """Return the name of a model's class, or the name by which torchvision or Keras knows it."""
    if type(model).__module__.startswith("torchvision.") and hasattr(args, "model"):
        return args.model
    if not hasattr(model, "state_dict"):
        return model.name
    names = (kind.__name__ for kind in type(model).__mro__)
    return next(name for name in names if not name.startswith("FSDP"))


def differences(old, path):
    """Return in which ways the data and the model of a checkpoint are others than this run's."""
    if old is None:
        what = "which did not note what its data and model were"
        print(f"{path} is from an older train.py, {what}: not compared")
        return []
    changed = []
    for part, now in facts.get("data", {}).items():
        then = old.get("data", {}).get(part)
        if then:
            changed.append(difference_of_data(part, then, now))
    then = old.get("model")
    now = facts.get("model")
    if then and now:
        changed.append(difference_of_models(then, now))
    return [words for words in changed if words]


def difference_of_data(part, then, now):
    """Return how the data set of an earlier run differs from that of this one, or nothing."""
    if then["samples"] != now["samples"]:
        return f"{then['samples']} {part} samples, now {now['samples']}"
    form_then = (then["form"], then["label"])
    form_now = (now["form"], now["label"])
    if None not in (then["form"], now["form"]) and form_then != form_now:
        before = f"{then['form']} with labels {then['label']}"
        after = f"{now['form']} with labels {now['label']}"
        return f"{part} samples of {before}, now {after}"
    known = None not in (then["labels"], now["labels"])
    if known and not same([then["labels"]], [now["labels"]]):
        return f"other labels of the {now['samples']} {part} samples"
    # One of the two runs may have had time for fewer samples.
    pairs = list(zip(then["read"], now["read"], strict=False))
    other = sum(not same(before, after) for before, after in pairs)
    if other:
        return f"other {part} samples: {other} of {len(pairs)} that were compared differ"
    if not pairs and then["name"] != now["name"]:
        return f"{part} samples of {then['name']}, now {now['name']}"
    return ""


def difference_of_models(then, now):
    """Return how the model of an earlier run differs from that of this one, or nothing."""
    if then["name"] != now["name"]:
        return f"the model {then['name']}, now {now['name']}"
    if then["checksum"] == now["checksum"]:
        return ""
    before = f"{then['weights']:,} weights in {then['tensors']} tensors"
    after = f"{now['weights']:,} weights in {now['tensors']} tensors"
    if before == after:
        before = "weights"
        after = "others in name, shape or type"
    return f"a model {now['name']} of {before}, now {after}"


def for_run_json():
    """Return what run.json says of data and model: all but the content of samples."""
    data = {
        part: {name: value for name, value in found.items() if name != "read"}
        for part, found in facts.get("data", {}).items()
    }
    return {"data": data, "model": facts.get("model")}


def long_warmup(args):
    """Return one line if the learning rate never reaches --lr, otherwise nothing."""
    if getattr(args, "has_scheduler", False):
        return ""  # DeepSpeed's file sets the learning rate instead of --warmup-steps
    warmup = getattr(args, "warmup_steps", 0)
    if not warmup:
        return ""
    steps = args.epochs * args.steps_per_epoch
    if warmup <= steps:
        return ""
    wrong = f"--warmup-steps {warmup} is above the {steps} steps of this run"
    share = f"{100 * steps / (warmup + 1):.3g}%"
    return f"{wrong}: its learning rate rises to {share} of what was asked for"


def summary():
    """Return one line that says what data and model are, or nothing where no run trains."""
    if "data" not in facts:
        return ""
    train = facts["data"]["training"]
    test = facts["data"]["test"]
    words = f"samples: {train['samples']} for training and {test['samples']} for testing"
    if train["form"]:
        words += f", {train['form']}"
    if "least" in labels_of_all:
        words += f", labels {labels_of_all['least']} to {labels_of_all['most']}"
    elif train["label"]:
        words += f", labels {train['label']}"
    if "unread" in train and not train["read"]:
        reason = f"since none could be read: {train['unread']}"
        words += f" (a resume compares no more of them, {reason})"
    return f"{words}; model: {facts['model']['weights']:,} weights"


# What cannot be right


def program():
    """Return the lines of train.py."""
    with contextlib.suppress(OSError):
        return Path(sys.argv[0]).read_text(errors="replace").splitlines()
    return []


def lines_with(pattern):
    """Return where in train.py a pattern is found, such as "train.py:84, train.py:90"."""
    name = Path(sys.argv[0]).name
    code = [line.partition("#")[0] for line in program()]
    numbers = [number for number, line in enumerate(code, 1) if re.search(pattern, line)]
    return ", ".join(f"{name}:{number}" for number in numbers)


def wrong_output(output):
    """Return an error message if a model's output does not fit the labels and the loss, or None."""
    shape = tuple(getattr(output, "shape", ()))
    loss = lines_with(CROSS_ENTROPY)
    if len(shape) != 2 or "least" not in labels_of_all or not loss or lines_with("ignore_index"):
        return None
    least = labels_of_all["least"]
    most = labels_of_all["most"]
    _, outputs = shape
    if least >= 0 and most < outputs:
        values = array(output)
        if not (outputs > 1 and values.min() >= 0 and abs(values.sum(1) - 1).max() <= 1e-5):
            return None
        wrong = "the model's outputs add up to 1, as softmax makes them"
        return f"{wrong}, which cross_entropy ({loss}) does as well: leave it out of the model"
    wrong = f"labels are from {least} to {most}, and the model has {outputs} outputs"
    need = f"cross_entropy ({loss}) needs labels from 0 to {outputs - 1}"
    advice = "Change the labels where the data are read, or the number of the model's outputs"
    return f"{wrong}: {need}. {advice}"


def explain(error):
    """Return an error message for an exception that says too little to a beginner, or None."""
    text = str(error).strip()
    # What a loader worker raises comes with its traceback, after which the error itself stands.
    last = text.rpartition("\n")[2]
    if type(error).__name__ == "DataError":
        return re.sub(r"^[\w.]*DataError: ", "", last)
    if text.startswith("Horovod has been shut down"):
        return "another process of the run has ended: what that one says is the cause"
    raised_in = "".join(frame.filename for frame in traceback.extract_tb(error.__traceback__)[-1:])
    no_length = last.endswith("has no len()") and raised_in.endswith("data/distributed.py")
    if no_length or "IterableDataset: expected unspecified sampler" in last:
        wrong = "a stream (IterableDataset) has no numbers that processes could share"
        return f"{wrong}: see docs/sequences-and-streams.md of the repository"
    if last.startswith("Expected more than 1 value per channel"):
        return f"BatchNorm needs batches of 2 or more samples ({last}): use a larger --batch-size"
    bad_label = r"Target (-?\d+) is out of bounds|label value of (-?\d+) which is outside"
    if found := re.search(bad_label, text):
        label = found[1] or found[2]
        wrong = f"the label {label} is outside of the classes for which the model has an output"
        advice = "change the labels where the data are read, or the model"
        return f"{wrong}, which count from 0 ({first_line(text)}): {advice}"
    compilers = ("torch._inductor.exc", "torch._dynamo.exc")
    if type(error).__module__ in compilers and "--compile" in sys.argv:
        return explain_compiler(text)
    if "device-side assert" in text:
        wrong = "a GPU met an index that is out of range"
        cause = "most often a label outside of the model's classes"
        more = "the line `Assertion` above says more"
        where = "CUDA_LAUNCH_BLOCKING=1 shows where it is"
        return f"{wrong}, {cause}: {more}, and {where} ({first_line(text)})"
    return None


def explain_compiler(text):
    """Return an error message for what PyTorch says where it cannot compile the model."""
    lines = [line.strip() for line in text.splitlines() if not line.endswith("raised:")]
    lines = [line for line in lines if line]
    errors = [*lines[:1], *(line for line in lines if "error: " in line)]
    wrong = f"PyTorch cannot compile the model ({': '.join(errors[:2])[:400]})"
    need = "A CPU needs g++, a GPU gcc and Triton, both need Python.h"
    folder = "a folder to write to, and to run programs from (TORCHINDUCTOR_CACHE_DIR)"
    page = "docs/compile.md of the repository"
    return f"--compile: {wrong}. {need} and {folder}: see {page}, or leave it out"


def first_line(text):
    """Return the first line of a message."""
    return text.strip().partition("\n")[0]


def note_loss(loader, loss):
    """Count the batches before the first one whose loss is not finite.

    The count is on the device of the loss, so that no step waits for it.
    """
    finite = loss.detach() * 0 == 0 if hasattr(loss, "detach") else math.isfinite(float(loss))
    losses["finite"] = finite & losses["finite"]
    losses["before"] = losses["before"] + losses["finite"]
    losses["batches"] += 1
    if losses["loader"] is None:
        losses["loader"] = loader


def note_saved(progress):
    """Note that a checkpoint has this progress, or will have it in a moment."""
    last_saved.update(step=progress["step"], epochs=len(progress["history"]))


def own_report(args, model):
    """Return what this process knows of its weights, and of its first bad loss.

    "weights" is whether they are finite; "checksum" is equal in processes whose weights are. A loss
    that is not finite is noted with how many steps ago it was, and with its samples.
    """
    batches = losses["batches"]
    before = int(losses["before"])
    found = extremes(model)
    whole = {name: bounds for name, bounds in found.items() if bounds[-1] < math.inf}
    report = {"weights": all(math.isfinite(least + most) for least, most, *_ in found.values())}
    report["checksum"] = zlib.crc32(repr(whole).encode())
    if before < batches:
        back = (batches - before - 1) // getattr(args, "gradient_accumulation_steps", 1)
        report |= {"steps_ago": back, "samples": samples_of(losses["loader"], before)}
    return report


def forget_losses():
    """Begin to count anew, with the first batch of an epoch."""
    losses.update(batches=0, before=0, finite=True, loader=None)


def extremes(model):
    """Return, by name, the least, the most and a mean of each trained weight, and a tolerance.

    The mean is that of the sizes: a few rows that differ may change neither the least nor the most.

    By this part of the largest value those of another process may differ: nodes of two kinds may
    round differently. It is infinite where each process has another part of a weight. The program
    waits once for each device: some weights may be offloaded to the CPU.
    """
    if not hasattr(model, "state_dict"):
        weights = enumerate(model.trainable_variables)  # several may have one name
        arrays = {f"{number} {weight.path}": weight.numpy() for number, weight in weights}
        return {
            name: (*map(float, (array.min(), array.max(), array.std())), tolerance(array.itemsize))
            for name, array in arrays.items()
            if array.size
        }
    torch = sys.modules["torch"]
    found = {}  # tolerance and bounds of each weight, by device and name
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        divided = hasattr(weight, "ds_tensor") or hasattr(weight, "to_local")
        divided = divided or not getattr(weight, "allreduce", True)  # an expert of DeepSpeed
        weight = shard_of(weight).detach()
        weight = weight.to_local() if hasattr(weight, "to_local") else weight
        weight = torch.view_as_real(weight) if weight.is_complex() else weight
        if weight.numel():
            allowed = math.inf if divided else tolerance(weight.element_size())
            wide = torch.promote_types(weight.dtype, torch.float32)
            mean = torch.linalg.vector_norm(weight, dtype=wide) / weight.numel() ** 0.5
            mean = mean.nan_to_num(posinf=0)  # squares of what is finite may be infinite
            bounds = torch.stack([part.double() for part in (*weight.aminmax(), mean)])
            found.setdefault(weight.device, {})[name] = (allowed, bounds)
    result = {}
    for weights in found.values():
        tolerances, bounds = zip(*weights.values(), strict=True)
        rows = zip(weights, torch.stack(bounds).tolist(), tolerances, strict=True)
        result |= {name: (*pair, allowed) for name, pair, allowed in rows}
    return result | {name: (count, count, count, 0) for name, count in gradients.items()}


def count_gradients(model):
    """Have the gradients be counted that each weight gets, for extremes().

    ZeRO at stages 1 and 2 sends them without names. Where processes get others, it would add those
    of one weight to those of another.
    """
    for name, weight in model.named_parameters():
        if weight.requires_grad and getattr(weight, "allreduce", True):  # no expert of DeepSpeed
            gradients[COUNT + name] = 0
            weight.register_hook(functools.partial(count_one, COUNT + name))


def count_one(name, _):
    """Count a gradient."""
    gradients[name] += 1


def shard_of(weight):
    """Return what this process has of a weight that DeepSpeed has divided; others as they are."""
    if not hasattr(weight, "ds_tensor"):
        return weight
    shard = weight.ds_tensor
    number = sys.modules["torch"].distributed.get_rank(weight.ds_process_group)
    # The last shards are filled up with what happens to be in memory, which may be no number.
    return shard[: max(0, weight.ds_numel - number * shard.ds_numel)]


def tolerance(size):
    """Return by which part equal numbers of so many bytes may differ after many steps."""
    return 1e-4 if size > 2 else 0.03


def samples_of(loader, number):
    """Return which samples or files are in a loader's batch, in words.

    They are unknown where the loader's order cannot be repeated.
    """
    source = getattr(loader, "batch_sampler", None)
    source = getattr(loader, "sampler", loader) if source is None else source
    try:
        with same_random_numbers():
            indices = indices_of(source, number)
            again = indices_of(source, number)
        if indices != again:
            return "unknown samples"
        names = getattr(getattr(loader, "dataset", None), "paths", None)
        noun = "samples" if names is None else "files"
        found = [str(index) if names is None else os.fsdecode(names[index]) for index in indices]
        more = f" and {len(found) - SAMPLES} more" if len(found) > SAMPLES else ""
        return f"{noun} {', '.join(found[:SAMPLES])}{more}"
    except Exception:  # the loader is of another kind
        return "unknown samples"


def indices_of(source, number):
    """Return the indices of a batch, by its number in what a loader takes batches from."""
    batch = next(islice(iter(source), number, None))
    # torchrun_vision's samplers give pairs of an index and a seed.
    return [int(index[0] if isinstance(index, tuple) else index) for index in batch]


def judge(args, progress, place, reports):
    """Return why the run cannot be right, and the variable that lets it go on all the same.

    The reason is None where nothing is wrong, and the variable where none lets the run go on.
    """
    epochs, step = place
    steps = args.steps_per_epoch
    saved = f"a checkpoint in {args.output_dir} is from before that"
    goes_on = f"{saved}. ALLOW_NAN=1 in the environment goes on"
    if any("steps_ago" in report for report in reports):
        what = first_bad_loss(args, progress, reports)
        return f"{what}: look at these samples, or lower --lr; {goes_on}", "ALLOW_NAN"
    if not all(report["weights"] for report in reports):
        what = f"weights are not finite after step {progress['step']} of the run"
        return f"{what}: lower --lr; {goes_on}", "ALLOW_NAN"
    what = f"epoch {epochs} has taken {steps + step} of {steps} steps"
    if step < 0:
        return f"{what}: does a loader end too early?", None
    before = last_saved["epochs"]
    if step > 0 and before is not None and before < epochs:  # at the end of an epoch
        advice = "drop_last=True leaves out a batch that not all have"
        return f"{what}: does a loader go on too long? {advice}", None
    if step > 0 or not progress["history"]:
        return None, None
    return judge_metrics(epochs, progress["history"], goes_on)


def judge_weights(found):
    """Return what judge() returns, for what extremes() has found in each process, by rank."""
    for number, weights in enumerate(found):
        for name in found[0] | weights:
            if name in found[0] and name in weights and alike(found[0][name], weights[name]):
                continue
            what = f"{name} of rank {number} differs from that of rank 0"
            advice = "add and unfreeze layers before DDP or hvd.DistributedOptimizer is made"
            advice = f"{advice}, train the model that DDP returns, and take each step, at the same"
            advice = f"{advice} learning rate, on all ranks"
            if name in gradients:
                advice = "use all weights in each batch on all ranks, or take --zero-stage 0"
            goes_on = "ALLOW_OTHER_WEIGHTS=1 in the environment goes on"
            return f"{what}: {advice}; {goes_on}", "ALLOW_OTHER_WEIGHTS"
    return None, None


def alike(one, other):
    """Return whether two processes have the same weight, by what extremes() says of it."""
    *bounds, allowed = one
    apart = max(abs(bound - other[place]) for place, bound in enumerate(bounds))
    return allowed == math.inf or apart <= allowed * max(map(abs, (*bounds, *other[:-1])))


def first_bad_loss(args, progress, reports):
    """Return where the first loss that is not finite was: its ranks, its step and its samples."""
    bad = {rank: report for rank, report in enumerate(reports) if "steps_ago" in report}
    longest_ago = max(report["steps_ago"] for report in bad.values())
    ranks = [rank for rank, report in bad.items() if report["steps_ago"] == longest_ago]
    first_rank, *others = ranks
    epoch, step = divmod(progress["step"] - longest_ago - 1, args.steps_per_epoch)
    more = f" and {len(others)} other ranks" if others else ""
    where = f"step {step + 1} of epoch {epoch + 1}, {bad[first_rank]['samples']}"
    return f"the loss of rank {first_rank}{more} is not finite in {where}"


def judge_metrics(epochs, history, goes_on):
    """Return what judge() returns, for the metrics at the end of an epoch."""
    for name, value in history[-1].items():
        if value is None or isinstance(value, str):
            continue
        if isinstance(value, (list, tuple, dict)) or getattr(value, "shape", ()):
            what = f"{name} of epoch {epochs} is no single number, as metrics.csv has them"
            return f"{what}: give each of its numbers a name of its own, such as {name}_0", None
        if math.isnan(value) or (name.endswith("loss") and math.isinf(value)):
            what = f"{name} of epoch {epochs} is {value}"
            return f"{what}: look at the data, or lower --lr; {goes_on}", "ALLOW_NAN"
        if "accuracy" in name and not -1e-9 <= value <= 1 + 1e-9:
            what = f"{name} of epoch {epochs} is {value:.2f}, and has to be from 0 to 1"
            return f"{what}: {count_advice()}", None
    loss = lines_with(CROSS_ENTROPY)
    if history[0].get("train_loss") == 0 and loss:
        what = f"train_loss of epoch 1 is exactly 0, as that of one output always is in {loss}"
        numbers = "to predict numbers take F.mse_loss there"
        classes = "for two classes give the model two outputs"
        return f"{what}: {numbers}, and {classes}", None
    return None, None


def count_advice():
    """Return which lines of train.py most likely count samples instead of predictions."""
    where = lines_with(r"\+= len\(labels\)|\blen\(labels\)\]|\.dataset\)$")
    advice = "where there is a prediction for each pixel, or token, divide by the number of these"
    advice = f"{advice}: labels.numel(), or with padding (labels != -100).sum()"
    advice += ", in the place of len(labels)"
    return f"{advice}, see {where}" if where else advice
