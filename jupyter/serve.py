"""Start JupyterLab inside a job, for its owner alone, and end it in good order. run.slurm calls this.

The token that opens the server is written to one file, which only its owner can read: the one that says how to connect.
It is in no command line, no log and no environment. Settings of the user's own, such as a token that others can guess,
are not used: they may be copied from a guide.
"""

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import secrets
import signal
import site
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import NoReturn

INTERRUPT, STOP = 60, 30  # seconds before the job's end, when cells are interrupted and when the server is stopped
AUTOSAVE = 10  # seconds between two times that the browser saves an open notebook; JupyterLab's default is 120


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True, help="the environment that has JupyterLab")
    parser.add_argument("--private", type=Path, required=True, help="folder that only its owner can read")
    parser.add_argument("--connect", type=Path, required=True, help="the file that says how to connect")
    parser.add_argument("--folder", type=Path, required=True, help="what the file browser shows")
    parser.add_argument("--listen", choices=["loopback", "node"], required=True, help="for whom the port is open")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--login", required=True, help="USER@HOST of the login node, seen from outside")
    return parser.parse_args()


def main() -> int:
    """Serve until the job ends, the user shuts JupyterLab down, or the server ends by itself."""
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # through `finally`
    server = Server(args)
    try:
        server.start()
        write_connect(server)
        watch(server)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cut this short
        args.connect.unlink(missing_ok=True)  # first: the token is worthless from now on
        server.stop()
    return 0


class Server:
    """JupyterLab in a process of its own, with its token, its address and, where others see its port, a certificate."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.private = args, args.private
        self.token = secrets.token_hex(32)
        self.node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self.address = "127.0.0.1" if args.listen == "loopback" else own_address(args.login)
        self.certificate = make_certificate(self) if args.listen == "node" else None
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, wait until it answers, and make sure that it answers nobody who lacks the token."""
        write_settings(self)
        reader, writer = os.pipe()  # the token goes through a pipe, so that no file or environment has it
        os.write(writer, self.token.encode())
        os.close(writer)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER_")}
        environment |= {
            "JUPYTER_CONFIG_DIR": str(self.private / "config"),
            "JUPYTER_CONFIG_PATH": str(self.private / "config"),  # also before what the environment or the site sets
            "JUPYTER_RUNTIME_DIR": str(self.private / "runtime"),  # sockets and keys of the kernels
            "JUPYTER_TOKEN_FILE": f"/dev/fd/{reader}",
            # The look of JupyterLab, in contrast, is the user's own.
            "JUPYTERLAB_SETTINGS_DIR": str(Path.home() / ".jupyter" / "lab" / "user-settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(Path.home() / ".jupyter" / "lab" / "workspaces"),
        }
        path = [str(self.private / "python"), *filter(None, [environment.get("PYTHONPATH")])]
        if self.args.venv.resolve() != Path(sys.prefix).resolve():  # it lies on top of an image: notebooks use both
            path += site.getsitepackages()
        environment["PYTHONPATH"] = os.pathsep.join(path)
        words = [f"{self.args.venv}/bin/python", "-m", "jupyterlab", str(self.args.folder)]
        self.process = subprocess.Popen(words, env=environment, pass_fds=[reader], stdin=subprocess.DEVNULL)
        os.close(reader)
        self.wait_for_answer()
        for file in (self.private / "runtime").glob("jpserver-*"):  # the server's own notes, which have the token
            file.unlink()
        if self.status("") != 403 or self.status(self.token) != 200:
            fail("the server does not insist on its token: look for a token or password in jupyter_server_config.*")

    def wait_for_answer(self) -> None:
        """Wait until the server has said which port it takes, and answers there."""
        deadline = time.monotonic() + 300  # where Python starts from a busy file system
        while time.monotonic() < deadline:
            if (self.private / "stop").exists():
                sys.exit(0)
            if self.process.poll() is not None:
                fail("JupyterLab has ended at once: see its message above")
            for file in (self.private / "runtime").glob("jpserver-*.json"):
                with contextlib.suppress(ValueError, OSError):  # not yet complete; does not yet listen
                    self.port = int(json.loads(file.read_text())["port"])
                    self.status("")
                    return
            time.sleep(0.1)
        fail("JupyterLab did not start within 300 s")

    def ask(self, path: str, token: str, method: str = "GET", seconds: float = 60) -> bytes:
        """Return what the server answers to a request; raises urllib.error.HTTPError if it refuses."""
        scheme = "https" if self.certificate else "http"
        context = ssl.create_default_context(cafile=self.certificate) if self.certificate else None
        headers = {"Authorization": f"token {token}"} if token else {}
        url = f"{scheme}://{in_url(self.address)}:{self.port}/{path}"
        request = urllib.request.Request(url, None, headers, method=method)
        # The cluster's HTTP proxy is not asked for an address of its own.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), *([urllib.request.HTTPSHandler(context=context)] if context else [])
        )
        with opener.open(request, timeout=seconds) as answer:
            return answer.read()

    def status(self, token: str) -> int:
        """Return the HTTP status of a question that only the owner may ask."""
        try:
            self.ask("api/status", token)
        except urllib.error.HTTPError as error:
            return error.code
        return 200

    def interrupt_kernels(self) -> None:
        """Interrupt running cells, as the stop button does, so that what stands in `finally:` can save results."""
        try:
            for kernel in json.loads(self.ask("api/kernels", self.token, seconds=5)):
                self.ask(f"api/kernels/{kernel['id']}/interrupt", self.token, "POST", seconds=5)
        except OSError as error:
            say(f"could not interrupt the running cells: {error}")

    def stop(self) -> None:
        """Ask the server to shut its kernels down and end; insist after 20 s."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def write_settings(server: Server) -> None:
    """Write the server's configuration. What matters for safety is named even where it is the default."""
    config = server.private / "config"
    (config / "labconfig").mkdir(parents=True)
    (server.private / "runtime").mkdir()
    settings = {
        "Application": {"log_level": "ERROR"},  # its other lines name addresses that nobody can open from outside
        "ServerApp": {
            "ip": server.address,
            "port": server.args.port,
            "open_browser": False,
            "port_retries": 0,
            "allow_root": True,  # in some containers the user is root
            "identity_provider_class": "jupyter_server.auth.PasswordIdentityProvider",
            "password": "",
            "allow_unauthenticated_access": False,
            "disable_check_xsrf": False,
            "allow_origin": "",
            "allow_origin_pat": "",
        },
        "PasswordIdentityProvider": {"hashed_password": "", "allow_password_change": False},  # the token is all
        # Sockets in a private folder: anybody on the node could connect to a port, and read what cells print.
        "KernelManager": {"transport": "ipc"},
        "LabApp": {"check_for_updates_class": "jupyterlab.NeverCheckForUpdate", "news_url": None},  # no internet
    }
    if server.certificate:
        settings["ServerApp"] |= {"certfile": str(server.certificate), "keyfile": str(server.private / "key.pem")}
    else:
        settings["ServerApp"] |= {"allow_remote_access": False}
    (config / "jupyter_server_config.json").write_text(json.dumps(settings))
    # JupyterLab's debugger would open a port through which anybody on the node can run code in the kernel.
    (server.private / "python" / "debugpy").mkdir(parents=True)
    stub = 'raise ImportError("switched off: its port is open to everybody on the node")\n'
    (server.private / "python" / "debugpy" / "__init__.py").write_text(stub)
    overrides = {
        "@jupyterlab/docmanager-extension:plugin": {"autosaveInterval": AUTOSAVE},
        "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    }
    (config / "labconfig" / "default_setting_overrides.json").write_text(json.dumps(overrides))


def own_address(login: str) -> str:
    """Return the address of this node on the network that it shares with the login node: of IPv4, if it has one."""
    host = os.environ.get("SLURM_SUBMIT_HOST") or login.rpartition("@")[2]
    errors = []
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((host, 22))  # sends nothing, but chooses the interface
                return probe.getsockname()[0]
        except OSError as error:
            errors.append(error)
    fail(f"this node does not find {host} ({errors[0]}), from where the job was submitted: use LISTEN=loopback")


def in_url(address: str) -> str:
    """Return an address as it stands before a port: one of IPv6 has colons itself."""
    return f"[{address}]" if ":" in address else address


def make_certificate(server: Server) -> Path:
    """Make a certificate for this job only, in cert.pem and key.pem, and return its path."""
    names = f"subjectAltName=DNS:{server.node},IP:{server.address},DNS:localhost,IP:127.0.0.1"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:3072", "-nodes", "-days", "30", "-subj", f"/CN={server.node}"]
    words += ["-addext", names, "-keyout", str(server.private / "key.pem"), "-out", str(server.private / "cert.pem")]
    try:
        subprocess.run(words, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        fail("LISTEN=node needs the program openssl (in the image, if there is one), to make a certificate")
    except subprocess.CalledProcessError as error:
        fail(f"openssl made no certificate: {(error.stderr.strip() or 'no reason given').splitlines()[-1]}")
    return server.private / "cert.pem"


def write_connect(server: Server) -> None:
    """Write how to connect to a file for the owner's eyes only, and its name to the log."""
    args = server.args
    scheme, way = "http", f"-J {args.login} {args.login.partition('@')[0]}@{server.node}"
    if server.certificate:
        scheme, way = "https", args.login
    tunnel = f"ssh -N -o ExitOnForwardFailure=yes -L 8888:{in_url(server.address)}:{server.port} {way}"
    job = os.environ.get("SLURM_JOB_ID", "?")
    lines = [
        f"JupyterLab of job {job} on {server.node}. Keep this file to yourself: it opens everything that you can open.",
        "",
        "1. On your own computer, in a terminal that you leave open; it prints nothing while it works:",
        f"   {tunnel}",
        "2. In the browser of your own computer:",
        f"   {scheme}://127.0.0.1:8888/lab?token={server.token}",
    ]
    if server.certificate:
        lines += [f"   It warns of an unknown certificate. Accept it if this is its SHA-256: {fingerprint(server)}"]
    lines += ["", "If 8888 is already in use there, take 8889 in both places.", f"To end the job:  scancel {job}", ""]
    with open(os.open(args.connect, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write("\n".join(lines))
    say(f"JupyterLab is ready on {server.node}. How to open it:  cat {args.connect.resolve()}")


def fingerprint(server: Server) -> str:
    """Return the SHA-256 of the certificate, as browsers show it."""
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(server.certificate.read_text())).hexdigest().upper()
    return ":".join(digest[i : i + 2] for i in range(0, len(digest), 2))


def watch(server: Server) -> None:
    """Wait for the end: of the server, of the job (run.slurm writes when to `ends`), or at once (`stop`)."""
    private, end, interrupted = server.private, None, False
    while server.process.poll() is None and not (private / "stop").exists():
        if end is None and (private / "ends").exists():
            end = int((private / "ends").read_text())
            left = max(0, end - time.time())
            say(f"the time limit is near: this job ends in {left:.0f} s. Save your work now.")
            say(f"Cells that still run are interrupted {INTERRUPT} s before the end; what stands in `finally:` is run.")
        if end is not None and not interrupted and time.time() > end - INTERRUPT:
            interrupted = True
            server.interrupt_kernels()
        if end is not None and time.time() > end - STOP:
            say("the time limit: shutting down")
            return
        time.sleep(0.25)
    status = server.process.poll()
    if status not in (None, 0) and not (private / "stop").exists():
        reason = ": perhaps for lack of memory, then raise --mem" if status == -signal.SIGKILL else ""
        fail(f"JupyterLab has ended with status {status}{reason}")


def say(text: str) -> None:
    """Print a line to the job's log, with the time of day."""
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", flush=True)


def fail(reason: str) -> NoReturn:
    """Give up, with one line."""
    sys.exit(f"serve.py: error: {reason}")


if __name__ == "__main__":
    sys.exit(main())
