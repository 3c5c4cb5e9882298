"""What .ci/run asks and installs before it checks anything. Nothing is really installed: stubs stand on its PATH."""

import os
import pty
import re
import shutil
import subprocess
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from harness import runs
from harness.launchers import ROOT
from harness.processes import finish

QUESTION = "Install openssh-server? [y/N] "
REFUSED = ".ci/run: error: the checks need these packages; nothing was installed\r\n"
UNASKED = ".ci/run: installing openssh-server unasked: CI is set, or there is no terminal\n"


class Run(NamedTuple):
    """What a run of the script has left."""

    status: int
    stdout: str
    stderr: str
    calls: list[str]  # of the stubs, in their order


class Machine:
    """A copy of the script, a home folder, and stubs that write down how they are called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.policy, self.calls = folder, folder / "policy-rc.d", folder / "calls"
        (folder / "bin").mkdir()
        (folder / ".ci").mkdir()
        text = (ROOT / ".ci" / "run").read_text()
        ours: dict[str, str | Path] = {"/usr/sbin/policy-rc.d": self.policy, "/etc/os-release": folder / "os-release"}
        ours["\nsystem="] = f"\nsystem={folder}/bin:"
        for path, own in ours.items():
            assert path in text
            text = text.replace(path, str(own))
        (folder / ".ci" / "run").write_text(text)
        (folder / "os-release").write_text('NAME="Debian GNU/Linux"\nID=debian\n')
        self.calls.touch()
        for path in (folder, self.calls):  # for another user, too
            path.chmod(0o777)
        self.stub("git", f"echo umask $(umask) >>{self.calls}; exit 9")  # for the clone: here the first half ends
        self.stub("python3", "exit 9")
        self.stub("systemctl", "exit 0")
        self.stub("sudo", 'shift; exec "$@"')
        self.stub("apt-get", f"{self.policy} ssh start; echo policy: $? cache: $UV_CACHE_DIR >>{self.calls}")

    def stub(self, name: str, text: str) -> None:
        """Put a program on the PATH."""
        file = self.folder / "bin" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'#!/bin/sh\necho "{name} $*" >>{self.calls}\n{text}\n')
        file.chmod(0o755)

    def packages(self, answer: str) -> None:
        """Have dpkg-query answer so for openssh-server, in the words of a shell; all else is installed."""
        self.stub("dpkg-query", f'case "$*" in *openssh-server) {answer} ;; *) printf "ii " ;; esac')

    def run(
        self, *words: str, answer: str | None = None, user: str | None = None, umask: int = 0o022, **variables: str
    ) -> Run:
        """Run the script: on a terminal on which `answer` has been typed, or without a terminal."""
        environment = {"PATH": f"{self.folder}/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": str(self.folder)}
        terminal, end = pty.openpty()
        mode = termios.tcgetattr(end)
        mode[3] &= ~termios.ECHO
        termios.tcsetattr(end, termios.TCSANOW, mode)
        os.write(terminal, (answer or "").encode())
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            status = finish(
                [str(shutil.which("bash")), str(self.folder / ".ci" / "run"), *words],
                300,
                stdin=subprocess.DEVNULL if answer is None else end,
                stdout=stdout,
                stderr=stderr if answer is None else end,
                cwd=self.folder,
                env=environment | variables,
                user=user,
                umask=umask,
            ).returncode
            os.close(end)
            printed = b""
            try:
                while piece := os.read(terminal, 4096):
                    printed += piece
            except OSError:  # nobody has the other end any more
                os.close(terminal)
            for file in (stdout, stderr):
                file.seek(0)
            calls = [call for call in self.calls.read_text().splitlines() if not call.startswith("dpkg-query")]
            return Run(status, stdout.read(), stderr.read() or printed.decode(), calls)


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine that lacks openssh-server, in a folder that another user can read."""
    with tempfile.TemporaryDirectory(prefix="ci-run-test-") as folder:
        place = Path(folder, "clone")  # beside which it writes
        place.mkdir()
        place.parent.chmod(0o777)  # for another user, too
        machine = Machine(place)
        machine.packages("exit 1")
        yield machine


@pytest.mark.parametrize("answer", ["n\n", "\n", "\4"])
def test_asks_on_a_terminal(machine: Machine, answer: str) -> None:
    """Whoever does not say yes, or ends the input, gets one line, and nothing happens."""
    assert machine.run(answer=answer) == Run(1, "", QUESTION + REFUSED, [])


def test_checkout_of_another_user(tmp_path: Path) -> None:
    """What is committed in a checkout that is not the caller's is cloned, too, and only that is."""
    machine = Machine(tmp_path)
    machine.packages("printf 'ii '")
    (tmp_path / "bin" / "git").unlink()
    script = tmp_path / ".ci" / "run"
    script.write_text(script.read_text().replace("bash .ci/run --in-clone", 'echo "in $PWD:" && ls -A && exit 7 ||'))
    git = ["git", "-c", "safe.directory=*", "-c", "user.name=a", "-c", "user.email=a@b.example"]
    (tmp_path / "committed").touch()
    for words in (["init", "-q"], ["add", "committed"], ["commit", "-q", "-m", "A file."]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True, timeout=300)
    if os.geteuid() == 0:
        for path in [tmp_path, *tmp_path.rglob("*")]:
            os.chown(path, 12345, 12345)
    run = machine.run()
    assert run.stderr == "" and run.stdout.splitlines()[1:] == [".git", "committed"], run


NO_APT, SNAP = "it installs Debian packages by apt-get, which this machine lacks", "Ubuntu has Chromium as a snap only"
MACHINES = {  # of another kind: its /etc/os-release, and what is said
    "Fedora": ("ID=fedora\n", NO_APT),
    "Arch": ("ID=arch\n", NO_APT),
    "nothing known": ("", NO_APT),
    "Ubuntu": ("ID=ubuntu\nID_LIKE=debian\n", SNAP),
    "Ubuntu in quotes": ('NAME="Ubuntu"\nID="ubuntu"\n', SNAP),
    "Ubuntu with Chrome": ("ID=ubuntu\n", ""),
    "Mint": ("ID=linuxmint\nID_LIKE=ubuntu\n", ""),
}


@pytest.mark.parametrize("name", MACHINES)
def test_other_distributions(machine: Machine, name: str) -> None:
    """Where packages cannot be had, one line says so and what to do, before anything is asked or installed."""
    release, says = MACHINES[name]
    (machine.folder / "os-release").write_text(release)
    if "Chrome" in name:
        machine.stub("google-chrome", "exit 0")
    path: dict[str, Any] = {}
    if says == NO_APT:
        (machine.folder / "bin" / "apt-get").unlink()
        path = {"PATH": f"{machine.folder}/bin"}
    run = machine.run(answer="n\n", **path)
    if says:
        assert run.status == 1 and run.calls == [] and run.stderr.count("\n") == 1, run
        assert run.stderr.startswith(f".ci/run: error: {says}"), run.stderr
    else:
        assert run.stderr == QUESTION + REFUSED, run.stderr


@pytest.mark.parametrize(("answer", "variables"), [(None, {}), (None, {"CI": "true"}), ("n\n", {"CI": "1"})])
def test_nobody_to_ask(machine: Machine, answer: str | None, variables: dict[str, Any]) -> None:
    """Without a terminal, or with CI set, it names what it will install, and goes on."""
    run = machine.run(answer=answer, **variables)
    assert run.status == 9 and run.stderr.replace("\r", "") == UNASKED
    assert any(call.startswith("git ") for call in run.calls)


@pytest.mark.parametrize("policy", ["", "#!/bin/sh\nexit 5\n"])
def test_installs_what_is_missing(machine: Machine, policy: str) -> None:
    """In the clone, by an ordinary user, and no service starts; root's uv has a cache of its own."""
    if policy:  # the machine's own, which stays
        machine.policy.write_text(policy)
        machine.policy.chmod(0o755)
    wheels = machine.folder / ".cache" / "horovod-wheels"
    (wheels / "key").mkdir(parents=True)
    (wheels / "key" / "horovod.whl").touch()
    run = machine.run("--in-clone", "rest", user="nobody" if os.geteuid() == 0 else None, UV_CACHE_DIR="/mine")
    assert f"note: {wheels} has wheels" in run.stdout
    status = f"policy: {5 if policy else 101} cache: {machine.folder}/.cache/uv-root"
    assert [call for call in run.calls if call.startswith(("apt-get", "policy", "systemctl"))] == [
        "apt-get update -qq",
        status,
        "apt-get install -qq -y --no-install-recommends openssh-server",
        status,
        "systemctl disable --quiet ssh.service ssh.socket",
    ]
    assert machine.policy.exists() == bool(policy)


def of_the_workflow() -> str:
    """Return the command by which the hosted workflow checks a part."""
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["checks"]["steps"]
    (step,) = [step for step in steps if "PART" in step.get("env", {})]
    return step["run"]


@pytest.mark.parametrize("weekly", ["", "weekly"])
@pytest.mark.parametrize("part", ["rest", "ddp_spawn"])
def test_command_of_the_workflow(machine: Machine, part: str, weekly: str) -> None:
    """What the hosted workflow calls runs the sessions of its part, weekly the long tests, too; nox knows them all."""
    machine.packages("printf 'ii '")
    machine.stub("google-chrome", "exit 0")
    machine.stub("python3", "exit 0")
    shutil.copy(ROOT / "README.md", machine.folder)
    for program in ("python", "pip", "nox"):
        machine.stub(f"../.venv/bin/{program}", "exit 0")
    command = of_the_workflow()
    assert command.startswith("bash .ci/run ")
    words = ["bash", "-c", command.replace("bash .ci/run ", "printf '%s\\n' ")]
    given = finish(words, 300, env={"PATH": os.environ["PATH"], "PART": part, "WEEKLY": weekly}).stdout.split()
    run = machine.run("--in-clone", *given)
    assert run.status == 0, run
    asked = [call.partition(" -s ")[2] for call in run.calls if call.startswith("../.venv/bin/nox ")]
    named = {word for words in asked for word in words.split() if not word.startswith("-")}
    assert named <= {*re.findall(r"^[*-] (\S+)", runs.nox(ROOT, "--list").stdout, re.MULTILINE), "train", "smoke"}
    if part == "rest":
        assert named >= {"repo", "sync", "lint"} and ("repo -- --weekly" in asked) == bool(weekly)
    else:
        assert named and all(word.endswith("(ddp_spawn)") for word in named)
        assert ("weekly(ddp_spawn)" in named) == bool(weekly)
