"""`longspan export`: a checkpoint's weights as a Hugging Face folder."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from longspan.cli.output import Flag, Json, console, print_json

Dtype = Annotated[
    Literal["float64", "float32", "bfloat16", "float16"] | None,
    Parameter(help="Type of the weights; the checkpoint's own when left out."),
]


def export(
    checkpoint: Path,
    folder: Path,
    /,
    *,
    dtype: Dtype = None,
    trust_checkpoint: Flag = False,
    json: Json = False,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder that transformers loads.

    One process does it, whatever the layout of the run.

    Args:
        checkpoint: The checkpoint, as in runs/demo/checkpoints/step-00000060.
        folder: A new folder.
        dtype: As declared.
        trust_checkpoint: Use a checkpoint that does not lie where its run wrote it.
        json: As for every verb.
    """
    from longspan.train.checkpoint.export import export as write

    folder = folder.resolve()
    exported = write(checkpoint.resolve(), folder, dtype=dtype, trust=trust_checkpoint)
    if json:
        print_json(asdict(exported) | {"folder": str(folder)})
        return
    tokenizer = (
        "with its tokenizer" if exported.tokenizer else "without a tokenizer: the run has none to copy"
    )
    console().print(
        f"step {exported.step:,}: {exported.num_parameters:,} parameters in {exported.dtype}, {tokenizer}, in "
        f"{folder}",
        soft_wrap=True,
    )
