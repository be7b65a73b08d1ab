"""Progress bars of commands."""

from io import StringIO

from rich.console import Console

from forebay.cli.view.screen import Screen


def test_brackets_in_the_name_of_a_file_are_shown() -> None:
    file = StringIO()
    with Screen(Console(file=file, force_terminal=True, width=120)) as screen:
        screen.progress("chat")("sending part[a]/of [/b]", 0, None)

    assert "chat: sending part[a]/of [/b]" in file.getvalue()
