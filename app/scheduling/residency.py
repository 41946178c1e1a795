"""Which models are on devices that do not hold all of them: what is loaded next, what goes for it, and how often.

    ABSENT ─ asked for, and there is room, or others may go ─► LOADING ─► RESIDENT ─ not used for longest ─► LEAVING ─┐
       └──────────────────────────────────────────────────────────────────────────────────────────────────────────────┘

Owns: the budget, the order of loads, and their bound. Pure logic; times are in seconds, the clock is a parameter. Must
not know workers, nor how a model is loaded.

A model that somebody waits for stays, and so does one that was loaded less than KEPT times its load time ago. After
that one in use goes, too, where a client waits for another model who uses fewer than each of those who use this one: no
client keeps others out, however much it asks for. While one stays for its load time, those that were used more recently
stay, too, unless they were not used for so long: what was loaded for somebody who came once does not make those go that
are always asked for. Loads for
which others have to go are paid from a credit of seconds, which grows by SHARE of the time that passes and holds
MOST_S at most: within any T seconds such loads take no more than MOST_S + SHARE * T seconds, and one load. What cannot
be loaded in time is refused at the door: a set that does not fit costs refusals, and never the device.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

KEPT = 10.0
SHARE = 0.1
MOST_S = 30.0
_WANTED_S = 60.0
"""So long a model is wanted of which somebody was told to ask again: it is loaded though nobody waits for it."""
_RETRY_S = 10.0
"""At least so long after a load that failed before the next one."""
_MOST_CLIENTS = 64
"""So many are known of each model, those who asked last."""

Busy = Callable[[str], bool]
"""Whether somebody waits for a model of this name, or a worker computes for it."""


class Place(Enum):
    """Where a model is."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"
    LEAVING = "leaving"
    """Nothing is computed by it any more, and its memory is not free yet."""


@dataclass(slots=True)
class Tenant:
    """A model that comes and goes. `load_s`: how long a load is expected to take; `since_s`: of its place;
    `asked_s`: since when somebody waits for it; `not_before_s`: no load begins earlier, as the last one failed;
    `clients`: when each has asked last, in this order.
    """

    name: str
    memory_bytes: int
    load_s: float
    place: Place = Place.ABSENT
    since_s: float = -math.inf
    used_s: float = -math.inf
    asked_s: float = math.inf
    not_before_s: float = -math.inf
    clients: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def asked_by(self, now: float, *, busy: bool) -> set[str]:
        """Return the clients that want or use it; of one that is `busy`, always who asked last."""
        recent = {client for client, asked_s in self.clients.items() if now <= asked_s + _WANTED_S}
        return {*recent, next(reversed(self.clients))} if busy and self.clients else recent


class Residency:
    """Of one set of models with one budget. Those that always stay are no part of it."""

    def __init__(self, budget_bytes: int, tenants: Iterable[Tenant]) -> None:
        self.budget_bytes = budget_bytes
        self.tenants = {each.name: each for each in tenants}
        self._credit_s, self._counted_s = MOST_S, -math.inf
        self._chosen: Tenant | None = None  # Others are leaving for it.

    @property
    def taken_bytes(self) -> int:
        """By all that are not absent."""
        return sum(each.memory_bytes for each in self.tenants.values() if each.place is not Place.ABSENT)

    def placed(self, place: Place) -> list[Tenant]:
        """Those there, the most recently used first."""
        return sorted((each for each in self.tenants.values() if each.place is place), key=lambda each: -each.used_s)

    def ask(self, name: str, now: float, busy: Busy, client: str = "") -> float:
        """Take note that a client asks for a model; return the seconds until it is expected to be resident: 0 where it
        is, infinite where that is not known.
        """
        tenant = self.tenants[name]
        tenant.used_s = tenant.clients[client] = now
        tenant.clients.move_to_end(client)
        if len(tenant.clients) > _MOST_CLIENTS:
            tenant.clients.popitem(last=False)
        if tenant.place is Place.RESIDENT:
            return 0.0
        if tenant.place is not Place.LOADING:
            tenant.asked_s = min(tenant.asked_s, now)
        return self._expected_s(tenant, now, busy)

    def next(self, now: float, busy: Busy) -> tuple[Sequence[str], str | None]:
        """What leaves now, and what begins to load; to be asked whenever something has changed, and now and then."""
        excess = self.taken_bytes - self.budget_bytes
        if excess > 0 and (over := self._victims(excess, now, busy, hurry=True)):  # More than it was measured before.
            return self._leave(over, now, busy), None
        if self.placed(Place.LOADING) or self.placed(Place.LEAVING):
            return (), None
        waiting = self.waiting(now, busy)
        if self._chosen not in waiting:
            self._chosen = None
        for tenant in [self._chosen] if self._chosen else waiting:
            missing = tenant.memory_bytes + self.taken_bytes - self.budget_bytes
            if now < tenant.not_before_s:
                continue
            if missing <= 0:
                self._chosen = None
                tenant.place, tenant.since_s, tenant.asked_s = Place.LOADING, now, math.inf
                return (), tenant.name
            if self._credit(now) > 0 and (victims := self._victims(missing, now, busy, tenant)):
                self._credit_s -= tenant.load_s
                self._chosen = tenant
                return self._leave(victims, now, busy), None
            self._chosen = None  # What was to leave for it is gone, and was not enough after all.
        return (), None

    def loaded(self, name: str, now: float, memory_bytes: int, load_s: float) -> None:
        """A load is done, and this is what it took.

        What is told above the budget counts as all of it: a CPU's figure has noise, and a model that was there comes
        again.
        """
        tenant = self.tenants[name]
        tenant.place, tenant.since_s, tenant.load_s = Place.RESIDENT, now, load_s
        tenant.memory_bytes = min(memory_bytes, self.budget_bytes)

    def failed(self, name: str, now: float) -> None:
        """A load failed, or took more memory than there was; it is not tried again at once."""
        tenant = self.tenants[name]
        tenant.not_before_s, tenant.asked_s = now + max(_RETRY_S, KEPT * tenant.load_s), math.inf
        self.left(name, now)

    def left(self, name: str, now: float) -> None:
        """Take note that a model's memory is free."""
        tenant = self.tenants[name]
        tenant.place, tenant.since_s = Place.ABSENT, now

    def _leave(self, tenants: Iterable[Tenant], now: float, busy: Busy) -> list[str]:
        names = []
        for each in tenants:
            each.place, each.since_s = Place.LEAVING, now
            each.asked_s = now if busy(each.name) else math.inf
            names.append(each.name)
        return names

    def waiting(self, now: float, busy: Busy) -> list[Tenant]:
        """Those that are absent and wanted, in the order in which they were asked for."""
        absent = [each for each in self.placed(Place.ABSENT) if each.asked_s < math.inf]
        for each in absent:
            if now > each.used_s + _WANTED_S and not busy(each.name):
                each.asked_s = math.inf  # Whoever has asked has left, and did not ask again.
        return sorted((each for each in absent if each.asked_s < math.inf), key=lambda each: each.asked_s)

    def _victims(
        self, missing: int, now: float, busy: Busy, wanted: Tenant | None = None, *, hurry: bool = False
    ) -> list[Tenant]:
        """Return what may go now for so many bytes, the least recently used first; nothing where that is not enough."""
        found: list[Tenant] = []
        for stays_s, each in self._going(now, busy, wanted):
            if missing > 0 and (hurry or stays_s <= 0):
                found.append(each)
                missing -= each.memory_bytes
        return found if missing <= 0 else []

    def _going(self, now: float, busy: Busy, wanted: Tenant | None) -> list[tuple[float, Tenant]]:
        """Return those that nobody uses, the least recently used first, and then those that go for `wanted` all the
        same; each with the seconds for which it stays.
        """
        found, before_s = [], 0.0  # How long those stay that were not used for longer.
        in_use, there = [], self.placed(Place.RESIDENT)
        users = {each.name: each.asked_by(now, busy=busy(each.name)) for each in there}
        count = Counter(client for each in users.values() for client in each if client)  # "": nobody knows who.
        wanting = wanted.asked_by(now, busy=busy(wanted.name)) if wanted is not None else ()
        fewest = min((count[client] for client in wanting), default=len(there))
        for each in reversed(there):
            kept_s = KEPT * each.load_s - now
            if busy(each.name):
                if fewest < min((max(1, count[client]) for client in users[each.name]), default=1):
                    in_use.append((max(0.0, each.since_s + kept_s), each))
            else:
                before_s = max(before_s, each.since_s + kept_s)
                found.append((max(0.0, each.since_s + kept_s, min(before_s, each.used_s + kept_s)), each))
        return found + in_use

    def _credit(self, now: float) -> float:
        self._credit_s = min(MOST_S, self._credit_s + SHARE * max(0.0, now - self._counted_s))
        self._counted_s = max(self._counted_s, now)
        return self._credit_s

    def _expected_s(self, tenant: Tenant, now: float, busy: Busy) -> float:
        going_s = max((each.since_s + each.load_s - now for each in self.placed(Place.LOADING)), default=0.0)
        if tenant.place is Place.LOADING:
            return max(going_s, 0.0)
        ahead = [each for each in self.waiting(now, busy) if each is not tenant and each.asked_s <= tenant.asked_s]
        loads_s = sum(each.load_s for each in ahead)
        start_s = max(going_s, tenant.not_before_s - now, 0.0) + loads_s
        staying = self.taken_bytes - sum(each.memory_bytes for each in self.placed(Place.LEAVING))
        missing = sum(each.memory_bytes for each in (tenant, *ahead)) + staying - self.budget_bytes
        if missing > 0 and tenant is not self._chosen:
            start_s = max(start_s, (loads_s - self._credit(now)) / SHARE)
            for stays_s, each in sorted(self._going(now, busy, tenant), key=lambda going: going[0]):
                if missing > 0:
                    missing -= each.memory_bytes
                    start_s = max(start_s, stays_s)
            if missing > 0:
                return math.inf
        return start_s + tenant.load_s
