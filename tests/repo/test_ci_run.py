"""What .ci/run asks and installs before it checks anything. Nothing is really installed: stubs stand on its PATH."""

import os
import pty
import subprocess
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.launchers import ROOT

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
        assert "/usr/sbin/policy-rc.d" in text
        (folder / ".ci" / "run").write_text(text.replace("/usr/sbin/policy-rc.d", str(self.policy)))
        self.calls.touch()
        for path in (folder, self.calls):  # for another user, too
            path.chmod(0o777)
        self.stub("git", "exit 9")  # it would make the clone: here the first half ends
        self.stub("python3", "exit 9")
        self.stub("systemctl", "exit 0")
        self.stub("sudo", 'shift; exec "$@"')
        self.stub("apt-get", f"{self.policy} ssh start; echo policy: $? >>{self.calls}")

    def stub(self, name: str, text: str) -> None:
        """Put a program on the PATH."""
        file = self.folder / "bin" / name
        file.write_text(f'#!/bin/sh\necho "{name} $*" >>{self.calls}\n{text}\n')
        file.chmod(0o755)

    def packages(self, answer: str) -> None:
        """Have dpkg-query answer so for openssh-server, in the words of a shell; all else is installed."""
        self.stub("dpkg-query", f'case "$*" in *openssh-server) {answer} ;; *) printf "ii " ;; esac')

    def run(self, *words: str, answer: str | None = None, user: str | None = None, **variables: str) -> Run:
        """Run the script: on a terminal on which `answer` has been typed, or without a terminal."""
        environment = {"PATH": f"{self.folder}/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": str(self.folder)}
        terminal, end = pty.openpty()
        mode = termios.tcgetattr(end)
        mode[3] &= ~termios.ECHO
        termios.tcsetattr(end, termios.TCSANOW, mode)
        os.write(terminal, (answer or "").encode())
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            status = subprocess.run(
                ["bash", str(self.folder / ".ci" / "run"), *words],
                stdin=subprocess.DEVNULL if answer is None else end,
                stdout=stdout,
                stderr=stderr if answer is None else end,
                cwd=self.folder,
                env=environment | variables,
                user=user,
                timeout=60,
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
        machine = Machine(Path(folder))
        machine.packages("exit 1")
        yield machine


@pytest.mark.parametrize("answer", ["n\n", "\n", "\4"])
def test_asks_on_a_terminal(machine: Machine, answer: str) -> None:
    """Whoever does not say yes, or ends the input, gets one line, and nothing happens."""
    assert machine.run(answer=answer) == Run(1, "", QUESTION + REFUSED, [])


def test_inherited_folder(machine: Machine) -> None:
    """A variable of the caller does not take the place of the fresh clone, and so of the question."""
    assert machine.run(answer="n\n", CI_FOLDER=str(machine.folder)).stderr == QUESTION + REFUSED


def test_goes_on_after_a_yes(machine: Machine) -> None:
    run = machine.run(answer="y\n")
    assert run.stderr == QUESTION and run.status == 9
    assert [call.split()[:4] for call in run.calls if not call.startswith("sudo")] == [
        ["git", "-c", "safe.directory=*", "clone"]
    ]


@pytest.mark.parametrize(("answer", "variables"), [(None, {}), (None, {"CI": "true"}), ("n\n", {"CI": "1"})])
def test_nobody_to_ask(machine: Machine, answer: str | None, variables: dict[str, str]) -> None:
    """Without a terminal, or with CI set, it names what it will install, and goes on."""
    run = machine.run(answer=answer, **variables)
    assert run.status == 9 and run.stderr.replace("\r", "") == UNASKED
    assert any(call.startswith("git ") for call in run.calls)


@pytest.mark.parametrize(
    ("state", "missing"), [("ii ", False), ("hi ", False), ("rc ", True), ("un ", True), ("iU ", True)]
)
def test_what_counts_as_missing(machine: Machine, state: str, missing: bool) -> None:
    """A package that was removed, but whose settings are left, or that is half installed; not one that is held."""
    machine.packages(f"printf '{state}'")
    assert machine.run().stderr == (UNASKED if missing else "")


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
    as_root = [call for call in run.calls if call.startswith("sudo ")]
    assert as_root and all(f" UV_CACHE_DIR={machine.folder}/.cache/uv-root " in call for call in as_root)
    status = f"policy: {5 if policy else 101}"
    assert [call for call in run.calls if call.startswith(("apt-get", "policy", "systemctl"))] == [
        "apt-get update -qq",
        status,
        "apt-get install -qq -y --no-install-recommends openssh-server",
        status,
        "systemctl disable --quiet ssh.service ssh.socket",
    ]
    assert machine.policy.exists() == bool(policy)
