"""Checks of a training program from outside: python -m verify FOLDER, or verify.check(FOLDER)."""

from verify.checks import LAUNCHERS, ROWS, check

__all__ = ["LAUNCHERS", "ROWS", "check"]
