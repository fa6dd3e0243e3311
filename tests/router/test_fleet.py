"""The router's choice: beginnings stay together, nobody drowns, nobody starves, nothing grows for ever."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from test_marks import marks

from octavo.router import Fleet, Flight, Marks, Report, Weights, choose
from octavo.router.ledger import MAX_REPORTED_MARKS

ROOMY = 1_000_000


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def ready(*digests: bytes, tokens: tuple[int, ...] = (), **fields: object) -> Report:
    return Report("ready", b"".join(digests), tokens, **{"free_tokens": ROOMY, **fields})  # type: ignore[arg-type]


def fleet_of(num: int, clock: Clock | None = None) -> Fleet:
    fleet = Fleet([str(index) for index in range(num)], Weights(), clock or Clock())
    for replica in fleet.replicas:
        replica.note_report(ready())
    return fleet


def send(fleet: Fleet, prompt: Marks) -> Flight:
    flight = fleet.send(prompt)
    assert flight is not None
    return flight


def document(number: int, question: int = 0, length: int = 1024) -> Marks:
    return marks(prompt=[number + 1] * length + [question] * 16)


def test_a_burst_with_a_new_prefix_stays_together() -> None:
    fleet = fleet_of(4)
    # 15: in turns, a document would come to another replica each time.
    homes = {number: set() for number in range(15)}
    for question in range(4):
        for number in homes:
            flight = send(fleet, document(number, question))
            homes[number].add(flight.replica.name)
            flight.end()
    assert all(len(home) == 1 for home in homes.values())
    assert Counter(name for home in homes.values() for name in home) == Counter("0123" * 4) - Counter("3")


def test_what_a_replica_holds_counts_and_what_it_lost_does_not() -> None:
    clock = Clock()
    fleet = fleet_of(3, clock)
    prompt = document(7)
    fleet.replicas[2].note_report(ready(*prompt.digests[:8], tokens=tuple(range(64, 576, 64))))
    flight = send(fleet, prompt)
    assert (flight.replica.name, flight.choice.saved_tokens) == ("2", 512)
    flight.end()
    # It was sent there: for a while that counts, whatever it reports.
    fleet.replicas[2].note_report(ready())
    assert fleet.replicas[2].saved_tokens(prompt) > 1000
    clock.now += 11
    fleet.replicas[2].note_report(ready())
    assert fleet.replicas[2].saved_tokens(prompt) == 0


def test_a_hot_prefix_spills_and_then_has_two_homes() -> None:
    fleet = fleet_of(4)
    prompt = document(1)
    flights = [send(fleet, prompt) for _ in range(32)]
    assert {flight.replica.name for flight in flights} == {flights[0].replica.name}
    flights += [send(fleet, prompt) for _ in range(400)]
    loads = sorted(replica.load_tokens for replica in fleet.replicas)
    assert loads[0] > 0
    assert loads[-1] <= 2 * loads[0] + Weights().slack_tokens
    for flight in flights:
        flight.end()
        flight.end()
    assert [replica.load_tokens for replica in fleet.replicas] == [0, 0, 0, 0]


def test_salts_are_strangers() -> None:
    fleet = fleet_of(2)
    text = "a document " * 500
    send(fleet, marks(prompt=text, cache_salt="a")).end()
    other = marks(prompt=text, cache_salt="b")
    assert [replica.saved_tokens(other) for replica in fleet.replicas] == [0, 0]
    assert send(fleet, other).replica.name == "1"


def test_new_prompts_go_round_and_nobody_starves() -> None:
    fleet = fleet_of(8)
    counts = Counter()
    for number in range(400):
        flight = send(fleet, document(number))
        counts[flight.replica.name] += 1
        flight.end()
    assert set(counts.values()) == {50}
    # Prompts that nobody can compare do, too.
    counts = Counter(send(fleet, Marks()).replica.name for _ in range(80))
    assert set(counts.values()) == {10}


def test_ten_thousand_prompts_leave_the_maps_bounded() -> None:
    fleet = fleet_of(2)
    for number in range(10_000):
        send(fleet, document(number, length=128)).end()
    assert all(replica.num_marks <= 2 * MAX_REPORTED_MARKS for replica in fleet.replicas)
    assert fleet.replicas[0].num_marks + fleet.replicas[1].num_marks == 2 * MAX_REPORTED_MARKS


def test_who_is_silent_down_or_draining_gets_nothing() -> None:
    clock = Clock()
    fleet = fleet_of(2, clock)
    fleet.replicas[0].note_report(Report("draining"))
    assert {send(fleet, document(number)).replica.name for number in range(5)} == {"1"}
    fleet.replicas[1].note_report(None)
    assert fleet.send(document(1)) is None
    fleet.replicas[1].note_report(ready())
    assert fleet.replicas[1].saved_tokens(document(1)) == 0
    assert fleet.send(document(1), but={"1"}) is None
    clock.now += 6
    assert fleet.send(document(1)) is None


def test_requests_of_other_routers_are_load() -> None:
    fleet = fleet_of(2)
    fleet.replicas[0].note_report(ready(num_running=9, num_waiting=3))
    assert fleet.replicas[0].load_tokens == 12 * Weights().request_tokens
    own = [send(fleet, document(number)) for number in range(3)]
    assert {flight.replica.name for flight in own[:1]} == {"1"}


def test_a_prompt_that_does_not_fit_goes_where_it_does() -> None:
    fleet = fleet_of(2)
    fleet.replicas[0].note_report(ready(free_tokens=16))
    for number in range(3):
        flight = send(fleet, document(number))
        assert flight.replica.name == "1"
        flight.end()


class Thing:
    def __init__(self, load: float, saved: int) -> None:
        self.load_tokens, self.free_tokens, self.last_chosen, self._saved = load, 1e9, 0, saved

    def saved_tokens(self, marks: Marks) -> int:
        return self._saved


THINGS = st.builds(Thing, st.floats(0, 1e6), st.integers(0, 10_000))


@given(st.lists(THINGS, max_size=12), st.integers(0, 10_000))
def test_the_choice_is_never_far_busier_than_the_least_busy(things: list[Thing], num_tokens: int) -> None:
    weights = Weights()
    found = choose(Marks(), num_tokens, things, weights)
    assert (found is None) == (not things)
    if found is not None:
        load = things[found.index].load_tokens
        assert load <= max(2 * min(thing.load_tokens for thing in things), weights.slack_tokens)
        assert found.saved_tokens + found.prefill_tokens == num_tokens
        # Whoever is idler and holds more would have been better.
        assert not any(
            thing.load_tokens < load and min(thing.saved_tokens(Marks()), num_tokens) > found.saved_tokens
            for thing in things
        )
