"""Admission's core: gates, order, deadlines; every refusal and every hold with its reason."""

from __future__ import annotations

import pytest

from mlx_troupe.actors.admission_core import STALL_S, AdmissionCore, AdmissionPolicy
from mlx_troupe.runtime.clock import ManualClock
from mlx_troupe.runtime.errors import EngineFailed, InvalidRequest, NotReady, Overloaded
from mlx_troupe.runtime.events import Failed
from mlx_troupe.runtime.messages.prefill import Admitted, CancelRows
from mlx_troupe.runtime.request import Request, State
from tests.actors.parts import endings, make_row, make_rows


class Gate:
    """An admission core and the rows it let in."""

    def __init__(self, *, max_rows: int = 2, max_queue: int = 3, queue_timeout_s: float | None = None) -> None:
        self.clock = ManualClock()
        self.core = AdmissionCore(AdmissionPolicy(max_rows, max_queue, queue_timeout_s), clock=self.clock)

    def submit(self, *rows: Request) -> Exception | None:
        error = self.core.submit(rows)
        self.core.settle()
        return error

    def admitted(self) -> list[int]:
        """Rows let in since the last call."""
        rows = [row.row for message in self.core.to_prefill if isinstance(message, Admitted) for row in message.rows]
        self.core.to_prefill.clear()
        return rows

    def end(self, *rows: Request) -> None:
        """Rows end as if decode had finished them."""
        for row in rows:
            row.finish("length", self.clock.now())
            self.core.row_done(row.row)
        self.core.settle()


def some(count: int, **more) -> list[Request]:
    return [make_row([1, 2], **more) for _ in range(count)]


def test_first_come_first_served_up_to_max_rows() -> None:
    gate, rows = Gate(), some(5)
    for row in rows:
        assert gate.submit(row) is None
    assert gate.admitted() == [rows[0].row, rows[1].row]
    assert [row.state for row in rows] == [State.ADMITTED] * 2 + [State.QUEUED] * 3
    assert gate.core.holds["max_rows"] > 0
    gate.end(rows[1])
    assert gate.admitted() == [rows[2].row]
    gate.end(rows[0], rows[2])
    assert gate.admitted() == [rows[3].row, rows[4].row]


def test_lower_priority_numbers_go_first_and_equal_ones_in_order() -> None:
    gate = Gate(max_rows=1, max_queue=9)
    rows = [make_row([1], priority=priority) for priority in (0, 5, 1, 5, 1)]
    for row in rows:
        gate.submit(row)
    order = []
    for _ in rows:
        (number,) = gate.admitted()
        order.append(number)
        gate.end(next(row for row in rows if row.row == number))
    assert order == [rows[index].row for index in (0, 2, 4, 1, 3)]


def test_a_head_with_many_rows_holds_those_behind_it() -> None:
    gate = Gate(max_rows=3)
    first, many, single = some(1), make_rows([1], n=3), some(1)
    gate.submit(*first)
    gate.submit(*many)
    gate.submit(*single)
    assert gate.admitted() == [first[0].row]
    gate.end(*first)
    assert gate.admitted() == [row.row for row in many]


def test_queue_full_says_when_to_come_again() -> None:
    gate = Gate(max_rows=1, max_queue=2)
    rows = some(4)
    assert [gate.submit(row) for row in rows[:3]] == [None] * 3
    error = gate.submit(rows[3])
    assert isinstance(error, Overloaded)
    assert (error.code, error.retry_after_s) == ("overloaded", 1.0)
    assert gate.core.rejections["overloaded"] == 1
    assert rows[3].state is State.QUEUED, "the caller answers for it"


def test_retry_after_follows_the_rate_of_ends_and_the_length_of_the_queue() -> None:
    gate = Gate(max_rows=1, max_queue=2)
    for _ in range(4):
        (row,) = some(1)
        gate.submit(row)
        gate.clock.advance(5.0)
        gate.end(row)
    for row in some(3):
        gate.submit(row)
    error = gate.submit(*some(1))
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 15.0


@pytest.mark.parametrize(("max_queue", "count", "refused"), [(0, 2, 0), (0, 3, 1), (2, 4, 0), (2, 5, 1)])
def test_a_burst_fills_free_places_before_the_queue(max_queue: int, count: int, refused: int) -> None:
    gate = Gate(max_rows=2, max_queue=max_queue)
    errors = [gate.core.submit((row,)) for row in some(count)]
    assert sum(error is not None for error in errors) == refused


def test_refusals_that_can_never_succeed() -> None:
    gate = Gate(max_rows=2)
    error = gate.submit(*make_rows([1], n=3))
    assert isinstance(error, InvalidRequest)
    assert error.param == "n"
    gate.submit(make_row([1], request_id="a"))
    error = gate.submit(make_row([1], request_id="a"))
    assert isinstance(error, InvalidRequest)
    assert error.param == "request_id"


def test_an_id_is_free_again_when_its_last_row_has_ended() -> None:
    gate = Gate(max_rows=2)
    rows = make_rows([1], n=2, request_id="a")
    gate.submit(*rows)
    gate.end(rows[0])
    assert gate.submit(make_row([1], request_id="a")) is not None
    gate.end(rows[1])
    assert gate.submit(make_row([1], request_id="a")) is None


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_holds_new_work_but_never_when_nothing_runs() -> None:
    gate, rows = Gate(max_rows=3), some(3)
    gate.core.pause("9 GiB in use")
    gate.submit(rows[0])
    assert gate.admitted() == [rows[0].row], "nothing ran: it must not wait for nobody"
    gate.submit(rows[1])
    assert gate.admitted() == []
    assert gate.core.holds["memory"] > 0
    gate.core.pause(None)
    gate.core.settle()
    assert gate.admitted() == [rows[1].row]


def test_a_head_held_by_memory_too_long_ends_with_a_named_error() -> None:
    gate, rows = Gate(max_rows=3), some(3)
    gate.submit(rows[0])
    gate.core.pause("9 GiB in use")
    gate.submit(rows[1])
    gate.clock.advance(STALL_S - 1)
    gate.submit(rows[2])
    gate.core.expire()
    assert not rows[1].finished
    gate.clock.advance(1)
    gate.core.expire()
    gate.core.settle()
    assert rows[1].finish_reason == "rejected:memory_admission_stalled"
    assert not rows[2].finished, "its own clock starts when it becomes the head"


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_queued_request_is_cancelled_at_once() -> None:
    gate = Gate(max_rows=1)
    first, second = some(1)[0], make_rows([1], n=1, request_id="b")[0]
    gate.submit(first)
    gate.submit(second)
    gate.core.cancel("b")
    assert second.finish_reason == "cancelled"
    assert gate.core.waiting == 0
    gate.core.cancel("b")
    gate.core.cancel("unknown")
    assert len(endings(second)) == 1


def test_an_admitted_request_is_cancelled_through_prefill() -> None:
    gate = Gate()
    rows = make_rows([1], n=2, request_id="a")
    gate.submit(*rows)
    gate.admitted()
    gate.end(rows[0])
    gate.core.cancel("a")
    assert gate.core.to_prefill == [CancelRows((rows[1].row,))]
    assert not rows[1].finished, "its owner ends it"


def test_deadlines_in_the_queue() -> None:
    gate = Gate(max_rows=1)
    rows = [make_row([1]), make_row([1], deadline_s=3.0), make_row([1], deadline_s=30.0)]
    for row in rows:
        gate.submit(row)
    gate.clock.advance(3.0)
    gate.core.expire()
    assert [row.finish_reason for row in rows] == [None, "timeout", None]


def test_queue_timeout() -> None:
    gate = Gate(max_rows=1, queue_timeout_s=10.0)
    first, second = some(2)
    gate.submit(first)
    gate.submit(second)
    gate.clock.advance(10.0)
    gate.core.expire()
    (end,) = endings(second)
    assert isinstance(end, Failed)
    assert (end.code, end.retry_after_s) == ("queue_timeout", 1.0)
    assert not first.finished


def test_draining_refuses_and_lets_the_queue_run_out() -> None:
    gate = Gate(max_rows=1)
    rows = some(2)
    for row in rows:
        gate.submit(row)
    gate.core.draining = True
    error = gate.submit(*some(1))
    assert isinstance(error, NotReady)
    assert error.code == "draining"
    gate.end(rows[0])
    assert not gate.core.idle
    gate.end(rows[1])
    assert gate.core.idle


def test_fail_all_ends_queued_and_admitted_rows_once() -> None:
    gate = Gate(max_rows=1)
    rows = some(3)
    for row in rows:
        gate.submit(row)
    gate.core.fail_all(EngineFailed("gone"))
    gate.core.row_done(rows[0].row)
    assert [row.finish_reason for row in rows] == ["error:engine_failed"] * 3
    assert [len(endings(row)) for row in rows] == [1, 1, 1]
    assert gate.core.idle
    assert gate.core.finished == {"error:engine_failed": 3}


def test_ends_are_counted_by_reason() -> None:
    gate = Gate(max_rows=1)
    first, second = some(2)
    gate.submit(first)
    gate.submit(second)
    gate.core.cancel(second.request_id)
    gate.end(first)
    assert gate.core.finished == {"cancelled": 1, "length": 1}
