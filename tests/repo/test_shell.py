"""Functions of plumbing/job.sh, called with stand-ins for SLURM: the copy of the program, folders of jobs."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import edits
from harness.launchers import ROOT
from harness.processes import clean_environment

JOB = """
source plumbing/job.sh
scontrol() { echo "JobId=$SLURM_JOB_ID JobName=x"; echo "   SubmitTime=$SUBMITTED EligibleTime=y"; }
claim_folder
keep_program
echo "code: $code"
"""
FIRST = {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "one", "SUBMITTED": "2026-11-26T10:00:00"}


def shell(folder: Path, script: str, **variables: str) -> subprocess.CompletedProcess:
    """Run a script of bash beside plumbing/, as run.slurm does."""
    shutil.copytree(ROOT / "plumbing", folder / "plumbing", dirs_exist_ok=True)
    return run_script(folder, script, {"SLURM_JOB_ID": "1"} | variables)


def run_script(folder: Path, script: str, variables: dict[str, str]) -> subprocess.CompletedProcess:
    """Run a script of bash with these variables."""
    environment = clean_environment() | variables
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def job(folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """Do what `prepare` does with the output folder, as the job whose SLURM sets these variables beside FIRST."""
    return shell(folder, JOB, **{name: value for name, value in (FIRST | variables).items() if value})


# ---- The copy of the program ----


def touch(folder: Path, *names: str) -> None:
    """Make files, and the folders that they are in."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def large(path: Path) -> None:
    """Make a file of 11 MB that takes no space."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, 11_000_000)


def emacs(folder: Path) -> None:
    (folder / "common" / ".#data.py").symlink_to("me@login1.4242:1700000000")


def dangling(folder: Path) -> None:
    (folder / "old.py").symlink_to("nowhere/old.py")
    (folder / "data").symlink_to("/scratch/gone")


def sockets(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(folder / "debug.sock"))
    os.mkfifo(folder / "common" / "pipe.py")


def odd_names(folder: Path) -> None:
    touch(folder, "my part/__init__.py", "my part/new\nline.py", "[a]*/__init__.py", "-n.py", "-p/__init__.py")


def environments(folder: Path) -> None:
    touch(folder, "venv/pyvenv.cfg", "venv/lib/python3.11/site-packages/x/__init__.py", "part/env/conda-meta/history")
    touch(folder, "part/__init__.py", "node_modules/x/index.js")


def data_package(folder: Path) -> None:
    touch(folder, "images/__init__.py", *(f"images/{number}.png" for number in range(1100)))


def large_files(folder: Path) -> None:
    for name in ("annotations.json", "common/weights.py", "common/vectors.npz"):
        large(folder / name)


def circles(folder: Path) -> None:
    touch(folder, "part/__init__.py", "part/inner/__init__.py")
    for link, target in {"self": ".", "up": "..", "part/again": ".", "part/inner/back": "../../part"}.items():
        (folder / link).symlink_to(target)
    touch(folder, "__init__.py")  # the folder itself is a package


def linked_package(folder: Path) -> None:
    touch(folder.parent, "shared/__init__.py", "shared/model.py")
    (folder / "shared").symlink_to("../shared")


COPIES: dict[str, tuple[Callable[[Path], None], list[str], list[str], list[str]]] = {
    # what is there besides, what is a file of the copy, what is a link, what is left out
    "an editor's lock": (emacs, ["common/data.py"], [], ["common/.#data.py"]),
    "links to nothing": (dangling, [], [], ["data", "old.py"]),
    "sockets and pipes": (sockets, [], [], ["common/pipe.py", "debug.sock"]),
    "names": (odd_names, ["my part/new\nline.py", "[a]*/__init__.py", "-n.py", "-p/__init__.py"], [], []),
    "environments": (environments, ["part/__init__.py"], ["venv", "part/env", "node_modules"], []),
    "a data folder with __init__.py": (data_package, [], ["images"], []),
    "large files": (large_files, [], ["annotations.json", "common/weights.py", "common/vectors.npz"], []),
    "circular links": (circles, ["part/inner/__init__.py"], ["self", "up", "part/again", "part/inner/back"], []),
    "a package elsewhere": (linked_package, ["shared/model.py"], [], []),
}


@pytest.mark.parametrize("case", COPIES)
def test_copy_of_the_program(tmp_path: Path, case: str) -> None:
    """What is no part of the program stops no job and is not copied; one line names what is neither file nor folder."""
    make, copied, linked, left_out = COPIES[case]
    folder = tmp_path / "project"
    touch(folder, "train.py", "settings.toml", "common/__init__.py", "common/data.py", "text.txt", "x-1.out", ".git/x")
    make(folder)
    run = job(folder)
    assert run.returncode == 0 and not run.stderr, run.stderr
    code = folder / "output" / "7" / "code-7"
    for name in ("train.py", "settings.toml", "common/data.py", *copied):
        path = code / name
        assert path.read_text() == (folder / name).read_text() and not path.is_symlink(), name
        assert path.resolve().is_relative_to(code), name
    for name in ("text.txt", *linked):
        assert (code / name).is_symlink() and (code / name).resolve() == (folder / name).resolve(), name
    assert not {"x-1.out", "output", ".git"} & {path.name for path in code.iterdir()}
    said = [line.rpartition(": ")[2].split() for line in run.stdout.splitlines() if "not in the copy" in line]
    assert sorted(sum(said, [])) == left_out and len(said) == bool(left_out), run.stdout
    assert sum(path.stat(follow_symlinks=False).st_size for path in code.rglob("*")) < 200_000

    touch(folder, "x.py")  # a restart runs the copy, and names what was edited
    (folder / "train.py").write_text("edited")
    again = job(folder, SLURM_RESTART_COUNT="1", SUBMITTED="2026-11-26T11:00:00")
    line = "run.slurm: running output/7/code-7, as it first started; changed since, for new jobs only: train.py"
    assert again.stdout.splitlines() == [line, "code: output/7/code-7"], again.stdout + again.stderr
    assert (code / "train.py").read_text() == "train.py" and not (code / "x.py").exists()


SCRIPTS = ["more/lm.py", "./more/lm.py", "more//lm.py", "common/../more/lm.py", "more/deep/lm.py"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_copy_of_another_script(tmp_path: Path, script: str) -> None:
    """The folder of SCRIPT is copied, since a script that is a link would import from where it was submitted."""
    touch(tmp_path, "train.py", "common/__init__.py", "more/lm.py", "more/deep/lm.py", "more/book.txt", "tools/x.py")
    run = job(tmp_path, SCRIPT=script)
    assert run.returncode == 0 and not run.stderr, run.stderr
    code = tmp_path / "output" / "7" / "code-7"
    assert (code / script).resolve() == (code / os.path.normpath(script)) and (code / script).exists()
    assert all((code / name).is_symlink() for name in ("more/book.txt", "tools"))


def test_copy_on_a_full_disk(tmp_path: Path) -> None:
    """A file of the program that cannot be copied ends the job with one line: without it another program would run."""
    touch(tmp_path, "train.py")
    run = shell(tmp_path, JOB.replace("claim_folder", "claim_folder\ncp() { return 1; }"), **FIRST)
    assert run.returncode == 2 and run.stderr == (
        "run.slurm: error: cannot copy train.py to output/7/code-7, see above\n"
    )


def test_log_on_a_full_disk(tmp_path: Path) -> None:
    """A job that starts again goes on where its log takes no more lines, such as in a home folder that is full."""
    touch(tmp_path, "train.py")
    assert job(tmp_path).returncode == 0
    script = "exec >/dev/full\n" + JOB.replace('echo "code: $code"', "echo went on >&2")
    run = shell(tmp_path, script, **FIRST | {"SLURM_RESTART_COUNT": "1"})
    assert run.returncode == 0 and run.stderr.endswith("No space left on device\nwent on\n"), run


# ---- A job's id that comes again ----

AGAIN: dict[str, tuple[dict[str, str], bool]] = {  # variables of a second start in the folder, and whether it goes on
    "requeued": ({"SLURM_RESTART_COUNT": "1", "SUBMITTED": "2026-11-26T11:00:00"}, True),
    "the third start": ({"SLURM_RESTART_COUNT": "2", "SUBMITTED": "2026-11-27T11:00:00"}, True),
    "twice in one allocation": ({}, True),
    "a successor": ({"SLURM_JOB_ID": "8", "OUTPUT_DIR": "output/7", "KEPT_CODE": "output/7/code-7"}, True),
    "a trial of a sweep": ({"SLURM_JOB_ID": "9", "OUTPUT_DIR": "output/7", "KEPT_CODE": "output/7/code-7"}, True),
    "SLURM reset, or the lab": ({"SUBMITTED": "2026-12-24T10:00:00"}, False),
    "another cluster": ({"SLURM_CLUSTER_NAME": "two", "SUBMITTED": "2026-12-24T10:00:00"}, False),
    "another cluster, requeued": ({"SLURM_CLUSTER_NAME": "two", "SLURM_RESTART_COUNT": "1"}, False),
    "SLURM says nothing": ({"SUBMITTED": ""}, False),
}


@pytest.mark.parametrize("case", AGAIN)
def test_id_that_comes_again(tmp_path: Path, case: str) -> None:
    """A job goes on in its own folder; one that only has the id of an earlier one is refused, and changes nothing."""
    variables, goes_on = AGAIN[case]
    touch(tmp_path, "train.py")
    assert job(tmp_path).returncode == 0
    before = files_in(tmp_path / "output")
    (tmp_path / "train.py").write_text("the new program")
    run = job(tmp_path, **variables)
    if goes_on:
        assert run.returncode == 0 and "running output/7/code-7, as it first started" in run.stdout, run.stderr
        return
    assert run.returncode == 2 and run.stderr.startswith("run.slurm: error: output/7 is of another run with the id 7: ")
    assert run.stderr.endswith("OUTPUT_DIR=output/7 sbatch run.slurm\n") and run.stderr.count("\n") == 1
    assert before == files_in(tmp_path / "output")


def files_in(folder: Path) -> dict[Path, bytes]:
    """Return the files below a folder and their content, but for the note that a job was refused."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".refused"}


@pytest.mark.parametrize("left", ["another job's", "a run's without SLURM", "a copy of another folder"])
def test_refused_and_requeued(tmp_path: Path, left: str) -> None:
    """A job that was refused for its id is refused again after `scontrol requeue`, until the folder is moved away."""
    touch(tmp_path, "train.py")
    if left == "another job's":
        assert job(tmp_path).returncode == 0
    elif left == "a copy of another folder":
        assert job(tmp_path, SLURM_JOB_ID="6").returncode == 0
        (tmp_path / "output/6").rename(tmp_path / "output/7")
    else:
        touch(tmp_path, "output/7/.lock", "output/7/checkpoint.pt")
    before, later = files_in(tmp_path / "output"), "2026-12-24T1{}:00:00"
    for restarts in "012":
        run = job(tmp_path, SUBMITTED=later.format(restarts), SLURM_RESTART_COUNT=restarts)
        assert run.returncode == 2 and "output/7 is of another run with the id 7: move it away" in run.stderr
        assert before == files_in(tmp_path / "output")
    assert job(tmp_path, SUBMITTED=later.format(3), SLURM_RESTART_COUNT="3", OUTPUT_DIR="output/7").returncode == 0

    (tmp_path / "output/7").rename(tmp_path / "elsewhere")
    for restarts in "34":
        run = job(tmp_path, SUBMITTED=later.format(restarts), SLURM_RESTART_COUNT=restarts)
        assert run.returncode == 0 and not list((tmp_path / "output").rglob("*.refused")), run.stderr


def test_another_clusters_job_leaves_no_note(tmp_path: Path) -> None:
    """The job whose folder it is goes on after a requeue, though one of the same id on another cluster was refused."""
    touch(tmp_path, "train.py")
    for variables, status in (
        ({}, 0),
        ({"SLURM_CLUSTER_NAME": "two"}, 2),
        ({"SLURM_CLUSTER_NAME": "two", "SLURM_RESTART_COUNT": "1"}, 2),
        ({"SLURM_RESTART_COUNT": "1", "SUBMITTED": "2026-11-27T10:00:00"}, 0),
    ):
        assert job(tmp_path, **variables).returncode == status


# A job saves and is asked to stop; meanwhile another has come, which train.py refuses: what becomes of the first?
BESIDE = """
source plumbing/job.sh
export code=.
scontrol() { echo "scontrol $*"; }
claim_folder
touch -d "2 seconds ago" "$output"/started*
touch -d "1 second ago" "$output/checkpoint.pt"
{second}
touch "$output/stopped"
run true
"""


@pytest.mark.parametrize("restarts", ["0", "1"])
@pytest.mark.parametrize("second", ["", "9", "9_1", "10", "70"])
def test_second_job_in_the_folder(tmp_path: Path, restarts: str, second: str) -> None:
    """A job that was submitted into the folder of one that runs changes nothing of it: that is requeued all the same.

    What the first had saved was before the other came; so it would be "no new checkpoint since the last restart".
    """
    other = f"(SLURM_JOB_ID={second} job={second} SLURM_RESTART_COUNT=0 claim_folder)" if second else ""
    variables = FIRST | {"OUTPUT_DIR": "output/7", "SLURM_RESTART_COUNT": restarts}
    run = shell(tmp_path, BESIDE.replace("{second}", other), **variables)
    assert run.returncode == 0 and run.stdout == "run.slurm: requeueing job 7\n", run.stdout + run.stderr


# A job that was restarted, and has saved nothing since then, is asked to stop.
NOTHING_NEW = """
source plumbing/job.sh
scontrol() { :; }
claim_folder
{near}
requeue
"""


@pytest.mark.parametrize(("near", "status"), [("", 0), ("near_end || true", 1)])
def test_stopped_without_progress(tmp_path: Path, near: str, status: int) -> None:
    """Preempted twice within one evaluation it goes on; one whose time is not enough for a step does not."""
    run = shell(tmp_path, NOTHING_NEW.replace("{near}", near), **FIRST | {"SLURM_RESTART_COUNT": "1"})
    assert run.returncode == status and ("no new checkpoint since" in run.stderr) == bool(status), run.stderr


EARLY = """
source plumbing/job.sh
kill -USR1 "$$"
trap 'echo heard; signalled=yes' USR1
started=x
run sleep 0.1
"""


def test_notice_before_the_trap(tmp_path: Path) -> None:
    """USR1 that comes while the job's script prepares does not end it, and is heard once the step runs."""
    run = shell(tmp_path, EARLY, **FIRST | {"IMAGE": ""})
    assert (run.returncode, run.stdout) == (0, "heard\n"), run.stdout + run.stderr


# SLURM says once when the job ends, and then does not answer.
END = """
source plumbing/job.sh
scontrol() {
    [[ ! -e asked ]] || return 1
    touch asked
    echo "   StartTime=x EndTime=$(command date -d "@$ENDS" "+${SLURM_TIME_FORMAT/standard/%FT%T}") Deadline=N/A"
}
date() { if [[ "$*" == +%s ]]; then echo "$NOW"; else command date "$@"; fi; }
for _ in 1 2; do ! near_end || echo near; done
"""
ENDS = {  # time zone, when the job ends, and how many seconds before that it is now; near its end or not
    "soon": ("UTC", 1793514600, 10, True),
    "later": ("UTC", 1793514600, 60, False),
    "in the hour that comes again": ("Europe/Berlin", 1792888200, 10, True),
    "in the hour that has come again": ("America/New_York", 1793514600, 60, False),
}


@pytest.mark.parametrize("case", ENDS)
def test_end_of_a_job(tmp_path: Path, case: str) -> None:
    """It is the last one that is known, in seconds, whatever the user's shell asks for: an hour may come twice."""
    zone, ends, before, near = ENDS[case]
    variables = {"SLURM_TIME_FORMAT": "relative", "TZ": zone, "ENDS": str(ends), "NOW": str(ends - before)}
    run = shell(tmp_path, END, **FIRST | variables)
    assert run.stdout == ("near\nnear\n" if near else "") and not run.stderr, run.stdout + run.stderr


NOTICED = r"""
source plumbing/job.sh
private=.
timeout() { shift; "$@"; }
scontrol() { printf '   StartTime=x EndTime=%s Deadline=N/A\n' "$ENDS"; }
squeue() { [[ "${SQUEUE_STATES:-RUNNING}" != RUNNING ]] || echo "$ENDS"; }
{function}
near_time_limit
cat ends
date +%s
"""


@pytest.mark.parametrize("ends", ["1793514600", "Unknown"])
def test_end_of_jupyter(tmp_path: Path, ends: str) -> None:
    """JupyterLab hears when its job ends, whatever the user has squeue show; without an answer it is in 300 s."""
    script = (ROOT / "jupyter" / "run.slurm").read_text()
    (function,) = re.findall(r"^near_time_limit\(\).*?^}", script, re.MULTILINE | re.DOTALL)
    run = shell(tmp_path, NOTICED.replace("{function}", function), ENDS=ends, SQUEUE_STATES="PENDING")
    assert run.returncode == 0 and not run.stderr, run
    found, now = map(int, run.stdout.split())
    assert found == 1793514600 if ends.isdecimal() else 0 <= now + 300 - found < 60


SUCCEED = """
source plumbing/job.sh
scontrol() { :; }
sbatch() { echo "$* with $OUTPUT_DIR" >&2; echo Welcome; echo "8;one"; }
succeed
"""


def test_environment_of_the_next_job(tmp_path: Path) -> None:
    """The job that goes on has the variables that name folder and program, also where a site's header exports none."""
    run = shell(tmp_path, SUCCEED, **FIRST | {"SLURM_JOB_NAME": "x", "SBATCH_EXPORT": "NONE"})
    assert run.returncode == 0 and "job 8 will continue it" in run.stdout, run.stderr
    assert " --export=ALL " in run.stderr and "with output/7" in run.stderr


def test_id_that_comes_again_on_purpose(tmp_path: Path) -> None:
    """With OUTPUT_DIR a job of the same id goes on, with its own program; the older one is kept. So do array tasks."""
    touch(tmp_path, "train.py")
    assert job(tmp_path).returncode == 0
    (tmp_path / "train.py").write_text("the new program")
    later = {"SUBMITTED": "2026-12-24T10:00:00", "OUTPUT_DIR": "output/7"}
    assert job(tmp_path, **later).returncode == 0
    programs = [path.read_text() for path in sorted((tmp_path / "output" / "7").glob("code-7*/train.py"))]
    assert programs == ["the new program", "train.py"]
    assert "as it first started" in job(tmp_path, **later, SLURM_RESTART_COUNT="1").stdout

    for task in ("1", "2"):
        run = job(tmp_path, SLURM_ARRAY_JOB_ID="20", SLURM_ARRAY_TASK_ID=task, SLURM_JOB_ID=f"2{task}")
        assert run.returncode == 0 and run.stdout.endswith(f"code: output/20_{task}/code-20_{task}\n"), run.stderr


def test_folder_of_a_run_without_slurm(tmp_path: Path) -> None:
    """A folder that `--output-dir output/7` has made without SLURM is no job's; one of an older release goes on."""
    touch(tmp_path, "train.py", "output/7/.lock")
    assert "is of another run" in job(tmp_path).stderr
    touch(tmp_path, "output/8/code-8/train.py")
    (tmp_path / "output/8/started").touch()  # empty: as before submissions were noted
    assert job(tmp_path, SLURM_JOB_ID="8", SLURM_RESTART_COUNT="1").returncode == 0


def test_hands_over(tmp_path: Path) -> None:
    """A requeued job, and the next in a chain, go on with the functions that they were submitted with.

    The live ones, which are edited meanwhile, are for new jobs. A copy of an older release, without them, takes these.
    """
    touch(tmp_path, "train.py")
    assert job(tmp_path).returncode == 0
    edits.end_after_handing_over(tmp_path)
    for variables in ({"SLURM_RESTART_COUNT": "1"}, {"SUCCESSION": "1", "KEPT_CODE": "output/7/code-7"}):
        run = run_script(tmp_path, JOB, FIRST | variables)
        assert run.returncode == 0 and "code: output/7/code-7\n" in run.stdout, run.stdout + run.stderr
    run = run_script(tmp_path, JOB, FIRST | {"SLURM_JOB_ID": "8"})
    assert run.returncode == 3 and run.stdout == "the edited plumbing\n"
    shutil.rmtree(tmp_path / "output" / "7" / "code-7" / "plumbing")
    assert run_script(tmp_path, JOB, FIRST | {"SLURM_RESTART_COUNT": "1"}).returncode == 3


def test_same_folders_in_the_tasks(tmp_path: Path) -> None:
    """An OUTPUT_DIR that stands in run.slurm, unexported, is that of the tasks, too, which read the functions again."""
    touch(tmp_path, "train.py")
    task = """bash -c 'source "$code/plumbing/job.sh"; echo "task: $output $code"'"""
    run = shell(tmp_path, f"OUTPUT_DIR=own/place\n{JOB}\n{task}\n", **FIRST)
    assert run.returncode == 0 and run.stdout.endswith("task: own/place own/place/code-7\n"), run.stdout + run.stderr


def test_functions_that_cannot_be_read(tmp_path: Path) -> None:
    """A plumbing/ without one of its files ends the job where run.slurm reads it."""
    shutil.copytree(ROOT / "plumbing", tmp_path / "plumbing")
    (tmp_path / "plumbing" / "gloo.sh").unlink()
    run = run_script(tmp_path, "source plumbing/job.sh || { echo ended; exit 2; }", FIRST)
    assert (run.returncode, run.stdout) == (2, "ended\n") and "gloo.sh" in run.stderr


# ---- What the shell holds ----

OTHERS = {
    "SLURM_CLUSTERS": "two",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_CPU_BIND_LIST": "0x1",
    "SLURM_ARRAY_JOB_ID": "5",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_GPUS": "1",
    "SLURM_GPUS_PER_NODE": "1",
    "SLURM_GPUS_PER_TASK": "1",
}
OWN = {  # what SLURM shows of this job, how many GPUs its nodes have, and what is its own, with GPUs at the end
    "a job without GPUs": ("TresPerTask=cpu=2", "0", ["SLURM_GPUS_PER_TASK=1", "7", "0"]),
    "an array": ("ArrayJobId=5 ArrayTaskId=3", "0", ["SLURM_ARRAY_JOB_ID=5", "SLURM_ARRAY_TASK_ID=3", "5_3", "0"]),
    "GPUs in all": ("TresPerJob=gres:gpu:1", "1", ["SLURM_GPUS=1", "7", "1"]),
    "some GPUs of a whole node": ("TresPerNode=gres/gpu:a100:2", "4", ["SLURM_GPUS_PER_NODE=1", "7", "2"]),
    "slices of two types": ("TresPerNode=gres:gpu:1g:1,gres:gpu:2g:1", "2", ["SLURM_GPUS_PER_NODE=1", "7", "2"]),
    "a whole node": ("Command=/gpu", "4", ["SLURM_GPUS_PER_NODE=4", "7", "4"]),
    "GPUs of each task": ("TresPerTask=cpu=2,gres/gpu=2", "4", ["SLURM_GPUS_PER_TASK=1", "7", "4"]),
    "no answer": ("", "4", [f"{name}={value}" for name, value in [*OTHERS.items()][3:]] + ["5_3", "4"]),
}
INSIDE_ANOTHER = r"""
scontrol() { [[ "$SHOWN" ]] && printf 'JobId=7 JobName=x\n   Restarts=0\n   %s\n   WorkDir=/gpu\n' "$SHOWN"; }
source plumbing/job.sh
share_gpus
env | grep -E "^SLURM_(CL|CPU_|ARRAY|GPUS)" | sort
echo "$job"
echo "$gpus"
bash -c 'scontrol() { touch asked; }; source plumbing/job.sh; [[ ! -e asked ]] && echo "$job"'
"""


@pytest.mark.parametrize("case", OWN)
def test_submitted_inside_another_job(tmp_path: Path, case: str) -> None:
    """What another job has left in the shell is forgotten, once for all tasks; of whole nodes the GPUs are counted."""
    shown, gpus, own = OWN[case]
    run = shell(tmp_path, INSIDE_ANOTHER, **OTHERS | {"SLURM_JOB_ID": "7", "SHOWN": shown, "gpus": gpus})
    assert run.stdout.splitlines() == [*own, own[-2]] and not run.stderr, run.stdout + run.stderr


INTERFACES = {
    "eth0": "",
    "lo,eth0": "",
    "": "",
    "ib0": "has no interface ib0 with an address; it has: eth0 lo",
    "^docker0,lo": "has no interface ^docker0",
    "=eth0": "has no interface =eth0",
    "eth": "has no interface eth ",
    "lo,ib0": "has no interface ib0",
}
ADDRESSES = r"""
source plumbing/job.sh
own_address() { echo 10.0.0.1; }
ip() {
    [[ "$*" != *" show eth0" && "$*" != *" show lo" && "$*" != *" show to "* && "$*" != "-o address" ]] && return 1
    [[ "$*" != "-o address" ]] || echo "1: lo    inet 127.0.0.1/8"
    echo "2: eth0    inet 10.0.0.1/24"
}
MASTER_ADDR=x choose_interface
echo "$GLOO_SOCKET_IFNAME"
"""


@pytest.mark.parametrize("value", INTERFACES)
def test_interface(tmp_path: Path, value: str) -> None:
    """A node without the interface that GLOO_SOCKET_IFNAME names says so in one line; without one it finds its own."""
    run = shell(tmp_path, ADDRESSES, GLOO_SOCKET_IFNAME=value)
    if not INTERFACES[value]:
        assert (run.returncode, run.stdout, run.stderr) == (0, f"{value or 'eth0'}\n", "")
        return
    (line,) = run.stderr.splitlines()
    assert run.returncode == 2 and line.startswith(
        f"run.slurm: error: GLOO_SOCKET_IFNAME={value}: {os.uname().nodename}"
    )
    assert INTERFACES[value] in line


PREPARE = """
IMAGE=""
source plumbing/job.sh
scontrol() { :; }
prepare json
python -c 'import os, sys; print([name for name in sys.argv[1:] if name in os.environ])' {names}
"""


def test_python_variables(tmp_path: Path) -> None:
    """These variables do not reach a job's steps; a numpy that comes by PYTHONPATH is named."""
    touch(tmp_path, "train.py", "other/numpy/__init__.py")
    variables = FIRST | {"VENV": sys.prefix, "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_NUM_NODES": "1"}
    lost = {"PYTHONHOME": str(tmp_path), "PYTHONSAFEPATH": "1", "SLURM_TIMELIMIT": "1:00", "SLURM_GRES": "gpu:1"}
    lost |= {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores", "GOMP_CPU_AFFINITY": "0", "KMP_AFFINITY": "compact"}
    variables |= lost | {"PYTHONPATH": str(tmp_path / "other")}
    script = PREPARE.replace("{names}", " ".join(lost))
    run = shell(tmp_path, script, **variables)
    assert run.returncode == 0 and run.stdout.splitlines() == [
        f"run.slurm: by PYTHONPATH or from your home, not from {sys.prefix}, come: {tmp_path}/other/numpy/__init__.py",
        "[]",
    ], run.stdout + run.stderr
    quiet = shell(tmp_path, script, **variables | {"PYTHONPATH": str(tmp_path), "SLURM_JOB_ID": "8"})
    assert quiet.returncode == 0 and quiet.stdout == "[]\n", quiet.stdout + quiet.stderr


def test_image_of_jupyter(tmp_path: Path) -> None:
    """JupyterLab's image sees the folder, as those of the examples do; an image of pyxis is refused."""
    folder = tmp_path / "jupyter"
    shutil.copytree(ROOT / "jupyter", folder)
    shutil.copytree(ROOT / "plumbing", tmp_path / "plumbing")
    touch(tmp_path, "venv/pyvenv.cfg", "bin/apptainer")
    (tmp_path / "bin/apptainer").write_text('#!/bin/bash\necho "$@"\nexit 1\n')
    (tmp_path / "bin/apptainer").chmod(0o755)
    variables = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "VENV": str(tmp_path / "venv")}
    variables |= {"SLURM_JOB_ID": "1", "SLURM_SUBMIT_HOST": "login"}
    bound = f" --bind {folder}:{folder} --bind {tmp_path / 'venv'}:"
    for image, says in {"a.sif": bound, "pyxis:a.sqsh": "images of pyxis are not known here"}.items():
        done = run_script(folder, "source ./run.slurm", variables | {"IMAGE": image})
        assert done.returncode == 2 and says in done.stderr, done


EMPTIED = """
export task="$$"
source plumbing/job.sh
until_asked_to_stop bash -c 'rm -r "${STOP_FILE%/*}"; kill -USR1 "$task"; sleep 0.5; ls "$STOP_FILE"'
"""


def test_temporary_folder_is_emptied(tmp_path: Path) -> None:
    """A task whose /tmp is emptied, as some sites do each week, still hears that it has to stop, and ends well."""
    run = shell(tmp_path, EMPTIED)
    assert (run.returncode, run.stderr) == (0, "") and run.stdout.endswith("/stop\n"), run


@pytest.mark.parametrize("folder", ["/nonexistent", "", "/proc"])
def test_temporary_folder(tmp_path: Path, folder: str) -> None:
    """A TMPDIR in which nothing can be made, as one of another node, does not end the task."""
    script = "source plumbing/job.sh; until_asked_to_stop bash -c 'test -d \"${STOP_FILE%/*}\" && echo here'"
    run = shell(tmp_path, script, TMPDIR=folder)
    assert (run.returncode, run.stdout, run.stderr) == (0, "here\n", "")


@pytest.mark.parametrize(
    ("types", "shares", "gpus"),
    [("(null)", "NO", "3"), ("(null)", "OK", "0"), ("gpu", "NO", "0"), ("gpu,shard", "NO", "0"), ("", "NO", "0")],
)
def test_slurm_without_gpus(tmp_path: Path, types: str, shares: str, gpus: str) -> None:
    """Where SLURM gives whole nodes and knows no GPUs, those of the node are counted; elsewhere they may be others'."""
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\nfor id in 0 1 2; do echo "GPU $id: X (UUID: GPU-1)"; done\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    script = 'scontrol() { if [[ "$2" == job ]]; then echo "   OverSubscribe=$SHARES Contiguous=0"\n'
    script += 'elif [[ "$TYPES" ]]; then echo "GresTypes               = $TYPES"; fi; }\n'
    script += 'source plumbing/job.sh; gpus=0; share_gpus; echo "$gpus$SLURM_GPUS_PER_NODE"'
    run = shell(tmp_path, script, PATH=f"{tmp_path}:{os.environ['PATH']}", TYPES=types, SHARES=shares)
    assert (run.returncode, run.stdout, run.stderr) == (0, f"{gpus}\n", ""), run


# ---- Copies on the node's disk ----

# srun and squeue as on one node; run.slurm has got `words` as its arguments.
STAGE = """
set -- {words}
source plumbing/job.sh
mkdir -p "$output"
srun() {{ while [[ "$1" == --* ]]; do shift; done; exec "$@"; }}
stage_data --model-dir=model --text-file={default}
printf "%s\\n" "${{staged[@]}}"
[[ ! "$STAGE_DIR" ]] || cat "$STAGE_DIR$PWD"/*
"""
COPIED = {
    "": ["model", "text.txt"],
    "--lr 1 --model-dir other --text-file=book.txt": ["other", "book.txt"],
    "--model-dir=model --model other --text 'my book'": ["other", "my book"],
}


@pytest.mark.parametrize("words", COPIED)
def test_what_is_copied(tmp_path: Path, words: str) -> None:
    """STAGE=1 copies what the flags name, however they are given; what is a link becomes a file."""
    for name in ("model", "other", "text.txt", "book.txt", "my book"):
        (tmp_path / f"real {name}").write_text(f"{name}\n")
        (tmp_path / name).symlink_to(f"real {name}")
    script = STAGE.format(words=words, default="text.txt")
    (tmp_path / "disk").mkdir()
    variables = {"STAGE": "1", "KEPT_CODE": ".", "TMPDIR": str(tmp_path / "disk"), "SLURM_JOB_NUM_NODES": "1"}
    run = shell(tmp_path, script, SLURM_NODEID="0", **variables)
    copies = f"{tmp_path}/disk/data-1{tmp_path}"
    model, text = COPIED[words]
    expected = ["--model-dir", f"{copies}/{model}", "--text-file", f"{copies}/{text}"]
    assert run.returncode == 0 and run.stdout.splitlines()[1:] == [*expected, *sorted([model, text])], run
    assert not list((tmp_path / "disk").iterdir()) and not run.stderr

    shared = shell(tmp_path, script, SLURM_NODEID="1", **variables)  # this node sees the first one's disk
    assert shared.returncode == 2 and not list((tmp_path / "disk").iterdir()), shared
    assert f"error: all nodes see the same {tmp_path}/disk: set TMPDIR to a disk of each node" in shared.stderr
    lost = shell(tmp_path, script, **variables | {"TMPDIR": "/nonexistent"})
    assert lost.returncode == 2 and "error: STAGE=1 needs a folder /nonexistent\n" in lost.stderr, lost

    running = 'source plumbing/job.sh; squeue() { echo "RUNNING$SQUEUE_STATES"; }; is_running'
    assert shell(tmp_path, running, SQUEUE_STATES="PENDING").returncode == 0, "data that is still read is kept"

    nothing = shell(tmp_path, STAGE.format(words="", default="").replace("--model-dir=model", "--a="), **variables)
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert nothing.stderr == "run.slurm: error: STAGE=1 finds nothing to copy: say what, with --a --text-file\n"
    without = shell(tmp_path, script, **variables | {"STAGE": ""})
    assert (without.returncode, without.stdout, without.stderr) == (0, "\n", "")


# ---- Checks ----


def test_no_check_is_an_assert() -> None:
    """No shipped Python file has an assert: with PYTHONOPTIMIZE=1, or python -O, it would check nothing."""
    found = []
    for room in ("examples", "common", "plumbing", "jupyter", "runs", "sweep", "preflight"):
        for path in (ROOT / room).rglob("*.py"):
            relative = path.relative_to(ROOT)
            if not {".venv", "output", "__pycache__"} & set(relative.parts):
                lines = path.read_text().splitlines()
                found += [
                    f"{relative}:{number}" for number, line in enumerate(lines, 1) if re.match(r"\s*assert\b", line)
                ]
    assert not found
