"""The tests: docs/maintaining.md says how they are chosen."""

import pytest

from harness.launchers import EXAMPLES


def ci_with(*names: str) -> pytest.MarkDecorator:
    """A mark: `.ci/run` runs the test with these examples, and `nox -s full` with the others.

    It is for tests of what is the same code in several examples, such as longrun.py and job.sh.
    """
    return pytest.mark.runs("full", *(name for name in EXAMPLES if name not in names))
