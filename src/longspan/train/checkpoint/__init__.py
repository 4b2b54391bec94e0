"""Checkpoints: saved beside training, published whole or not at all, loaded onto any layout.

together.py   work that all ranks do together, with one error for all
manifest.py   what a checkpoint holds, and the checksum of every file
folder.py     names, publishing, keeping the last few
output.py     whose an output folder is; an earlier run is set aside
state.py      a run's tensors by name
writing.py    the copy, and the thread that writes it
reading.py    checksums first, then a reader that runs no code
resume.py     which checkpoint a run goes on from, and whether it may
keeping.py    all of this as the training loop sees it
export.py     a checkpoint as a Hugging Face folder
"""
