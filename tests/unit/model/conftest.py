"""One thread: the machine is shared, and several threads would hide nothing here."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
