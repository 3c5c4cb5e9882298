"""The lab itself: it starts, breaks as told, and leaves nothing behind, however it ends."""

import contextlib
import grp
import hashlib
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import readme, runs
from harness.jobs import hand_over, job_processes, on_this_machine_only
from harness.launchers import ROOT, copy_example
from harness.processes import find_processes, read_line, running, wait_until
from lab import Lab, LabError, Wanted, accounting, cluster, config, faults, tracking, tree, why_not

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(why_not()), reason=str(why_not()))]


def namespaces(pids: Iterable[int | str]) -> set[str]:
    """Return the network and mount namespaces that processes are in."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            found |= {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("net", "mnt")}
    return found


def traces(name: str) -> list[str]:
    """Return what a lab of that name has left outside of its namespaces, and any daemon with its files open."""
    folder = f"/tmp/slurm-lab-{name}"
    left = [folder] if os.path.lexists(folder) else []
    left += [line for line in Path("/proc/mounts").read_text().splitlines() if folder in line]
    left += map(str, tracking.leftovers(Path(folder).name))
    left += [path.name for path in Path("/sys/class/net").iterdir() if re.match(r"lab|node\d", path.name)]
    return left + [f"process {pid}" for pid in find_processes(f"SLURM_CONF={folder}/slurm.conf")]


def etc() -> str:
    """Return a checksum over the files of /etc."""
    files = sorted(path for path in Path("/etc").rglob("*") if path.is_file() and not path.is_symlink())
    return hashlib.md5(b"".join(str(path).encode() + path.read_bytes() for path in files)).hexdigest()


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m lab`."""
    line = [sys.executable, "-m", "lab", *words]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture
def name() -> Iterator[str]:
    """A name for a lab, of which nothing may be left in the end."""
    name = f"own{os.getpid()}"
    assert not traces(name)
    yield name
    Lab(Wanted(name=name)).down()


def submit(lab: Lab, script: str, folder: Path, *options: str) -> str:
    """Submit a script and return the job's id."""
    text = "#!/bin/bash\n" + textwrap.dedent(script)
    done = lab.run(["sbatch", "--parsable", *options], input=text, cwd=hand_over(folder, lab))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_up_and_down(name: str, tmp_path: Path) -> None:
    """Idle nodes, which differ in name and address; `down` with a job running leaves nothing; /etc stays."""
    before = etc()
    with Lab(Wanted(nodes=2, gpus=1, name=name, share=[tmp_path])) as lab:
        assert lab.states() == {"node1": "idle", "node2": "idle"}
        shown = lab.run(["srun", "--nodes=2", "sh", "-c", "echo $(hostname) $(hostname -i) $(ls /tmp)"], cwd="/").stdout
        names, addresses, *_ = zip(*(line.split() for line in shown.splitlines()), strict=False)
        assert sorted(names) == ["node1", "node2"]
        assert {lab.addresses[node] for node in names} == set(addresses) and not any(a[:4] == "127." for a in addresses)
        assert "slurm-lab" in shown, "the lab's folder is shared, so it is in each node's own /tmp"
        job = submit(lab, "setsid sleep 1000 & srun sleep 1000", tmp_path, "--nodes=2")
        lab.wait_for_job(job, "RUNNING")
        spaces = namespaces(lab.processes()) - namespaces(["self"])
        assert len(spaces) >= 2 * 3  # of the head and two nodes
    assert not traces(name)
    wait_until(lambda: not spaces & namespaces(cluster.pids()), 300, "the end of the lab's namespaces")
    assert etc() == before


OWNER = """
import sys, time
from lab import Lab, Wanted
with Lab(Wanted(name=sys.argv[1])) as lab:
    lab.run(["sbatch", "--nodes=2", "--output=/dev/null", "--wrap", "setsid sleep 1000 & srun sleep 1000"])
    print("up", flush=True)
    while True:  # a signal that comes just before a sleep does not cut it short
        time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_owner_killed(name: str, number: signal.Signals) -> None:
    """A test run that crashes, in whatever way, takes its lab and the jobs in it along."""
    line = [sys.executable, "-c", OWNER, name]
    with running(line, cwd=ROOT, stderr=subprocess.DEVNULL) as owner:
        assert read_line(owner, 300) == "up\n"
        assert traces(name)
        owner.send_signal(number)
        owner.wait(300)
    wait_until(lambda: not traces(name), 300, f"an end without traces, not {traces(name)}")


def test_interrupted_up(name: str) -> None:
    """Ctrl-C at any moment of `up` leaves nothing."""
    line = [sys.executable, "-m", "lab", "up", "--name", name]
    for moment in range(8):
        with running(line, cwd=ROOT, stderr=subprocess.PIPE) as process:
            time.sleep(moment * 0.08)  # not a wait: the moment
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=300)
        if process.returncode == 0:
            assert command("down", "--name", name).returncode == 0
        wait_until(lambda: not traces(name), 300, f"an end without traces, not {traces(name)}")
    stays = Path(f"/tmp/slurm-lab-{name}/detached")  # from the moment when it is there
    with running(line, cwd=ROOT, stderr=subprocess.PIPE) as process:
        wait_until(lambda: stays.exists() or process.poll() is not None, 300, "a lab that stays", pause=0)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
    assert process.returncode == 0, "a lab that runs on has been reported as interrupted"
    assert command("down", "--name", name).returncode == 0


def test_stale_lab(name: str, tmp_path: Path) -> None:
    """A lab whose keeper was killed leaves its folder and its cgroups only, and the next `up` cleans that."""
    lab = Lab(Wanted(name=name)).up()
    keeper = int((lab.folder / "keeper").read_text().split()[0])
    os.kill(keeper, signal.SIGKILL)
    left = [str(lab.folder), *map(str, tracking.leftovers(lab.folder.name))]
    wait_until(lambda: traces(name) == left, 300, "the end of its processes")
    with pytest.raises(LabError, match="no lab named"):
        lab.states()
    with Lab(Wanted(name=name)) as fresh:
        assert fresh.states() == {"node1": "idle", "node2": "idle"}
    assert not traces(name)


def test_two_labs(name: str, lab: Lab) -> None:
    """A second lab runs beside the first; one of the same name is refused with one line."""
    assert command("up", "--nodes", "1", "--name", name).returncode == 0
    assert lab.states().keys() == {"node1", "node2"} and Lab.find(name).states() == {"node1": "idle"}
    refused = command("up", "--name", name)
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == [
        f"lab: error: a lab named {name} is running; end it first: python -m lab down"
    ]


# The clone is made, but the tree, which would need debootstrap, is not entered.
UPDATE = """
import os, sys
from pathlib import Path
from lab import tree
tree.enter = lambda *_: None
tree.run("made", ["sh", "-c", "umask"], Path(sys.argv[1]))
"""


def test_tree_of_another_users_repository(tmp_path: Path) -> None:
    """A tree has a clone of a repository that is not root's, which jobs can read whatever umask root's shell has."""
    theirs, made = tmp_path / "theirs", tmp_path / "trees" / "made"
    made.mkdir(parents=True, mode=0o755)
    (made / "complete").write_text(config.STUDENT)
    git = ["git", "-C", str(theirs), "-c", "user.name=a", "-c", "user.email=a@b.example"]
    for number in (1, 2):  # it is made, then it is brought up to date
        theirs.mkdir(exist_ok=True)
        (theirs / "file").write_text(f"{number}")
        for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "A file."]):
            subprocess.run([*git, "-c", "safe.directory=*", *words], check=True, timeout=300)
        for path in [theirs, *theirs.rglob("*")]:
            os.chown(path, 12345, 12345)
        line = [sys.executable, "-c", UPDATE, str(tmp_path / "trees")]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
        done = subprocess.run(line, cwd=theirs, umask=0o077, env=variables, capture_output=True, text=True, timeout=300)
        assert (done.stdout, done.stderr) == ("0022\n", "")
        assert (made / "project" / "file").read_text() == f"{number}"
        assert stat.S_IMODE((made / "project" / "file").stat().st_mode) == 0o644


def known(*numbers: int) -> Callable[[int], str]:
    """Return what asks a directory, as sssd's is asked, for one number: it knows these, and lists none of them."""

    def find(number: int) -> str:
        if number not in numbers:
            raise KeyError(number)
        return "somebody"

    return find


FIRST = config.UIDS.start
TAKEN = {  # users and groups of a directory; the number that is made up
    "nobody": ((), (), FIRST),
    "the old number": ((2001,), (2001,), FIRST),
    "a user": ((FIRST,), (), FIRST + 1),
    "a group": ((), (FIRST,), FIRST + 1),
    "a user and another group": ((FIRST,), (FIRST + 1,), FIRST + 2),
    "many": (tuple(range(FIRST, FIRST + 100)), (), FIRST + 100),
}


@pytest.mark.parametrize(("users", "groups", "number"), TAKEN.values(), ids=TAKEN)
def test_made_up_number(
    monkeypatch: pytest.MonkeyPatch, users: tuple[int, ...], groups: tuple[int, ...], number: int
) -> None:
    """The user who is made up has a number that is nobody's, also where a directory lists none of its users."""
    monkeypatch.chdir("/")
    monkeypatch.setattr(pwd, "getpwall", list)
    monkeypatch.setattr(pwd, "getpwuid", known(*users))
    monkeypatch.setattr(grp, "getgrgid", known(*groups))
    student = pwd.struct_passwd(("student", "x", 1000, 1000, "", "/home/student", "/bin/sh"))
    find, names = pwd.getpwnam, {"student": student}  # a real one, as at a university: he is not taken unasked
    monkeypatch.setattr(pwd, "getpwnam", lambda name: names.get(name) or find(name))
    account = config.find_account(Wanted())
    assert (account.user, account.uid, account.gid, account.made_up) == ("lab-student", number, number, True)


def test_no_devices(name: str) -> None:
    """Where root may make no device, as in a container, a lab starts without one; with --gpus one line says why not."""
    line = ["setpriv", "--bounding-set=-mknod", "--inh-caps=-mknod", sys.executable, "-m", "lab", "up", "--name", name]
    options: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([*line, "--nodes", "1"], **options)
    assert done.returncode == 0, done.stderr
    assert command("down", "--name", name).returncode == 0
    done = subprocess.run([*line, "--gpus", "1"], **options)
    assert done.returncode == 2 and "--gpus: this machine permits no devices" in done.stderr, done.stderr


def test_devices(name: str) -> None:
    """Everybody in a lab can use its /dev/fuse; on the machine there is no device of it, but what stands for GPUs."""
    with Lab(Wanted(name=name, nodes=1, gpus=1)) as lab:
        lab.run(["sh", "-ec", "[ ! -e /dev/fuse ] || : <>/dev/fuse"], "node1", "/", check=True)
        devices = [path for path in lab.folder.rglob("*") if path.is_char_device()]
        assert [(path.name, path.stat().st_rdev) for path in devices] == [("gpu0", os.makedev(1, 3))]


def test_command_line(name: str) -> None:
    """up, run, status, logs and down do what they say, and `run` passes the exit status on."""
    assert "node1 node2 idle" in command("up", "--name", name, "--gpus", "2").stdout
    ran = command("run", "--name", name, "--", "srun", "--nodes=1", "--gpus-per-node=2", "env")
    assert "SLURM_GPUS_ON_NODE=2" in ran.stdout and "CUDA_VISIBLE_DEVICES=0,1" in ran.stdout
    assert command("run", "--name", name, "--", "sh", "-c", "exit 7").returncode == 7
    assert command("run", "--name", name, "--chdir", "lab", "--", "pwd").stdout == f"{ROOT}/lab\n"
    assert command("run", "--name", name, "--user", "root", "--", "id", "-un").stdout == "root\n"
    assert re.search(r"node2 +[\d.]+ +idle", command("status", "--name", name).stdout)
    assert "slurmctld version" in command("logs", "--name", name, "slurmctld").stdout
    assert command("down", "--name", name).stdout == "lab: ended\n"
    assert command("down", "--name", name).stdout == "lab: nothing was running\n"


def as_written(command: str, name: str, words: str = "") -> str:
    """Return a README's command for a lab of another name, and with more words for `up`, run by this Python."""
    pattern = r"^(sudo )?python3? -m lab ([\w-]+)"
    command, found = re.subn(pattern, rf"{sys.executable} -m lab \2 --name {name}", command)
    assert found, command
    return command.replace(" up ", f" up {words} ")


def repository(folder: Path) -> str:
    """Make a folder with what the READMEs' commands for the lab need; return the words that share it with nodes."""
    shutil.copytree(ROOT / "lab", folder / "lab")
    copy_example(ROOT / "examples" / "ddp_spawn", folder / "examples" / "ddp_spawn")
    hand_over(folder)
    return " ".join(f"--share {path}" for path in on_this_machine_only(Path(sys.prefix)))


def run_lines(lines: list[str], folder: Path, **variables: str) -> str:
    """Run commands of a README and return what the last one prints; what they start runs on after them.

    Their python3 is that of these tests: the user who runs jobs cannot read one that is in root's home folder.
    """
    path = f"{Path(sys.executable).resolve().parent}:{os.environ['PATH']}"
    return readme.run_block(lines, folder, **{"PATH": path, runs.MARKER: ""}, **variables).stdout


def test_from_nothing_to_a_job(name: str, tmp_path: Path) -> None:
    """The first block of the lab's README: an environment, then a job that trains."""
    share = repository(tmp_path / "clone")
    _, *install = readme.until("lab/README.md", "sudo python3 -m lab down")  # without apt-get: .ci/run installs that
    up, submit, down = (as_written(line, name, share) for line in install[2:])
    assert run_lines([*install[:2], up, submit], tmp_path / "clone") == "Submitted batch job 2\n"
    assert Lab.find(name).wait_for_job(2)["JobState"] == "COMPLETED"
    log = tmp_path / "clone" / "examples" / "ddp_spawn" / "ddp_spawn-2.out"
    assert "finished: the model is in" in log.read_text()
    assert run_lines([down], tmp_path / "clone") == "lab: ended\n"


@pytest.mark.runs("full")  # test_from_nothing_to_a_job has the first of these commands
def test_readme(name: str, tmp_path: Path) -> None:
    """Each command in the lab's README does what stands beside it."""
    share = repository(tmp_path / "clone")
    use = readme.block("lab/README.md", "python -m lab shell")
    damage = readme.block("lab/README.md", "python -m lab cut ...")
    for line in [*use[:-1], *damage, use[-1]]:  # `down` comes last
        printed = run_lines([as_written(line, name, share)], tmp_path / "clone", VENV=sys.prefix)
        if " up " in line:
            lab = Lab.find(name)
        elif "sbatch" in line:
            lab.wait_for_job(2, "RUNNING")
        elif "squeue" in line or "status" in line:
            assert "node1" in printed, printed
        elif " cut " in line:
            lab.wait_for_node("node2", "down*")
        elif " heal " in line:
            lab.wait_for_node("node2", "idle", "mixed", "allocated")
        elif " requeue " in line:
            lab.wait_for_job(2, "RUNNING")
            assert lab.job(2)["Restarts"] == "1"
        elif " timelimit " in line:
            log = tmp_path / "clone" / "examples" / "ddp_spawn" / "ddp_spawn-2.out"
            wait_until(lambda log=log: "run.slurm: " in log.read_text(), 300, "run.slurm's answer to the signal")
    assert printed == "lab: ended\n"


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root, without the programs, or with bad numbers: one clear line."""
    for words, text in ((("--nodes", "0"), "--nodes 0"), (("--name", "a/b"), "--name"), (("--share", "/x"), "--share")):
        refused = command("up", *words)
        assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1 and text in refused.stderr
    script = "import os, runpy, sys; os.geteuid = lambda: 1000; sys.argv = ['lab', 'up']; runpy.run_module('lab')"
    script = script.replace("run_module('lab')", "run_module('lab', run_name='__main__')")
    refused = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == ["lab: error: a lab needs root: run it with sudo"]
    monkeypatch.setattr(cluster, "PROGRAMS", (*cluster.PROGRAMS, "no-such-program"))
    reason = why_not()
    assert reason and "no-such-program" in reason and "apt-get install" in reason


# Its first argument is an address to listen at, the second how many bytes to wait for: it prints the Mbit/s.
RECEIVE = """
import socket, sys, time
server, left = socket.create_server((sys.argv[1], 5001)), int(sys.argv[2])
print("ready", flush=True)
client, _ = server.accept()
start, size = time.monotonic(), left
client.sendall(b"go")
while left:
    left -= len(client.recv(min(left, 1 << 20)))
print(size * 8 / 1e6 / (time.monotonic() - start))
"""
SEND = """
import socket, sys
server = socket.create_connection((sys.argv[1], 5001))
server.recv(2)
server.sendall(bytes(int(sys.argv[2])))
server.recv(1)  # the receiver's end
"""


def throughput(lab: Lab, sender: str, receiver: str, size: int) -> float:
    """Send `size` bytes from one node to another, over TCP; return the rate in Mbit/s."""
    words = [lab.addresses[receiver], str(size)]
    command = lab.command([sys.executable, "-c", RECEIVE, *words], receiver, "/")
    with running(command) as receiving:
        assert read_line(receiving, 300) == "ready\n"
        lab.run([sys.executable, "-c", SEND, *words], sender, "/", check=True, timeout=300)
        return float(read_line(receiving, 300))


def test_slow(name: str) -> None:
    """A slow link has no more than the rate that was asked for, in both directions, until it is healed.

    `status` shows it. How much less a link has, on a busy machine, is not looked at.
    """
    with Lab(Wanted(name=name, share=on_this_machine_only(Path(sys.prefix)))) as lab:
        ways = [("node1", "node2"), ("node2", "node1")]
        for rate, expected in ("100mbit", 100), ("20mbit", 20):  # the second replaces the first
            assert command("slow", "node2", rate, "--name", name).stdout == f"lab: slow node2 {rate}: done\n"
            rates = [throughput(lab, *way, expected * 50_000) for way in ways]  # 0.4 s
            assert max(rates) < 1.15 * expected, rates
        node1, node2, *_ = command("status", "--name", name).stdout.splitlines()
        assert node2.endswith("slowed to 20Mbit") and "slowed" not in node1
        faults.heal(lab, "node2")
        assert min(throughput(lab, *way, 50_000_000) for way in ways) > 1.15 * expected
        assert "slowed" not in command("status", "--name", name).stdout


def test_slow_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such rate, no such node, no program tc: one clear line, and nothing has changed."""
    with Lab(Wanted(name=name, nodes=1)) as lab:
        faults.slow(lab, "node1", "2gbit")
        bad = ("100", "fast", "100mb", "0mbit", "-1mbit", "1.5gbit", "1001gbit", "1gbit latency 1ms")
        for node, rate in *(("node1", rate) for rate in bad), ("node2", "1gbit"):
            refused = command("slow", "--name", name, "--", node, rate)
            assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1, refused.stderr
            text = f"slow: {rate}: must be a rate such as 100mbit" if node == "node1" else "no such node: node2"
            assert text in refused.stderr
        assert faults.rate_of(lab, "node1") == "2Gbit"
        monkeypatch.setattr(faults, "SEARCH", "/nowhere")
        faults.heal(lab, "node1")  # needs tc only where there is a limit that tc can show
        with pytest.raises(LabError, match=r"missing program: tc \(apt-get install .*iproute2\)"):
            faults.slow(lab, "node1", "1gbit")


def test_no_orphans(lab: Lab, tmp_path: Path) -> None:
    """What a job has started ends with it, also in a session of its own and without a parent; signals arrive."""
    script = "trap 'echo told; exit 0' USR1; (setsid sleep 1000 &) & srun sh -c 'setsid sleep 1000 & sleep 1000' & wait"
    jobs = [submit(lab, script, tmp_path, "--output=%j.out", "--signal=B:USR1@60") for _ in range(2)]

    def sleeping(job: str) -> list[str]:
        lines = lab.processes()
        return [lines[pid] for pid in job_processes(lab, job) if lines.get(pid, "").startswith("sleep ")]

    for job in jobs:
        lab.wait_for_job(job, "RUNNING")
        wait_until(lambda job=job: len(sleeping(job)) >= 3, 300, f"three sleeps of job {job}")
    faults.timelimit(lab, jobs[0])
    lab.run(["scancel", jobs[1]])
    assert [lab.wait_for_job(job)["JobState"] for job in jobs] == ["COMPLETED", "CANCELLED"]
    for job in jobs:
        wait_until(lambda job=job: not job_processes(lab, job), 300, f"the end of all processes of job {job}")
    assert (tmp_path / f"{jobs[0]}.out").read_text().endswith("told\n")


@pytest.fixture(params=[pytest.param(mode, id=mode) for mode in tracking.MODES])
def tracked(request: pytest.FixtureRequest, name: str, tmp_path: Path) -> Iterator[Lab]:
    """A lab with each of the ways to track processes that work on this machine."""
    if reason := tracking.why_not(request.param):
        pytest.skip(f"{request.param}: {reason}")
    with Lab(Wanted(nodes=2, name=name, share=on_this_machine_only(tmp_path), tracking=request.param)) as lab:
        yield lab


# Each process writes a line when it gets USR1. The task of the step and the batch shell have a child and an orphan,
# which has left their session and lost its parent. All write a last line when they find the file `ask`: a signal that
# came before has been answered by then, since bash does so between two commands.
LISTENERS = """
listen() {
    trap "echo $1 >>told" USR1
    echo $1 >>ready
    until [ -e ask ]; do sleep 0.1; done
    echo $1 >>answered
    while :; do sleep 0.1; done
}
export -f listen
families() {
    (setsid bash -c "listen $1-orphan" &)
    bash -c "listen $1-child" &
    listen $1-task
}
export -f families
srun --nodelist=node2 --nodes=1 --ntasks=1 bash -c "families step" &
families batch
"""


def lines(file: Path) -> set[str]:
    """Return the lines of a file that may not be there yet."""
    return set(file.read_text().splitlines()) if file.exists() else set()


def test_signals_reach_tasks_only(tracked: Lab, tmp_path: Path) -> None:
    """USR1 reaches what slurmstepd has started, not what that has started; with linuxproc all. SIGKILL ends all."""
    told, roles = tmp_path / "told", {"task", "child", "orphan"}
    reached = roles if tracked.tracking == "linuxproc" else {"task"}  # so this test can fail
    job = submit(tracked, LISTENERS, tmp_path, "--nodes=2")
    everyone = {f"{part}-{role}" for part in ("batch", "step") for role in roles}
    wait_until(lambda: lines(tmp_path / "ready") == everyone, 300, "everyone who listens")
    faults.timelimit(tracked, job)
    expected = {"batch-task"}  # whatever the mode: --batch is for the shell alone
    wait_until(lambda: expected <= lines(told), 300, "USR1 in the batch shell")
    tracked.run(["scancel", "--signal=USR1", job], check=True)
    expected |= {f"step-{role}" for role in reached}
    wait_until(lambda: expected <= lines(told), 300, "USR1 in the step")
    (tmp_path / "ask").touch()
    wait_until(lambda: lines(tmp_path / "answered") == everyone, 300, "an answer of everyone")
    assert lines(told) == expected
    tracked.run(["scancel", job], check=True)
    assert tracked.wait_for_job(job)["JobState"] == "CANCELLED"
    wait_until(lambda: not job_processes(tracked, job), 300, "the end of all processes")


def test_suspended_job_ends_with_its_lab(tracked: Lab, tmp_path: Path) -> None:
    """What is suspended, with cgroups frozen, neither runs on nor keeps a lab from its end."""
    script = "while :; do echo on >>$SLURM_JOB_NAME; sleep 0.1; done"
    suspended, other = (submit(tracked, script, tmp_path, f"--job-name={name}") for name in ("suspended", "other"))
    for job, name in ((suspended, "suspended"), (other, "other")):
        tracked.wait_for_job(job, "RUNNING")
        wait_until((tmp_path / name).exists, 300, f"the first line of job {name}")
    tracked.run(["scontrol", "suspend", suspended], user="root", check=True)
    tracked.wait_for_job(suspended, "SUSPENDED")

    def written_meanwhile() -> int:
        """Return how many bytes the suspended job has written while the other one has written five lines."""
        before, enough = (tmp_path / "suspended").stat().st_size, (tmp_path / "other").stat().st_size + 15
        wait_until(lambda: (tmp_path / "other").stat().st_size >= enough, 300, "five lines of the other job")
        return (tmp_path / "suspended").stat().st_size - before

    wait_until(lambda: not written_meanwhile(), 300, "the end of its writing")  # SLURM calls it suspended before it is
    assert not written_meanwhile()
    assert tracked.down()
    assert not traces(tracked.folder.name.removeprefix("slurm-lab-"))


def test_next_way_to_track(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where slurmd does not start with the best mode, the next is used, unless the first was asked for."""
    texts = {"filter": "CgroupPlugin=nonsense\n", "linuxproc": tracking.cgroup_conf("linuxproc")}
    monkeypatch.setattr(tracking, "cgroup_conf", texts.get)
    monkeypatch.setattr(tracking, "MODES", texts)
    monkeypatch.setattr(tracking, "why_not", lambda mode: None)
    with Lab(Wanted(name=name, nodes=1)) as lab:
        assert lab.tracking == "linuxproc"
    with pytest.raises(LabError, match="node1 ended"):
        Lab(Wanted(name=name, nodes=1, tracking="filter")).up()


WHO = "echo $(id -un) $(id -u) $(id -gn) $USER $LOGNAME $HOME ${OMPI_ALLOW_RUN_AS_ROOT-unset} $(cd; >file; ls)"


def test_ordinary_user(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and jobs are a made-up user's, with a home folder, where the current folder is root's."""
    monkeypatch.chdir("/")
    before = etc()
    with Lab(Wanted(name=name, share=on_this_machine_only(tmp_path), tracking="linuxproc")) as lab:
        assert lab.user == "lab-student" and lab.uid in config.UIDS
        expected = f"lab-student {lab.uid} lab-student lab-student lab-student {lab.home} unset file\n"
        assert lab.run(["sh", "-c", WHO], cwd="/").stdout == expected
        job = submit(lab, f"{WHO}; srun --nodes=2 bash -c '{WHO}'", tmp_path, "--nodes=2", "--output=out")
        assert lab.wait_for_job(job)["UserId"] == f"lab-student({lab.uid})"
        assert (tmp_path / "out").read_text() == 3 * expected
        assert (tmp_path / "out").stat().st_uid == lab.uid
        as_root = lab.run(["sh", "-c", "id -un; echo $OMPI_ALLOW_RUN_AS_ROOT"], cwd="/", user="root").stdout
        assert as_root == "root\n1\n"
    assert etc() == before


HOMES = "~ $HOME $(getent passwd $(id -u) | cut -d: -f6)"
# What `developer` does: show which home is his and what is in it, and change that.
WRITE = f"echo $(id -un) $(id -u) $(id -gn) {HOMES} $(ls -A ~); mkdir -p ~/.ssh; echo changed >~/.ssh/config; >~/new"
# He is a user of the machine, in a copy of its /etc. Root only looks: if this test fails, the home may be the real one.
DEVELOPER = f"""
mount -t tmpfs tmpfs /mnt && cp -a /etc/. /mnt && mount --bind /mnt /etc
echo "developer:x:4242:4242::$PWD/real:/bin/sh" >>/etc/passwd
echo "developers:x:4242:" >>/etc/group
"$0" -m lab up --name "$1" --nodes 1 $2 >/dev/null
"$0" -m lab run --name "$1" -- srun sh -c '{WRITE}'
"$0" -m lab run --name "$1" -- sh -c 'echo $(ls -A ~)'
"$0" -m lab run --name "$1" --user root -- sh -c 'echo {HOMES}'
"$0" -m lab down --name "$1" >/dev/null
"""


@pytest.mark.parametrize("option", ["", "--real-home"])
def test_home_folder(name: str, tmp_path: Path, option: str) -> None:
    """A real user, and root, get empty home folders, which end with the lab, and not their own unless asked for."""
    config = tmp_path / "real" / ".ssh" / "config"
    config.parent.mkdir(parents=True)
    config.write_text("precious\n")
    for path in [tmp_path, *tmp_path.rglob("*")]:
        os.chown(path, 4242, 4242)
    line = ["unshare", "--mount", "sh", "-ec", DEVELOPER, sys.executable, name, option]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    step, then, root = done.stdout.splitlines()
    home = str(tmp_path / "real") if option else f"/tmp/slurm-lab-{name}/home"
    assert step.split() == ["developer", "4242", "developers", home, home, home, *([".ssh"] if option else [])]
    assert then == ".ssh new"
    home = pwd.getpwnam("root").pw_dir if option else f"/tmp/slurm-lab-{name}/root"
    assert root.split() == [home, home, home]
    assert config.read_text() == ("changed\n" if option else "precious\n")
    assert (tmp_path / "real" / "new").exists() == bool(option)
    assert not traces(name)


def test_job_without_the_environment(lab: Lab) -> None:
    """`sbatch --export=NONE` gives a job what a fresh login of its user has, and not what sbatch had."""
    (Path(lab.home) / ".profile").write_text("export FROM_LOGIN=yes\n")
    words = ["sbatch", "--wait", "--export=NONE", "--output=out", "--wrap=echo $FROM_LOGIN $FROM_SBATCH $HOME"]
    done = lab.run(words, cwd=lab.home, env={"FROM_SBATCH": "yes"})
    assert done.returncode == 0, done.stderr
    assert (Path(lab.home) / "out").read_text() == f"yes {lab.home}\n"


def test_user_by_name(name: str, tmp_path: Path) -> None:
    """`--user` names root or another user of the machine; the owner of the current folder is the default."""
    (tmp_path / "lab").symlink_to(ROOT / "lab")
    os.chown(tmp_path, 12345, 12345)  # nobody's number: the owner gets a name inside
    for words, user in ([], "lab-student 12345"), (["--user", "root"], "root 0"), (["--user", "daemon"], "daemon 1"):
        line = [sys.executable, "-m", "lab", "up", "--name", name, "--nodes", "1", *words]
        subprocess.run(line, cwd=tmp_path, check=True, capture_output=True, timeout=300)
        assert Lab.find(name).run(["sh", "-c", "echo $(id -un) $(id -u)"], cwd="/").stdout == f"{user}\n"
        assert f"user: {user.split()[0]} " in command("status", "--name", name).stdout
        assert Path(Lab.find(name).home).is_relative_to(Lab.find(name).folder)
        assert command("down", "--name", name).returncode == 0
    refused = command("up", "--name", name, "--user", "nobody-here")
    assert refused.stderr == "lab: error: --user nobody-here: this machine has no such user\n"


def test_folder_that_is_not_the_users(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One line says that a folder cannot be used, but only if the command needs it."""
    unshared = tmp_path_factory.mktemp("unshared")
    closed, foreign, mine = (tmp_path / folder for folder in ("closed", "foreign", "mine"))
    for folder, mode in (closed, 0o700), (foreign, 0o755), (mine, 0o755):
        folder.mkdir(mode)
    hand_over(mine)
    (mine / "job.sh").write_text("#!/bin/sh\n")

    def said(folder: Path | str, *words: str) -> str:
        done = command("run", "--name", name, "--chdir", str(folder), "--", *words)
        assert len(done.stderr.splitlines()) == (1 if done.returncode else 0), done.stderr
        return done.stderr

    with Lab(Wanted(name=name, share=on_this_machine_only(tmp_path), tracking="linuxproc")) as lab:
        assert re.search(rf"user {lab.user} cannot enter .*/closed: .*--user root", said(closed, "true"))
        assert re.search(
            rf"user {lab.user} cannot write to .*/foreign, .*--user root", said(foreign, "sbatch", "--wrap=true")
        )
        assert not said(foreign, "squeue") and not said(foreign, "sbatch", "--output=/dev/null", "--wrap=true")
        assert not said(mine, "sbatch", "job.sh")
        assert "is not there inside" in said(unshared, "true")


def test_domain_and_names(name: str, tmp_path: Path) -> None:
    """Hosts may have fully qualified names, and names that resolve to nothing; SLURM works all the same."""
    share = on_this_machine_only(tmp_path)
    with Lab(Wanted(name=name, share=share, domain="cluster.example", tracking="linuxproc")) as lab:
        ask = ["srun", "--nodes=2", "sh", "-c", "echo $(hostname) $(hostname -s) $SLURMD_NODENAME"]
        names = sorted(lab.run(ask, cwd="/").stdout.splitlines())
        assert names == ["node1.cluster.example node1 node1", "node2.cluster.example node2 node2"]
        for known in "node1", "node1.cluster.example":
            done = lab.run(["getent", "hosts", known], node="node2", cwd="/")
            assert done.stdout.split() == [lab.addresses["node1"], "node1.cluster.example", "node1"]
        assert command("unresolve", "node1", "--name", name).returncode == 0
        for place in "head", *lab.nodes:
            for unknown in "node1", "node1.cluster.example":
                assert lab.run(["getent", "hosts", unknown], node=place, cwd="/").returncode == 2
            assert lab.run(["getent", "hosts", "node2"], node=place, cwd="/").returncode == 0
        job = submit(lab, "srun --nodes=2 hostname", tmp_path, "--nodes=2", "--output=out")
        assert lab.wait_for_job(job)["JobState"] == "COMPLETED"
        assert sorted((tmp_path / "out").read_text().split()) == ["node1.cluster.example", "node2.cluster.example"]
        faults.resolve(lab, "node1")
        assert lab.run(["getent", "hosts", "node1"], node="node1", cwd="/").returncode == 0


READMES = sorted(ROOT.glob("examples/*/README.md"))


@pytest.mark.runs("full")
def test_accounting(name: str, tmp_path: Path) -> None:
    """`sacct` shows the last slice of a requeued job, `sacct -D` both; so does `seff`, where there is one.

    The READMEs' command shows state, time, memory and exit status.
    """
    try:
        accounting.check()
    except LabError as error:
        pytest.skip(str(error))
    share = on_this_machine_only(tmp_path, Path(sys.prefix))
    with Lab(Wanted(name=name, share=share, accounting=True)) as lab:
        script = '[[ "$SLURM_RESTART_COUNT" ]] || exec sleep 1000; srun true'
        job = submit(lab, script, tmp_path, "--requeue", "--output=/dev/null")
        lab.wait_for_job(job, "RUNNING")
        faults.requeue(lab, job)
        assert lab.wait_for_job(job)["JobState"] == "COMPLETED"

        def states(*options: str) -> list[str]:
            words = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", "--format=Account,State"]
            return lab.run([*words, *options], cwd="/", check=True).stdout.split()

        wait_until(lambda: states() == ["lab|COMPLETED"], 300, "the end of the job in the database")
        assert states("--duplicates") == ["lab|REQUEUED", "lab|COMPLETED"]
        if shutil.which("seff"):  # part of SLURM's sources that Debian does not package
            assert "State: COMPLETED" in lab.run(["seff", job], cwd="/", check=True).stdout

        # The line of the examples' READMEs. SLURM asks a step for its memory every few seconds only.
        (line,) = {line for path in READMES for line in re.findall(r"^    (sacct -D .*?) +#", path.read_text(), re.M)}
        end = tmp_path / "end"
        hold = f"import os, time; kept = b'x' * (200 << 20)\nwhile not os.path.exists('{end}'): time.sleep(0.1)"
        failing = submit(lab, f'srun {sys.executable} -c "{hold}"; exit 3', tmp_path, "--output=/dev/null")
        lab.wait_for_job(failing, "RUNNING")
        ask = ["sstat", "--noheader", "--format=MaxRSS", f"--jobs={failing}.0"]
        wait_until(lambda: memory(lab.run(ask, cwd="/").stdout) > 200 << 10, 300, "the step's memory", pause=1)
        end.touch()
        assert lab.wait_for_job(failing)["JobState"] == "FAILED"
        words = line.replace("JOBID ", f"{failing} ", 1).split()

        def rows() -> dict[str, list[str]]:
            shown = lab.run([*words, "--noheader", "--parsable2"], cwd="/", check=True).stdout
            return {cells[0]: cells[1:] for cells in (row.split("|") for row in shown.splitlines())}

        wait_until(lambda: rows().get(failing, [""])[0] == "FAILED", 300, "the end of the job in the database")
        (state, elapsed, _, status), step = rows()[failing], rows()[f"{failing}.0"]
        assert (state, status) == ("FAILED", "3:0") and re.fullmatch(r"\d\d:\d\d:\d\d", elapsed)
        assert step[0] == "COMPLETED" and memory(step[2]) > 200 << 10 and step[3] == "0:0"

        # runs/show.py reads what this sacct prints of both jobs.
        (tmp_path / "metrics.csv").write_text("epoch,train_loss\n1,0.5\n")
        for one in (job, failing):
            (tmp_path / f"started-{one}").touch()
        shown = lab.run([sys.executable, str(ROOT / "runs" / "show.py"), str(tmp_path)], cwd=tmp_path, check=True)
        jobs = [line.split() for line in shown.stdout.split("\n\n")[1].splitlines()[1:]]
        assert [line[1:3] for line in jobs] == [[job, "REQUEUED"], [job, "COMPLETED"], [failing, "FAILED"]]
        assert int(jobs[2][-1]) >= 200, shown.stdout  # MB
    assert not traces(name)


def memory(text: str) -> int:
    """Return what SLURM shows as memory in KB, or 0 if it shows none."""
    return int(match[1]) if (match := re.fullmatch(r"(\d+)K", text.strip())) else 0


def test_tree_refused(tmp_path: Path) -> None:
    """No command, a name that is none, no git repository, no such suite: one line says so."""
    made = tmp_path / "trees" / "made"
    made.mkdir(parents=True)
    (made / "complete").touch()

    def refused(folder: Path, *words: str) -> str:
        line = [sys.executable, "-m", "lab", "tree", "--trees", str(tmp_path / "trees"), *words]
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(line, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        return done.stderr

    assert "which command?" in refused(ROOT, "made")
    assert "letters and digits" in refused(ROOT, "../made", "--", "true")
    assert "not a git repository" in refused(tmp_path, "made", "--", "true")
    if shutil.which("debootstrap"):
        assert "debootstrap: " in refused(ROOT, "--mirror", "file:///nowhere", "no-such-suite", "--", "true")
    assert not (tmp_path / "trees" / "no-such-suite" / "complete").exists()


def put_link(path: Path) -> None:
    """Replace a file or folder by a link to it."""
    path.symlink_to(path.rename(path.with_name("elsewhere")).name)


# How somebody else could have come between, by what is said of it.
SPOILT: dict[str, Callable[[Path], None]] = {
    "is a link": put_link,
    "belongs to user 12345": lambda path: os.chown(path, 12345, 12345),
    "can be written to by others": lambda path: path.chmod(path.stat().st_mode | 0o020),
}


@pytest.mark.parametrize("problem", SPOILT)
@pytest.mark.parametrize(
    "where", [".", "trees", "trees/made", "trees/made/complete", "trees/made/project", "trees/made.log"]
)
def test_tree_of_others(tmp_path: Path, where: str, problem: str) -> None:
    """A tree that others could have made or changed is refused with one line, before anything is run or written."""
    top = tmp_path / "top"
    (top / "trees/made/project").mkdir(parents=True)
    (top / "trees/made/complete").write_text("made before")
    (top / "trees/made.log").write_text("made before")
    if where.endswith(".log"):
        (top / "trees/made/complete").unlink()  # so that it would be made again
    for path in [top, *top.rglob("*")]:
        path.chmod(0o755)
    SPOILT[problem](top / where)
    before = contents(tmp_path)
    words = ["--trees", str(top / "trees"), "--mirror", "file:///nowhere", "made", "--", "true"]
    refused = command("tree", *words)
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1, refused.stderr
    assert refused.stderr.startswith(f"lab: error: {top / where} {problem}")
    after = contents(tmp_path)
    after.pop(top / "trees/.lock", None)
    assert after == before


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Return all that lies below a folder, and what is in the files."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.runs("full")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("suite", tree.SUITES)
def test_tree(suite: str) -> None:
    """In another Debian, with another SLURM, a lab starts and a step runs on two nodes as an ordinary user."""
    if reason := tree.why_not(suite):
        pytest.skip(reason)
    script = """
        python3 -m lab up --name tree
        python3 -m lab run --name tree --chdir / -- srun --nodes=2 id -un
        python3 -m lab run --name tree --chdir / -- sinfo --version
        python3 -m lab down --name tree
    """
    line = [sys.executable, "-m", "lab", "tree", "--clone", f"test{os.getpid()}", suite, "--", "sh", "-ec", script]
    try:
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("lab-student\n") == 2 and "lab: ended" in done.stdout
    finally:
        shutil.rmtree(tree.default_folder() / suite / f"test{os.getpid()}", ignore_errors=True)
