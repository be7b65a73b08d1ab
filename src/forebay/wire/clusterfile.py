"""Parses the cluster file and similar files: YAML text to a section, or every problem at once with its path.

YAML 1.2 scalars only: `no` is a string and `1e3` a number. Tags are rejected; size, depth and aliases are bounded.
"""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from forebay.core.cluster import ORIGIN_PATTERN, SHA256_PATTERN, Cluster, conflicts
from forebay.core.deploy.course import Course
from forebay.core.deploy.settings import PlanSettings, plan_conflicts
from forebay.core.dispatch.settings import HEADER_PATTERN, PUBLIC_PATTERN, TARGET_PATTERN
from forebay.core.errors import Conflict
from forebay.core.scaling.schedule import DAYS_PATTERN, TIME_PATTERN
from forebay.core.section import NAME_PATTERN, Section

TEXT_BYTES_MAX = 1_000_000
NODES_MAX = 50_000
DEPTH_MAX = 32
PROBLEMS_MAX = 100
FOUND_CHARS_MAX = 80
INT_CHARS_MAX = 30

_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_NULL = re.compile(r"~|null|Null|NULL|")
_INT = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_PATTERNS = {
    NAME_PATTERN: "up to 63 of a-z, 0-9, `.`, `_`, `-`, with a letter or digit at both ends",
    SHA256_PATTERN: "64 digits of 0-9 and a-f",
    PUBLIC_PATTERN: "up to 128 letters, digits, `.`, `_`, `:`, `/`, `-`, with a letter or digit at both ends",
    TARGET_PATTERN: "the name of a model or an alias, or NAME@REVISION",
    ORIGIN_PATTERN: "`*` or an origin such as https://app.example without anything after host and port",
    DAYS_PATTERN: "days such as mon-fri or sat",
    TIME_PATTERN: "a time from 00:00 to 24:00",
    HEADER_PATTERN: "up to 64 of a-z, 0-9, `-`, with a letter or digit at both ends",
}
_HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair: what a byte that is not UTF-8 becomes on a command line."""
_STEP = re.compile(r"[^.\[\]]+|\[\d+\]")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: where it is, what was found, what is allowed. `line` None: not in the file."""

    path: str
    found: str
    allowed: str
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.path or 'the file'}: found {self.found}; allowed: {self.allowed}"


class ClusterFileError(Exception):
    """A cluster file is invalid; `problems` is never empty and holds all of them, in the file's order."""

    def __init__(self, source_name: str, problems: Iterable[Problem]) -> None:
        ordered = sorted(problems, key=lambda p: (p.line is None, p.line or 0))
        self.source_name = source_name
        self.problems = tuple(ordered[:PROBLEMS_MAX])
        lines = [f"{source_name}{f':{p.line}' if p.line else ''}: {p}" for p in self.problems]
        super().__init__("\n".join(lines))

    def listing(self, otherwise: str) -> str:
        """All problems as text for a person; `otherwise` states the consequence (`nothing was started`)."""
        count = len(self.problems)
        lines = [f"{f'line {p.line}' if p.line else 'set' if p.path else '':>9}  {p}" for p in self.problems]
        return "\n".join([f"{self.source_name}: {count} problem{'s' if count > 1 else ''}; {otherwise}.", *lines])


S = TypeVar("S", bound=Section)
Look = Callable[[Mapping[str, Any]], Iterable[Conflict]]


def _nothing(_: Mapping[str, Any]) -> tuple[Conflict, ...]:
    return ()


def load(
    text: str | bytes,
    source_name: str,
    overrides: Mapping[str, str] | None = None,
    *,
    look: Look = _nothing,
) -> Cluster:
    """Load a cluster file, with `overrides` (`gateway.port`, `models[0].replicas`, `models.chat.replicas`) applied.

    `look` gets the plain, not yet validated data, and returns problems with the files that it names. Raises
    `ClusterFileError` with all problems of the file and the overrides.
    """
    return load_as(Cluster, text, source_name, overrides, look=look, agree=conflicts)


def load_as(
    section: type[S],
    text: str | bytes,
    source_name: str,
    overrides: Mapping[str, str] | None = None,
    *,
    look: Look = _nothing,
    agree: Look = _nothing,
) -> S:
    """Load a file that holds another section, like `load`; it may be empty if the section has no required keys.

    `agree` gets the plain data too, and returns settings that conflict with each other.
    """
    reader = _Reader()
    root = reader.read(text)
    required = [key for key, field in section.model_fields.items() if field.is_required()]
    allowed = f"a section with the key `{required[0]}`" if required else "a section"
    if root is None and not reader.problems:
        if required:
            reader.problem("", "nothing", allowed, None)
        else:
            root = {}
    if root is not None and not isinstance(root, dict):
        reader.problem("", _show(root), allowed, 1)
    if reader.problems and not isinstance(root, dict):
        raise ClusterFileError(source_name, reader.problems)
    assert isinstance(root, dict)
    for path, value in (overrides or {}).items():
        reader.override(root, path, value)
    for path, found, fine in look(root):
        reader.problem(path, found, fine, reader.line_of(path))
    whole = _validate(section, root, reader, agree)
    if whole is None:
        raise ClusterFileError(source_name, reader.problems)
    return whole


def load_course(text: str | bytes, source_name: str) -> Course:
    """Load the course of a rollout from a plan file, or from a JSON document. Raises `ClusterFileError`."""
    return load_as(PlanSettings, text, source_name, agree=plan_conflicts).value()


def parse_value(text: str) -> Any:
    """One value, as in a file. Raises `ClusterFileError`."""
    reader = _Reader()
    value = reader.read(text)
    if reader.problems:
        raise ClusterFileError("", reader.problems)
    return value


def _validate(section: type[S], root: dict[str, Any], reader: "_Reader", agree: Look) -> S | None:
    for path, found, allowed in agree(root):
        reader.problem(path, found, allowed, reader.line_of(path))
    reported = {p.path for p in reader.problems}
    try:
        # Via JSON: there a list may become a tuple and a string an enum member, yet "8080" is not a number.
        value = section.model_validate_json(json.dumps(root), strict=True)
    except ValidationError as error:
        schema = _schema_of(section)
        for details in error.errors(include_url=False):
            if details["type"] == "value_error":
                continue  # our own validators' errors are reported by `agree` already
            if details["type"] == "too_short" and details["input"]:
                continue  # pydantic counts valid entries only
            problem = _translate(details, root, schema, reader)
            if problem.path not in reported:
                reported.add(problem.path)  # each member of a union reports its own error
                reader.problems.append(problem)
        return None
    return None if reader.problems else value


_schema_of = cache(lambda section: section.model_json_schema())


class _Reader:
    """Converts YAML to plain data; records the line of every path and collects problems."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._lines: dict[str, int | None] = {}
        self._nodes = 0

    def problem(self, path: str, found: str, allowed: str, line: int | None) -> None:
        self.problems.append(Problem(path, found, allowed, line))

    def line_of(self, path: str) -> int | None:
        """The line of the value at `path`, or of the nearest enclosing section in the file."""
        while path and path not in self._lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self._lines.get(path)

    def read(self, text: str | bytes) -> Any:
        """The data, or None if there are problems."""
        if len(text) > TEXT_BYTES_MAX:
            return self.problem("", f"{len(text)} bytes", f"at most {TEXT_BYTES_MAX} bytes", None)
        try:
            if isinstance(text, bytes):
                text = text.decode("utf-8-sig")
            if self._unfit(text):
                return None
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except UnicodeDecodeError as error:
            return self.problem("", f"a byte that is not UTF-8 at offset {error.start}", "UTF-8 text", None)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            words = " ".join(str(part) for part in (error.problem, error.context) if part)
            found, line = f"a syntax error ({words})", mark.line + 1 if mark else None
            return self.problem("", found, "valid YAML, one document, indented with spaces", line)
        except yaml.YAMLError as error:
            return self.problem("", f"a syntax error ({' '.join(str(error).split())})", "valid YAML", None)
        return None if node is None else self._value(node, "", ())

    def _unfit(self, text: str) -> bool:
        """Reports tags and invalid characters, and bounds size and depth first: composing recurses and follows
        aliases, reading events does not."""
        depth = 0
        for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            line = event.start_mark.line + 1 if event.start_mark else None
            tag = getattr(event, "tag", None)
            if tag is not None:
                self.problem("", f"the tag {tag}", "values without tags", line)
            if isinstance(event, yaml.ScalarEvent) and _HALF.search(event.value):
                shown = event.value.encode("ascii", "backslashreplace").decode()
                self.problem("", f'"{shown[:FOUND_CHARS_MAX]}", with an invalid character', "UTF-8 text", line)
            if depth > DEPTH_MAX:
                self.problem("", f"sections nested more than {DEPTH_MAX} deep", f"at most {DEPTH_MAX}", line)
                return True
            if count > NODES_MAX:
                self.problem("", f"more than {NODES_MAX} values", f"at most {NODES_MAX}", line)
                return True
        return False

    def _value(self, node: yaml.Node, path: str, above: tuple[int, ...]) -> Any:
        line = _line(node)
        self._lines[path] = line
        self._nodes += 1
        if id(node) in above:
            return self.problem(path, "a section that contains itself", "no alias to a section around it", line)
        if self._nodes > NODES_MAX:
            if self._nodes == NODES_MAX + 1:
                found = f"aliases that unfold to more than {NODES_MAX} values"
                self.problem(path, found, f"at most {NODES_MAX}", line)
            return None
        above = (*above, id(node))
        if isinstance(node, yaml.MappingNode):
            return self._section(node, path, above)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, f"{path}[{i}]", above) for i, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _section(self, node: yaml.MappingNode, path: str, above: tuple[int, ...]) -> dict[str, Any]:
        section: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = _line(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self.problem(path, "a key that is a section or list", "keys that are plain words", line)
                continue
            key = str(key_node.value)
            key_path = f"{path}.{key}" if path else key
            if key in section:
                self.problem(key_path, f"the key again, first on line {self._lines[key_path]}", "each key once", line)
                continue
            section[key] = self._value(value_node, key_path, above)
            self._lines[key_path] = line
        return section

    def _scalar(self, node: yaml.Node, path: str) -> Any:
        text = str(node.value)
        plain = isinstance(node, yaml.ScalarNode) and node.style is None
        value = _plain_value(text) if plain else text
        if isinstance(value, float) and not math.isfinite(value):
            return self.problem(path, text, "a finite number", _line(node))
        return value

    def override(self, root: dict[str, Any], path: str, text: str) -> None:
        """Set one value. The text is YAML, so lists and quoted strings work."""
        inner = _Reader()
        value = inner.read(text)
        steps = _steps(path, root)
        if inner.problems or not steps:
            found = inner.problems[0].found if inner.problems else "a path that cannot be read"
            return self.problem(path, found, "KEY.KEY=VALUE, with the keys of the file", None)
        place: Any = root
        for depth, (step, following) in enumerate(zip(steps, [*steps[1:], None], strict=True), 1):
            if isinstance(step, int):
                if not isinstance(place, list) or step >= len(place):
                    return self.problem(path, f"no entry {step}", "the number of an existing entry", None)
            elif isinstance(place, list):
                return self._missing(path, step, place)
            elif not isinstance(place, dict):
                return self.problem(path, f"`{step}` where there is no section", "the path of a setting", None)
            if following is None:
                place[step] = value
            elif isinstance(place, dict):
                if step == "engine" and isinstance(place.get(step), str):
                    place[step] = {"name": place[step]}
                if step not in place:  # what is wrong with it is on no line of the file
                    self._lines[_path(steps[:depth])] = None
                place = place.setdefault(step, {})
            else:
                place = place[step]
        self._lines[_path(steps)] = None
        return None

    def _missing(self, path: str, name: str, entries: list[Any]) -> None:
        """A path names an entry of a list; models have names, other entries have numbers."""
        if path.startswith("models."):
            known = ", ".join(str(each["name"]) for each in entries if isinstance(each, dict) and "name" in each)
            return self.problem(path, f"no model `{name}`", known or "none: the file has no models", None)
        return self.problem(path, f"no entry `{name}`", "the number of an existing entry, such as [0]", None)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _plain_value(text: str) -> Any:
    """A plain scalar by the rules of YAML 1.2."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return _bounded_int(text)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _bounded_int(text: str) -> int | str:
    # No setting has more digits, and Python refuses to convert thousands of digits anyway.
    if len(text) > INT_CHARS_MAX:
        return text
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


def _steps(path: str, root: Mapping[str, Any]) -> list[str | int]:
    """`models[0].engine.threads` or `models.chat.engine.threads` as keys and indexes; empty: not a valid path."""
    models = root.get("models")
    names = [m.get("name") if isinstance(m, dict) else None for m in models] if isinstance(models, list) else []
    steps: list[str | int] = []
    if path.startswith("models."):
        rest = path.removeprefix("models.")
        fitting = [n for n in names if isinstance(n, str) and rest.startswith(f"{n}.")]
        if fitting:
            name = max(fitting, key=len)
            steps = ["models", names.index(name)]
            path = rest.removeprefix(f"{name}.")
    if _STEP.sub("", path).strip(".") or ".." in path or not path:
        return []
    return steps + [int(s[1:-1]) if s.startswith("[") else s for s in _STEP.findall(path)]


def _path(steps: Iterable[str | int]) -> str:
    path = ""
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f"{'.' if path else ''}{step}"
    return path


def _translate(details: ErrorDetails, root: Any, schema: dict[str, Any], reader: _Reader) -> Problem:
    """Translates an error of pydantic into a problem in the terms of the cluster file."""
    steps = _real_steps(details["loc"], root, schema)
    path = _path(steps)
    match details["type"]:
        case "extra_forbidden":
            section = _schema_at(steps[:-1], root, schema)
            keys = sorted(section.get("properties", {}))
            allowed = f"the keys {', '.join(keys)}" + _guess(str(steps[-1]), keys)
            return Problem(path, "an unknown key", allowed, reader.line_of(path))
        case "missing":
            return Problem(path, "nothing", _describe(_schema_at(steps, root, schema), schema), reader.line_of(path))
        case "union_tag_not_found":
            steps = [*steps, "name"] if isinstance(_at(steps, root), dict) else steps
        case "union_tag_invalid":
            steps = [*steps, "name"]
    allowed = _describe(_schema_at(steps, root, schema), schema)
    value = _at(steps, root)
    if isinstance(value, str) and " or a section" not in allowed:
        allowed += _guess(value, re.findall('"([^"]+)"', allowed))
    return Problem(_path(steps), _show(value), allowed, reader.line_of(_path(steps)))


def _real_steps(loc: tuple[int | str, ...], root: Any, schema: dict[str, Any]) -> list[str | int]:
    """Pydantic's location without the names of union members, which it appends to the field."""
    steps: list[str | int] = []
    for index, step in enumerate(loc):
        if index and loc[index - 1] == "engine":
            continue
        if "anyOf" in _schema_at(steps, root, schema):
            break
        steps.append(step)
    return steps


def _at(steps: Iterable[str | int], root: Any) -> Any:
    place = root
    for step in steps:
        if isinstance(place, str) and step == "name":
            continue  # `engine: NAME` is short for `engine: {name: NAME}`
        try:
            place = place[step]
        except (KeyError, IndexError, TypeError):
            return None
    return place


def _schema_at(steps: Iterable[str | int], root: Any, schema: dict[str, Any]) -> dict[str, Any]:
    """The part of the JSON Schema that describes the place."""
    part, place = schema, root
    for step in steps:
        part = _resolved(part, place, schema)
        if isinstance(step, int):
            part = part.get("items", {})
        elif "discriminator" in part and step == "name":
            part = {"enum": sorted(part["discriminator"]["mapping"])}
        else:
            part = part.get("properties", {}).get(step) or part.get("additionalProperties") or {}
        place = _at([step], place)
    return _resolved(part, place, schema)


def _resolved(part: dict[str, Any], place: Any, schema: dict[str, Any]) -> dict[str, Any]:
    """Follow references; for an optional value its schema; for a union the member that the data names."""
    while True:
        if "$ref" in part:
            part = schema["$defs"][part["$ref"].rsplit("/", 1)[1]]
        elif "anyOf" in part:
            members = [p for p in part["anyOf"] if p.get("type") != "null"]
            if len(members) > 1:
                return {"anyOf": members}
            part = members[0]
        elif "discriminator" in part and isinstance(place, dict) and isinstance(place.get("name"), str):
            mapping = part["discriminator"]["mapping"]
            if place["name"] not in mapping:
                return part
            part = {"$ref": mapping[place["name"]]}
        else:
            return part


def _describe(part: dict[str, Any], schema: dict[str, Any]) -> str:
    """What a place accepts, in plain words."""
    if "discriminator" in part:
        return f"one of {', '.join(sorted(part['discriminator']['mapping']))}, or a section with `name`"
    if "anyOf" in part:
        return ", or ".join(f'"{p["const"]}"' if "const" in p else _describe(p, schema) for p in part["anyOf"])
    if "enum" in part or "const" in part:
        return "one of " + ", ".join(f'"{v}"' for v in part.get("enum", [part.get("const")]))
    match part.get("type"):
        case "integer":
            return f"a whole number{_range(part)}"
        case "number":
            return f"a number{_range(part)}"
        case "boolean":
            return "true or false"
        case "string":
            such = f", such as {' or '.join(part['examples'])}" if "examples" in part else ""
            return _PATTERNS.get(part.get("pattern", ""), "text (not empty)") + such
        case "array":
            many = f" of at least {part['minItems']}" if part.get("minItems") else ""
            return f"a list{many}, of which each entry begins with `- `"
        case _:
            keys = part.get("properties", {})
            return f"a section with the keys {', '.join(sorted(keys))}" if keys else "a section, each line NAME: TEXT"


def _range(part: dict[str, Any]) -> str:
    words = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "and below"}
    return "".join(f" {word} {part[key]:.15g}" for key, word in words.items() if key in part)


def _guess(word: str, words: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(words), n=1)
    return f" (did you mean `{close[0]}`?)" if close else ""


def _show(value: Any) -> str:
    """The value found, shortened, as it would be written in the file."""
    match value:
        case None:
            return "nothing"
        case dict():
            return "a section"
        case list():
            return f"a list of {len(value)}"
        case str():
            text = json.dumps(value, ensure_ascii=False)
        case _:
            text = json.dumps(value)
    return text if len(text) <= FOUND_CHARS_MAX else text[: FOUND_CHARS_MAX - 1] + "…"
