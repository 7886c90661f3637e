"""The queue of requests: its order, its batches, and what becomes of requests that are cancelled."""

import random
import sys
import threading

import pytest
from serving.served import in_threads, wait_for

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from fastbert.serving.errors import Problem
from fastbert.serving.queue import TokenQueue


class Slow:
    """A lane that computes -row; each batch waits for `go`."""

    def __init__(self):
        self.batches, self.gate = [], threading.Semaphore(0)

    def compute(self, rows):
        self.batches.append(list(rows))
        assert self.gate.acquire(timeout=20)
        if "broken" in rows:
            raise RuntimeError("out of memory")
        return [-row for row in rows]

    def go(self, times=1000):
        self.gate.release(times)


@pytest.fixture
def make():
    queues = []

    def new(**options):
        queues.append(TokenQueue(**options))
        return queues[-1]

    yield new
    for queue in queues:
        queue.close(20)


def busy(queue, lane):
    """Keeps the queue busy: whatever is submitted afterwards waits until `go`."""
    first = queue.submit(lane, [0], [1])
    wait_for(lambda: lane.batches)
    return first


@pytest.mark.parametrize("workers", [1, 2])
def test_how_long_waiting_tokens_take(make, workers):
    """As long as those of the last batch took, shared by the threads; the number of rows does not count, and many small
    batches say little. At most as long as a request waits."""
    took, lane = [], Slow()
    queue = make(workers=workers, longest_wait=60, on_batch=lambda batch, seconds: took.append(seconds))
    assert queue.seconds_of(8000) == 1
    lane.go()
    queue.submit(lane, [1] * 8, [1000] * 8).result(20)
    wait_for(lambda: took and queue.seconds_of(8000) != 1)
    assert queue.seconds_of(8000 * workers) == pytest.approx(took[0])
    for _ in range(20):
        queue.submit(lane, [1], [3]).result(20)
    wait_for(lambda: len(took) == 21)
    assert queue.seconds_of(8000 * workers) == pytest.approx(sum(took), rel=0.05)
    assert queue.seconds_of(1 << 60) == 60


def test_what_waits_is_computed_together_in_its_order_up_to_the_budget(make):
    queue, lane = make(batch_tokens=10), Slow()
    first = busy(queue, lane)
    futures = [queue.submit(lane, rows, [4] * len(rows)) for rows in ([1, 2, 3], [4], [5, 6])]
    assert queue.waiting() == (3, 24)
    lane.go()
    assert [future.result(20).results for future in futures] == [[-1, -2, -3], [-4], [-5, -6]]
    assert lane.batches == [[0], [1, 2], [3, 4], [5, 6]] and first.result(20).results == [0]
    assert queue.waiting() == (0, 0)
    done = futures[2].result()
    assert done.waited > 0 and done.computed >= 0


def test_a_row_beyond_the_budget_is_computed_alone(make):
    queue, lane = make(batch_tokens=10), Slow()
    busy(queue, lane)
    futures = [queue.submit(lane, [1], [50]), queue.submit(lane, [2], [1]), queue.submit(lane, [3], [50])]
    lane.go()
    assert [future.result(20).results for future in futures] == [[-1], [-2], [-3]]
    assert lane.batches == [[0], [1], [2], [3]]


def test_lanes_do_not_mix_and_the_first_in_line_decides(make):
    queue, lane, other = make(batch_tokens=10), Slow(), Slow()
    busy(queue, lane)
    futures = [queue.submit(to, [row], [3]) for to, row in ((other, 1), (lane, 2), (other, 3), (lane, 4))]
    lane.go()
    other.go()
    assert [future.result(20).results for future in futures] == [[-1], [-2], [-3], [-4]]
    assert other.batches == [[1, 3]] and lane.batches == [[0], [2, 4]]


def test_who_has_gone_is_not_computed_any_more(make):
    queue, lane = make(batch_tokens=2), Slow()
    busy(queue, lane)
    gone, half, left = (queue.submit(lane, rows, [1] * len(rows)) for rows in ([1, 2], [3, 4, 5, 6], [7]))
    assert gone.cancel()
    lane.go(1)
    wait_for(lambda: [3, 4] in lane.batches)
    assert half.cancel()  # after its first half
    lane.go()
    assert left.result(20).results == [-7] and lane.batches == [[0], [3, 4], [7]]


def test_too_much_is_refused_with_the_time_it_will_take(make):
    queue, lane = make(batch_tokens=10, waiting_tokens=100), Slow()
    busy(queue, lane)
    kept = queue.submit(lane, [1] * 9, [10] * 9)
    with pytest.raises(Problem, match="90 tokens are waiting, and at most 100") as refused:
        queue.submit(lane, [2, 3], [10, 1])
    assert refused.value.status == 429 and int(refused.value.headers["retry-after"]) >= 1
    fits = queue.submit(lane, [2], [10])
    assert kept.cancel()
    alone = queue.submit(lane, [4], [90])
    lane.go()
    assert fits.result(20).results == [-2] and alone.result(20).results == [-4]
    huge = queue.submit(lane, [5], [500])  # admitted as nothing else waits; else it never would be
    assert huge.result(20).results == [-5]


def test_a_batch_that_fails_takes_its_requests_and_no_others(make):
    queue, lane = make(batch_tokens=2), Slow()
    busy(queue, lane)
    broken = queue.submit(lane, ["broken", 1, 2, 3], [1] * 4)
    kept = queue.submit(lane, [4], [1])
    lane.go()
    with pytest.raises(RuntimeError, match="out of memory"):
        broken.result(20)
    assert kept.result(20).results == [-4] and lane.batches[-1] == [4] and [2, 3] not in lane.batches


def test_a_lane_that_gives_too_few_results_fails(make):
    queue, lane = make(), Slow()
    lane.compute = lambda rows: rows[:-1]
    with pytest.raises(RuntimeError, match="1 results for 2 rows"):
        queue.submit(lane, [1, 2], [1, 1]).result(20)


def test_a_stall_is_seen(make):
    queue, lane = make(stall_seconds=0.05), Slow()
    assert queue.stalled is None
    busy(queue, lane)
    wait_for(lambda: queue.stalled)
    assert "a batch has been computed for" in queue.stalled
    lane.go()
    wait_for(lambda: queue.stalled is None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nothing_is_admitted_once_the_threads_have_ended(make):
    queue, lane = make(), Slow()
    lane.compute = lambda rows: sys.exit()
    queue.submit(lane, [1], [1])
    wait_for(lambda: queue.stalled == "an inference thread has ended")
    with pytest.raises(Problem, match="the inference threads have ended"):
        queue.submit(lane, [2], [1])


def test_closing_computes_what_waits_and_admits_no_more(make):
    queue, lane = make(), Slow()
    busy(queue, lane)
    waiting = queue.submit(lane, [1], [1])
    closing = threading.Thread(target=queue.close)
    closing.start()
    wait_for(lambda: queue._closing)
    with pytest.raises(Problem, match="shutting down"):
        queue.submit(lane, [2], [1])
    lane.go()
    assert waiting.result(20).results == [-1]
    closing.join(20)
    assert not closing.is_alive() and not any(thread.is_alive() for thread in queue._threads)


def test_nothing_is_computed_for_nothing(make):
    assert make().submit(Slow(), [], []).result(1).results == []


def test_several_threads_share_the_parts_of_a_request(make):
    queue, lane, other = make(workers=2, batch_tokens=2), Slow(), Slow()
    future = queue.submit(lane, [1, 2, 3, 4, 5], [1] * 5)
    wait_for(lambda: len(lane.batches) == 2)  # both are computed, and the last row waits
    assert queue.waiting() == (1, 1)
    queue.submit(other, [6], [1])
    lane.go(1)
    wait_for(lambda: [5] in lane.batches)
    lane.go(1)
    wait_for(lambda: other.batches)  # so the thread that computed a part has gone on to it
    assert not future.done()
    other.go()
    lane.go()
    done = future.result(20)
    assert done.results == [-1, -2, -3, -4, -5] and queue.waiting() == (0, 0)


def test_a_part_that_fails_is_the_end_of_the_others(make):
    queue, lane = make(workers=2, batch_tokens=1), Slow()
    future = queue.submit(lane, [1, "broken", 3, 4], [1] * 4)
    wait_for(lambda: len(lane.batches) == 2)
    lane.go()
    with pytest.raises(RuntimeError, match="out of memory"):
        future.result(20)
    wait_for(lambda: queue.waiting() == (0, 0))
    assert queue.submit(lane, [7], [1]).result(20).results == [-7] and queue.stalled is None


def test_a_stall_of_one_thread_of_several_is_seen(make):
    queue, lane = make(workers=2, stall_seconds=0.05), Slow()
    busy(queue, lane)
    free = Slow()
    free.go()
    assert queue.submit(free, [1], [1]).result(20).results == [-1]
    wait_for(lambda: queue.stalled)
    lane.go()
    wait_for(lambda: queue.stalled is None)


def test_what_is_counted_is_what_waits(make):
    """The counts end at zero, whatever is cancelled, and whenever."""
    queue, lane, rng = make(workers=2, batch_tokens=5), Slow(), random.Random(0)
    lane.go(10**6)
    futures = [queue.submit(lane, [1] * n, [n] * n) for n in (rng.randrange(1, 5) for _ in range(500))]
    for future in rng.sample(futures, 300):
        future.cancel()
    wait_for(lambda: all(future.done() for future in futures))
    wait_for(lambda: queue.waiting() == (0, 0))


def test_a_listener_that_fails_ends_nothing(make, caplog):
    def fails(batch, seconds):
        raise OSError("disk full")

    queue, lane = make(on_batch=fails), Slow()
    lane.go()
    for row in (1, 2):
        assert queue.submit(lane, [row], [1]).result(20).results == [-row]
    wait_for(lambda: len(caplog.records) == 2)
    assert "disk full" in caplog.text and queue.stalled is None


def test_on_batch_is_told_of_each(make):
    told = []
    queue, lane = make(on_batch=lambda batch, seconds: told.append((batch.rows, batch.tokens, seconds > 0))), Slow()
    lane.go()
    queue.submit(lane, [1, 2], [3, 4]).result(20)
    wait_for(lambda: told)
    assert told == [([1, 2], 7, True)]


@pytest.mark.parametrize("options", [{"workers": 0}, {"batch_tokens": 0}, {"waiting_tokens": 0}])
def test_bad_numbers_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} is 0; expected at least 1"):
        TokenQueue(**options)


@pytest.mark.parametrize("workers", [1, 3])
def test_many_threads_at_once(make, workers):
    """Each thread gets its own results, however its rows were batched."""
    queue, lane, wrong = make(workers=workers, batch_tokens=7), Slow(), []
    lane.go(10**6)

    def client(number):
        for turn in range(50):
            rows = [number * 1000 + turn * 10 + i for i in range(turn % 4)]
            if queue.submit(lane, rows, [1 + i for i in range(len(rows))]).result(20).results != [-row for row in rows]:
                wrong.append(rows)

    in_threads(client, 8, 30)
    assert not wrong


class Picky:
    """A lane that refuses batches with a wrong row, or with more than `most` rows."""

    def __init__(self, most):
        self.most = most

    def compute(self, rows):
        if len(rows) > self.most:
            raise MemoryError("out of memory")
        if "wrong" in rows:
            raise ValueError("NaN")
        return list(rows)


@pytest.mark.parametrize("most", [1, 9])
def test_an_error_is_only_that_request_s(make, most):
    queue, slow, lane = make(), Slow(), Picky(most)
    first = busy(queue, slow)
    futures = [queue.submit(lane, [row], [1]) for row in (1, "wrong", 3)]
    slow.go()
    assert first.result(20).results == [0]
    assert [futures[i].result(20).results for i in (0, 2)] == [[1], [3]]
    with pytest.raises(ValueError, match="NaN"):
        futures[1].result(20)
