"""Checks of a training program from outside: python -m verify FOLDER, or verify.check(FOLDER)."""

from verify.program import LAUNCHERS, Refused
from verify.rows import ROWS, Row, check

__all__ = ["LAUNCHERS", "ROWS", "Refused", "Row", "check"]
