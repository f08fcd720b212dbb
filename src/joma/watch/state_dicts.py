"""Read the state dicts that `torch.save` writes (`pytorch_model.bin`) without unpickling them.

A pickle is a program. Here its codes are followed on a stack of descriptions, and nothing that it names is imported or
called: what is not a table of tensors is refused. The tensors' values lie outside the pickle, as uncompressed entries
of a zip archive, or one after another in the format of torch before 1.6. All sizes are checked before values are read.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from joma.memory import readable
from joma.watch.byte_ranges import ByteSource, StoredTensor, Unreadable, is_storable, whole_numbers

MAX_PICKLE = 1 << 22  # bytes: 30,000 tensors in one file; following its codes takes seconds
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # the first two objects of a file in the old format
LOCAL_HEADER = 30  # bytes before the name of a zip archive's entry
ENCRYPTED = 1  # flag of an entry
LITTLE, OTHER_MACHINE = b"little", "save it on another machine, or leave it out"
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
UNTYPED = ("torch.UntypedStorage", "torch.storage.UntypedStorage")  # their length is in bytes
LATER_DTYPES = ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")  # dtypes without a typed storage
TENSOR_TYPES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
DICT = "collections.OrderedDict"
TENSOR, TENSOR_V2, TENSOR_V3 = (f"torch._utils._rebuild_tensor{version}" for version in ("", "_v2", "_v3"))
PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
FROM_TYPE = "torch._tensor._rebuild_from_type_v2"  # a tensor with attributes
DTYPES = {
    **{f"torch.{storage}": dtype for storage, dtype in STORAGES.items()},
    **{f"torch.{name}": getattr(torch, name) for name in LATER_DTYPES},
}
KNOWN = {DICT, TENSOR, TENSOR_V2, TENSOR_V3, *PARAMETERS, FROM_TYPE, *UNTYPED, *TENSOR_TYPES, *DTYPES}


@dataclass(frozen=True)
class Global:
    """A function or a class that a pickle names."""

    name: str


@dataclass(frozen=True)
class Call:
    """A call of a function, which is not made."""

    function: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Persistent:
    """A reference to a storage outside the pickle."""

    identity: Any


@dataclass
class Table:
    """A dictionary as pairs: hashing keys from outside can take for ever."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)


_MARK = object()


class Interpreter:
    """Follows the codes of one pickle.

    Attributes:
        file: the file's name in error messages.
        stack: descriptions of the objects on the pickle's stack.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, content: io.BytesIO) -> Any:
        """Return a description of the object in the next pickle of `content`."""
        for code, argument, _ in pickletools.genops(content):
            if code.name in _CONSTANTS:
                self.stack.append(_CONSTANTS[code.name]())
            elif code.name in _VALUES:
                self.stack.append(argument)
            elif code.name in _ACTIONS:
                _ACTIONS[code.name](self, argument)
            elif code.name not in ("PROTO", "FRAME", "STOP"):
                self.refuse(f"the code {code.name}")
        return self.stack.pop()

    def refuse(self, what: str) -> NoReturn:
        remedy = "convert it to safetensors if you trust it, or leave it out"
        raise Unreadable(self.file, "tensors only", f"a pickle with {what} in it", remedy, must="contain")

    def global_name(self, name: str) -> None:
        if name not in KNOWN:
            self.refuse(name)
        self.stack.append(Global(name))

    def stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.global_name(f"{module}.{name}")

    def mark(self, _: Any) -> None:
        self.stack.append(_MARK)

    def pop_mark(self) -> list[Any]:
        """Pop everything above the last mark, and the mark."""
        values = []
        while (value := self.stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def put(self, index: int | None) -> None:
        self.memo[len(self.memo) if index is None else index] = self.stack[-1]

    def get(self, index: int) -> None:
        self.stack.append(self.memo[index])

    def collect(self, count: int) -> None:
        """Replace the last `count` objects by a tuple."""
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def append(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            self.refuse("a list that is none")
        self.stack[-1].extend(values)

    def set_items(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], Table) or len(values) % 2:
            self.refuse("a table that is none")
        self.stack[-1].pairs.extend(zip(values[::2], values[1::2], strict=True))

    def reduce(self, _: Any) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            self.refuse("a call of something else than a function")
        if function.name == DICT:
            self.stack.append(Table([tuple(pair) for pair in arguments[0]] if arguments else []))
        else:
            self.stack.append(Call(function.name, arguments))

    def build(self, _: Any) -> None:
        """Ignore the attributes of an object, such as the versions in a state dict."""
        self.stack.pop()
        if not isinstance(self.stack[-1], Table | Call):
            self.refuse("attributes of something else than an object")


_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": Table,
}
_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES"),
}
_ACTIONS: Mapping[str, Callable[[Interpreter, Any], None]] = {
    "GLOBAL": lambda self, argument: self.global_name(argument.replace(" ", ".")),
    "STACK_GLOBAL": Interpreter.stack_global,
    "MARK": Interpreter.mark,
    "PUT": Interpreter.put,
    "BINPUT": Interpreter.put,
    "LONG_BINPUT": Interpreter.put,
    "MEMOIZE": Interpreter.put,
    "GET": Interpreter.get,
    "BINGET": Interpreter.get,
    "LONG_BINGET": Interpreter.get,
    "TUPLE": lambda self, _: self.stack.append(tuple(self.pop_mark())),
    "TUPLE1": lambda self, _: self.collect(1),
    "TUPLE2": lambda self, _: self.collect(2),
    "TUPLE3": lambda self, _: self.collect(3),
    "LIST": lambda self, _: self.stack.append(self.pop_mark()),
    "APPEND": lambda self, _: self.append([self.stack.pop()]),
    "APPENDS": lambda self, _: self.append(self.pop_mark()),
    "SETITEM": lambda self, _: self.set_items([self.stack.pop(), self.stack.pop()][::-1]),
    "SETITEMS": lambda self, _: self.set_items(self.pop_mark()),
    "REDUCE": Interpreter.reduce,
    "BUILD": Interpreter.build,
    "BINPERSID": lambda self, _: self.stack.append(Persistent(self.stack.pop())),
}


@dataclass(frozen=True)
class Storage:
    """What a pickle says of a storage: its name, the dtype of its values (None if untyped), and its bytes."""

    key: str
    dtype: torch.dtype | None
    nbytes: int


@dataclass(frozen=True)
class View:
    """A tensor as a pickle describes it: a view of a storage."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def at(self, position: int) -> StoredTensor:
        """Return the tensor if its storage begins at `position` of the file."""
        in_order, step = [], 1
        for size in reversed(self.shape):
            in_order.append(step)
            step *= size
        axes = zip(self.shape, self.strides, reversed(in_order), strict=True)
        ordered = all(size == 1 or stride == expected for size, stride, expected in axes)
        start = position + self.offset * self.dtype.itemsize
        return StoredTensor(self.dtype, self.shape, start, None if ordered else self.strides)


def read_state_dict(source: ByteSource) -> dict[str, StoredTensor]:
    """Return where the tensors of a state dict lie in its file, by name."""
    zipped = source.read(0, min(2, source.size)) == b"PK"
    views, positions = _read_archive(source) if zipped else _read_old_format(source)
    tensors = {name: view.at(positions[view.storage.key]) for name, view in views.items()}
    for name, tensor in tensors.items():
        if tensor.nbytes > source.size:
            got = f"{readable(tensor.nbytes)} for {name} in a file of {readable(source.size)}"
            raise Unreadable(source.name, "tensors that are not larger than it", got, "leave it out", must="contain")
    return tensors


def _damaged(source: ByteSource, got: str) -> Unreadable:
    return Unreadable(source.name, "a complete file written by torch", got, "download it again")


def _read_archive(source: ByteSource) -> tuple[dict[str, View], dict[str, int]]:
    """Return the tensors in a zip archive, and where each storage begins."""
    with zipfile.ZipFile(_BoundedFile(source)) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        _check_entries(source, archive.infolist())
        pickles = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1 or entries[pickles[0]].file_size > MAX_PICKLE:
            raise _damaged(source, f"an archive without a table of tensors of at most {readable(MAX_PICKLE)}")
        folder = pickles[0].removesuffix("data.pkl")
        marker = entries.get(f"{folder}byteorder")
        if marker is not None and (marker.file_size != len(LITTLE) or archive.read(marker) != LITTLE):
            raise Unreadable(source.name, "in little-endian order", "another order", OTHER_MACHINE)
        content = archive.read(pickles[0])
    views = _views(source, Interpreter(source.name).run(io.BytesIO(content)))
    positions = {}
    for storage in _storages(views):
        entry = entries.get(f"{folder}data/{storage.key}")
        if entry is None or entry.file_size != storage.nbytes:
            got = "no entry" if entry is None else f"an entry of {entry.file_size:,} bytes"
            raise _damaged(source, f"{got} for a storage of {storage.nbytes:,} bytes")
        positions[storage.key] = _position(source, entry)
    return views, positions


def _check_entries(source: ByteSource, entries: list[zipfile.ZipInfo]) -> None:
    """Refuse archives that would unpack to more than they are: torch stores everything as it is, and once."""
    total = sum(entry.file_size for entry in entries)
    compressed = any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & ENCRYPTED for entry in entries)
    if total > source.size or compressed or any(entry.file_size != entry.compress_size for entry in entries):
        got = f"an archive of {readable(source.size)} that unpacks to {readable(total)}, as torch never writes it"
        raise Unreadable(source.name, "an uncompressed archive", got, "save it with `torch.save`, or leave it out")
    if len({entry.filename for entry in entries}) < len(entries):
        raise _damaged(source, "an archive with two entries of one name")


def _position(source: ByteSource, entry: zipfile.ZipInfo) -> int:
    """Return where the content of an entry begins: behind its local header, which must agree with the directory."""
    name = entry.orig_filename.encode()
    header = source.read(entry.header_offset, entry.header_offset + LOCAL_HEADER + len(name))
    lengths = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    if header[:4] != b"PK\3\4" or header[LOCAL_HEADER:] != name or lengths[0] != len(name):
        raise _damaged(source, f"no entry {entry.filename} where the archive's directory has it")
    start = entry.header_offset + LOCAL_HEADER + sum(lengths)
    if start + entry.file_size > source.size:
        raise _damaged(source, f"an entry {entry.filename} that ends behind the file")
    return start


class _BoundedFile(io.RawIOBase):
    """A file for `zipfile`, which reads the directory of an archive in one piece: refuse one that is too large."""

    def __init__(self, source: ByteSource) -> None:
        self.source, self.position = source, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.source.size}[whence]
        if self.position < 0:
            raise ValueError("a position before the file")
        return self.position

    def tell(self) -> int:
        return self.position

    def read(self, size: int = -1) -> bytes:
        stop = self.source.size if size < 0 else min(self.source.size, self.position + size)
        if stop - self.position > MAX_PICKLE:
            raise _damaged(self.source, f"a directory of {readable(stop - self.position)}")
        content = bytes(self.source.read(self.position, max(self.position, stop)))
        self.position = max(self.position, stop)
        return content


def _read_old_format(source: ByteSource) -> tuple[dict[str, View], dict[str, int]]:
    """Return the tensors in a file of the format before zip archives, and where each storage begins.

    It consists of five pickles: a magic number, a version, a description of the system, the tensors, and the names of
    the storages. Then the storages follow, each after its length.
    """
    content = io.BytesIO(bytes(source.read(0, min(MAX_PICKLE, source.size))))
    if Interpreter(source.name).run(content) != MAGIC or Interpreter(source.name).run(content) != PROTOCOL:
        raise _damaged(source, "one without its magic number")
    system = dict(Interpreter(source.name).run(content).pairs)
    if system.get("little_endian") is not True:
        raise Unreadable(source.name, "in little-endian order", "another order", OTHER_MACHINE)
    views = _views(source, Interpreter(source.name).run(content))
    storages = {storage.key: storage for storage in _storages(views)}
    positions, position = {}, 0
    for number, key in enumerate(Interpreter(source.name).run(content)):
        position = content.tell() if number == 0 else position
        storage = storages[key]
        itemsize = 1 if storage.dtype is None else storage.dtype.itemsize
        count = int.from_bytes(source.read(position, position + 8), "little")
        if count * itemsize != storage.nbytes or key in positions:
            raise _damaged(source, f"{count * itemsize:,} bytes for a storage of {storage.nbytes:,}")
        positions[key] = position + 8
        position += 8 + storage.nbytes
    if position != source.size or len(positions) != len(storages):
        raise _damaged(source, f"{source.size:,} bytes where its storages end at byte {position:,}")
    return views, positions


def _storages(views: Mapping[str, View]) -> Iterator[Storage]:
    """Yield each storage once; two descriptions of one storage must have the same length."""
    seen: dict[str, Storage] = {}
    for view in views.values():
        storage = seen.setdefault(view.storage.key, view.storage)
        if storage.nbytes != view.storage.nbytes:
            raise ValueError("two lengths for one storage")
        if storage is view.storage:
            yield storage


def _views(source: ByteSource, content: Any) -> dict[str, View]:
    """Return the tensors that a pickle describes, by name."""
    if not isinstance(content, Table):
        got = f"a {type(content).__name__.lower()}"
        raise Unreadable(source.name, "a table of tensors", got, "save only the model's `state_dict()`")
    views: dict[str, View] = {}
    for name, value in content.pairs:
        if not is_storable(name) or name in views:
            got = f"{_short(name)} twice" if is_storable(name) else f"{_short(name)} for a name"
            raise Unreadable(source.name, "a table of tensors by name", got, "save only the model's `state_dict()`")
        if not isinstance(value, Call):
            got = f"a {type(value).__name__.lower()} as {name}"
            raise Unreadable(source.name, "a table of tensors", got, "save only the model's `state_dict()`")
        view = _view(value)
        if isinstance(view, str):
            raise _damaged(source, f"{view} for {name}")
        views[name] = view
    if not views:
        raise Unreadable(source.name, "tensors", "none", "download it again", must="contain")
    return views


def _short(name: object) -> str:
    return repr(name)[:80] if isinstance(name, str | bytes | int | float | None) else f"a {type(name).__name__.lower()}"


def _view(call: Call) -> View | str:
    """Return the tensor that a call would make, or what is wrong with it."""
    while call.function in PARAMETERS or call.function == FROM_TYPE:
        if call.function == FROM_TYPE:
            function, _, arguments, _ = call.arguments
            call = Call(function.name, arguments)
        else:
            call = call.arguments[0]
    expected = {TENSOR: 4, TENSOR_V2: 6, TENSOR_V3: 7}.get(call.function)
    if expected is None or not expected <= len(call.arguments) <= expected + (call.function != TENSOR):
        return "no tensor"
    if call.arguments[expected:] not in ((), (None,)) and call.arguments[expected].pairs:
        return "a tensor that is conjugate or negated"
    storage = _storage(call.arguments[0])
    if storage is None:
        return "an unknown storage"
    dtype = DTYPES[call.arguments[6].name] if call.function == TENSOR_V3 else storage.dtype
    offset, shape, strides = (whole_numbers(numbers) for numbers in ((call.arguments[1],), *call.arguments[2:4]))
    if dtype is None or offset is None or shape is None or strides is None or len(shape) != len(strides):
        return "sizes, strides or an offset that no tensor has"
    span = StoredTensor(dtype, shape, 0, strides).span
    if span and (offset[0] + span) * dtype.itemsize > storage.nbytes:
        return f"a storage of {storage.nbytes:,} bytes, which is too short"
    return View(storage, dtype, offset[0], shape, strides)


def _storage(reference: object) -> Storage | None:
    """Return the storage that a pickle refers to, or None if it is no reference to a storage."""
    if not isinstance(reference, Persistent) or not isinstance(reference.identity, tuple):
        return None
    kind, storage_type, key, _, count = reference.identity[:5]
    if kind != "storage" or not isinstance(key, str) or whole_numbers([count]) is None:
        return None
    if reference.identity[5:] not in ((), (None,)):  # a part of another storage, in very old files
        return None
    dtype = None if storage_type.name in UNTYPED else DTYPES[storage_type.name]
    return Storage(key, dtype, count * (1 if dtype is None else dtype.itemsize))
