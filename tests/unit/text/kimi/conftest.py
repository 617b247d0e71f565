"""The tiny Kimi vocabulary."""

from __future__ import annotations

import pytest

from meshfire.text.tiktoken_tokenizer import TiktokenTokenizer
from tests.small_kimi import make_small_kimi


@pytest.fixture(scope="session")
def small_kimi(tmp_path_factory: pytest.TempPathFactory) -> TiktokenTokenizer:
    return make_small_kimi(tmp_path_factory.mktemp("small-kimi"))
