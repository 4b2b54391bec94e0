"""Timings of Longspan, with the libraries it is compared with beside it; run from the repository root."""
