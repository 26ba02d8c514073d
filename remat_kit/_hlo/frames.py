"""Source positions of a compiled program: JAX 0.12 leaves only a frame number in each instruction."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Code that is not the user's: installed packages, Python itself, and JAX, Flax, Optax or this package from a checkout.
_LIBRARY = re.compile(
    r"[/\\](site-packages|dist-packages|python3\.\d+)[/\\]"
    r"|[/\\](jax|flax|optax|chex)[/\\](_src|experimental|core|linen|nnx|interpreters|transforms)[/\\]"
    r"|^<frozen "
)
_OWN = str(Path(__file__).resolve().parent.parent)


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of source code: file, line number from 1, and the function it is in."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Frames:
    """All source positions of a module, by frame number from 1.

    Attributes:
      frames: each frame's own position; None at 0 and where the module is incomplete.
      parents: number of the frame that called it, 0 for none.
      users: number of the first frame outward that is the user's code, 0 for none.
    """

    frames: tuple[Frame | None, ...]
    parents: tuple[int, ...]
    users: tuple[int, ...]

    def user(self, frame_id: int) -> Frame | None:
        """The user's line: the innermost frame outside installed packages, Python, JAX, Flax, Optax and this package.

        None when no frame is, or `frame_id` is 0 or unknown.
        """
        return self.frames[self.users[frame_id]] if 0 < frame_id < len(self.users) else None

    def stack(self, frame_id: int) -> tuple[Frame, ...]:
        """All frames of a position, innermost first."""
        found: list[Frame] = []
        seen: set[int] = set()
        while 0 < frame_id < len(self.frames) and frame_id not in seen:
            seen.add(frame_id)
            frame = self.frames[frame_id]
            if frame is not None:
                found.append(frame)
            frame_id = self.parents[frame_id]
        return tuple(found)

    @staticmethod
    def from_proto(proto: Any) -> "Frames":
        """The frames of a StackFrameIndexProto. All its numbers count from 1; one that points nowhere is "unknown"."""
        files, functions = list(proto.file_names), list(proto.function_names)
        theirs = [_is_library(file) for file in files]
        places: list[tuple[Frame | None, bool]] = [(None, True)]
        for place in proto.file_locations:
            known = 0 < place.file_name_id <= len(files)
            function = functions[place.function_name_id - 1] if 0 < place.function_name_id <= len(functions) else ""
            frame = Frame(files[place.file_name_id - 1], place.line, function) if known else None
            places.append((frame, not known or theirs[place.file_name_id - 1]))
        frames: list[Frame | None] = [None]
        parents, skipped = [0], [True]
        count = len(proto.stack_frames)
        for each in proto.stack_frames:
            location = each.file_location_id if 0 < each.file_location_id < len(places) else 0
            frames.append(places[location][0])
            skipped.append(places[location][1])
            parents.append(each.parent_frame_id if 0 < each.parent_frame_id <= count else 0)
        return Frames(tuple(frames), tuple(parents), _first_users(parents, skipped))


def _is_library(file: str) -> bool:
    return bool(_LIBRARY.search(file)) or file.startswith(_OWN)


def _first_users(parents: list[int], skipped: list[bool]) -> tuple[int, ...]:
    """For each frame the first one outward that is not skipped, itself included. Linear; a loop ends at 0."""
    users: list[int | None] = [0] + [None] * (len(parents) - 1)
    for start in range(1, len(parents)):
        path = []
        at = start
        while users[at] is None and skipped[at]:
            users[at] = 0  # Until the answer is known; a loop meets it and stops.
            path.append(at)
            at = parents[at]
        found = users[at]
        if found is None:
            found = users[at] = at
        for each in path:
            users[each] = found
    return tuple(each or 0 for each in users)
