"""The lab itself: it starts, breaks as told, and leaves nothing behind, however it ends."""

import grp
import hashlib
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import readme, runs
from harness.jobs import hand_over, job_processes, on_this_machine_only
from harness.launchers import ROOT, copy_example
from harness.processes import find_processes, read_line, running, wait_until
from lab import Lab, LabError, Wanted, cluster, config, faults, why_not

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(why_not()), reason=str(why_not()))]


def traces(name: str) -> list[str]:
    """Return what a lab of that name has left outside of its namespaces, and any daemon with its files open."""
    folder = f"/tmp/slurm-lab-{name}"
    left = [folder] if os.path.lexists(folder) else []
    left += [line for line in Path("/proc/mounts").read_text().splitlines() if folder in line]
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
        wait_until(lambda: len(job_processes(lab, job)) >= 5, 300, "three sleeps, their shell and srun")
    assert not traces(name)
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
    for moment in range(8):
        with running([sys.executable, "-m", "lab", "up", "--name", name], cwd=ROOT, stderr=subprocess.PIPE) as process:
            time.sleep(moment * 0.15)  # not a wait: the moment
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=300)
        if process.returncode == 0:
            assert command("down", "--name", name).returncode == 0
        wait_until(lambda: not traces(name), 300, f"an end without traces, not {traces(name)}")


def test_stale_lab(name: str) -> None:
    """A lab whose keeper was killed leaves its folder only, and the next `up` cleans that."""
    lab = Lab(Wanted(name=name)).up()
    os.kill(int((lab.folder / "keeper").read_text()), signal.SIGKILL)
    wait_until(lambda: traces(name) == [str(lab.folder)], 300, "the end of its processes")
    with pytest.raises(LabError, match="no lab named"):
        lab.states()
    with Lab(Wanted(name=name)) as fresh:
        assert fresh.states() == {"node1": "idle", "node2": "idle"}
    assert not traces(name)


def test_command_line(name: str, lab: Lab) -> None:
    """up, run, status, logs and down do what they say, beside another lab; `run` passes the exit status on."""
    assert "node1 node2 idle" in command("up", "--name", name, "--gpus", "2").stdout
    refused = command("up", "--name", name)
    assert refused.stderr == f"lab: error: a lab named {name} is running; end it first: python -m lab down\n"
    assert refused.returncode == 2 and lab.nodes == list(lab.states())
    ran = command("run", "--name", name, "--", "srun", "--nodes=1", "--gpus-per-node=2", "env")
    assert "SLURM_GPUS_ON_NODE=2" in ran.stdout and "CUDA_VISIBLE_DEVICES=0,1" in ran.stdout
    assert command("run", "--name", name, "--", "sh", "-c", "exit 7").returncode == 7
    assert command("run", "--name", name, "--chdir", "lab", "--", "pwd").stdout == f"{ROOT}/lab\n"
    assert command("run", "--name", name, "--root", "--", "id", "-un").stdout == "root\n"
    assert re.search(r"node2 +[\d.]+ +idle", command("status", "--name", name).stdout)
    assert "slurmctld version" in command("logs", "--name", name, "slurmctld").stdout
    assert command("down", "--name", name).stdout == "lab: ended\n"
    assert command("down", "--name", name).stdout == "lab: nothing was running\n"


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root, without the programs, or with bad numbers: one clear line."""
    for words, text in ((("--nodes", "0"), "--nodes 0"), (("--name", "a/b"), "--name"), (("--share", "/x"), "--share")):
        refused = command("up", *words)
        assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1 and text in refused.stderr
    script = "import os, runpy, sys; os.geteuid = lambda: 1000; sys.argv = ['lab', 'down']; "
    line = [sys.executable, "-c", f"{script} runpy.run_module('lab', run_name='__main__')"]
    refused = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == ["lab: error: a lab needs root: run it with sudo"]
    monkeypatch.setattr(cluster, "PROGRAMS", (*cluster.PROGRAMS, "no-such-program"))
    reason = why_not()
    assert reason and "no-such-program" in reason and "apt-get install" in reason


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


@pytest.mark.runs("full")
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


@pytest.mark.runs("full")
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
        elif "State=drain" in line:
            assert lab.states()["node1"].startswith("drain")
    assert printed == "lab: ended\n"


PARTITIONS = [
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=low Nodes=ALL PriorityTier=1",
    "PartitionName=high Nodes=ALL PriorityTier=9",
]


def test_faults(name: str, tmp_path: Path) -> None:
    """Three nodes: preemption, an array, a held job, a drained node, one that is cut off, one without a name."""
    wanted = Wanted(nodes=3, name=name, share=on_this_machine_only(tmp_path), conf=PARTITIONS)
    with Lab(wanted) as lab:
        script = '[[ "$SLURM_RESTART_COUNT" ]] || sleep 1000'
        low = submit(lab, script, tmp_path, "--partition=low", "--nodes=3", "--requeue", "--output=/dev/null")
        lab.wait_for_job(low, "RUNNING")
        high = submit(lab, "true", tmp_path, "--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null")
        assert lab.wait_for_job(high)["JobState"] == "COMPLETED"
        again = lab.wait_for_job(low)
        assert (again["JobState"], again["Restarts"], again["UserId"]) == ("COMPLETED", "1", f"{lab.user}({lab.uid})")

        array = submit(lab, "sleep 1000", tmp_path, "--array=1-3", "--output=/dev/null")
        for task in range(1, 4):
            lab.wait_for_job(f"{array}_{task}", "RUNNING")
        lab.run(["scancel", array], cwd="/", check=True)
        held = submit(lab, "sleep 1000", tmp_path, "--requeue", "--output=/dev/null")
        lab.wait_for_job(held, "RUNNING")
        lab.slurm("scontrol", "requeuehold", held)
        lab.wait_for_job(held, "PENDING")
        assert "held" in lab.job(held)["Reason"].lower()

        lab.slurm("scontrol", "update", "NodeName=node3", "State=drain", "Reason=repair")
        faults.cut(lab, "node2")
        lab.wait_for_node("node2", "down*")
        assert lab.states() == {"node1": "idle", "node2": "down*", "node3": "drained"}
        faults.heal(lab, "node2")
        lab.wait_for_node("node2", "idle")
        assert command("unresolve", "node1", "--name", name).returncode == 0
        for place in "head", *lab.nodes:
            asked = [lab.run(["getent", "hosts", node], place, "/").returncode for node in ("node1", "node2")]
            assert asked == [2, 0]
        assert lab.run(["srun", "--nodes=2", "true"], cwd="/").returncode == 0

        # That it limits the rate is seen by the tests of preflight/.
        assert command("slow", "node2", "20mbit", "--name", name).stdout == "lab: slow node2 20mbit: done\n"
        for rate in ("100", "fast", "0mbit", "1.5gbit", "1gbit latency 1ms"):
            refused = command("slow", "--name", name, "node2", rate)
            assert refused.stderr == f"lab: error: slow: {rate}: must be a rate such as 100mbit\n"
        assert command("cut", "node9", "--name", name).stderr.startswith("lab: error: no such node: node9")


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


def test_signals_reach_tasks_only(lab: Lab, tmp_path: Path) -> None:
    """USR1 reaches what slurmstepd has started, and not what that has started. SIGKILL ends all."""
    told = tmp_path / "told"
    job = submit(lab, LISTENERS, tmp_path, "--nodes=2")
    everyone = {f"{part}-{role}" for part in ("batch", "step") for role in ("task", "child", "orphan")}
    wait_until(lambda: lines(tmp_path / "ready") == everyone, 300, "everyone who listens")
    faults.timelimit(lab, job)  # for the batch shell alone
    wait_until(lambda: lines(told) == {"batch-task"}, 300, "USR1 in the batch shell")
    lab.run(["scancel", "--signal=USR1", job], check=True)
    wait_until(lambda: "step-task" in lines(told), 300, "USR1 in the step")
    (tmp_path / "ask").touch()
    wait_until(lambda: lines(tmp_path / "answered") == everyone, 300, "an answer of everyone")
    assert lines(told) == {"batch-task", "step-task"}
    lab.run(["scancel", job], check=True)
    assert lab.wait_for_job(job)["JobState"] == "CANCELLED"
    wait_until(lambda: not job_processes(lab, job), 300, "the end of all processes")


def test_no_orphans(lab: Lab, tmp_path: Path) -> None:
    """What a job has started ends with the job, also in a session of its own and without a parent."""
    script = "(setsid sleep 1000 &) & srun sh -c 'setsid sleep 1000 & touch started'; [ -e started ]"
    job = submit(lab, script, tmp_path, "--output=/dev/null")
    assert lab.wait_for_job(job)["JobState"] == "COMPLETED"
    wait_until(lambda: not job_processes(lab, job), 300, "the end of all processes")


def test_suspended_job(name: str, tmp_path: Path) -> None:
    """What is suspended does not run on, is resumed, and does not keep a lab from its end."""
    script = "while :; do echo on >>$SLURM_JOB_NAME; sleep 0.1; done"
    with Lab(Wanted(name=name, share=on_this_machine_only(tmp_path))) as lab:
        suspended, other = (submit(lab, script, tmp_path, f"--job-name={name}") for name in ("suspended", "other"))
        for job, file in ((suspended, "suspended"), (other, "other")):
            lab.wait_for_job(job, "RUNNING")
            wait_until((tmp_path / file).exists, 300, f"the first line of job {file}")

        def written_meanwhile() -> int:
            """Return how many bytes the suspended job has written while the other one has written five lines."""
            before, enough = (tmp_path / "suspended").stat().st_size, (tmp_path / "other").stat().st_size + 15
            wait_until(lambda: (tmp_path / "other").stat().st_size >= enough, 300, "five lines of the other job")
            return (tmp_path / "suspended").stat().st_size - before

        for _ in range(2):
            lab.slurm("scontrol", "suspend", suspended)
            lab.wait_for_job(suspended, "SUSPENDED")
            wait_until(lambda: not written_meanwhile(), 300, "the end of its writing")  # somewhat later
            assert not written_meanwhile()
            lab.slurm("scontrol", "resume", suspended)
            wait_until(written_meanwhile, 300, "a line of the resumed job")
        lab.slurm("scontrol", "suspend", suspended)
    assert not traces(name)


def test_made_up_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user who is made up has a number that is nobody's, also where a directory lists none of its users."""

    def known(*numbers: int) -> object:
        def find(number: int) -> str:
            if number not in numbers:
                raise KeyError(number)
            return "somebody"

        return find

    first = config.UIDS.start
    monkeypatch.chdir("/")
    monkeypatch.setattr(pwd, "getpwnam", known())  # .ci/run full makes a user of the name
    monkeypatch.setattr(pwd, "getpwuid", known(first))
    monkeypatch.setattr(grp, "getgrgid", known(first + 1))
    account = config.find_account(Wanted())
    assert (account.user, account.uid, account.gid) == ("lab-student", first + 2, first + 2)


WHO = "echo $(id -un) $(id -u) $(id -gn) $USER $LOGNAME $HOME ${OMPI_ALLOW_RUN_AS_ROOT-unset} $(cd; >file; ls)"


def test_ordinary_user(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and jobs are lab-student's, with a home folder, where the current folder is root's.

    `sbatch --export=NONE` gives a job what a fresh login of that user has, and not what sbatch had. All can use
    /dev/fuse.
    """
    monkeypatch.chdir("/")
    with Lab(Wanted(name=name, share=on_this_machine_only(tmp_path))) as lab:
        assert lab.user == "lab-student" and lab.uid != 0
        expected = f"lab-student {lab.uid} lab-student lab-student lab-student {lab.home} unset file\n"
        assert lab.run(["sh", "-c", WHO], cwd="/").stdout == expected
        job = submit(lab, f"{WHO}; srun --nodes=2 bash -c '{WHO}'", tmp_path, "--nodes=2", "--output=out")
        assert lab.wait_for_job(job)["UserId"] == f"lab-student({lab.uid})"
        assert (tmp_path / "out").read_text() == 3 * expected
        assert (tmp_path / "out").stat().st_uid == lab.uid
        as_root = lab.run(["sh", "-c", "id -un; echo $OMPI_ALLOW_RUN_AS_ROOT"], cwd="/", user="root").stdout
        assert as_root == "root\n1\n"
        (Path(lab.home) / ".profile").write_text("export FROM_LOGIN=yes\n")
        words = ["sbatch", "--wait", "--export=NONE", "--output=login", "--wrap=echo $FROM_LOGIN $FROM_SBATCH $HOME"]
        lab.run(words, cwd=lab.home, env={"FROM_SBATCH": "yes"}, check=True)
        assert (Path(lab.home) / "login").read_text() == f"yes {lab.home}\n"
        lab.run(["sh", "-ec", "[ ! -e /dev/fuse ] || : <>/dev/fuse"], "node1", "/", check=True)


HOMES = "~ $HOME $(getent passwd $(id -u) | cut -d: -f6)"
# A user of the machine, in a copy of its /etc, tries to change what is in his home folder. Root only looks: if this
# test fails, that may be the real one.
DEVELOPER = f"""
mount -t tmpfs tmpfs /mnt && cp -a /etc/. /mnt && mount --bind /mnt /etc
echo "developer:x:4242:4242::$PWD/real:/bin/sh" >>/etc/passwd
echo "developers:x:4242:" >>/etc/group
"$0" -m lab up --name "$1" --nodes 1 >/dev/null
"$0" -m lab run --name "$1" -- srun sh -c 'echo $(id -un) $(id -u) $(id -gn) {HOMES} $(ls -A ~); mkdir ~/.ssh; >~/new'
"$0" -m lab run --name "$1" --root -- sh -c 'echo {HOMES}'
"$0" -m lab down --name "$1" >/dev/null
"""


def test_home_folder(name: str, tmp_path: Path) -> None:
    """A real user, and root, get empty home folders, which end with the lab, and not their own."""
    (tmp_path / "real" / ".ssh").mkdir(parents=True)
    for path in [tmp_path, *tmp_path.rglob("*")]:
        os.chown(path, 4242, 4242)
    line = ["unshare", "--mount", "sh", "-ec", DEVELOPER, sys.executable, name]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    home, root = (f"/tmp/slurm-lab-{name}/{user}" for user in ("home", "root"))
    assert done.stdout.splitlines() == [f"developer 4242 developers {home} {home} {home}", f"{root} {root} {root}"]
    assert [path.name for path in (tmp_path / "real").iterdir()] == [".ssh"]
    assert not traces(name)


def test_folder_that_is_not_the_users(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One line says that a folder cannot be used."""
    unshared = tmp_path_factory.mktemp("unshared")
    (tmp_path / "closed").mkdir(0o700)
    (tmp_path / "foreign").mkdir(0o755)

    def said(folder: Path, *words: str) -> tuple[int, str]:
        done = command("run", "--name", name, "--chdir", str(folder), "--", *words)
        assert len(done.stderr.splitlines()) < 2, done.stderr
        return done.returncode, done.stderr

    with Lab(Wanted(name=name, share=on_this_machine_only(tmp_path))) as lab:
        tmp_path.chmod(0o755)
        for folder in (tmp_path / "closed", unshared):
            status, text = said(folder, "true")
            assert status == 2 and "--share" in text and f"or user {lab.user} cannot enter it" in text
        assert said(tmp_path / "foreign", "squeue") == (0, "")
        status, text = said(tmp_path / "foreign", "sbatch", "--wrap=true")
        assert status == 0 and f"user {lab.user} cannot write to {tmp_path}/foreign" in text
