"""The report of trial.py: what a cluster is, a table, the same as data, all without names; and a page that shows it."""

import getpass
import grp
import html
import importlib.metadata
import json
import os
import platform
import re
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

BEGIN = "The same as data:\n"
SCALES = ("1-process", "1-node", "2-nodes")
LONGEST = 300  # characters of a result
PACKAGES = ("torch", "lightning", "deepspeed", "accelerate", "horovod", "tensorflow", "transformers", "peft")
COLOURS = {"ok": "#cec", "WARN": "#fe9", "FAIL": "#fbb", "left out": "#eee"}
UNCLEAN = ("check", "state", "scale", "unit")  # words of ours, which may also be names
# Files whose name may stand in a report; of all other paths nothing does.
HARMLESS = re.compile(r"\.(?:py|sh|slurm|so(?:\.\d+)*|h|cpp|cu|pt|npz|json|toml|yaml|csv|txt|log|out)$")
Row = dict[str, Any]  # check, state (of COLOURS), result; of a run also seconds, rate and unit, scale; log: lines


def known_names(nodes: list[str]) -> dict[str, str]:
    """Return what may not be in a report, as far as this job's environment tells it, and what stands there instead."""
    env, host, full = os.environ, os.uname().nodename, socket.getfqdn()
    words = {node: f"node{number}" for number, node in enumerate(nodes, 1)}
    for name in (host, full, host.partition(".")[0], env.get("SLURMD_NODENAME", "")):
        words.setdefault(name, "node1")
    for path in (os.getcwd(), str(Path.cwd().parent), *(env.get(name, "") for name in ("HOME", "VENV", "TMPDIR"))):
        words.setdefault(path, "PATH")
    for name in ("JOB_USER", "JOB_ACCOUNT", "JOB_PARTITION", "JOB_QOS", "JOB_GROUP", "CLUSTER_NAME", "SUBMIT_HOST"):
        words.setdefault(env.get(f"SLURM_{name}", ""), name.removeprefix("JOB_"))
    words.setdefault(env.get("HOSTNAME", ""), "HOST")
    for name in (host, full, env.get("SLURM_SUBMIT_HOST", ""), env.get("HOSTNAME", "")):
        words.setdefault(name.partition(".")[2], "DOMAIN")
    for name in (getpass.getuser(), env.get("USER", ""), env.get("LOGNAME", "")):
        words.setdefault(name, "USER")
    with suppress(KeyError):
        words.setdefault(grp.getgrgid(os.getgid()).gr_name, "GROUP")
    return {word: instead for word, instead in words.items() if len(word) > 1}


def cleaner(words: dict[str, str]) -> Callable[[Any], Any]:
    """Return a function that replaces these words in all texts of what it is given, and paths, addresses, hosts alike.

    A host is alike if it has the name of one that is known, with another number.
    """
    hosts = [name for name, instead in words.items() if re.fullmatch(r"node\d+|SUBMIT_HOST|HOST", instead)]
    known = [re.escape(word) for word in sorted(words, key=len, reverse=True)]
    alike = [re.sub(r"\d+", r"\\d+", re.escape(name)) for name in hosts if re.search(r"\d", name)]
    word = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(known + alike)})(?![A-Za-z0-9])")
    part = r"[^\s/'\"`,;:()<>|]+"
    begin = r"(?:(?<![\w./])|(?<=-[IL]))(?:~\w*|PATH|\$\w+|\$\{\w+\})?/+"
    # An address of the web, which stays; what stands in quotes; or a path, on behind a space if a / comes in that word.
    path = re.compile(
        rf"(?P<web>https?://\S+)|(?P<quote>['\"`])(?={begin})[^'\"`\n]+(?P=quote)|"
        rf"{begin}{part}(?:/+{part}| {part}/+{part})*/*"
    )

    def shorten(found: re.Match) -> str:
        quote, name = found["quote"] or "", found[0].strip("'\"`").rpartition("/")[2]
        return found["web"] or f"{quote}...{'/' + name if HARMLESS.search(name) else ''}{quote}"

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: one if key in UNCLEAN else clean(one) for key, one in value.items()}
        if isinstance(value, list):
            return [clean(one) for one in value]
        if not isinstance(value, str):
            return value
        value = word.sub(lambda found: words.get(found[0], "NODE"), value)
        value = re.sub(r"\S+@\S+", "EMAIL", value)
        value = path.sub(shorten, value)
        value = re.sub(r"\b(?!127\.)\d{1,3}(?:\.\d{1,3}){3}\b", "ADDRESS", value)
        return re.sub(r"(?i)\b(?:[0-9a-f]{1,4}:){3,}[0-9a-f:]*|\b(?:[0-9a-f]{1,4}:)+:[0-9a-f:]*", "ADDRESS", value)

    return clean


def describe(nodes: int, cpus: int, gpus: int) -> str:
    """Return in three lines what this cluster is."""
    version = subprocess.run(["scontrol", "--version"], capture_output=True, text=True, timeout=60).stdout.strip()
    with suppress(OSError):
        version += f", {platform.freedesktop_os_release().get('PRETTY_NAME', '')}"
    packages = []
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages.append(f"{name} {importlib.metadata.version(name)}")
    versions = ", ".join([f"Python {platform.python_version()}", *packages])
    return f"{version}\n{versions}\nnodes: {nodes}; of each {cpus} cores and {gpus} GPUs"


def report_text(system: str, minutes: float, rows: list[Row]) -> str:
    """Return the report: counts, the table, the speeds of one process, one node and two, and the rows as data."""
    counts = [f"{sum(one['state'] == state for one in rows)} {state}" for state in COLOURS]
    lines = [f"trial: {', '.join(counts)}; {minutes:.0f} minutes", system, ""]
    width = max(len(one["check"]) for one in rows)
    for one in rows:
        seconds = f" ({one['seconds']:.0f} s)" if "seconds" in one else ""
        lines.append(f"{one['check']:{width}} | {one['state']:8} | {one['result'][:LONGEST]}{seconds}")
        lines += [f"{'':{width}} |          | > {line}" for line in one.get("log", [])]
    found = {one["scale"]: one["rate"] for one in rows if "scale" in one}
    speeds = {name: found[name] for name in SCALES if name in found}
    base = speeds.get("1-process", 0)
    times = [f"{name} {rate:.0f}" + (f" ({rate / base:.2f} times)" if base else "") for name, rate in speeds.items()]
    lines += ["", f"samples/s of a small model: {', '.join(times) or 'none'}", "", BEGIN.strip()]
    data = ",\n".join(json.dumps(one) for one in rows)
    head = f'{{"system": {json.dumps(system)},\n"speeds": {json.dumps(speeds)},\n"rows": [\n'
    return "\n".join(lines) + f"\n{head}{data}\n]}}\n"


def draw(report: Path) -> Path:
    """Write a page that shows a report, beside it; return its path. Raises ValueError if it is no report."""
    try:
        data = json.loads(report.read_text().partition(BEGIN)[2])
        rows, speeds, system = data["rows"], data["speeds"], html.escape(data["system"]).replace("\n", "<br>")
    except (OSError, ValueError, LookupError, TypeError):
        raise ValueError(f"{report} is no report of a trial: give a trial-JOBID.txt") from None
    most, bars, cells = max([*speeds.values(), 1]), [], []
    for number, (name, rate) in enumerate(speeds.items()):
        width, y = 400 * rate / most, 30 * number
        bars.append(
            f'<text y="{y + 20}">{html.escape(name)}</text><text x="{width + 98}" y="{y + 20}">{rate:.0f}</text>'
        )
        bars.append(f'<rect x="90" y="{y + 5}" width="{width}" height="20" fill="#47a"/>')
    for one in rows:
        texts = (one["check"], one["state"], " / ".join([one["result"], *one.get("log", [])]))
        cells.append(f'<tr style="background:{COLOURS.get(one["state"], "")}">')
        cells += [f"<td>{html.escape(text)}" for text in texts]
    page = report.with_suffix(".html")
    parts = [
        f'<!doctype html><meta charset="utf-8"><title>{html.escape(report.stem)}</title>',
        "<style>body{font:14px sans-serif;margin:2em}td{padding:2px 8px}</style>",
        f"<h1>{html.escape(report.stem)}</h1><p>{system}</p><h2>samples/s of a small model</h2>",
        f'<svg width="600" height="{30 * len(speeds)}">{"".join(bars)}</svg>',
        f"<h2>Checks</h2><table>{''.join(cells)}</table>\n",
    ]
    page.write_text("\n".join(parts))
    return page
