"""From a :class:`planner.messages.RankSpec` to a trainer that is ready to run: the one place that knows all parts."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import distributed as dist

from planner import manifest
from planner.errors import BadInputError
from planner.events import Action
from planner.messages import RankCheckpoint, RankNote, RankPhase, RankSpec
from planner.pretrain_config import PretrainConfig
from pretrain import data, device, model, optimizer, parallel, recovery, snapshot, tokenizer
from pretrain.channel import Channel
from pretrain.checkpoint import Parts
from pretrain.data import Corpus, Samples
from pretrain.faults import Injector
from pretrain.order import SampleOrder
from pretrain.published import Fence
from pretrain.saving import PublishedCheckpoints, checkpoint_folder
from pretrain.snapshots import first_on_node, memory_dir, open_snapshots
from pretrain.state import TrainState
from pretrain.step import Machine
from pretrain.tokenizer import Tokenizer
from pretrain.trainer import StopRequest, Trainer
from pretrain.validation import Validation


@dataclass(frozen=True)
class _Text:
    tokenizer: Tokenizer
    corpus: Corpus
    samples: Samples


def cache_folder(job_folder: Path) -> Path:
    """Where token indices are kept: one folder for all jobs of a state directory."""
    state_dir = job_folder.parent.parent if job_folder.parent.name == "jobs" else job_folder
    return state_dir / "cache"


def assemble(spec: RankSpec, channel: Channel) -> Trainer:
    """Read the data, join the other ranks, build the model and load its state.

    Raises:
        BadInputError: data, tokenizer or layout cannot work; found before the other ranks are waited for.
        MissingServiceError: the rendezvous store does not answer.
        GivenUpError: there are checkpoints, and none can be used.
    """
    config = spec.config
    where = device.prepare(spec.device)
    torch.set_num_threads(spec.threads)
    layout = parallel.layout(spec.rank, spec.world_size, config.parallel.tensor, config.parallel.pipeline)
    text = _prepare_text(config, Path(spec.job_folder))
    parallel.join(
        layout,
        store_host=spec.store_host,
        store_port=spec.store_port,
        prefix=f"{spec.job}/{spec.incarnation}",
        bind_address=spec.bind_address,
    )
    _same_data_everywhere(text.corpus.train.digest)
    parallel.seed_generators(config.seed)
    vocabulary = model.padded_vocabulary(text.tokenizer.size, config.parallel.tensor)
    chunk = model.wrap(model.build(config, vocabulary))
    optim = optimizer.build_optimizer(config, [chunk])
    injector = Injector(config.faults, spec.fired_faults, spec.origin_rank, channel.send)
    order = SampleOrder(text.samples.count, config.seed)
    fresh = TrainState(seed=config.seed, incarnation=spec.incarnation, data_digest=text.corpus.train.digest)
    checkpoints = PublishedCheckpoints(
        folder=checkpoint_folder(config, Path(spec.job_folder)),
        fence=Fence(spec.job, spec.incarnation, spec.lease_token),
        parts=Parts(model=chunk, optimizer=optim, state=fresh, config=config, vocabulary=vocabulary),
        channel=channel,
        injector=injector,
    )
    state = _load(spec, checkpoints, channel, text.corpus.train.digest)
    return Trainer(
        config=config,
        incarnation=spec.incarnation,
        machine=Machine(layout, chunk, optim, text.samples, order.index, injector, where),
        schedule=optimizer.build_schedule(config, optim),
        order=order,
        state=state,
        channel=channel,
        checkpoints=checkpoints,
        validation=_validation(config, text.corpus, where),
        stop=StopRequest(),
        job_folder=Path(spec.job_folder),
        snapshots=open_snapshots(
            checkpoints.parts,
            layout,
            fence=checkpoints.fence,
            tell=channel.send,
            memory=memory_dir(),
            first_replica_here=first_on_node(layout, platform.node() + spec.bind_address),
        ),
    )


def _prepare_text(config: PretrainConfig, job_folder: Path) -> _Text:
    tokens = tokenizer.load(config.tokenizer)
    corpus = data.prepare(config.data, tokens, cache_folder(job_folder))
    samples = Samples(corpus.train, config.model.seq_length)
    if samples.count < 1:
        raise BadInputError(
            f"data.train: {corpus.train.tokens} tokens are too few for one sample of model.seq_length "
            f"{config.model.seq_length}; give more text or a shorter sequence"
        )
    return _Text(tokens, corpus, samples)


def _validation(config: PretrainConfig, corpus: Corpus, where: torch.device) -> Validation | None:
    if corpus.valid is None:
        return None
    samples = Samples(corpus.valid, config.model.seq_length)
    return Validation(samples, config.batch.micro, where) if samples.count else None


def _same_data_everywhere(digest: str) -> None:
    """Refuse nodes whose files differ: their ranks would mean different text by the same sample ids (collective)."""
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if odd:
        raise BadInputError(
            f"data.train: ranks {odd} see other text than rank 0; give every node the same files and tokenizer"
        )


def _load(spec: RankSpec, checkpoints: PublishedCheckpoints, channel: Channel, digest: str) -> TrainState:
    """Claim the checkpoint folder and load what the spec names; the fresh state where it names nothing."""
    channel.send(RankPhase(phase="load", step=0, time=time.time()))
    checkpoints.claim()
    state = None if spec.exact_resume else _from_memory(spec, checkpoints, channel)
    if state is None and spec.resume is None:
        return checkpoints.parts.state
    if state is None:
        state = checkpoints.resume(Path(spec.resume or ""))
    if state.data_digest != digest:
        if spec.rank == 0:
            reason = (
                "the training text is not that of the checkpoint; the sample order goes on over the new text"
                f" (digest {digest[:12]}, was {state.data_digest[:12]})"
            )
            channel.send(RankNote(action=Action.CHECKPOINT_LOADED.value, reason=reason, time=time.time()))
        state.data_digest = digest
    return state


def _from_memory(spec: RankSpec, checkpoints: PublishedCheckpoints, channel: Channel) -> TrainState | None:
    """The state of a snapshot that outlived its rank, where one is newer than the checkpoint to resume (collective)."""
    memory = memory_dir()
    folder = snapshot.job_dir(memory, spec.job) if memory is not None else None
    named = manifest.parse_step_dir(Path(spec.resume).name) if spec.resume else None
    began = time.monotonic()
    recovered = recovery.from_snapshots(checkpoints.parts, folder, newer_than=named[0] if named else 0)
    if dist.get_rank() == 0:
        for one in recovered.refused:
            channel.send(
                _told("refused", one.candidate.step, time.monotonic() - began, f"{one.candidate}: {one.reason}")
            )
        if recovered.chosen is not None:
            channel.send(_told("loaded", recovered.chosen.step, time.monotonic() - began, recovered.reason))
    return checkpoints.parts.state if recovered.chosen is not None else None


def _told(what: Literal["refused", "loaded"], step: int, seconds: float, reason: str) -> RankCheckpoint:
    return RankCheckpoint(what=what, step=step, seconds=seconds, reason=reason, time=time.time())
