"""What the training loop sees: a run's output folder and checkpoints, from the first step to the last."""

import hashlib
import json
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from longspan.data import TokenStore
from longspan.errors import CheckpointError
from longspan.train.checkpoint.folder import complete
from longspan.train.checkpoint.manifest import Manifest, Progress
from longspan.train.checkpoint.output import CHECKPOINTS, Output, output_folder
from longspan.train.checkpoint.reading import CheckedReader, read_tensors, verify_together
from longspan.train.checkpoint.resume import Found, earlier_words
from longspan.train.checkpoint.state import RunTensors
from longspan.train.checkpoint.together import Together
from longspan.train.checkpoint.writing import Writer
from longspan.train.metrics import describe_run
from longspan.train.session import Session

__all__ = ["Keeper", "keeping"]

# A save under way when another error ends the run may still become a checkpoint, but must not hold the end up.
GRACE_S = 3.0


class Keeper:
    """Loads and saves one run; every rank has one and calls its methods in the same order.

    Made by `keeping`.

    Attributes:
        output: the output folder.
    """

    def __init__(
        self, session: Session, found: Found | None, output: Output, together: Together, threads: Together
    ) -> None:
        self._session, self._found, self.output = session, found, output
        self._together, self._threads = together, threads
        self._root = session.config.output.folder / CHECKPOINTS
        self._last = found.step if found and found.own else 0
        self._writer: Writer | None = None

    @property
    def newest(self) -> Path | None:
        """The last complete checkpoint."""
        return next(reversed(complete(self._root).values()), None)

    def begin(
        self, parameters: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer
    ) -> Progress:
        """Fill model and optimizer from the checkpoint that the run goes on from, if any.

        Args:
            parameters: all of this rank's by name, before the first forward pass.
            optimizer: AdamW over them.

        Returns:
            How far the run is.

        Raises:
            LongspanError: a checkpoint that is of another model, or cannot be read.
        """
        tensors = RunTensors(dict(parameters), optimizer, self._together.rank)
        settings = self._session.config.checkpoint
        self._writer = Writer(
            self._root,
            tensors.by_name,
            self._describe,
            threads=self._threads,
            together=self._together,
            keep=settings.keep,
            asynchronous=settings.asynchronous,
        )
        if self._found is None:
            return Progress()
        self._load(self._found, tensors)
        return self._found.manifest.progress

    def after_step(self, progress: Progress) -> None:
        """Save if the run file says so, and learn whether an earlier save failed.

        Raises:
            LongspanError: it did; on all ranks in the same step.
        """
        self._saver.check()
        every = self._session.config.checkpoint.every
        if every and progress.step % every == 0:
            self.save(progress)

    def save(self, progress: Progress) -> None:
        """Save the run as it is now, unless its last checkpoint is of this step."""
        if progress.step != self._last:
            self._saver.save(progress)
            self._last = progress.step

    def finish(self, progress: Progress) -> None:
        """Save the run as it is now and wait until its checkpoint is complete."""
        self.save(progress)
        self._saver.wait()

    def wait_briefly(self) -> None:
        """Give a save under way the chance to end, when the run fails by something else."""
        if self._writer is not None:
            self._writer.wait_briefly(GRACE_S)

    @property
    def _saver(self) -> Writer:
        assert self._writer is not None, "begin comes first"
        return self._writer

    def _load(self, found: Found, tensors: RunTensors) -> None:
        def read() -> None:
            # Generators are one for each rank, so another number of ranks starts them anew.
            same_world = found.manifest.world == self._together.world
            reader = CheckedReader(found.folder, found.manifest)
            stored = reader.tensors()
            # A run that computed on another kind of device has no generator for this one.
            wanted = {
                name: tensor
                for name, tensor in tensors.by_name(rng=same_world).items()
                if name in stored or not name.startswith("rng.")
            }
            read_tensors(reader, wanted)
            if same_world:
                tensors.set_generators(wanted)

        self._together.agree(read, doing=f"loading {found.folder}", fix=earlier_words(found.folder))

    def _describe(self, progress: Progress) -> Manifest:
        session = self._session
        run = describe_run(session.config, torch.device(session.groups.device))
        return Manifest(
            run_id=self.output.run_id,
            progress=progress,
            world=session.groups.layout.world,
            model=json.loads(session.spec.model_dump_json()),
            config=run["config"],
            corpus=corpus_digest(session.corpus.train),
            versions=run["versions"],
        )


@contextmanager
def keeping(session: Session, found: Found | None) -> Generator[Keeper]:
    """A run's keeper, with its output folder made ready and held; every rank calls it together.

    Args:
        session: the run on this rank.
        found: the checkpoint to go on from, or None to start anew.

    Raises:
        LongspanError: a checkpoint that is damaged or saw other documents, and then nothing was changed; a folder
            that cannot be used; in the same words on all ranks.
    """
    rank, world = session.groups.rank, session.groups.layout.world
    timeout_s = session.config.train.timeout_s
    together, threads = (Together.create(rank, world, timeout_s) for _ in range(2))
    folder = session.config.output.folder
    _agree_on_start(found, together)
    changed = _verify(found, session, together) if found is not None else ()
    with ExitStack() as held:

        def ready() -> Output | None:
            if rank != 0:
                return None
            inputs = [found.folder] if found and not found.own else []
            goes_on_from = found.step if found and found.own else None
            context = output_folder(session.config, goes_on_from=goes_on_from, inputs=inputs)
            return held.enter_context(context)

        output = together.through_rank_0(
            ready,
            lambda parts: [parts[0]] * world,
            doing=f"preparing {folder}",
            fix="make it a folder that can be written, or set output.folder",
        )
        assert output is not None, "rank 0 made it"
        output = replace(output, notes=(*changed, *output.notes))
        keeper = Keeper(session, found, output, together, threads)
        try:
            yield keeper
        except Exception:
            keeper.wait_briefly()
            raise
    together.close()
    threads.close()


def _agree_on_start(found: Found | None, together: Together) -> None:
    """Refuse to start if ranks found different checkpoints, as on a shared file system that shows them unequally."""

    def same(starts: list[str]) -> list[None]:
        if len(set(starts)) > 1:
            told = " and ".join(sorted(set(starts)))
            raise CheckpointError(f"ranks would start from {told}; name one with --resume PATH")
        return [None] * len(starts)

    mine = "step 0" if found is None else f"{found.folder} of run {found.manifest.run_id}"
    together.through_rank_0(lambda: mine, same, doing="choosing a checkpoint", fix="start again")


def _verify(found: Found, session: Session, together: Together) -> tuple[str, ...]:
    """Refuse a damaged checkpoint, or one of other documents, before anything is read or renamed.

    Returns:
        What a person should know, if other documents were allowed.
    """
    verify_together(found.folder, found.manifest, together, earlier_words(found.folder))
    if found.manifest.corpus == corpus_digest(session.corpus.train):
        return ()
    other = f"{found.folder} saw other training documents than data.source has now"
    if not found.allow_changes:
        raise CheckpointError(f"{other}; restore them, or --allow-changes")
    return (f"changed since the checkpoint: {other}",)


def corpus_digest(documents: TokenStore) -> str:
    """What tells one set of documents in one order, cut into as many tokens, from another."""
    return hashlib.sha256(documents.keys.tobytes() + documents.offsets.tobytes()).hexdigest()
