"""The compiled kernels, fuzzed in a process of their own under the address and UB sanitizers.

To repeat a run, or for a longer one:

    FUZZ_SEED=1 FUZZ_CASES=5000 pytest tests/attention/test_kernel_sanitizers.py
"""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

HELPERS = [str(Path(__file__).parents[1] / "support")]
CASES = int(os.environ.get("FUZZ_CASES", "24"))
# As an option of the compiler, which thus builds every kernel library as Octavo does, and keeps it apart.
WRAPPER = """#!/bin/sh
exec {compiler} "$@" -O0 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined {options} \\
    -fno-sanitize-recover=all
"""


def sanitizer_runtime(compiler):
    """Path of the compiler's shared address sanitizer, which a process must load first; skips without one."""
    asked = [compiler, "-print-file-name=libasan.so"]
    try:
        path = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no C compiler {compiler!r}, so no compiled kernels either ({error})")
    if not path.is_absolute():
        pytest.skip(f"{compiler} has no libasan.so; install it (Debian: libasan of the gcc, Fedora: libasan)")
    content = path.read_bytes()
    if content.startswith(b"\x7fELF"):
        return path
    # Where several architectures live together the file is a linker's script that names the library.
    return Path(re.search(r"/\S+libasan\.so[.\d]*", content.decode())[0])


# Whoever arrives last while others sleep, as all do at once, has been late.
LEAVING = "-DSPIN_NS=0 -DLATE_NS=-1000000 -DLATE_PART=1000000"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="loads the sanitizer by LD_PRELOAD")
@pytest.mark.timeout(300 + 2 * CASES)
@pytest.mark.parametrize("options", ["", LEAVING], ids=["all stay", "threads leave"])
def test_fuzz_under_sanitizers(tmp_path, options):
    """Wrong calls end in typed errors, right ones agree with the reference, and no sanitizer reports."""
    compiler, seed = os.environ.get("CC", "cc"), os.environ.get("FUZZ_SEED", str(random.randrange(10**9)))
    runtime = sanitizer_runtime(compiler)
    wrapper = tmp_path / "cc"
    wrapper.write_text(WRAPPER.format(compiler=compiler, options=options))
    wrapper.chmod(0o700)
    environment = {
        **os.environ,
        "CC": str(wrapper),
        "XDG_CACHE_HOME": str(tmp_path),
        "LD_PRELOAD": str(runtime),
        # Python and torch leave memory to the end of the process.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": os.pathsep.join([*HELPERS, os.environ.get("PYTHONPATH", "")]),
    }
    script = Path(__file__).with_name("kernel_fuzz.py")
    command = [sys.executable, str(script), "--sanitized", f"--seed={seed}", f"--cases={CASES}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    print(done.stdout, done.stderr[-20_000:])
    libraries = {path.name.split("-")[0] for path in (tmp_path / "octavo").glob("*.so")}
    assert done.returncode == 0, f"seed {seed}: {done.stdout} {done.stderr[-20_000:]}"
    assert "both sanitizers report" in done.stdout
    assert "Sanitizer" not in done.stderr
    assert "runtime error" not in done.stderr
    assert libraries == {"attention", "layers"}
