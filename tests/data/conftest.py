"""The user's caches, empty, for tests that read pictures."""

import pytest


@pytest.fixture
def caches(tmp_path_factory, monkeypatch):
    import datasets

    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "hugging_face")
