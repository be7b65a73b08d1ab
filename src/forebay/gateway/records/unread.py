"""What is noted of what the listener answers by itself: bad heads, bodies too large or too late, too many at once."""

from collections.abc import Callable

from forebay.core.errors import TABLE, Code
from forebay.gateway.records import told
from forebay.gateway.records.accesslog import AccessLog
from forebay.gateway.records.recorder import Recorder
from forebay.net.server import Exchange


class Unread:
    """The books, for requests that nobody has read to their end; `id_of` names them as it names all others."""

    def __init__(self, id_of: Callable[[Exchange], bytes], log: AccessLog, recorder: Recorder | None) -> None:
        self._id_of = id_of
        self._log = log
        self._recorder = recorder

    def note(self, seen: Exchange, code: Code) -> bytes:
        """Write down that it was refused. Returns the id that its answer is to carry."""
        request_id = self._id_of(seen)
        line = told.refused(seen.path, request_id.decode(), TABLE[code].status, code.value, "")
        raw = self._log.add(line)
        if self._recorder is not None:  # whatever its method: often that is not known
            self._recorder.finished(told.refused_facts(line, raw, None, seen.peer))
        return request_id
