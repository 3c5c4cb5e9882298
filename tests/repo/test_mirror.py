"""docs/environments.md where only a site's own mirror of PyPI can be reached: pip, uv, nox and a lock file."""

import functools
import http.server
import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import readme
from harness.launchers import ROOT
from harness.processes import clean_environment
from tests.repo.test_installation import NOXFILE

INSTALL = {"pip": "pip install -r requirements.txt", "uv": "uv pip install -r requirements.txt"}


def write_wheel(folder: Path, name: str, version: str, word: str) -> Path:
    """Write a wheel of one module, which has a word; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"WORD = {word!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
    (folder / "index.html").write_text(f'<a href="{path.name.replace("+", "%2B")}">{path.name}</a>')
    return path


class Mirror:
    """A simple index (PEP 503) at an address of this machine, and what has been asked of it."""

    def __init__(self, site: Path, certificate: Path | None = None) -> None:
        self.asked: list[str] = []
        handler = functools.partial(self.handler(), directory=str(site))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.address = f"http{'s' if certificate else ''}://127.0.0.1:{self.server.server_port}"
        self.url = f"{self.address}/simple"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def handler(self) -> type[http.server.SimpleHTTPRequestHandler]:
        asked = self.asked

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *arguments: object) -> None:
                asked.append(self.path)

        return Handler

    def served(self) -> set[str]:
        """Return the wheels that it has been asked for since the last call: by uv twice, for the metadata first."""
        found = {path.rpartition("/")[2] for path in self.asked if path.endswith(".whl")}
        self.asked.clear()
        return found


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with an index of two packages: one with a name that no other index has, and in the place of PyTorch."""
    write_wheel(tmp_path / "site" / "simple" / "lesson-of-a-mirror", "lesson_of_a_mirror", "1.0", "mirror")
    write_wheel(tmp_path / "site" / "simple" / "torch", "torch", "2.15.0", "mirror")
    return tmp_path / "site"


@pytest.fixture
def mirror(site: Path) -> Iterator[Mirror]:
    """The index, served without TLS."""
    mirror = Mirror(site)
    yield mirror
    mirror.server.shutdown()


@pytest.fixture(scope="module")
def with_pip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of pip alone, which takes some seconds to make. A test leaves it as it was."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    return folder


@pytest.fixture
def project(with_pip: Path, tmp_path: Path) -> Path:
    """A folder with an environment, and a requirement that the mirror alone can serve."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / ".venv").symlink_to(with_pip)
    (folder / "requirements.txt").write_text("lesson-of-a-mirror\n")
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Return variables of a user without settings, for whom no address but this machine's can be reached.

    A proxy that does not answer stands before all others. Nothing is kept, so that each install asks again.
    """
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    words = ("PIP_", "UV_", "SSL_", "CURL_", "REQUESTS_")
    variables = {name: value for name, value in clean_environment().items() if not name.startswith(words)}
    variables.pop("CI", None)
    variables |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    variables |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
    path = f"{folder}/.venv/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    once = {"PIP_NO_CACHE_DIR": "1", "UV_NO_CACHE": "1", "PIP_RETRIES": "0", "UV_HTTP_RETRIES": "0"}
    return variables | once | {"HOME": str(home), "PATH": path, "VIRTUAL_ENV": f"{folder}/.venv"}


def run(folder: Path, *commands: str) -> subprocess.CompletedProcess:
    """Run commands in one shell."""
    script = "\n".join(commands)
    return subprocess.run(
        ["bash", "-ec", script], cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=300
    )


def named(mirror: Mirror) -> str:
    """Return the page's line that names a mirror to pip and to uv."""
    change = {"https://pypi.example.org/simple": mirror.url}
    return readme.command("docs/environments.md", "export PIP_INDEX_URL=... UV_DEFAULT_INDEX=...", change)


def installs(folder: Path, mirror: Mirror, program: str, *settings: str) -> bool:
    """Return whether the requirements can be installed after these settings, by the mirror; undo it."""
    done = run(folder, *settings, INSTALL[program])
    served = mirror.served()
    if done.returncode:
        assert not served, done.stderr
        return False
    assert served == {"lesson_of_a_mirror-1.0-py3-none-any.whl"}
    word = run(folder, "python -c 'import lesson_of_a_mirror; print(lesson_of_a_mirror.WORD)'")
    assert word.stdout == "mirror\n" and run(folder, "pip uninstall -y lesson-of-a-mirror").returncode == 0
    return True


def test_mirror(project: Path, mirror: Mirror) -> None:
    """Each way of the page to name a mirror serves pip, uv, or both, as it says; without it there is nothing."""
    assert INSTALL["pip"] == readme.command("examples/ddp_spawn/README.md", "pip install -r requirements.txt")
    change = {"https://pypi.example.org/simple": mirror.url}
    variables = named(mirror)
    here = readme.command("docs/environments.md", ".venv/bin/pip config --site set global.index-url ...", change)
    home = readme.command("docs/environments.md", "pip config set global.index-url ...", change)
    for_uv = readme.block("docs/environments.md", "mkdir -p ~/.config/uv")
    assert readme.command("docs/environments.md", "printf ... >>~/.config/uv/uv.toml") in for_uv
    for_uv = [readme.changed(line, change) for line in for_uv if line.startswith("printf")]
    for program in INSTALL:
        assert not installs(project, mirror, program)
        assert installs(project, mirror, program, variables)
        assert not installs(project, mirror, program)
    assert installs(project, mirror, "pip", here) and (project / ".venv" / "pip.conf").exists()
    assert not installs(project, mirror, "uv")
    (project / ".venv" / "pip.conf").unlink()
    assert installs(project, mirror, "pip", home)
    shutil.rmtree(project.parent / "home" / ".config")
    assert run(project, "mkdir -p ~/.config/uv", *for_uv).returncode == 0
    assert installs(project, mirror, "uv") and not installs(project, mirror, "pip")


def test_certificate_of_the_site(project: Path, site: Path, tmp_path: Path) -> None:
    """A certificate of the site's own authority is refused, until the page's variables name that authority."""
    script = """
        openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj "/CN=authority" -keyout own.key -out own.pem
        openssl req -newkey rsa:2048 -nodes -subj "/CN=mirror" -keyout key.pem -out request.pem
        printf 'subjectAltName=IP:127.0.0.1\\nbasicConstraints=CA:FALSE\\n' >extensions
        openssl x509 -req -in request.pem -CA own.pem -CAkey own.key -CAcreateserial -days 2 -extfile extensions \
            -out certificate.pem
        cat key.pem certificate.pem >both.pem
    """
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, check=True, capture_output=True, timeout=300)
    mirror = Mirror(site, tmp_path / "both.pem")
    variables = named(mirror)
    own = readme.command(
        "docs/environments.md",
        "export PIP_CERT=... SSL_CERT_FILE=...",
        {"/etc/ssl/certs/ca-certificates.crt": tmp_path / "own.pem"},
    )
    for program in INSTALL:
        assert not installs(project, mirror, program, variables)
        assert installs(project, mirror, program, variables, own)
    mirror.server.shutdown()


def test_builds_of_pytorch(project: Path, site: Path, mirror: Mirror) -> None:
    """UV_TORCH_BACKEND asks PyTorch's own index, whatever the mirror has. A mirror of that is named to pip."""
    (project / "requirements.txt").write_text("torch==2.15.0\n")
    write_wheel(site / "pytorch-cpu" / "simple" / "torch", "torch", "2.15.0+cpu", "for CPUs")
    variables = named(mirror)
    refused = run(project, variables, f"UV_TORCH_BACKEND=cpu {INSTALL['uv']}")
    assert refused.returncode != 0 and "download.pytorch.org" in refused.stderr and not mirror.served()
    line = readme.command(
        "docs/environments.md", "pip install --extra-index-url ...", {"https://pypi.example.org": mirror.address}
    )
    done = run(project, variables, line, "python -c 'import torch; print(torch.WORD)'")
    run(project, "pip uninstall -y torch")
    assert done.returncode == 0 and done.stdout.endswith("for CPUs\n"), done.stderr
    assert mirror.served() == {"torch-2.15.0%2Bcpu-py3-none-any.whl"}


def test_lock(project: Path, site: Path, mirror: Mirror) -> None:
    """What the page's lock file names is installed by pip and by uv; a file that was changed since is refused by both.

    So is a package that the lock file lacks.
    """
    variables = named(mirror)
    write = readme.command("docs/environments.md", "uv pip compile requirements.txt ...")
    lines = [
        readme.command("docs/environments.md", "uv pip install --require-hashes -r requirements.lock"),
        readme.command("docs/environments.md", "pip install --require-hashes -r requirements.lock"),
    ]
    assert run(project, variables, write).returncode == 0
    lock = (project / "requirements.lock").read_text()
    assert re.search(r"^lesson-of-a-mirror==1\.0 \\\n +--hash=sha256:[0-9a-f]{64}$", lock, re.MULTILINE), lock
    remove = "pip uninstall -y lesson-of-a-mirror"
    for line in lines:
        done = run(project, variables, line, remove)
        assert done.returncode == 0, done.stderr
        (project / "requirements.lock").write_text(f"{lock}torch==2.15.0\n")
        more = run(project, variables, line)
        assert more.returncode != 0 and "torch" in more.stderr, more.stderr
        (project / "requirements.lock").write_text(lock)
    write_wheel(site / "simple" / "lesson-of-a-mirror", "lesson_of_a_mirror", "1.0", "somebody else's")
    for line in lines:
        done = run(project, variables, line)
        assert done.returncode != 0 and re.search("hash", done.stderr, re.IGNORECASE), done.stderr
        assert run(project, "python -c 'import lesson_of_a_mirror'").returncode != 0


@pytest.mark.parametrize("backend", ["uv", "virtualenv"])
def test_nox(project: Path, mirror: Mirror, backend: str) -> None:
    """`nox -s smoke` takes what it installs from the mirror, and PyPI's PyTorch, since the other cannot be reached."""
    example = project / "ddp_spawn"
    example.mkdir()
    (example / "requirements.txt").write_text("lesson-of-a-mirror\ntorch==2.15.0\n")
    text = NOXFILE.format(noxfile=str(ROOT / "noxfile.py"), folder=str(example), package="torch")
    (project / "noxfile.py").write_text(text.replace("def installs(", "def smoke("))
    variables = named(mirror)
    nox = f"{sys.executable} -m nox --default-venv-backend {backend} --envdir {project}/nox -s smoke"
    done = run(project, variables, nox)
    assert done.returncode == 0 and f"installed into {project}/nox/smoke" in done.stdout, done.stdout + done.stderr
    assert "PyTorch: PyPI's build for CUDA, since" in done.stdout + done.stderr
    assert mirror.served() == {"lesson_of_a_mirror-1.0-py3-none-any.whl", "torch-2.15.0-py3-none-any.whl"}
