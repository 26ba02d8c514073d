"""Broken HloProto files, by the thousand: is each refused with a RematKitError, or answered with sums that add up?

    python experiments/fuzz_analyzer.py [--cases 20000] [--first 0] [--seeds FOLDER] [--failures out/fuzz]

A case is a number: seed files with mutations drawn from it (`tests/fuzz.py`). Seeds are a program made by hand and
every `*.pb` in FOLDER (small ones, since a case reads its file whole). Cases run in child processes, each case with a
limit of time, and of memory: ten times the file and 200 MB above what the process had after its imports. Prints a
count by outcome; writes the file of each failure and exits with 1 when there is one.
"""

import argparse
import collections
import os
import pathlib
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import fuzz  # noqa: E402  # pyright: ignore[reportMissingImports]

SECONDS = 10
PER_FILE_BYTE = 10
ABOVE = 200 * 10**6
CHUNK = 200
"""Cases a child process."""


def address_space() -> int:
    """Bytes of virtual memory of this process."""
    pages = pathlib.Path("/proc/self/statm").read_text().split()[0]
    return int(pages) * resource.getpagesize()


def outcome(seeds: Sequence[bytes], number: int, base: int) -> str:
    """What becomes of one case, in this process, under the limit of memory. SIGALRM ends it when it takes too long."""
    data = fuzz.case(seeds, number)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (base + ABOVE + PER_FILE_BYTE * len(data), hard))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        return fuzz.examine(data)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {pathlib.Path(frame.filename).name}:{frame.lineno}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def run(seeds: Sequence[bytes], numbers: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Cases with their outcomes. One that kills its process is reported, and the rest goes on in another."""
    while numbers:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            base = address_space()
            for number in numbers:
                os.write(writing, f"{number}\t{outcome(seeds, number, base)}\n".encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as lines:
            done = [(int(number), text.strip()) for number, text in (line.split("\t", 1) for line in lines)]
        _, status = os.waitpid(child, 0)
        yield from done
        numbers = numbers[len(done) :]
        if status and numbers:
            died = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {status}"
            yield numbers[0], f"more than {SECONDS} s" if died == "SIGALRM" else died
            numbers = numbers[1:]


def main() -> int:
    """0 when every case is refused or answered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=pathlib.Path)
    parser.add_argument("--failures", type=pathlib.Path, default=ROOT / "out/fuzz")
    arguments = parser.parse_args()
    seeds = [fuzz.small_seed()]
    if arguments.seeds:
        seeds += [file.read_bytes() for file in sorted(arguments.seeds.glob("*.pb"))]
    for number, seed in enumerate(seeds):
        assert fuzz.examine(seed) == fuzz.ANSWERED, f"seed {number} is not answered"
    counts: collections.Counter[str] = collections.Counter()
    start = time.perf_counter()
    last = arguments.first + arguments.cases
    for first in range(arguments.first, last, CHUNK):
        for number, text in run(seeds, range(first, min(first + CHUNK, last))):
            counts[text] += 1
            if text not in (fuzz.REFUSED, fuzz.ANSWERED):
                arguments.failures.mkdir(parents=True, exist_ok=True)
                (arguments.failures / f"{number}.pb").write_bytes(fuzz.case(seeds, number))
                print(f"case {number}: {text}", flush=True)
    for text, count in counts.most_common():
        print(f"{count:8}  {text}")
    print(f"{len(seeds)} seeds, {sum(counts.values())} cases, {time.perf_counter() - start:.0f} s")
    return int(bool(set(counts) - {fuzz.REFUSED, fuzz.ANSWERED}))


if __name__ == "__main__":
    sys.exit(main())
