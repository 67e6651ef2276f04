"""The steps of a rank: counts those of a cell's optimizers, and stops it between two, at the end of the loop's body.

Owns, while a stop is pending, the main thread's trace function. What a step is: `metrics.events.step_events`.
Independent of sockets, of other ranks, or of who asks.

Ranks stop after the same step without a collective: each is armed and says how many steps it has made. As an armed rank
waits before and after its next step, none can pass the largest of these counts + 1, and that becomes everybody's
target. Ranks that are interrupted at once make no new step, but finish the one that others have made, and the loop's
body behind it: so shards, schedulers and the user's own counters agree. Ranks come together for a call (`step_call`) as
they do for a stop, and go on with the cell then.

The main thread and the control thread share no lock: an interrupt could leave it locked. Each field has one writer;
only `_requests` has two, and what they do with it are single operations of a dict.
"""

from __future__ import annotations

import dis
import itertools
import os
import queue
import statistics
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from nbdist.base import limits
from nbdist.metrics.events import step_events
from nbdist.wire.questions.stopping import StepsMade
from nbdist.worker.cell.interrupts import StepStop, is_the_users
from nbdist.worker.recovery.step_call import StepCall

if TYPE_CHECKING:
    from torch.optim import Optimizer

_RECENT = 32  # step-to-step times that the median is of
_JUMPS = {*dis.hasjrel, *dis.hasjabs} - {dis.opmap.get("JUMP_BACKWARD_NO_INTERRUPT")}  # that one goes on with an await


class StepCounter:
    """Counts optimizer steps of the running cell and stops the main thread at the step it is told.

    Made in the main thread. Calls of several optimizers count one by one.

    Args:
        wake: Called from the main thread when `overdue` has a new answer.
        after_step: Called after each step when the main thread may be interrupted again.
        on_stop: Called with the frame in which the main thread is about to be stopped.

    Attributes:
        available: Whether steps are counted.
        reason: Why not, if they are not.
        count: Steps that the cell has made.
        stopped: The step after which the cell was stopped; None if it was not, or has gone on since.
    """

    def __init__(
        self,
        wake: Callable[[], None] = lambda: None,
        *,
        after_step: Callable[[], None] = lambda: None,
        on_stop: Callable[[FrameType], None] = lambda frame: None,
    ) -> None:
        self.available = False
        self.reason = "the hooks are not installed"
        self.count = 0
        self.stopped: int | None = None
        self.after_step = after_step
        self._on_stop = on_stop
        self._wake = wake
        self._serial = 0
        self._finished = 0
        self._times: deque[float] = deque(maxlen=_RECENT + 1)
        self._requests: dict[int, _Request] = {}
        self._events = step_events.of_this_thread()
        self._stop_listening: Callable[[], None] | None = None
        self._place: list[tuple[CodeType, int]] = []  # of the last step's call, the innermost frame first
        self._rates: tuple[weakref.ref[Optimizer], list[Any]] | None = None  # that the last step was made with
        self._body: _LoopBody | None = None

    # --- the main thread

    def install(self) -> None:
        """Count from now on. If torch lacks what this needs, `available` stays False and `reason` says what."""
        self.reason = step_events.missing()
        self.available = not self.reason
        if self.available:
            self._stop_listening = self._events.listen(
                before=self._before, after=self._after, over=self._over, compiled=True
            )
            os.register_at_fork(after_in_child=self._forget_requests)

    def uninstall(self) -> None:
        """Count no longer."""
        if self._stop_listening is not None:
            self._stop_listening()
        self.available, self.reason = False, "the hooks are not installed"

    def begin(self, serial: int) -> None:
        """Begin a cell; nothing interrupts yet. A stop that was already requested stays.

        Args:
            serial: Number of the cell; each is larger than those before.
        """
        self.count, self.stopped = 0, None
        self._place = []
        self._rates = None
        self._times.clear()
        self._serial = serial
        for old in list(self._requests):
            if old < serial:  # of cells that never ran here
                self._requests.pop(old, None)

    def end(self, serial: int) -> None:
        """End the cell; nothing interrupts any more."""
        self._leave_body()
        self._events.forget()
        self._serial = 0
        self._finished = serial  # first this, then the request: `arm` does it the other way round
        request = self._requests.pop(serial, None)
        if request is not None:
            request.call_off("the cell has ended")

    def finishing(self) -> bool:
        """Return whether the main thread, about to be interrupted, made a step that its loop's body has yet to count.

        Then it is stopped at the end of that body instead, or interrupted where it is in 0.1 s. In the main thread.
        """
        if self._body is not None and self._body.request.gathers:
            self._body.request.call_off("the cell was interrupted")
            self._leave_body()
        if self._body is not None:
            over = self._body.request.over
            if over:
                self._leave_body()
            return not over
        frames = self._frames_since_step()
        if not frames or sys.gettrace() is not None or sys.exc_info()[0] is not None:
            return False
        request = _Request(limits.HURRIED_BODY)
        body = _LoopBody(frames, request, self._reached)
        if not body.goes_on:
            return False
        self.disarm(self._serial)
        request.aim(self.count)
        self._requests[self._serial] = request
        self._body = body
        body.watch()
        self._wake()
        return True

    # --- the control thread

    def rescheduled(self) -> bool:
        """Return whether a scheduler has set learning rates since the last step. Those kept in tensors don't count."""
        optimizer = self._rates[0]() if self._rates is not None else None
        return self._rates is not None and optimizer is not None and self._rates[1] != _rates(optimizer)

    def arm(self, serial: int) -> StepsMade:
        """Let the rank wait at the end of its next step in this cell, until it is told where to stop."""
        request = self._requests.get(serial)
        if request is None or request.over or request.gathers:
            self._requests[serial] = _Request()
        else:
            request.target = None  # armed once more: there will be another
        if request is not None and request.gathers:
            request.call_off("the cell is being stopped")
        return self._made(serial)

    def gather(self, serial: int) -> StepsMade:
        """Let the rank wait at the end of its next step in this cell, until it is told where to call."""
        request = self._requests.get(serial)
        if request is not None and not request.over:  # it is being stopped, or others gather
            return StepsMade(count=0, stepping=False, running=False)
        self._requests[serial] = _Request(gathers=True)
        return self._made(serial)

    def _made(self, serial: int) -> StepsMade:
        """Return the steps of a cell; one that has ended is no longer asked for anything."""
        running = serial > self._finished
        if not running:
            self._requests.pop(serial, None)
        mine = serial == self._serial
        times = list(self._times) if mine else []
        return StepsMade(
            count=self.count if mine else 0,
            stepping=mine and self._events.stepping,
            running=running,
            age=time.monotonic() - times[-1] if times else None,
            median=_median_distance(times),
        )

    def aim(self, serial: int, target: int, *, hurry: bool = False) -> None:
        """Let the armed cell stop after its step number `target`, when the loop's body is finished.

        Args:
            hurry: Whether the rest of the body is to be waited for 0.1 s only.
        """
        request = self._requests.get(serial)
        if request is not None:
            request.limit = limits.HURRIED_BODY if hurry else limits.BODY
            request.aim(target)

    def arrive(self, serial: int, target: int, call: StepCall) -> None:
        """Let the cell that gathers wait for a call after its step number `target`, at the end of the loop's body."""
        request = self._requests.get(serial)
        if request is None or request.over or not request.gathers:
            call.call_off("the cell has ended, or is being stopped")
            return
        request.limit, request.call = call.patience, call
        request.aim(target)

    def call_off(self, serial: int, why: str) -> None:
        """Let the cell that gathers go on; a stop that has come meanwhile stays."""
        request = self._requests.get(serial)
        if request is not None and request.gathers:
            request.call_off(why)

    def gathered(self, serial: int) -> StepCall | None:
        """Return the call for which a cell waits."""
        request = self._requests.get(serial)
        return None if request is None else request.call

    def disarm(self, serial: int, why: str = "") -> None:
        """Call the stop, or the call, off: a rank that waits goes on, one that finishes its loop's body goes on there.

        Args:
            why: What those are told who wait for a call.
        """
        request = self._requests.pop(serial, None)
        if request is not None:
            request.call_off(why)

    def overdue(self) -> float | None:
        """Return the seconds until a pending stop has waited long enough for the loop's body; None if none is pending.

        At 0.0 call `expire`: the main thread is not in a loop, or in a very long body.
        """
        body = self._body
        return None if body is None or body.request.over else max(0.0, body.deadline - time.monotonic())

    def expire(self) -> bool:
        """Give up what is overdue. Returns whether it is a stop: then interrupt the main thread where it is."""
        body = self._body
        self.disarm(self._serial, "the loop does not come to its next turn")
        return body is not None and not body.request.gathers

    # --- inside steps

    def _before(self, optimizer: Optimizer) -> None:
        if self._requests:
            self._park()

    def _after(self, optimizer: Optimizer) -> None:
        """Kept tight, as the others here: it runs in every step of every cell."""
        self.count += 1
        self.stopped = None
        self._times.append(time.monotonic())
        self._rates = weakref.ref(optimizer), _rates(optimizer)
        self._place = place = []
        frame = self._events.frame
        while frame is not None:
            code = frame.f_code
            place.append((code, frame.f_lasti))
            frame = None if code.co_name == "<module>" else frame.f_back

    def _over(self) -> None:
        self.after_step()
        if self._requests:
            self._meet()

    def _park(self) -> None:
        """Before a step while a stop is asked for: wait until it is known whether this step is to be made."""
        request = self._requests.get(self._serial)
        if request is None or (self._body is not None and self._body.request is request):
            return
        target = request.wait()  # it may be interrupted here
        if target is not None and self.count >= target and not request.gathers:
            self._on_stop(sys._getframe(1))
            raise KeyboardInterrupt

    def _frames_since_step(self) -> list[tuple[FrameType, int]]:
        """Return the user's frames in which the last step was called, and where; none before the next turn."""
        place = self._place[::-1]
        running: list[FrameType] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and place:
            running.append(frame)
            frame = None if frame.f_code is place[0][0] else frame.f_back
        found: list[tuple[FrameType, int]] = []
        for (code, offset), frame in zip(place, reversed(running), strict=False):
            if frame.f_code is not code or frame.f_lasti < offset:
                return []
            if is_the_users(frame):
                found.insert(0, (frame, offset))
            if frame.f_lasti > offset:
                break
        return found

    def _meet(self) -> None:
        """After a step while a stop is asked for: wait for the target, and stop there."""
        request = self._requests.get(self._serial)
        target = None if request is None else request.wait()
        if request is None or target is None or self.count < target:
            return
        frames = _users_frames()
        if self._body is not None and self._body.request is request:
            if self._body.is_again_at(frames):  # there was no jump: the loop is not Python's, as in `map`
                self._reached(request)
            return
        self._leave_body()
        if not frames or sys.gettrace() is not None:  # a debugger's or coverage's: there is room for one
            self._reached(request)
            return
        self._body = _LoopBody([(frame, frame.f_lasti) for frame in frames], request, self._reached)
        self._body.watch()
        self._wake()

    def _reached(self, request: _Request) -> None:
        """Do what was asked for here: make a call, or stop."""
        request.over = True
        self._leave_body()
        if request.call is not None:
            request.call.attend()
            return
        self.stopped = self.count
        self._on_stop(sys._getframe(1))
        raise StepStop(f"stopped after step {self.count:,}")

    def _leave_body(self) -> None:
        if self._body is not None:
            self._body.leave()
            self._body = None

    def _forget_requests(self) -> None:
        """Forget requests in a child process forked by the cell, which will never get a target."""
        self._requests.clear()
        self._leave_body()


class _Request:
    """A stop, or a call, that was asked for: at first without a target, then with one, at last over.

    Args:
        limit: Seconds that the rest of the loop's body may take.
        gathers: Whether it is for a call.

    Attributes:
        call: The call, once its step is known.
    """

    def __init__(self, limit: float = limits.BODY, *, gathers: bool = False) -> None:
        self.limit = limit
        self.gathers = gathers
        self.call: StepCall | None = None
        self.target: int | None = None
        self.over = False  # reached, called off, or given up
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # an interrupt leaves no lock of it locked

    def aim(self, target: int) -> None:
        self.target = target
        self._news.put(None)

    def call_off(self, why: str = "") -> None:
        """Let the rank go on. why: what is said to those who wait for a call."""
        self.over = True
        self._news.put(None)
        if self.call is not None:
            self.call.call_off(why)

    def wait(self) -> int | None:
        """Return the target, once it is known; None when the request is over."""
        while self.target is None and not self.over:
            try:
                self._news.get(timeout=limits.AIM)
            except queue.Empty:
                self.over = True
        return None if self.over else self.target


class _LoopBody:
    """The body of the user's loop in which the last step was made, watched until the program jumps back.

    Args:
        frames: The user's frames, the innermost first, each with the place where it has called the step.
        request: What the stop is for; when it is over, the watch ends by itself.
        reached: Called in the frame that has jumped back; it may raise.
    """

    def __init__(
        self, frames: list[tuple[FrameType, int]], request: _Request, reached: Callable[[_Request], None]
    ) -> None:
        self.request = request
        self.deadline = time.monotonic() + request.limit
        self._position = [(frame.f_code, offset) for frame, offset in frames]
        self._calls = {frame: _Call(frame.f_code, offset) for frame, offset in frames}
        self._reached = reached

    @property
    def goes_on(self) -> bool:
        """Whether the program is still inside a loop around the step."""
        return any(call.surrounds(frame) for frame, call in self._calls.items())

    def is_again_at(self, frames: list[FrameType]) -> bool:
        """Return whether the program is at the very place where the watch began."""
        return [(frame.f_code, frame.f_lasti) for frame in frames] == self._position

    def watch(self) -> None:
        for frame in self._calls:
            frame.f_trace = self._trace
        sys.settrace(self._enter)

    def leave(self) -> None:
        """Take all traces off. In the main thread."""
        if sys.gettrace() == self._enter:
            sys.settrace(None)
        for frame in self._calls:
            if frame.f_trace == self._trace:
                frame.f_trace = None
        self._calls = {}

    def _enter(self, frame: FrameType, event: str, arg: object) -> None:
        """Handle a function call, from which the control thread can't remove the traces, so it is done here."""
        if self.request.over:
            self.leave()

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if self.request.over:
            self.leave()
            return None
        if event == "line" and self._calls[frame].is_over(frame):
            self._reached(self.request)
            return None  # it was a call
        return self._trace


class _Call:
    """Where a frame stands that makes a step, itself or deeper down, and what tells that its loop's body has ended.

    Line numbers alone can't tell: at the end of a `with`, and inside a statement of several lines, they go back too.
    """

    def __init__(self, code: CodeType, offset: int) -> None:
        instructions = list(dis.get_instructions(code))
        # Python 3.12 points behind a `for` head's instruction when that runs a generator.
        self._offset = max(instruction.offset for instruction in instructions if instruction.offset <= offset)
        # A `for` whose head is the call itself drives a generator that makes the steps: that one's body counts.
        around = [jump for jump in instructions if jump.opcode in _JUMPS and jump.argval < self._offset < jump.offset]
        self._jumps = {jump.offset for jump in around}
        # The condition of a `while` is compiled twice, before and behind the body; the latter is not to be evaluated.
        self._conditions = {_line_before(code, jump.argval) for jump in around}

    def surrounds(self, frame: FrameType) -> bool:
        """Return whether the frame is still inside a loop around the call."""
        return frame.f_lasti <= max(self._jumps, default=-1)

    def is_over(self, frame: FrameType) -> bool:
        """Return whether the frame, at the beginning of a line, has jumped back or is about to."""
        at = frame.f_lasti
        return at < self._offset or at in self._jumps or frame.f_lineno in self._conditions


def _line_before(code: CodeType, offset: int) -> int | None:
    """Return the line of the instruction before this one."""
    return next((line for start, end, line in code.co_lines() if start < offset <= end), None)


def _rates(optimizer: Optimizer) -> list[Any]:
    return [rate for group in optimizer.param_groups if isinstance(rate := group.get("lr"), float)]


def _users_frames() -> list[FrameType]:
    """Return the main thread's frames in which a loop of the user's may be, the innermost first."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_the_users(frame):
            frames.append(frame)
        frame = frame.f_back
    return frames


def _median_distance(times: list[float]) -> float | None:
    if len(times) < 2:
        return None
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))
