"""`forebay chat`: a conversation in the terminal, streamed as it is generated."""

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import msgspec
from rich.console import Console
from rich.markup import escape

from forebay.cli.server import refusal
from forebay.cli.settings import INTERRUPTED, WRONG_USAGE, UserError

TURNS_MAX = 1000
PROMPT_CHARS_MAX = 1_000_000
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, which would let a model control the terminal."""


class ChatFailed(Exception):  # noqa: N818 - states the condition
    """There is no response, or an incomplete one; the text is for the user."""


@dataclass
class Answer:
    """The answer of one turn, and its timings."""

    text: str = ""
    tokens: int = 0
    first_s: float | None = None
    total_s: float = 0.0
    finish: str | None = None


@dataclass
class Talk:
    """One conversation with one model."""

    client: httpx.Client
    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, prompt: str, answer: Answer) -> Iterator[str]:
        """Pieces of the answer as they arrive; `answer` is filled meanwhile. Raises `ChatFailed`.

        Only turns with an answer are added to the conversation, even if the user stopped it halfway.
        """
        begun_s = time.monotonic()
        turn = {"role": "user", "content": prompt}
        document: dict[str, object] = {
            "model": self.model,
            "messages": [*self.messages, turn],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.max_tokens is not None:
            document["max_tokens"] = self.max_tokens
        if self.temperature is not None:
            document["temperature"] = self.temperature
        try:
            for event in _events(self.client, document):
                piece = _take(event, answer)
                if piece:
                    answer.first_s = answer.first_s or time.monotonic() - begun_s
                    answer.text += piece
                    yield piece
        finally:
            answer.total_s = time.monotonic() - begun_s
            if answer.text:
                self.messages += [turn, {"role": "assistant", "content": answer.text}]
                del self.messages[: max(0, len(self.messages) - 2 * TURNS_MAX)]


def _events(client: httpx.Client, document: dict[str, object]) -> Iterator[dict[str, object]]:
    """The events of a streamed response. Raises `ChatFailed` if there is none, or it is cut off."""
    try:
        with client.stream("POST", "/v1/chat/completions", json=document) as response:
            if response.status_code != 200:
                response.read()
                raise ChatFailed(refusal(response))
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data == "[DONE]":
                    return
                if data:
                    yield msgspec.json.decode(data, type=dict)
    except httpx.ConnectError:
        raise ChatFailed(f"{client.base_url} does not answer any more") from None
    except (httpx.HTTPError, msgspec.MsgspecError) as error:
        raise ChatFailed(f"the answer was interrupted ({type(error).__name__})") from None
    raise ChatFailed("the answer was interrupted before its end")


def _take(event: dict[str, object], answer: Answer) -> str:
    """The text of an event; usage and finish reason go to `answer`. Raises `ChatFailed` for an error event."""
    error = event.get("error")
    if isinstance(error, dict):
        raise ChatFailed(f"{error.get('message')} [{error.get('code')}]")
    usage = event.get("usage")
    if isinstance(usage, dict):
        answer.tokens = int(usage.get("completion_tokens") or 0)
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices:
        return ""
    answer.finish = choices[0].get("finish_reason") or answer.finish
    return str((choices[0].get("delta") or {}).get("content") or "")


def show_answer(talk: Talk, prompt: str, out: Console, notes: Console) -> int:
    """Print an answer as it is generated; returns the exit code. Ctrl-C ends the answer, not the conversation."""
    answer = Answer()
    try:
        for piece in talk.ask(prompt, answer):
            out.file.write(_UNSAFE.sub("", piece))
            out.file.flush()
        out.file.write("\n")
    except KeyboardInterrupt:
        out.file.write("\n")
        notes.print("[yellow]stopped[/]")
        return INTERRUPTED
    except ChatFailed as failure:
        out.file.write("\n" if answer.text else "")
        notes.print("[bold red]No answer:[/] " if not answer.text else "[bold red]Incomplete:[/] ", end="")
        notes.print(_UNSAFE.sub("", str(failure)), markup=False, highlight=False)
        return 1
    if notes.is_terminal:
        notes.print(summary(answer), style="dim", highlight=False)
    return 0


def summary(answer: Answer) -> str:
    """One line of statistics about an answer."""
    parts = [f"{answer.tokens} tokens"] if answer.tokens else []
    if answer.first_s is not None:
        parts.append(f"first after {answer.first_s:.2f} s")
        if answer.tokens > 1 and answer.total_s > answer.first_s:
            parts.append(f"then {(answer.tokens - 1) / (answer.total_s - answer.first_s):.0f}/s")
    if answer.finish == "length":
        parts.append("cut at the token limit")
    return " · ".join(parts) or "an empty answer"


def converse(talk: Talk, out: Console, notes: Console) -> int:
    """Loop until Ctrl-D. Ctrl-C stops an answer; at the prompt it clears the line, a second one in a row quits."""
    import readline  # noqa: F401 - gives input() history and editing

    notes.print(
        f"[bold]{escape(talk.model)}[/] at {talk.client.base_url}   [dim]Ctrl-C stops an answer, Ctrl-D quits, "
        "/reset starts over[/]",
        highlight=False,
    )
    system = [m for m in talk.messages if m["role"] == "system"]
    leaving = False
    while True:
        try:
            prompt = input("\001\033[1;36m\002you >\001\033[0m\002 " if out.is_terminal else "you > ").strip()
            prompt.encode()  # see `chat`
        except UnicodeError:
            notes.print("[yellow]that is not UTF-8[/]")
            continue
        except EOFError:
            out.file.write("\n")
            return 0
        except KeyboardInterrupt:
            out.file.write("\n")
            if leaving:
                return INTERRUPTED
            notes.print("[dim]Ctrl-C again, or Ctrl-D, quits[/]")
            leaving = True
            continue
        leaving = False
        if prompt == "/reset":
            talk.messages = list(system)
            notes.print("[dim]a new conversation[/]")
        elif prompt:
            show_answer(talk, prompt, out, notes)


def chat(talk: Talk, prompt: str | None, out: Console, notes: Console) -> int:
    """Answer a single prompt from the argument or standard input, else start a conversation."""
    if prompt is None and not sys.stdin.isatty():
        try:
            prompt = sys.stdin.read(PROMPT_CHARS_MAX).strip()
            prompt.encode()  # with some locales other bytes have become surrogates
        except UnicodeError:
            raise UserError("Standard input is not UTF-8.", WRONG_USAGE) from None
        if not prompt:
            raise UserError("No prompt: give one as an argument or on standard input.", WRONG_USAGE)
    if prompt is None:
        return converse(talk, out, notes)
    return show_answer(talk, prompt, out, notes)


def system_message(text: str | None) -> list[dict[str, str]]:
    """The initial messages of a conversation."""
    return [{"role": "system", "content": text}] if text else []
