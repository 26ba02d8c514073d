"""The programs in a profile: an XSpace (`*.xplane.pb`), of which everything else is passed over.

A profiler puts the HloProto of each program that ran into the metadata of the host: a plane of its own, with one kind
of event for each program and the HloProto as a stat of it. Profiles can be large, so they are not parsed as a whole:
fields are skipped by their length. The numbers are those of the OpenXLA profiler's `xplane.proto`.
"""

from collections.abc import Iterator

from remat_kit._errors import RematKitError

_SPACE_PLANES, _SPACE_HOSTNAMES = 1, 4
_PLANE_ID, _PLANE_NAME, _PLANE_EVENTS, _PLANE_STATS = 1, 2, 4, 5
_ID, _NAME, _EVENT_STATS = 1, 2, 5
_STAT_ID, _STAT_BYTES = 1, 6
_KEY, _VALUE = 1, 2
_METADATA, _PROGRAM = b"/host:metadata", b"Hlo Proto"

_NUMBER, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def programs(data: bytes | memoryview) -> list[tuple[str, memoryview]]:
    """Name, e.g. `jit_step(3)`, and HloProto of each program in a serialized XSpace.

    Raises RematKitError when `data` is none.
    """
    try:
        return list(_programs(memoryview(data)))
    except (IndexError, ValueError, TypeError) as error:
        raise RematKitError("it is not a whole *.xplane.pb. Take the profile again, or give a dump of XLA.") from error


def profile_of(name: str, program: bytes, host: str) -> bytes:
    """A serialized XSpace of `host` that holds one program and nothing else."""
    stat = _field(_STAT_ID, 1) + _field(_STAT_BYTES, program)
    event = _field(_ID, 1) + _field(_NAME, name.encode()) + _field(_EVENT_STATS, stat)
    plane = (
        _field(_PLANE_ID, 1)
        + _field(_PLANE_NAME, _METADATA)
        + _field(_PLANE_EVENTS, _field(_KEY, 1) + _field(_VALUE, event))
        + _field(_PLANE_STATS, _field(_KEY, 1) + _field(_VALUE, _field(_ID, 1) + _field(_NAME, _PROGRAM)))
    )
    return _field(_SPACE_PLANES, plane) + _field(_SPACE_HOSTNAMES, host.encode())


def _programs(space: memoryview) -> Iterator[tuple[str, memoryview]]:
    for plane in _all(space, _SPACE_PLANES):
        if bytes(_last(plane, _PLANE_NAME)) != _METADATA:
            continue
        kinds = [_last(entry, _VALUE) for entry in _all(plane, _PLANE_STATS)]
        wanted = {_integer(kind, _ID) for kind in kinds if bytes(_last(kind, _NAME)) == _PROGRAM}
        for entry in _all(plane, _PLANE_EVENTS):
            event = _last(entry, _VALUE)
            for stat in _all(event, _EVENT_STATS):
                if _integer(stat, _STAT_ID) in wanted:
                    yield bytes(_last(event, _NAME)).decode(), _last(stat, _STAT_BYTES)


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field. Raises IndexError or ValueError when the message is cut off or is none."""
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        kind = key & 7
        if kind == _NUMBER:
            value, at = _read_varint(message, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, at = _read_varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + size > len(message):
            raise IndexError("cut off")
        yield key >> 3, message[at : at + size]
        at += size


def _all(message: memoryview, number: int) -> list[memoryview]:
    return [value for each, value in _fields(message) if each == number and isinstance(value, memoryview)]


def _last(message: memoryview, number: int) -> memoryview:
    """The field's bytes; of several the last counts, and none is empty."""
    return next(iter(_all(message, number)[-1:]), memoryview(b""))


def _integer(message: memoryview, number: int) -> int:
    return next((value for each, value in _fields(message) if each == number and isinstance(value, int)), 0)


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3 | _NUMBER) + _varint(value)
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
