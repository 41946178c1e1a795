"""Residency of models on devices that cannot hold all of them: next load, evictions, and their rate.

    ABSENT ─ asked for, and there is room, or others may go ─► LOADING ─► RESIDENT ─ not used for longest ─► LEAVING ─┐
       └──────────────────────────────────────────────────────────────────────────────────────────────────────────────┘
    RESIDENT, LOADING ─ a worker is new ─► RETURNING ─ asked for, or nobody waits for others ─► LOADING

Owns: the budget, the order of loads, and their bound. Pure logic; times are in seconds, the clock is a parameter. Must
not know workers, nor how a model is loaded.

A model that a client waits for stays, and so does one loaded less than KEPT times its load time ago. After that, a
model in use can be evicted for another, if a client that waits for the other uses fewer models than each client of this
one: no client keeps others out. While a model stays for its load time, models used more recently stay, too, unless they
were idle as long: a load for a client that came once evicts no model in constant use. Loads that need an eviction are
paid from a credit of seconds, which grows by SHARE of the time that passes and holds MOST_S at most: within any T
seconds such loads take no more than MOST_S + SHARE * T seconds, and one load. Admission refuses requests whose model
cannot be loaded in time: a set of models that does not fit costs refusals, and never the device.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile

KEPT = 10.0
SHARE = 0.1
MOST_S = 30.0
_RISES = 3.0
_WANTED_S = 60.0
"""Seconds for which a model stays wanted after a client was told to ask again: it is loaded though nobody waits."""
_RETRY_S = 10.0
"""Shortest pause after a failed load before the next one."""
_MOST_CLIENTS = 64
"""Most clients remembered for each model: those who asked last."""

Busy = Callable[[str], bool]
"""Test of a model's name: True if a client waits for the model, or a worker computes with it."""


class Place(Enum):
    """Place of a model."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"
    LEAVING = "leaving"
    """State after the last computation, until the memory is free."""
    RETURNING = "returning"
    """State after the worker ended, until the next worker loads it; it keeps its room, and requests go first."""


@dataclass(slots=True)
class Tenant:
    """Model that comes and goes. `load_s`: expected seconds of a load; `since_s`: start of the current place;
    `asked_s`: start of the oldest wait for it; `not_before_s`: earliest next load after a failed one; `clients`: time
    of each client's last request, in this order.
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
        """Return the clients that want or use the model. If it is `busy`, the last client is always among them."""
        recent = {client for client, asked_s in self.clients.items() if now <= asked_s + _WANTED_S}
        return {*recent, next(reversed(self.clients))} if busy and self.clients else recent


def expected_load_s(known_s: float, load_s: float) -> float:
    """Return the load time to expect after a load: at most three times what was known, as one load may have stood still
    for reasons of its own.
    """
    return min(load_s, _RISES * known_s or load_s)


class Residency:
    """One set of models with one memory budget, without the models that always stay."""

    def __init__(self, budget_bytes: int, tenants: Iterable[Tenant]) -> None:
        self.budget_bytes = budget_bytes
        self.tenants = {each.name: each for each in tenants}
        self._credit_s, self._counted_s = MOST_S, -math.inf
        self._chosen: Tenant | None = None  # Others are leaving for it.

    @property
    def taken_bytes(self) -> int:
        """Return the memory of all models that are not absent."""
        return sum(each.memory_bytes for each in self.tenants.values() if each.place is not Place.ABSENT)

    def placed(self, place: Place) -> list[Tenant]:
        """Return the models at this place, the most recently used first."""
        return sorted((each for each in self.tenants.values() if each.place is place), key=lambda each: -each.used_s)

    def ask(self, name: str, now: float, busy: Busy, client: str = "") -> float:
        """Note that a client asks for a model; return the seconds until it should be resident; infinite if unknown."""
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
        """Return the models that leave now, and the one that begins to load. Call it after changes and periodically."""
        excess = self.taken_bytes - self.budget_bytes
        idle = [each for each in self.placed(Place.RETURNING) if not busy(each.name)]
        if excess > 0 and idle:
            return self._move(idle[-1:], Place.LEAVING, now, busy), None
        if excess > 0 and (over := self._victims(excess, now, busy, hurry=True)):  # More than it was measured before.
            return self._move(over, Place.LEAVING, now, busy), None
        if self.placed(Place.LOADING) or self.placed(Place.LEAVING):
            return (), None
        waiting = self.waiting(now, busy)
        if self._chosen not in waiting:
            self._chosen = None
        returning = [each for each in self.placed(Place.RETURNING) if each not in waiting]
        for tenant in [self._chosen] if self._chosen else [*waiting, *returning]:
            missing = self._missing([tenant])
            if now < tenant.not_before_s:
                continue
            if missing <= 0:
                self._chosen = None
                tenant.place, tenant.since_s, tenant.asked_s = Place.LOADING, now, math.inf
                return (), tenant.name
            if self._credit(now) > 0 and (victims := self._victims(missing, now, busy, tenant)):
                self._credit_s -= tenant.load_s
                self._chosen = tenant
                return self._move(victims, Place.LEAVING, now, busy), None
            self._chosen = None  # The models that left for it did not free enough memory.
        return (), None

    def loaded(self, name: str, now: float, memory_bytes: int, load_s: float) -> None:
        """Note that a load is done, with its memory and its seconds.

        More memory than the budget counts as the whole budget: a CPU's figure is noisy, and a model that was resident
        must be able to come again.
        """
        tenant = self.tenants[name]
        tenant.place, tenant.since_s = Place.RESIDENT, now
        tenant.load_s = expected_load_s(tenant.load_s, load_s)
        tenant.memory_bytes = min(memory_bytes, self.budget_bytes)

    def failed(self, name: str, now: float) -> None:
        """Note that a load failed or exceeded the memory; the next attempt waits."""
        tenant = self.tenants[name]
        tenant.not_before_s, tenant.asked_s = now + max(_RETRY_S, KEPT * tenant.load_s), math.inf
        self.left(name, now)

    def left(self, name: str, now: float) -> None:
        """Note that a model's memory is free."""
        tenant = self.tenants[name]
        tenant.place, tenant.since_s = Place.ABSENT, now

    def begun_anew(self, now: float, busy: Busy) -> None:
        """Take note that a worker is new: what was there, or on its way, is loaded again.

        One at a time, so that a request waits for its own model and not for all of them.
        """
        self._move((*self.placed(Place.RESIDENT), *self.placed(Place.LOADING)), Place.RETURNING, now, busy)

    def _move(self, tenants: Sequence[Tenant], place: Place, now: float, busy: Busy) -> list[str]:
        for each in tenants:
            each.place, each.since_s = place, now
            each.asked_s = now if busy(each.name) else math.inf
        return [each.name for each in tenants]

    def waiting(self, now: float, busy: Busy) -> list[Tenant]:
        """Return the models that are absent and wanted, in the order of their requests."""
        there = [*self.placed(Place.ABSENT), *self.placed(Place.RETURNING)]
        absent = [each for each in there if each.asked_s < math.inf]
        for each in absent:
            if now > each.used_s + _WANTED_S and not busy(each.name):
                each.asked_s = math.inf  # Whoever has asked has left, and did not ask again.
        return sorted(
            (each for each in absent if each.asked_s < math.inf), key=lambda each: (each.asked_s, -each.used_s)
        )

    def _missing(self, tenants: Sequence[Tenant], spared_bytes: int = 0) -> int:
        """Return the bytes that these lack beside what is taken: one that returns has its room."""
        more = sum(each.memory_bytes for each in tenants if each.place is not Place.RETURNING)
        return more + self.taken_bytes - spared_bytes - self.budget_bytes

    def _victims(
        self, missing: int, now: float, busy: Busy, wanted: Tenant | None = None, *, hurry: bool = False
    ) -> list[Tenant]:
        """Return the models to evict now for so many bytes, the least recently used first; none if too few can go."""
        found: list[Tenant] = []
        for stays_s, each in self._going(now, busy, wanted):
            if missing > 0 and (hurry or stays_s <= 0):
                found.append(each)
                missing -= each.memory_bytes
        return found if missing <= 0 else []

    def _going(self, now: float, busy: Busy, wanted: Tenant | None) -> list[tuple[float, Tenant]]:
        """Return the idle models, the least recently used first, then the models in use that `wanted` may evict; each
        with the seconds for which it stays.
        """
        found, before_s = [], 0.0  # Seconds for which the less recently used models stay.
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
        ahead = list(takewhile(lambda each: each is not tenant, self.waiting(now, busy)))
        loads_s = sum(each.load_s for each in ahead)
        start_s = max(going_s, tenant.not_before_s - now, 0.0) + loads_s
        missing = self._missing((tenant, *ahead), sum(each.memory_bytes for each in self.placed(Place.LEAVING)))
        if missing > 0 and tenant is not self._chosen:
            start_s = max(start_s, (loads_s - self._credit(now)) / SHARE)
            for stays_s, each in sorted(self._going(now, busy, tenant), key=lambda going: going[0]):
                if missing > 0:
                    missing -= each.memory_bytes
                    start_s = max(start_s, stays_s)
            if missing > 0:
                return math.inf
        return start_s + tenant.load_s
