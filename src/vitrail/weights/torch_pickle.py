"""Check the pickle in a .pth before torch's restricted unpickler runs it.

That unpickler runs no code from the file, but it calls functions that allocate: 277 bytes make it take 5 GB by
`bytearray(6_000_000_000)`, and a text of 1 MB can be encoded a hundred thousand times. The check steps through the
pickle without creating its objects. Only calls that build tensors and dictionaries of what it holds are allowed.
"""

import io
import pickletools
from typing import Any

import torch

MAX_OPCODES = 2_000_000  # 35 a tensor; a checkpoint with its optimizer has some ten thousand
REBUILD_FUNCTIONS = {
    *(f"torch._utils _rebuild_{kind}" for kind in ("tensor", "tensor_v2", "tensor_v3", "sparse_tensor")),
    *(f"torch._utils _rebuild_{kind}" for kind in ("parameter", "parameter_with_state", "meta_tensor_no_storage")),
}
REBUILD_FROM_TYPE = "torch._tensor _rebuild_from_type_v2"  # which calls its first argument
CONSTANT_FUNCTIONS = {
    "torch Size", "torch device", "torch.serialization _get_layout", "builtins complex", "__builtin__ complex",
}  # fmt: skip
COPYING_FUNCTIONS = {
    "collections OrderedDict", "collections Counter", "builtins set", "__builtin__ set", "_codecs encode",
}  # fmt: skip
REFERENCED_CLASSES = {"torch.nn.parameter Parameter", "torch Tensor"}  # never called; storages and dtypes neither
ALLOWED_FUNCTIONS = REBUILD_FUNCTIONS | CONSTANT_FUNCTIONS | COPYING_FUNCTIONS


class PickleError(ValueError):
    """A pickle that makes a forbidden call, or copies more than it holds."""


class _Global(str):
    """The module and name of a function or class."""


class _SizedValue:
    """A text or container, of which only the size matters."""

    def __init__(self, size: int = 0) -> None:
        self.size = size


def check_pickle(content: bytes) -> None:
    """Refuse a pickle that calls anything but what builds a state dict, or copies more than it holds."""
    machine = _PickleMachine(len(content))
    for number, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(content))):
        if number >= MAX_OPCODES:
            raise PickleError(f"it has over {MAX_OPCODES:,} instructions")
        try:
            machine.run(opcode.name, argument)
        except (IndexError, KeyError) as error:
            raise PickleError(f"its instruction {opcode.name} takes a value that is missing") from error


class _PickleMachine:
    """Pickle's stack and memo, with sizes instead of objects."""

    def __init__(self, budget: int) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.budget = budget  # how much all calls together may copy; a sound file copies each value once

    def run(self, name: str, argument: Any) -> None:
        """Execute one instruction."""
        match name:
            case "PROTO" | "STOP":
                pass
            case "MARK":
                self.marks.append(len(self.stack))
            case "GLOBAL":
                self.stack.append(_check_global(argument))
            case "BINUNICODE" | "SHORT_BINSTRING":
                self.stack.append(_SizedValue(len(argument)))
            case "EMPTY_LIST" | "EMPTY_DICT" | "EMPTY_SET":
                self.stack.append(_SizedValue())
            case "NONE" | "NEWTRUE" | "NEWFALSE" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                self.stack.append(None)
            case "EMPTY_TUPLE":
                self.stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self.stack.append(self.pop(int(name[-1])))
            case "TUPLE":
                self.stack.append(self.pop_mark())
            case "APPEND" | "SETITEM":
                self.fill(len(self.pop(1 if name == "APPEND" else 2)))
            case "APPENDS" | "SETITEMS":
                self.fill(len(self.pop_mark()))
            case "BUILD":
                self.pop(1)
            case "BINPERSID":
                self.pop(1)
                self.stack.append(None)
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = self.stack[-1]
            case "BINGET" | "LONG_BINGET":
                self.stack.append(self.memo[argument])
            case "REDUCE":
                function, arguments = self.pop(2)
                self.stack.append(self.call(function, arguments))
            case _:
                raise PickleError(f"it has the instruction {name}, which no state dict needs")

    def pop(self, count: int) -> tuple[Any, ...]:
        """Remove and return the last values, which must stand above the last mark."""
        start = len(self.stack) - count
        if start < (self.marks[-1] if self.marks else 0):
            raise IndexError
        values = tuple(self.stack[start:])
        del self.stack[start:]
        return values

    def pop_mark(self) -> tuple[Any, ...]:
        """Remove and return the values above the last mark."""
        return self.pop(len(self.stack) - self.marks.pop())

    def fill(self, count: int) -> None:
        """Add so many values to the container on top of the stack."""
        if not isinstance(self.stack[-1], _SizedValue):
            raise PickleError("it fills a value that is no list or dictionary")
        self.stack[-1].size += count

    def call(self, function: Any, arguments: Any) -> _SizedValue:
        """Return the size of a call's result, if the call is allowed."""
        if function == REBUILD_FROM_TYPE and arguments:
            function = arguments[0]
        if not isinstance(function, _Global) or function not in ALLOWED_FUNCTIONS:
            raise PickleError(f"it calls {function or 'a value'!s:.80}")
        if not isinstance(arguments, tuple):
            raise PickleError(f"it calls {function} with arguments that are no tuple")
        size = sum(value.size for value in arguments if isinstance(value, _SizedValue))
        if function in COPYING_FUNCTIONS:
            self.budget -= size
        if self.budget < 0:
            raise PickleError(f"it has {function} copy the same values again and again")
        return _SizedValue(size)


def _check_global(argument: str) -> _Global:
    """Return a global name, if a state dict may mention it."""
    module, _, name = argument.partition(" ")
    known = argument in ALLOWED_FUNCTIONS | REFERENCED_CLASSES | {REBUILD_FROM_TYPE}
    of_torch = module in ("torch", "torch.cuda", "torch.storage")
    if known or (of_torch and (name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype))):
        return _Global(argument)
    raise PickleError(f"it names {argument.replace(' ', '.')!s:.80}")
