"""python -m benchmarks.avx2: benchmarks.run with its options, where nobody uses anything newer than AVX2 and FMA.

fastbert and PyTorch can be told. Other engines ask the processor, so they are copied to build/avx2 with every `cpuid`
replaced by `ud2`, which is as long, and cpuid.c answers the signal that this raises. So each takes the code that it has
for such processors. How fast they run it is another question: this processor's caches and clock stay its own.

It takes objdump and cc, on Linux on x86-64.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks import run

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "avx2"
LIBRARY = BUILD / "cpuid.so"
ENGINES = ("openvino", "onnxruntime", "ctranslate2")
TOLD = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "FASTBERT_CPU_SET": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
CPUID, UD2 = b"\x0f\xa2", b"\x0f\x0b"


def environment() -> dict[str, str]:
    """Copies and compiles anew. What a process needs in addition to this one's environment."""
    BUILD.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", LIBRARY, HERE / "cpuid.c"], check=True)
    for name in ENGINES:
        copy_engine(name)
    path = os.pathsep.join(filter(None, (str(BUILD), os.environ.get("PYTHONPATH"))))
    return TOLD | {"LD_PRELOAD": str(LIBRARY), "PYTHONPATH": path}


def copy_engine(name: str) -> None:
    """A package with its libraries, anew. Raises RuntimeError where no cpuid is found: it would go unmasked."""
    found = importlib.util.find_spec(name)
    for old in BUILD.glob(f"{name}*"):
        shutil.rmtree(old)
    if found is None:
        return
    source = Path(found.origin).parent
    for folder in (source, source.with_name(f"{name}.libs")):  # the second is where auditwheel puts them
        if folder.exists():
            shutil.copytree(folder, BUILD / folder.name)
    libraries = [path for path in BUILD.glob(f"{name}*/**/*.so*") if path.is_file()]
    if not sum(map(mask, libraries)):
        raise RuntimeError(f"no cpuid found in {name}")


def mask(library: Path) -> int:
    """Replaces the instructions. Returns how many there were."""
    loaded = segments(library)
    places = [offset(address, loaded) for address in addresses(library)]
    data = bytearray(library.read_bytes())
    for place in places:
        assert data[place : place + 2] == CPUID, f"{library}: no cpuid at {place}"
        data[place : place + 2] = UD2
    if places:
        library.write_bytes(data)
    return len(places)


def addresses(library: Path) -> list[int]:
    """Raises CalledProcessError if objdump fails: the rest of the library would go unmasked."""
    words = ["objdump", "-d", "--no-show-raw-insn", library]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as listing:  # of gigabytes
        found = [int(line.partition(":")[0], 16) for line in listing.stdout if line.endswith("cpuid\n")]
    if listing.returncode:
        raise subprocess.CalledProcessError(listing.returncode, words)
    return found


def segments(library: Path) -> list[tuple[int, int, int]]:
    """Offset in the file, address and size of what is loaded."""
    headers = subprocess.run(["readelf", "-lW", library], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^ +LOAD +(\w+) (\w+) \w+ (\w+)", headers, re.M)
    return [(int(at, 16), int(address, 16), int(size, 16)) for at, address, size in found]


def offset(address: int, loaded: list[tuple[int, int, int]]) -> int:
    return next(at + address - begin for at, begin, size in loaded if begin <= address < begin + size)


if __name__ == "__main__":
    if os.environ.get("LD_PRELOAD") == str(LIBRARY):
        sys.exit(run.main())
    os.execve(sys.executable, [sys.executable, "-m", "benchmarks.avx2", *sys.argv[1:]], os.environ | environment())
