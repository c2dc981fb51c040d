"""Prints each performance target beside what this machine reaches, and the baseline measured in the same run.

``python tests/benchmarks [ROW ...]`` measures the rows whose names contain one of the arguments, by default all. A
ratio is baseline time over our time, so that more is better, unless the row says otherwise. Baselines and our own runs
alternate, and medians are taken, since shared machines drift.
"""

from __future__ import annotations

import os
import statistics
import sys
from typing import TYPE_CHECKING

import torch
from collectives import Broadcasts
from mailboxes import rows as mailbox_rows
from receivers import Session, grow, handshake, notice
from workloads import MIB, copy_seconds, large, nbytes, pipe_seconds, queue_seconds, random, small, socket_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROUNDS = 3
UPDATES = 5


def main() -> None:
    torch.set_num_threads(1)
    wanted = sys.argv[1:]
    print(f"torch {torch.__version__}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f} before the start\n")
    print("| what | target | measured | ours | baseline |")
    print("|---|---|---|---|---|", flush=True)
    for name, row in ROWS.items():
        if not wanted or any(word in name for word in wanted):
            for line in row():
                print(line, flush=True)


def rate(
    session: Session,
    total: int,
    baseline: Callable[[], float],
    what: str,
    target: float,
    send: Callable[[], float] | None = None,
) -> Iterator[str]:
    """A row that compares updates with a baseline over the same bytes, in turns."""
    send = send or session.send
    send()
    send()
    ours, theirs = [], []
    for _ in range(ROUNDS):
        theirs.append(baseline())
        ours.append(statistics.median(send() for _ in range(UPDATES)))
    session.close()
    mine, other = statistics.median(ours), statistics.median(theirs)
    yield f"| {what} | >= {target:g} | {other / mine:.2f} | {speed(total, mine)} | {speed(total, other)} |"


def speed(total: int, seconds: float) -> str:
    return f"{total / seconds / 1e9:.2f} GB/s"


def shm_rows() -> Iterator[str]:
    source = large()
    total = nbytes(source)
    for how, words in (("load", "into existing targets"), ("lease", "leases, each byte digested by the reader")):
        for checksum, target in ((False, 0.95 if how == "load" else 1.2), (None, 0.75 if how == "load" else 0.95)):
            digests = "no checksum" if checksum is False else "checksums"
            session = Session(source, how, backends=["shm"], checksum=checksum)
            what = f"shm, 81 tensors / 1.1 GB bf16, {words}, {digests}; warm copy"
            yield from rate(session, total, lambda: copy_seconds(source, 3), what, target)


def small_row() -> Iterator[str]:
    source = small()
    session = Session(source, "load", backends=["shm"])
    what = "shm, 20 000 tensors / 1 GB bf16, checksums; warm copy"
    yield from rate(session, nbytes(source), lambda: copy_seconds(source, 3), what, 0.75)


def queue_row() -> Iterator[str]:
    source = large()
    session = Session(source, "load", backends=["shm"], checksum=False)
    what = "shm, tensors made anew each time, no checksum; torch.multiprocessing queue"
    yield from rate(session, nbytes(source), lambda: queue_seconds(source, 3), what, 3, send=session.send_fresh)


def pickle_rows() -> Iterator[str]:
    source = large()
    total = nbytes(source)
    chunk = 16 * MIB
    for baseline, what, target in (
        (lambda: socket_seconds(total // chunk * chunk, chunk, 3), "sendall/recv_into on a unix socket", 0.45),
        (lambda: pipe_seconds(source, 3), "pickle through a Pipe", 3),
    ):
        session = Session(source, "load", backends=["pickle"], checksum=False)
        yield from rate(session, total, baseline, f"pickle, 81 tensors / 1.1 GB, no checksum; {what}", target)


def lanes_row() -> Iterator[str]:
    source = large()
    one = Session(source, "load", 1, backends=["shm"])
    three = Session(source, "load", 3, backends=["shm"])
    pairs = [(one.work(), three.work()) for _ in range(UPDATES + 2)][2:]
    one.close()
    three.close()
    ratio = statistics.median(more / less for less, more in pairs)
    alone, shared = (statistics.median(each) for each in zip(*pairs, strict=True))
    yield (
        "| shm, 81 tensors / 1.1 GB bf16, 3 receivers, processor time of the sender; serving 1 | < 1.3 times | "
        f"{ratio:.2f} times | {shared:.2f} s | {alone:.2f} s |"
    )


def gloo_rows() -> Iterator[str]:
    many = {f"experts.{i}.weight": random((24, 1024)) for i in range(20_000)}
    few = large()
    for source, sizes, checksum, what, target in (
        (many, [t.nbytes for t in many.values()], None, "20 000 tensors of 48 KiB; one broadcast per tensor", 5.0),
        (few, [nbytes(few)], False, "81 tensors / 1.1 GB, no checksum; one broadcast of the packed bytes", 0.8),
    ):
        baseline = Broadcasts(sizes)
        session = Session(source, "load", backends=["gloo"], checksum=checksum)
        baseline.seconds()
        session.send()
        session.send()
        pairs = [(baseline.seconds(), session.send()) for _ in range(5)]
        session.close()
        baseline.close()
        total = nbytes(source)
        mine, other = statistics.median(ours for _, ours in pairs), statistics.median(theirs for theirs, _ in pairs)
        ratio = statistics.median(theirs / ours for theirs, ours in pairs)
        yield f"| gloo, {what} | >= {target:g} | {ratio:.2f} | {speed(total, mine)} | {speed(total, other)} |"


def memory_row() -> Iterator[str]:
    for backend in ("shm", "pickle"):
        for strided in (False, True):
            sender, receiver = grow(backend, strided=strided)
            words = "strided" if strided else "contiguous"
            limit = 3 * 16 + 64
            yield (
                f"| memory above the model, {backend}, 4 GiB {words}, 3 slots of 16 MiB | <= {limit} MiB | "
                f"sender {sender / MIB:.0f} MiB, receiver {receiver / MIB:.0f} MiB | | |"
            )


def handshake_row() -> Iterator[str]:
    taken = handshake(15)
    yield (
        f"| handshake, all backends installed, torch imported | <= 50 ms | {statistics.median(taken) * 1e3:.1f} ms | "
        f"worst of {len(taken)}: {max(taken) * 1e3:.1f} ms | |"
    )


def death_rows() -> Iterator[str]:
    for backend in ("shm", "pickle", "gloo"):
        taken = list(notice(backend, 10))
        yield (
            f"| {backend}, a sender killed in mid-update, until its receiver raises | <= 1 s | "
            f"{statistics.median(taken) * 1e3:.1f} ms | worst of {len(taken)}: {max(taken) * 1e3:.1f} ms | |"
        )


ROWS = {
    "shm": shm_rows,
    "small": small_row,
    "queue": queue_row,
    "pickle": pickle_rows,
    "lanes": lanes_row,
    "gloo": gloo_rows,
    "memory": memory_row,
    "handshake": handshake_row,
    "death": death_rows,
    "mailbox": mailbox_rows,
}

if __name__ == "__main__":
    main()
