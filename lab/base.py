"""What all parts of the lab use."""

import os

SEARCH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # daemons are not on everybody's path


class LabError(Exception):
    """Something that the user can understand from one line."""
