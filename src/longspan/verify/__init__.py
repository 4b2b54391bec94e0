"""Proof that a layout computes the same function as one process, and faults that the proof must catch."""

from longspan.verify.command import verify
from longspan.verify.compare import Check, ParameterError, Report
from longspan.verify.sabotage import SABOTAGES

__all__ = ["SABOTAGES", "Check", "ParameterError", "Report", "verify"]
