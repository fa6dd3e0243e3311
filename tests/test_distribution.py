"""What would be published: a wheel and a source distribution, built in a copy, and looked into."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("octavo", "docs", "deploy", "examples", "tests")
FILES = (
    "pyproject.toml",
    "MANIFEST.in",
    "LICENSE",
    "constraints.txt",
    *(path.name for path in ROOT.glob("*.md")),
)
# These belong to the package, but are no sources.
MADE = ("__pycache__", ".pyc", ".so")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("distribution")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    # With the setuptools that is here: torch brings it.
    command = [
        sys.executable,
        "-m",
        "uv",
        "build",
        "--quiet",
        "--offline",
        "--no-config",
        "--no-build-isolation",
    ]
    done = subprocess.run(
        [*command, "--python", sys.executable], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Iterator[zipfile.ZipFile]:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as found:
        yield found


@pytest.fixture(scope="module")
def sources(built: Path) -> set[str]:
    """Files of the source distribution, without its folder's name."""
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as found:
        return {name.partition("/")[2] for name in found.getnames()}


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def package_files() -> set[str]:
    found = (path for path in (ROOT / "octavo").rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in found if not any(part in str(path) for part in MADE)}


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == package_files()
    assert {"octavo/py.typed", "octavo/server/live/page/index.html"} <= names


def test_the_sources_build_it_and_have_no_tests(sources: set[str]) -> None:
    assert package_files() <= sources
    assert {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "constraints.txt"} <= sources
    assert not {name for name in sources if name.startswith("tests/") or "/test_" in name}


def test_what_readme_links_to_is_in_the_sources(sources: set[str]) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert target.startswith("http") or target in sources, target


def test_the_index_page_has_no_link_that_breaks(metadata: Message) -> None:
    text = metadata.get_payload()
    assert isinstance(text, str)
    assert text.startswith("# Octavo\n")
    assert metadata["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\(([^)]+)\)|(?:src|href)=\"([^\"]+)\"", text)
    assert all((link or attribute).startswith("https://") for link, attribute in targets)


def test_metadata_say_who_for_whom_and_where(metadata: Message) -> None:
    assert (metadata["Name"], metadata["License-Expression"]) == ("octavo", "Apache-2.0")
    assert metadata["Author"]
    assert metadata["Summary"]
    classifiers = set(metadata.get_all("Classifier", ()))
    for beginning in ("Development Status", "Operating System", "Typing", "Programming Language"):
        assert any(classifier.startswith(beginning) for classifier in classifiers), beginning
    for url in metadata.get_all("Project-URL", ()):
        assert url.partition(", ")[2].startswith("https://")


def test_the_wheel_runs(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = "import octavo, octavo.cli; print(octavo.__version__, octavo.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    (found,) = Path(tmp_path).glob("octavo-*.dist-info")
    assert done.stdout.split() == [
        found.name.removeprefix("octavo-").removesuffix(".dist-info"),
        str(tmp_path / "octavo" / "__init__.py"),
    ]
