"""The busy process wants a core while it is wanted, and is gone afterwards."""

import os

import pytest
from disturbance import BusyProcess


def test_it_uses_a_core_until_the_end_of_the_with() -> None:
    with BusyProcess() as busy:
        pid = busy._process.pid
        assert busy.cpu_s() > 0.0
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert busy.cpu_s() > 0.0


def test_it_ends_also_when_the_measurement_fails() -> None:
    with pytest.raises(RuntimeError), BusyProcess() as busy:
        raise RuntimeError
    with pytest.raises(ProcessLookupError):
        os.kill(busy._process.pid, 0)
