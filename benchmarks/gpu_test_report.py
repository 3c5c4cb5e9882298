"""A plugin of pytest that notes each test as soon as it has ended: of a session that is killed, the rest is known.

It writes lines of JSON to the file in TEST_REPORT: {"collected": [names]}, and for each test its outcome.
"""

import json
import os

import pytest


def note(line: dict[str, object]) -> None:
    """Append a line, in one write."""
    with open(os.environ["TEST_REPORT"], "a") as file:
        file.write(json.dumps(line) + "\n")


def short(name: str) -> str:
    """Return the name of a test without its file."""
    return name.rpartition("::")[2]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note which tests are to come; with pytest-xdist each worker does."""
    if session.items:
        note({"collected": [short(item.nodeid) for item in session.items]})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what became of a test; with pytest-xdist the controller does, and not the worker as well."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    line: dict[str, object] = {"test": short(report.nodeid), "outcome": report.outcome}
    line |= {"seconds": report.duration, "reason": "", "tail": ""}
    if report.skipped:
        line["reason"] = report.longrepr[2].removeprefix("Skipped: ")
    if report.failed:
        text = report.longreprtext
        errors = [part[1:].strip() for part in text.splitlines() if part.startswith("E")]
        line["reason"] = f"{report.when}: {(errors or ['?'])[0]}"[:300]
        line["tail"] = "\n".join(text.splitlines()[-40:])[-4000:]
    note(line)
