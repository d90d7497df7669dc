"""`mlx-troupe chat`."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from mlx_troupe.runtime.errors import ContextLengthExceeded
from mlx_troupe.runtime.events import Failed, TextDelta

from .fake_cli import loaded, run, slow_or_hello

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30


def talk(monkeypatch, service, *lines: str, arguments=()) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    before = threading.active_count()
    code = run(service, "chat", *arguments)
    assert threading.active_count() == before
    assert service.exited
    return code


def test_the_conversation_is_kept(monkeypatch, capsys):
    service = loaded()
    assert talk(monkeypatch, service, "one", "", "two", arguments=["--system", "be brief"]) == 0
    found = capsys.readouterr()
    assert found.out == "Hello, wörld!\nHello, wörld!\n"
    assert "fake/model" in found.err
    assert service.submitted[1].messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Hello, wörld!"},
        {"role": "user", "content": "two"},
    )


def test_reset_and_quit(monkeypatch):
    service = loaded()
    assert talk(monkeypatch, service, "one", "/reset", "two", "/what", "/quit", "three") == 0
    assert [len(generation.messages) for generation in service.submitted] == [1, 1]


def test_a_turn_that_fails_is_forgotten(monkeypatch, capsys):
    service = loaded()
    service.refusals.append(ContextLengthExceeded("too long"))
    assert talk(monkeypatch, service, "very long", "short") == 0
    assert service.submitted[0].messages == ({"role": "user", "content": "short"},)
    errors = capsys.readouterr().err
    assert "error: too long" in errors
    assert "/reset" in errors


def test_a_turn_that_breaks_off_keeps_what_was_said(monkeypatch, capsys):
    service = loaded(lambda _: [TextDelta("Hel", (1,)), Failed("engine_failed", "nan")])
    assert talk(monkeypatch, service, "one", "two") == 0
    assert service.submitted[1].messages[1] == {"role": "assistant", "content": "Hel"}
    assert "error: nan" in capsys.readouterr().err


def test_an_interrupt_ends_the_answer_only(monkeypatch):
    service = loaded(slow_or_hello)

    class InterruptedAtOnce(io.StringIO):
        def write(self, text: str) -> int:
            if text == "Once":
                raise KeyboardInterrupt
            return super().write(text)

    stdout = InterruptedAtOnce()
    monkeypatch.setattr("sys.stdout", stdout)
    assert talk(monkeypatch, service, "slow", "again") == 0
    assert stdout.getvalue() == "seen 3\n"
    assert service.submitted[1].messages[1] == {"role": "assistant", "content": "Once"}
    assert service.cancelled == [service.submitted[0].request_id]


class Terminal:
    """A chat on a terminal of its own."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self.descriptor = descriptor
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def until(self, text: str) -> None:
        while text not in self.seen:
            assert select.select([self.descriptor], [], [], PATIENCE_S)[0], self.seen
            try:
                data = os.read(self.descriptor, 4096)
            except OSError:  # the other end is closed
                data = b""
            assert data, self.seen
            self.seen += data.decode(errors="replace")
        self.seen = self.seen.partition(text)[2]

    def interrupt(self) -> None:
        """Ctrl-C, once the process waits for something: before that, Python's `input` may miss it."""
        main_thread = psutil.Process(self.process.pid)
        while main_thread.status() != psutil.STATUS_SLEEPING:
            pass
        self.process.send_signal(signal.SIGINT)


@contextmanager
def terminal() -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tests.cli.fake_cli", "chat"]
    with subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        try:
            yield Terminal(process, ours)
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            os.close(ours)


def test_on_a_terminal():
    with terminal() as chat:
        chat.until("> ")
        chat.type("slow\n")
        chat.until("Once")
        chat.interrupt()
        chat.until("> ")
        chat.type("hello\n")
        chat.until("seen 3")
        chat.until("> ")
        chat.type("/quit\n")
    assert chat.process.returncode == 0


def test_two_interrupts_at_the_prompt_leave():
    with terminal() as chat:
        chat.until("> ")
        chat.interrupt()
        chat.until("Ctrl-C again")
        chat.until("> ")
        chat.interrupt()
    assert chat.process.returncode == 130


def test_end_of_input_leaves():
    with terminal() as chat:
        chat.until("> ")
        chat.type("\x04")
    assert chat.process.returncode == 0
