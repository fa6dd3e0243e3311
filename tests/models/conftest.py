"""A tiny GGUF model."""

import gguf_builder as build
import pytest
from gguf_builder import metadata_of, tensors_of

from octavo.models.formats.gguf.file import GGUFFile


@pytest.fixture
def model(tmp_path):
    """Write a tiny model and open it; options as those of metadata_of."""
    files = []

    def make(architecture, tensors=None, more=None, **options):
        metadata = metadata_of(architecture, **options) | (more or {})
        files.append(
            GGUFFile.open(build.write(tmp_path / "m.gguf", metadata, tensors or tensors_of(architecture)))
        )
        return files[-1]

    yield make
    for file in files:
        file.close()
