"""Arguments of the command line: parsed by tyro, with readable usage errors; configs changed by `KEY=VALUE`."""

from __future__ import annotations

import dataclasses
import io
import re
from contextlib import redirect_stderr
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import tyro

from joma.terminal import printable

OPTION = re.compile(r"-(?![\d.]|inf|nan)", re.IGNORECASE)  # begins with a dash, and is no negative number


def parse(kind: Any, args: list[str], **options: Any) -> Any:
    """Parse arguments with tyro; a usage error shows them without control characters."""
    readable = [printable(argument) for argument in args]
    if readable == args:
        return tyro.cli(kind, args=args, **options)
    try:
        with redirect_stderr(io.StringIO()):
            return tyro.cli(kind, args=args, **options)
    except SystemExit as stop:
        if stop.code:
            tyro.cli(kind, args=readable, **options)  # fails in the same way, with arguments that can be shown
        raise


def config_with(study: Any, preset: str, changes: tuple[str, ...]) -> Any:
    """Return the preset's config with `KEY=VALUE` changes, each parsed by tyro as the field's type."""
    from joma.arguments import InputError, choice

    config = choice("preset", preset, study.presets).config
    fields = {field.name: field for field in dataclasses.fields(config)}
    hints = get_type_hints(type(config))
    args: list[str] = []
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise InputError("--set", "KEY=VALUE", repr(change), "write for example --set steps=500")
        field = choice(f"--set key of {study.name}", key.replace("-", "_"), fields)
        args += [f"--{field.name}", *_tyro_arguments(field.name, hints[field.name], value)]
    if not args:
        return config
    prog, markers = f"joma run {study.name}", (tyro.conf.FlagConversionOff,)
    return parse(type(config), args, default=config, prog=prog, config=markers)


def _tyro_arguments(name: str, hint: Any, value: str) -> list[str]:
    """Return the arguments from which tyro reads a value of this type: a list is split at its commas."""
    from joma.arguments import InputError

    types = alternatives(hint)
    is_list = any(get_origin(kind) is tuple for kind in types)
    for part in value.split(",") if is_list else [value]:
        if OPTION.match(part):  # tyro would take it for one
            raise InputError(name, "a value", repr(part), "leave the dash out")
    if is_list:
        return value.split(",") if value else []
    return [value.capitalize()] if bool in types and value.lower() in {"true", "false"} else [value]


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types that a field may have: those of a union, or the one type that it is.

    >>> alternatives(int | None)
    (<class 'int'>, <class 'NoneType'>)
    """
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def available_device(name: str) -> str:
    """Return the device to use: `auto` is cuda if available; a device that is missing is bad input."""
    import torch

    from joma.arguments import InputError

    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise InputError("--device", "an available device", "cuda, which this machine lacks", "use --device cpu")
    return ("cuda" if has_cuda else "cpu") if name == "auto" else name
