"""Pytest fixtures over the model zoo; load with `pytest_plugins = ["tests.models.fixtures"]`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.folder import tiny_model_dir


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 llama with a chat template; shared, never write into it."""
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture(scope="session")
def tiny_gemma_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 gemma3_text with windows of 24 tokens beside full layers; shared."""
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "gemma3_text")


@pytest.fixture(scope="session")
def tiny_lfm2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 lfm2: convolution states (checkpoints only) beside full layers; shared."""
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "lfm2")
