"""The disk tier of the prefix cache: an SQLite index and one file a page, in a private folder for each model.

Everything here runs on the cache's I/O thread (or in a command). A fault is a miss, never an error or a wrong answer.
"""

from .faults import NO_FAULTS, Faults
from .report import FolderReport, clear, reports, verify
from .tier import DiskTier, DiskUnusable

__all__ = ["NO_FAULTS", "DiskTier", "DiskUnusable", "Faults", "FolderReport", "clear", "reports", "verify"]
