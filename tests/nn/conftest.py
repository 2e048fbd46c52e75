"""One thread for the small tensors of these tests: two of them waiting for each other on a busy machine take ten times longer."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
