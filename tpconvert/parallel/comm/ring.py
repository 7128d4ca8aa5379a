"""Which part of a memory that another rank writes into is free, known without asking.

Two ranks make the same calls in the same order, and each writes into the other's memory.  What one knows of the other::

    this rank     begin 0  end 0  begin 1  end 1  begin 2
    the other     begin 0  end 0  begin 1  ...

*end 1* waits for what the other sent at its *begin 1*, so the other is past its *end 0* by then, and place 0 is free
for *begin 2*.  Where nothing proves that a place is free, the ranks have to meet first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FLAGS = 64
"""Numbers of places, used in turn; fewer than half of them may be under way."""
ALIGNED = 256


@dataclass(eq=False)
class Place:
    """Bytes of the memory that hold what was sent, from its begin to its end."""

    start: int
    stop: int
    flag: int
    begun: int
    ended: int | None = None
    """The time of this rank's end, which is the other's too."""

    def meets(self, start: int, stop: int) -> bool:
        """Whether it has bytes in common with these."""
        return self.start < stop and start < self.stop


@dataclass(eq=False)
class Ring:
    """The places of one memory of ``size`` bytes, one behind the other and then from the beginning again."""

    size: int
    places: list[Place] = field(default_factory=list)
    time: int = 0
    known: int = 0
    """The other rank is past all that came before this time."""
    head: int = 0
    count: int = 0
    context: tuple[int, ...] = ()
    recorded: bool = False

    def begin(self, size: int, context: tuple[int, ...], recording: bool) -> tuple[Place, bool] | None:
        """A place, and whether the ranks must meet before it is written; None where there is none.

        Of another ``context`` (another stream, a CUDA graph that is being recorded) nothing is known.  A graph is
        replayed at any time, so once there is one, what is not in a graph begins with meeting.
        """
        under_way = [p for p in self.places if p.ended is None]
        at = next((s for s in (self.head, 0) if self._fits(s, size, under_way)), None)
        if at is None or 2 * (len(under_way) + 1) >= FLAGS:
            return None
        self.recorded = self.recorded or recording
        meets = context != self.context or (self.recorded and not recording)
        used = [p for p in self.places if p.meets(at, at + size)]
        if meets or any(p.ended is None or p.ended >= self.known for p in used):
            meets, self.known = True, self.time
        self.context = context
        self.places = [p for p in self.places if p not in used]
        place = Place(at, at + size, self.count % FLAGS, self.time)
        self.places.append(place)
        self.head = -(-place.stop // ALIGNED) * ALIGNED
        self.count += 1
        self.time += 1
        return place, meets

    def end(self, place: Place) -> None:
        """What was sent there has been read, and what the other rank sent at its begin has come."""
        place.ended = self.time
        self.known = max(self.known, place.begun)
        self.time += 1

    def _fits(self, start: int, size: int, under_way: list[Place]) -> bool:
        return start + size <= self.size and not any(p.meets(start, start + size) for p in under_way)
