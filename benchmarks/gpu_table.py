"""What on_gpu.py has measured, as the table of RESULTS.md."""

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_steps import FAILED, LEFT_OUT, MEASURED, Row

BEGIN, END = "<!-- on_gpu: what follows is written by `--fill` -->", "<!-- on_gpu: end -->"


def load(folders: Sequence[Path]) -> tuple[dict[str, Any], list[Row]]:
    """Return what is known of the machine, and a row for all that was planned; what was measured goes before a lack."""
    about: dict[str, Any] = {}
    rows: dict[str, Row] = {}
    for folder in folders:
        found = json.loads((folder / "results.json").read_text())
        about |= {name: value for name, value in found["about"].items() if value not in ("", None)}
        late = {"state": LEFT_OUT, "reason": "the run was ended before it"}
        got = {row["name"]: row for row in found["rows"]}
        for name in [*found["plan"], *got]:
            row = got.get(name, {"name": name, **late})
            if name not in rows or rank(row) >= rank(rows[name]):
                rows[name] = row
    return about, list(rows.values())


def rank(row: Row) -> int:
    """Return how much a row says."""
    return (LEFT_OUT, FAILED, MEASURED).index(row["state"])


def document(folders: Sequence[Path]) -> str:
    """Return the text of RESULTS.md: what machine it was, the tests, the figures, and what was left out."""
    about, rows = load(folders)
    parts = [caption(about), table_of_tests(rows), table_of_figures(rows), *others(rows), left_out(rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def caption(about: dict[str, Any]) -> str:
    """Return when it was, on which card, with which releases."""
    words = [time.strftime("%d %B %Y", time.gmtime(about.get("started", 0))).lstrip("0")]
    if about.get("gpus"):
        words.append(f"{about['gpus']} x {about['card']}")
        words.append(f"driver {about.get('driver', '?')}, CUDA {about.get('cuda')}")
    else:
        words.append("no GPU")
    words.append(f"{about.get('cores')} cores, Python {about.get('python')}")
    words.append(", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items()))
    if about.get("commit"):
        words.append(f"commit {about['commit']}")
    if about.get("matmul_tflops"):
        words.append(f"a product of 8192 x 8192 in bf16: {about['matmul_tflops']} TFLOP/s")
    if about.get("tiny"):
        words.append("small sizes (`--tiny`): the figures say nothing")
    return wrap("; ".join(words) + ".")


def wrap(text: str, width: int = 120) -> str:
    """Return a text in lines."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".lstrip()
    return "\n".join(lines)


def table(rows: Sequence[dict[str, str]]) -> str:
    """Return rows of cells as a Markdown table, without columns that are all empty."""
    if not rows:
        return ""
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    lines = [titles, *([row[title].replace("|", "/") for title in titles] for row in rows)]
    heading, *rest = (f"| {' | '.join(line)} |\n" for line in lines)
    return f"{heading}{'|---' * len(titles)}|\n{''.join(rest)}".rstrip()


def table_of_tests(rows: Sequence[Row]) -> str:
    """Return how many tests of each example have passed and failed."""
    cells = []
    for row in rows:
        if row["name"].startswith("tests ") and "counts" in row:
            counts = row["counts"]
            cells.append(
                {
                    "tests/test_gpu.py": row["name"].removeprefix("tests "),
                    **{what: str(counts[what]) for what in ("passed", "failed", "skipped")},
                    "not ended": str(counts["not ended"] or ""),
                    "what failed": row.get("reason", "")[:300],
                }
            )
    return table(cells)


def number(value: float) -> str:
    """Return a figure with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table_of_figures(rows: Sequence[Row]) -> str:
    """Return a table with a row for each figure and each public script: speed, share of the peak, memory, power."""
    speeds = {row["name"]: row["value"] for row in rows if row["state"] == MEASURED and "value" in row}
    cells = []
    for row in rows:
        if "value" not in row:
            continue
        values = row.get("values", [])
        spread = f" ({number(min(values))} to {number(max(values))})" if len(values) > 1 else ""
        ratio = ""
        if ours := speeds.get(row.get("beside", "")):
            ratio = f"{ours / row['value']:.2f}"
        cells.append(
            {
                "figure": row["name"],
                "batch": str(row.get("batch", "")),
                "median": f"{number(row['value'])}{spread} {row['unit']}",
                "of the peak": f"{row['peak_share']:.1%}" if "peak_share" in row else "",
                "ours / this": ratio,
                "GPU MB, by torch": f"{row['torch_mb']:,}" if row.get("torch_mb") else "",
                "by nvidia-smi": f"{row['smi_mb']:,}" if row.get("smi_mb") else "",
                "W": str(row.get("watt", "")),
                "busy": f"{row['busy_percent']} %" if "busy_percent" in row else "",
                "s": str(row.get("seconds", "")),
                "remark": row.get("remark", ""),
            }
        )
    return table(cells)


def others(rows: Sequence[Row]) -> list[str]:
    """Return preflight's rows, and the profiles."""
    texts = []
    for row in rows:
        if row["name"] == "preflight" and row["state"] == MEASURED:
            names = [name for name in ("gpus", "reduce") if name in row]
            texts.append(wrap(f"preflight: {'; '.join(f'{name}: {row[name]}' for name in names)}."))
        if "kernels" in row:
            idle = f", no kernel in {row['idle_share']:.1%} of it" if "idle_share" in row else ""
            step = f": a step of {row['step_ms']:.1f} ms{idle}" if "step_ms" in row else ""
            kernels = [
                {
                    "kernel": f"`{kernel['name'][:90]}`",
                    "ms of a step": f"{kernel['ms']:.2f}",
                    "share": f"{kernel['share']:.1%}",
                    "calls": f"{kernel['count']:.0f}",
                }
                for kernel in row["kernels"]
            ]
            texts.append(f"{row['name']}{step}\n\n{table(kernels)}")
    return texts


def left_out(rows: Sequence[Row]) -> str:
    """Return what was not measured, each with its reason."""
    lines = []
    for row in rows:
        if row["state"] != MEASURED and "counts" not in row:
            reason = re.sub(r"\s+", " ", row.get("reason", ""))[:300]
            lines.append(f"* {row['name']}: {'failed: ' if row['state'] == FAILED else ''}{reason}")
    return "Not measured:\n\n" + "\n".join(lines) if lines else ""


def fill(folders: Sequence[Path], page: Path) -> str:
    """Put the text between the marks of a page; return a line that says so."""
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"on_gpu.py: error: {page} has not one line {BEGIN} and one {END}")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{document(folders)}\n{END}{after}")
    return f"{page}: written from {', '.join(map(str, folders))}"
