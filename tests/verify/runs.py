"""A tiny run on a tiny corpus, for tests that need a whole session."""

from pathlib import Path

RUN = """
[model.spec]
family = "qwen3"
num_layers = 2
hidden_size = 32
intermediate_size = 48
num_heads = 4
num_kv_heads = 2
head_dim = 8
vocab_size = 257
windows = [0, 24]
initializer_range = 0.1

[data]
source = "corpus"
sequence = 121
eval_documents = 0.3

[batch]
global_batch = 2

[train]
steps = 4
eval_rows = 3
eval_every = 2

[output]
folder = "out"
tensorboard = false
"""


def write_run(folder: Path) -> Path:
    """A run file with 24 documents of 3 to 240 bytes beside it."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(24):
        text = f"document {number} " * (1 + number * number % 17)
        (corpus / f"{number:02}.txt").write_text(text[: 3 + 10 * number])
    run = folder / "run.toml"
    run.write_text(RUN)
    return run
