"""An inbox's attention: which producers are there, which of them has a message; nothing is handed out here.

One poller watches every link and the bell that newcomers ring. A producer with a complete message waits in line and is
not read meanwhile, so producers take turns, and one whose message is half there delays nobody.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import select
import time
from typing import TYPE_CHECKING

from transportkit.errors import DeadlineError, PeerClosedError, PeerLostError, TransportKitError
from transportkit.inheritance import give_up
from transportkit.link.base import close_in_child

if TYPE_CHECKING:
    from collections.abc import Callable

    from transportkit.deadline import Deadline
    from transportkit.mailbox.counts import InboxCounts
    from transportkit.mailbox.producer import Producer

_log = logging.getLogger("transportkit")

#: How often a wait looks whether a lease has ended, in seconds, where one is outstanding.
IDLE_PERIOD = 0.02

#: A yield that took longer than so many seconds gave the processor away.
_YIELDED = 20e-6

#: How many lost producers an error names.
_NAMED = 4


class Intake:
    """The producers of an inbox. One thread at a time, but for `arrive` and `ring`.

    Args:
        counts: the inbox's counters.
        spin: how long `next` looks again and again before it waits in the kernel, in seconds; only where its last wait
            was no longer than twice that.
        expected: how many producers there will be; None where that is not known.
        check: raises where the inbox is closed.
    """

    def __init__(self, counts: InboxCounts, spin: float, expected: int | None, check: Callable[[], None]) -> None:
        self._counts = counts
        self._spin = spin
        self._short = True
        """Whether the last wait was one that polling nearly answered, or did."""
        self._expected = expected
        self._check = check
        self._here: dict[int, Producer] = {}
        self._arrived: collections.deque[Producer] = collections.deque()
        self._ready: collections.deque[Producer] = collections.deque()
        self._unread: set[Producer] = set()
        self._poller = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller.register(self._wake, select.EPOLLIN)
        self._lost: list[str] = []
        """Who was lost and not reported by `_check_expected` yet."""
        self._settle_at = 0.0
        self.unsettled = False
        """Whether a lease has ended and nobody has looked since."""
        self.free_seats: list[dict[str, object]] = []
        """What the producers had inherited who have left in order."""
        close_in_child(self)

    @property
    def producers(self) -> list[Producer]:
        """Those who are there, newcomers last."""
        return [*self._here.values(), *self._arrived]

    def arrive(self, producer: Producer) -> None:
        """A newcomer. From any thread."""
        self._counts.connected += 1
        self._arrived.append(producer)
        self.ring()

    def ring(self) -> None:
        """Make a wait look at everything. From any thread."""
        wake = self._wake
        if wake >= 0:
            with contextlib.suppress(OSError):
                os.eventfd_write(wake, 1)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def next(self, deadline: Deadline) -> Producer:
        """A producer with a complete message, which is taken off the queue of those."""
        began = time.monotonic()
        if began >= self._settle_at:  # however busy others are, nobody's slot stays withheld
            self._settle_at = began + IDLE_PERIOD
            self.settle()
        producer = self._look()
        if producer is not None:
            return producer
        spin = began + (deadline.remaining(self._spin) or 0.0) if self._short else began
        try:
            while True:
                pause = 0.0 if time.monotonic() < spin else self._pause(deadline)
                events = self._poller.poll(pause)
                if events:
                    producer = self._look(events)
                    if producer is not None:
                        return producer
                elif pause:
                    self.settle()
                    producer = self._look()
                    if producer is not None:
                        return producer
                now = time.monotonic()
                if now >= spin:
                    deadline.check()
                elif not events:
                    os.sched_yield()
                    if time.monotonic() - now > _YIELDED:  # the producer, perhaps, had to wait for this very processor
                        spin = now
        except DeadlineError as error:
            raise self._empty(deadline) from error
        finally:
            waited = time.monotonic() - began
            self._short = waited <= 2 * self._spin
            self._counts.waits += 1
            self._counts.wait_seconds += waited

    def _pause(self, deadline: Deadline) -> float | None:
        leased = any(each.leases or each.imports.held for each in self._here.values())
        return deadline.remaining(IDLE_PERIOD if leased else None)

    def _look(self, events: list[tuple[int, int]] | None = None) -> Producer | None:
        """Take in what is there, of everybody; a producer with a complete message."""
        self._check()
        for fileno, _ in self._poller.poll(0) if events is None else events:
            if fileno == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                self._check()
                self._admit()
                self.settle()
            else:
                producer = self._here.get(fileno)  # the bell may have let it go just now
                if producer is not None:
                    self._unread.add(producer)
        if self._unread:
            unread, self._unread = self._unread, set()
            for producer in unread:
                self._advance(producer)
        if self._ready:
            return self._ready.popleft()
        self._check_expected()
        return None

    def _advance(self, producer: Producer) -> None:
        if not producer.advance():
            self._tend(producer)
        elif producer not in self._ready:  # and nothing more is read from it, until `done`
            self._ready.append(producer)

    def _tend(self, producer: Producer) -> None:
        """Wait for what this producer's link is to be looked at for; let it go where it is gone."""
        if producer.gone is not None and producer.complete is None:
            self._leave(producer)
            return
        events = producer.events()
        if events != producer.watched:
            self._poller.modify(producer.fileno, events)
            producer.watched = events

    def _admit(self) -> None:
        while self._arrived:
            producer = self._arrived.popleft()
            self._here[producer.fileno] = producer
            producer.watched = select.EPOLLIN
            self._poller.register(producer.fileno, producer.watched)
            self._unread.add(producer)

    def _leave(self, producer: Producer) -> None:
        error = producer.gone
        self._poller.unregister(producer.fileno)
        del self._here[producer.fileno]
        self._unread.discard(producer)
        orderly = isinstance(error, PeerClosedError)
        if orderly:
            self._counts.closed += 1
            if producer.inherited:
                self.free_seats.append(producer.inherited)
            _log.info("%s has left", producer.name)
        else:
            self._counts.lost += 1
            self._lost.append(f"{producer.name} ({error})")
            del self._lost[:-_NAMED]
            _log.warning("%s is lost: %s", producer.name, error)
        producer.close(error)
        if not orderly:
            give_up(producer.inherited, "sender", "receiver")

    def _check_expected(self) -> None:
        if self._expected is None or self._here or self._arrived:
            return
        closed, lost = self._counts.closed, self._counts.lost
        if closed >= self._expected:
            raise PeerClosedError(f"all {self._expected} producers have left, and what they put is taken")
        if self._lost and closed + lost >= self._expected:
            told, self._lost = self._lost, []
            raise PeerLostError(
                f"of {self._expected} producers {closed} have left in order, {lost} were lost, and none is there any "
                f"more; lost was {'; '.join(told)}"
            )

    def _empty(self, deadline: Deadline) -> DeadlineError:
        told = ["1 producer is there" if len(self._here) == 1 else f"{len(self._here)} producers are there"]
        told += [f"{n} slots of {each.name} are in use" for each in self._here.values() if (n := each.open_chunks)]
        advice = f" (raise `{deadline.keyword}=` where that is too short)" if deadline.seconds else ""
        return DeadlineError(f"no message within {deadline.seconds or 0:g} s; {', '.join(told)}{advice}")

    def look_again(self) -> None:
        """A call was interrupted, nobody knows where: have the next one look at everybody."""
        self._unread.update(self.producers)

    def put_back(self, producer: Producer) -> None:
        """What `next` gave has not been taken after all."""
        self._ready.appendleft(producer)

    def done(self, producer: Producer) -> None:
        """The message of a producer has been taken; more of it may be there already."""
        self._unread.add(producer)
        self._tend(producer)

    def settle(self) -> None:
        """Free the slots of leases that are over."""
        self.unsettled = False
        for producer in list(self._here.values()):
            if producer.leases or producer.imports.held:
                try:
                    producer.settle()
                except TransportKitError as error:
                    producer.gone = producer.gone or error
                self._tend(producer)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Hang up on everybody, in order."""
        for producer in self.producers:
            if producer.complete is not None:
                self._counts.drop("closed")
            producer.close(None)
            give_up(producer.inherited, "sender", "receiver")
        for inherited in self.free_seats:
            give_up(inherited, "sender", "receiver")
        self.free_seats.clear()
        self._here.clear()
        self._arrived.clear()
        self._ready.clear()
        self._unread.clear()
        wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)
            self._poller.close()

    def lose(self) -> None:
        """In a forked child: close the descriptors; the producers are the parent's."""
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
            self._poller.close()
