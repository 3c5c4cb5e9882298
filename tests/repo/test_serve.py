"""What jupyter/serve.py does with addresses of IPv4 and IPv6; tests/slurm/test_jupyter.py opens it in the lab."""

import contextlib
import socket
import ssl
import threading
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from harness import outputs
from harness.launchers import ROOT

FAMILIES = ["127.0.0.1"]
with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as query:
    query.bind(("::1", 0))
    FAMILIES.append("::1")  # a container may have none of IPv6


@pytest.fixture
def serve() -> ModuleType:
    """The module of serve.py."""
    return outputs.import_file(ROOT / "jupyter" / "serve.py")


class Answer(BaseHTTPRequestHandler):
    """An answer to any question: the host that was asked for."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.headers["Host"].encode())

    def log_message(self, *_: object) -> None:
        pass


def server_at(serve: ModuleType, tmp_path: Path, listen: str) -> Any:
    """Return serve.py's server, which has not started, of a job that was submitted from this machine."""
    args = Namespace(private=tmp_path, connect=tmp_path / "connect.txt", listen=listen, login="me@login", port=0)
    return serve.Server(args)


@pytest.mark.parametrize(("host", "address"), [("localhost", "127.0.0.1"), *zip(FAMILIES, FAMILIES, strict=True)])
def test_own_address(serve: ModuleType, monkeypatch: pytest.MonkeyPatch, host: str, address: str) -> None:
    """The address towards the login node is one of IPv4, where that is possible, else one of IPv6."""
    monkeypatch.setenv("SLURM_SUBMIT_HOST", host)
    assert serve.own_address("me@elsewhere") == address


def test_unknown_login_node(serve: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a way to the login node, one line says what helps."""
    monkeypatch.setenv("SLURM_SUBMIT_HOST", "no.such.host.invalid")
    with pytest.raises(SystemExit, match=r"^serve.py: error: .* no.such.host.invalid \(.+\), .*: use LISTEN=loopback$"):
        serve.own_address("me@elsewhere")


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("address", FAMILIES)
def test_address_before_a_port(
    serve: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, secure: bool
) -> None:
    """It asks a server at its address, by a certificate if it has one, and says how to open a tunnel to it."""
    monkeypatch.setenv("SLURM_SUBMIT_HOST", address)
    shown = {"127.0.0.1": "127.0.0.1", "::1": "[::1]"}[address]

    class Server(HTTPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

    ours = server_at(serve, tmp_path, "node")
    assert ours.address == address
    with Server((address, 0), Answer) as server:
        if secure:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(ours.certificate, tmp_path / "key.pem")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        else:
            ours.certificate = None
        ours.port = server.server_port
        thread = threading.Thread(target=server.handle_request, daemon=True)
        thread.start()
        assert ours.ask("api", "").decode() == f"{shown}:{ours.port}"
        thread.join(300)
    serve.write_connect(ours)
    assert f"-L 8888:{shown}:{ours.port} " in (tmp_path / "connect.txt").read_text()
