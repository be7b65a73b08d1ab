"""Fills a protobuf message from parsed fields, and reports why each invalid field does not fit."""

import difflib
import math
from typing import Any, Final

from forebay.modelserver.repository.form.pbtxt import Field, Value, Word, is_text

Message = Any
"""A protobuf message; the library is untyped."""

PROBLEMS_MAX: Final = 50
"""Checking stops here: a file with so many problems is likely the wrong file."""
ITEMS_MAX: Final = 20_000
"""Fields in one file, nested ones included."""
SHOWN_CHARS_MAX: Final = 60
_TRUE = {"true", "True", "t"}
_FALSE = {"false", "False", "f"}


class Problems:
    """Problems with their field paths, such as `input[0].dims`. Only the first problem of a field is kept."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._paths: set[str] = set()

    def add(self, path: str, text: str, line: int = 0) -> None:
        """Report a problem of the field at `path`."""
        if path in self._paths:
            return
        self._paths.add(path)
        self.found.append(f"line {line}: {path}: {text}" if line else f"{path}: {text}")

    def __bool__(self) -> bool:
        return bool(self.found)


def fill(message: Message, fields: list[Field], problems: Problems, *, lenient: bool = False) -> None:
    """Set `fields` in `message`. `lenient`: as in JSON, with quoted numbers and enum values, and camelCase names."""
    _Filler(problems, lenient).message(message, fields, "")


class _Filler:
    def __init__(self, problems: Problems, lenient: bool) -> None:
        self._problems = problems
        self._lenient = lenient
        self._left = ITEMS_MAX

    def message(self, message: Message, fields: list[Field], path: str) -> None:
        counts: dict[str, int] = {}
        choices: dict[str, str] = {}
        for item in fields:
            self._left -= 1
            if self._left == 0:
                self._problems.add(path + item.name, f"more than {ITEMS_MAX} fields in one file", item.line)
            if self._left <= 0 or len(self._problems.found) >= PROBLEMS_MAX:
                return
            descriptor = self._known(message.DESCRIPTOR, item, path)
            if descriptor is None:
                continue
            name = descriptor.name
            seen = counts.get(name, 0)
            counts[name] = seen + 1
            if descriptor.is_repeated:
                where = path + name if _is_map(descriptor) else f"{path}{name}[{seen}]"
                self._repeated(message, descriptor, item, where)
                continue
            if seen:
                self._problems.add(path + name, "given more than once", item.line)
                continue
            choice = descriptor.containing_oneof
            if choice is not None and choices.setdefault(choice.name, name) != name:
                self._problems.add(path + name, f"cannot be given together with {choices[choice.name]}", item.line)
                continue
            self._single(message, descriptor, item, path + name)

    def _known(self, of: Any, item: Field, path: str) -> Any:
        descriptor = of.fields_by_name.get(item.name)
        if descriptor is None and self._lenient:
            descriptor = of.fields_by_camelcase_name.get(item.name)
        if descriptor is None:
            names = sorted(of.fields_by_name)
            near = difflib.get_close_matches(item.name[:SHOWN_CHARS_MAX], names, 1)
            allowed = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(names)}"
            self._problems.add(path + item.name[:SHOWN_CHARS_MAX], f"no such field; {allowed}", item.line)
        return descriptor

    def _repeated(self, message: Message, descriptor: Any, item: Field, path: str) -> None:
        into = getattr(message, descriptor.name)
        if descriptor.message_type is None:
            value = self._scalar(descriptor, item, path)
            if value is not None:
                into.append(value)
        elif not isinstance(item.value, list):
            self._problems.add(path, f"found {_shown(item.value)}; allowed: {{ … }}", item.line)
        elif _is_map(descriptor):
            self._entries(into, descriptor, item, path)
        else:
            self.message(into.add(), item.value, f"{path}.")

    def _entries(self, into: Any, descriptor: Any, item: Field, path: str) -> None:
        """Fill a map: an object in JSON, repeated pairs of `key` and `value` in the text format."""
        members = item.value
        assert isinstance(members, list)
        of = descriptor.message_type.fields_by_name
        if self._lenient:
            pairs: list[tuple[Field, Value | None]]
            pairs = [(Field("key", member.name, member.line), member.value) for member in members]
        else:
            keys = [field for field in members if field.name == "key"]
            values = [field for field in members if field.name == "value"]
            if len(keys) > 1 or len(values) > 1 or len(keys) + len(values) != len(members):
                self._problems.add(path, "an entry is one `key` and one `value`, and nothing else", item.line)
                return
            key_field = keys[0] if keys else Field("key", of["key"].default_value, item.line)
            pairs = [(key_field, values[0].value if values else None)]
        for key_field, value in pairs:
            key = self._scalar(of["key"], key_field, f"{path}.key")
            if key is None:
                continue
            where = f"{path}[{key!r}]" if isinstance(key, int) else f'{path}["{str(key)[:SHOWN_CHARS_MAX]}"]'
            if key in into:
                self._problems.add(where, "given more than once", key_field.line)
            elif of["value"].message_type is None:
                scalar = self._scalar(of["value"], Field("value", "" if value is None else value, item.line), where)
                into[key] = "" if scalar is None else scalar
            elif value is None or isinstance(value, list):
                self.message(into[key], value or [], f"{where}.")
            else:
                self._problems.add(where, f"found {_shown(value)}; allowed: {{ … }}", item.line)

    def _single(self, message: Message, descriptor: Any, item: Field, path: str) -> None:
        if descriptor.message_type is not None:
            if isinstance(item.value, list):
                inner = getattr(message, descriptor.name)
                inner.SetInParent()
                self.message(inner, item.value, f"{path}.")
            else:
                self._problems.add(path, f"found {_shown(item.value)}; allowed: {{ … }}", item.line)
            return
        value = self._scalar(descriptor, item, path)
        if value is not None:
            setattr(message, descriptor.name, value)

    def _scalar(self, descriptor: Any, item: Field, path: str) -> str | int | float | bool | None:
        """The value in the field's type; None, with a problem reported, if it does not fit."""
        value = item.value
        fitting: str | int | float | bool | None
        if descriptor.cpp_type == descriptor.CPPTYPE_STRING:
            fitting = value if isinstance(value, str) and not isinstance(value, Word) and is_text(value) else None
            allowed = "a string in quotes, without NUL"
        elif descriptor.cpp_type == descriptor.CPPTYPE_BOOL:
            fitting, allowed = _truth(value), "true or false"
        elif descriptor.cpp_type == descriptor.CPPTYPE_ENUM:
            fitting = self._choice(descriptor.enum_type, value)
            allowed = f"one of {', '.join(sorted(descriptor.enum_type.values_by_name))}"
        elif descriptor.cpp_type in {descriptor.CPPTYPE_FLOAT, descriptor.CPPTYPE_DOUBLE}:
            fitting, allowed = self._float(value), "a finite number"
        else:
            low, high = _range(descriptor)
            number = self._whole(value)
            fitting = number if number is not None and low <= number <= high else None
            allowed = f"a whole number from {low} to {high}"
        if fitting is None:
            self._problems.add(path, f"found {_shown(value)}; allowed: {allowed}", item.line)
        return fitting

    def _choice(self, enum: Any, value: Value) -> int | None:
        if isinstance(value, str) and (self._lenient or isinstance(value, Word)):
            name = value.upper() if self._lenient else value
            known = enum.values_by_name.get(name) if is_text(name) else None
            return None if known is None else int(known.number)
        whole = self._whole(value)
        return whole if whole in enum.values_by_number else None

    def _whole(self, value: Value) -> int | None:
        if isinstance(value, bool):
            return None
        if isinstance(value, int):
            return value
        if self._lenient and isinstance(value, float) and value.is_integer():
            return int(value)
        if self._lenient and isinstance(value, str) and len(value) < 25 and value.removeprefix("-").isdecimal():
            return int(value)
        return None

    def _float(self, value: Value) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if abs(value) < 3e38 and math.isfinite(value) else None


def _is_map(descriptor: Any) -> bool:
    of = descriptor.message_type
    return of is not None and bool(of.GetOptions().map_entry)


def _truth(value: Value) -> bool | None:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in {0, 1}:
        return value == 1
    if isinstance(value, Word):
        return True if value in _TRUE else False if value in _FALSE else None
    return None


def _range(descriptor: Any) -> tuple[int, int]:
    return {
        descriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
        descriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
        descriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
        descriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    }[descriptor.cpp_type]


def _shown(value: Value) -> str:
    if isinstance(value, list):
        return "{ … }"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = value if isinstance(value, Word) else repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"
