"""Failure logs made on the spot: a healthy part, one root, its cascades, in wordings that differ from log to log."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta


@dataclass
class Log:
    """Lines of a log and the truth about it (1-based line of the root)."""

    root: str
    lines: list[str] = field(default_factory=list)
    evidence: int | None = None
    node: str | None = None
    rank: int | None = None

    def add(self, *lines: str) -> None:
        """Append lines."""
        self.lines.extend(lines)

    def blame(self, line: str, node: str | None = None, rank: int | None = None) -> None:
        """Append the root line."""
        self.lines.append(line)
        self.evidence, self.node, self.rank = len(self.lines), node, rank

    def text(self) -> str:
        """The whole log."""
        return "\n".join(self.lines) + "\n"


START = datetime(2027, 3, 4, 5, 6, 7, tzinfo=UTC)

# root, how the rank says it ({r}: rank, {h}: host), severity expected
BY_A_RANK = [
    ("key_error", "[rank{r}]: KeyError: 'position_bias'", "STOP"),
    ("type_error", "[rank{r}]: TypeError: backward() missing 1 required positional argument: 'grad'", "STOP"),
    ("attribute_error", "[rank{r}]: AttributeError: module 'model' has no attribute 'router'", "STOP"),
    ("zero_division", "[rank{r}]: ZeroDivisionError: integer division or modulo by zero", "STOP"),
    ("index_error", "[rank{r}]: IndexError: index 50304 is out of bounds for dimension 0 with size 50257", "STOP"),
    ("value_error", "[rank{r}]: ValueError: not enough values to unpack (expected 3, got 2)", "STOP"),
    ("name_error", "[rank{r}]: UnboundLocalError: local variable 'mask' referenced before assignment", "STOP"),
    ("import_error", "[rank{r}]: ModuleNotFoundError: No module named 'apex.transformer'", "STOP"),
    ("file_not_found", "[rank{r}]: FileNotFoundError: [Errno 2] No such file or directory: '/cfg/moe.yaml'", "STOP"),
    ("permission_error", "[rank{r}]: PermissionError: [Errno 13] Permission denied: '/out/run7'", "STOP"),
    ("disk_full", "[rank{r}]: OSError: [Errno 122] Disk quota exceeded: '/ckpt/step_900/model.pt'", "STOP"),
    ("storage_error", "[rank{r}]: OSError: [Errno 5] Input/output error: '/lustre/tok/part_3.bin'", "SEV2"),
    ("illegal_memory_access", "[rank{r}]: RuntimeError: CUDA error: an illegal memory access was encountered", "SEV2"),
    ("cuda_error", "[rank{r}]: RuntimeError: CUDA error: CUBLAS_STATUS_INTERNAL_ERROR in cublasSgemm", "SEV2"),
    ("ecc_error", "[rank{r}]: RuntimeError: CUDA error: uncorrectable ECC error encountered", "SEV1"),
    ("dataset_loading_error", "[rank{r}]: pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer", "STOP"),
    ("model_loading_error", "[rank{r}]: RuntimeError: Error(s) in loading state_dict for GPTModel:", "STOP"),
    ("checkpoint_corrupt", "[rank{r}]: safetensors_rust.SafetensorError: deserializing header: HeaderTooLarge", "SEV2"),
    ("nan_loss", "[rank{r}]: RuntimeError: loss is nan at step 431, refusing to go on", "SEV2"),
    ("connection_error", "[rank{r}]: RuntimeError: [gloo/pair.cc:534] Connection closed by peer [10.0.4.2]", "SEV3"),
]  # fmt: skip

BY_THE_KERNEL = [
    ("gpu_lost", "NVRM: Xid (PCI:0000:9b:00): 79, pid=4711, name=python3, GPU has fallen off the bus.", "SEV1"),
    ("nvlink_error", "NVRM: Xid (PCI:0000:9b:00): 74, pid='<unknown>', NVLink: fatal error detected on link 2", "SEV1"),
    ("ecc_error", "NVRM: Xid (PCI:0000:9b:00): 48, pid=1, uncorrectable double bit error (DBE) detected", "SEV1"),
    ("gpu_driver_error", "NVRM: Xid (PCI:0:9b:00): 119, Timeout after 45s of waiting for an RPC response", "SEV1"),
    ("invalid_dma_mapping", "AMD-Vi: Event logged [IO_PAGE_FAULT device=9b:00.0 address=0x7f0000]", "SEV1"),
    ("host_out_of_memory", "Memory cgroup out of memory: Killed process 4711 (pt_main_thread) total-vm:99kB", "SEV2"),
    ("link_flapping", "mlx5_core 0000:9b:00.0 ens5f0np0: Link down", "SEV3"),
]  # fmt: skip


def stamp(seconds: float) -> str:
    """An ISO time ``seconds`` after the log's start."""
    return (START + timedelta(seconds=seconds)).strftime("%Y-%m-%d %H:%M:%S")


def healthy(log: Log, steps: int, noise: random.Random, first: int = 100) -> None:
    """Progress lines with monitors between them."""
    for index in range(steps):
        loss = 3.0 - 0.001 * index + noise.uniform(-0.02, 0.02)
        log.add(
            f"[{stamp(10 * index)}] iteration {first + index:8d}/ 9000 | elapsed time per iteration (ms): 9876.5 | "
            f"lm loss: {loss:.6E} | loss scale: 1.0 | number of nan iterations:   0 |"
        )
        if index % 3 == 0:
            log.add(f"[gpumon host-{noise.randrange(4):02d}] util=99% temp=50C power=400W xid=none")


def cascade(log: Log, root_rank: int | None, noise: random.Random, at: float) -> None:
    """What the other ranks and the launcher say when one is gone."""
    for rank in noise.sample([rank for rank in range(16) if rank != root_rank], 6):
        log.add(
            f"[rank{rank}]:[E304 {stamp(at + 600).split()[1]}.123 ProcessGroupNCCL.cpp:616] [Rank {rank}] "
            f"Watchdog caught collective operation timeout: WorkNCCL(SeqNum=77, OpType=ALLREDUCE, Timeout(ms)=600000) "
            f"ran for 600021 milliseconds before timing out.",
            f"[rank{rank}]: torch.distributed.DistBackendError: [Rank {rank}] NCCL communicator was aborted",
        )
    log.add("W0304 05:30:00.000 77 elastic/multiprocessing/api.py:897] Sending process 12 closing signal SIGTERM")
    log.add("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ")
    if root_rank is not None:
        log.add("Root Cause (first observed failure):", "[0]:", f"  host      : host-{root_rank // 4:02d}",
                f"  rank      : {root_rank} (local_rank: {root_rank % 4})", "  exitcode  : 1 (pid: 4711)")  # fmt: skip


def by_a_rank(root: str, line: str, seed: int, cascade_first: bool) -> Log:
    """A rank's own exception, before or after its echoes in the file."""
    noise = random.Random(seed)
    rank = noise.randrange(16)
    log = Log(root)
    healthy(log, 40, noise)
    if cascade_first:
        cascade(log, None, noise, 400)
    log.add(
        f"[rank{rank}]: Traceback (most recent call last):", f'[rank{rank}]:   File "/src/train.py", line 88, in step'
    )
    log.blame(line.format(r=rank), rank=rank)
    cascade(log, rank, noise, 400)
    return log


def by_the_kernel(root: str, line: str, seed: int) -> Log:
    """Ranks show only echoes; the kernel's section at the end has the root."""
    noise = random.Random(seed)
    log = Log(root)
    healthy(log, 40, noise)
    cascade(log, None, noise, 400)
    host = f"host-{noise.randrange(4):02d}"
    log.add(f"===== dmesg -T @ {host} =====")
    log.add("[Thu Mar  4 05:00:00 2027] EXT4-fs (sda1): mounted filesystem with ordered data mode.")
    log.blame(f"[Thu Mar  4 05:12:47 2027] {line}", node=host)
    return log
