"""Files that survive a kill at any moment, in an output folder that one run alone writes to."""

import contextlib
import errno
import fcntl
import os
import shutil

from .launchers import fail


def lock(folder):
    """Lock the folder until this process exits or is killed; return an error message or None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The file stays open on purpose: to close it would release the lock.
        file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_unfinished(folder)
    except BlockingIOError:
        wrong = f"another run is writing to --output-dir {folder}"
        return f"{wrong}: wait for its end, or choose another folder"
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            return None  # this file system has no locks
        what = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        return f"cannot write to --output-dir {folder} ({what}): choose another folder"


def remove_unfinished(folder):
    """Remove what `write` has left in a folder whose run was killed meanwhile.

    Only the process that holds the folder's lock may call this.
    """
    for path in (*folder.glob("tmp.*"), *folder.glob("checkpoint/tmp.*")):
        process, _, name = path.name.removeprefix("tmp.").partition(".")
        if path.name == "tmp.link" or (process.isdecimal() and "." in name):
            with contextlib.suppress(OSError):
                path.unlink()


def write(path, save):
    """Write a file as a whole or not at all.

    save(file) writes a temporary file, and may read it; it is then flushed to the disk and renamed
    to `path`.
    """
    temporary = path.with_name(f"tmp.{os.getpid()}.{path.name}")
    try:
        with open(temporary, "w+b") as file:
            save(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
        with contextlib.suppress(OSError):
            temporary.unlink()
        if "CUDA error" in str(error):
            raise  # a GPU could not be read
        wrong = f"cannot write {path} ({error}): is the disk full, or your quota?"
        fail(f"{wrong} Free some space, then use --resume")


def link(path, other):
    """Give a file another name as well, which takes no space; without hard links, copy it."""
    temporary = other.with_name("tmp.link")  # no name of `write`, which empties the file it opens
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
        os.replace(temporary, other)
    except OSError:
        with open(path, "rb") as file:
            write(other, lambda copy: shutil.copyfileobj(file, copy))


def write_metrics(args, progress):
    """Write metrics.csv, which has the rows of the history."""
    history = progress["history"]
    if not history:
        return
    # A resumed run may have other metrics than the run that it continues.
    names = list(dict.fromkeys(name for row in history for name in row))
    rows = [names, *([row.get(name, "nan") for name in names] for row in history)]
    # Libraries of metrics return tensors of one number.
    rows = [[value.item() if hasattr(value, "item") else value for value in row] for row in rows]
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    write(args.output_dir / "metrics.csv", lambda file: file.write(text.encode()))
