"""Reads the configuration of a model found in a repository."""

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from forebay.modelserver.repository.check import check, check_whole, without_effect
from forebay.modelserver.repository.defaults import SUFFIXES, fill_in
from forebay.modelserver.repository.form.fill import Message, Problems, fill
from forebay.modelserver.repository.form.pbtxt import TEXT_BYTES_MAX, BadText, parse_json, parse_text
from forebay.modelserver.repository.form.reading import values_of
from forebay.modelserver.repository.form.schema import document_of, empty
from forebay.modelserver.repository.paths import is_within, path_problem, version_of
from forebay.modelserver.repository.values import (
    ALLOW_PICKLE,
    COMPLETE,
    CONFIG_FILE,
    CONFIGS_FOLDER,
    BadModel,
    Described,
    Found,
    Rules,
)
from forebay.modelserver.strays import new_folder

FILE_PREFIX: Final = "file:"
FILES_MAX: Final = 10_000
"""Files per load request."""
LABELS_BYTES_MAX: Final = 64 << 20
"""Size limit of a label file."""


def read(
    found: Found, override: str | None = None, files: Mapping[str, bytes] | None = None, rules: Rules | None = None
) -> Described:
    """The validated configuration, as far as known without loading. Raises `BadModel` with all problems.

    `override` is JSON that replaces `config.pbtxt`; `files` (`file:<version>/<name>` → content) replace the model's
    whole folder and require `override`. They are written to a folder that `Described.release` removes.
    """
    rules = rules or Rules()
    if files:
        if override is None:
            raise BadModel(found.name, ["load parameter 'config' must be specified for model file override"])
        found, temporary = _written(found.name, files)
    else:
        if found.problems:
            raise BadModel(found.name, found.problems)
        temporary = None
    try:
        return _described(found, override, temporary, rules)
    except BaseException:
        if temporary is not None:
            temporary.cleanup()
        raise


def describe(message: Message, like: Described, rules: Rules) -> Described:
    """`like` with the configuration from `message`, which must have been validated."""
    config = values_of(message)
    if config.name in rules.allow_pickle:
        config.parameters[ALLOW_PICKLE] = "true"
    if not rules.auto_complete and config.backend == "python":
        config.parameters[COMPLETE] = "true"
    return replace(like, config=config, document=document_of(message))


def _described(
    found: Found, override: str | None, temporary: "tempfile.TemporaryDirectory[str] | None", rules: Rules
) -> Described:
    problems = Problems()
    message = _message(found, override, rules, problems)
    files = _file_names(found)
    fill_in(message, found.name, files, rules)
    check(message, found.name, problems, rules, files)
    if not rules.auto_complete:
        check_whole(message, problems)
    if problems:
        raise BadModel(found.name, problems.found)
    labels = _labels(message, found, problems)
    _data_files(message, found, problems)
    if problems:
        raise BadModel(found.name, problems.found)
    blank = Described(
        values_of(message),
        {},
        found.folder,
        found.versions,
        labels,
        (*found.warnings, *without_effect(message)),
        temporary,
    )
    return describe(message, blank, rules)


def _message(found: Found, override: str | None, rules: Rules, problems: Problems) -> Message:
    """The configuration from the override or file, as far as it fits the schema."""
    message = empty()
    try:
        if override is not None:
            fill(message, parse_json(override), problems, lenient=True)
        elif not found.bare:
            text = _config_text(found, rules)
            if text is None and not rules.auto_complete:
                raise BadModel(found.name, [f"there is no {CONFIG_FILE}"])
            fill(message, parse_text(text or b""), problems)
    except BadText as error:
        source = "Invalid config override" if override is not None else CONFIG_FILE
        raise BadModel(found.name, [f"{source}: {error}"]) from None
    if found.bare:
        message.backend = message.backend or SUFFIXES[Path(found.bare).suffix]
        message.default_model_filename = message.default_model_filename or found.bare
    return message


def _config_text(found: Found, rules: Rules) -> bytes | None:
    names = [CONFIG_FILE]
    if rules.config_name and not path_problem(rules.config_name):
        names.insert(0, f"{CONFIGS_FOLDER}/{rules.config_name}.pbtxt")
    for name in names:
        try:
            with (found.folder / name).open("rb") as file:
                return file.read(TEXT_BYTES_MAX + 1)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise BadModel(found.name, [f"{name} cannot be read: {error.strerror}"]) from None
    return None


def _file_names(found: Found) -> Collection[str]:
    """File names in the folder of the lowest version; Triton, too, looks at the first one."""
    if not found.versions:
        return ()
    try:
        return {entry.name for entry in found.versions[min(found.versions)].iterdir()}
    except OSError as error:
        raise BadModel(found.name, [f"version {min(found.versions)} cannot be read: {error.strerror}"]) from None


def _inside(found: Found, path: str) -> Path:
    """A file in the model's folder. Raises `OSError` if it does not exist or is a link that is not allowed."""
    file = found.folder / path
    if not is_within(file, found.folder.resolve(), *found.roots):
        raise OSError(0, "it is a link out of the model's folder")
    return file


def _labels(message: Message, found: Found, problems: Problems) -> dict[str, tuple[str, ...]]:
    labels = {}
    for index, output in enumerate(message.output):
        if not output.label_filename:
            continue
        path = f"output[{index}].label_filename"
        try:
            with _inside(found, output.label_filename).open("rb") as file:
                text = file.read(LABELS_BYTES_MAX + 1)
        except OSError as error:
            problems.add(path, f"{output.label_filename!r} cannot be read: {error.strerror}")
            continue
        if len(text) > LABELS_BYTES_MAX:
            problems.add(path, f"{output.label_filename!r} has more than {LABELS_BYTES_MAX} bytes")
        labels[output.name] = tuple(text.decode("utf-8", "replace").removesuffix("\n").split("\n")) if text else ()
    return labels


def _data_files(message: Message, found: Found, problems: Problems) -> None:
    """Check that the files with warm-up data and initial states exist within the model's folder."""
    wanted = [
        (f'model_warmup[{index}].inputs["{name}"]', f"warmup/{warmup.inputs[name].input_data_file}")
        for index, warmup in enumerate(message.model_warmup)
        for name in sorted(warmup.inputs)
        if warmup.inputs[name].input_data_file
    ] + [
        (f"sequence_batching.state[{index}].initial_state[0].data_file", f"initial_state/{initial.data_file}")
        for index, state in enumerate(message.sequence_batching.state)
        for initial in state.initial_state
        if initial.data_file
    ]
    for path, file in wanted:
        try:
            _inside(found, file)
        except OSError as error:
            problems.add(path, f"{file!r} cannot be read: {error.strerror}")


def _written(name: str, files: Mapping[str, bytes]) -> "tuple[Found, tempfile.TemporaryDirectory[str]]":
    """Write the files of a load request to disk, as a model of their own."""
    contents = {key.removeprefix(FILE_PREFIX): files[key] for key in sorted(files)}
    problems = [f"file '{path}': {trouble}" for path in contents if (trouble := path_problem(path))]
    if len(contents) > FILES_MAX:
        problems.append(f"{len(contents)} files; at most {FILES_MAX}")
    if problems:
        raise BadModel(name, problems)
    try:
        temporary = new_folder()
    except OSError as error:
        raise BadModel(name, [f"there is no folder for its files: {error.strerror}"]) from None
    folder = Path(temporary.name)
    for path, content in contents.items():
        target = folder / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        except OSError as error:
            temporary.cleanup()
            raise BadModel(name, [f"file '{path}' cannot be written: {error.strerror}"]) from None
    versions = {
        version: entry
        for entry in sorted(folder.iterdir())
        if entry.is_dir() and (version := version_of(entry.name)) is not None
    }
    return Found(name, folder, versions), temporary
