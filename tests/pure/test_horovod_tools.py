"""Horovod's small tools: threads, lists, environment."""

import os
import threading
import warnings
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring.horovod import arguments, builds
from multiring.horovod.threads import execute_function_multithreaded, in_thread, on_event
from multiring.horovod.versions import HorovodVersionMismatchError

OPS = SimpleNamespace(Average=0, Sum=1)


@given(st.lists(st.integers()), st.integers(1, 9))
def test_a_list_is_split_evenly(values: list[int], pieces: int) -> None:
    split = arguments.split_list(values, pieces)
    assert len(split) == pieces
    assert [value for piece in split for value in piece] == values
    lengths = [len(piece) for piece in split]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


def test_powers_of_two() -> None:
    assert [n for n in range(-2, 70) if arguments.num_rank_is_power_2(n)] == [1, 2, 4, 8, 16, 32, 64]


def test_average_and_op() -> None:
    chosen = arguments.get_average_backwards_compatibility_fun(OPS)
    assert chosen(None, None) == 0
    assert chosen(5, None) == 5
    with pytest.raises(ValueError, match="op=1 and average=False"):
        chosen(1, False)
    with pytest.warns(DeprecationWarning, match="pass op instead"):
        assert chosen(None, False) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert chosen(None, True) == 0


def test_variables_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_A", "before")
    monkeypatch.delenv("TEST_B", raising=False)
    with pytest.raises(KeyError, match="TEST_C"), arguments.env(TEST_A="1", TEST_B="2", TEST_C=None):
        os.environ["TEST_C" if os.environ["TEST_A"] + os.environ["TEST_B"] == "12" else "TEST_A"]
    assert os.environ["TEST_A"] == "before"
    assert "TEST_B" not in os.environ


def test_rank_and_size_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in arguments._RANK_AND_SIZE:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    assert arguments.get_env_rank_and_size() == (0, 1)
    monkeypatch.setenv("PMI_RANK", "2")
    with pytest.raises(RuntimeError, match="PMI_RANK=2 and PMI_SIZE=None"):
        arguments.get_env_rank_and_size()
    monkeypatch.setenv("PMI_SIZE", "4")
    assert arguments.get_env_rank_and_size() == (2, 4)
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_SIZE", "3")
    assert arguments.get_env_rank_and_size() == (1, 3)


def test_what_may_be_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arguments.is_exportable("PATH")
    assert not arguments.is_exportable("NVIDIA_CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", "/etc/mpi/kubexec.sh")
    assert arguments.is_kubeflow_mpi()
    assert arguments.is_iterable("x")
    assert not arguments.is_iterable(1)


def test_extensions() -> None:
    assert not builds.extension_available("mxnet", verbose=True)
    assert not builds.gpu_available("torch")
    with pytest.raises(
        ImportError, match=r"horovod.mxnet is not available: multiring has adapters for torch, tensorflow"
    ):
        builds.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__, "lib")
    builds.check_installed_version("torch", "9.9", ImportError("none"))
    assert builds.is_version_greater_equal_than("2.10.1", "2.9.0")
    assert not builds.is_version_greater_equal_than("2.0rc1", "2.0.0")
    with pytest.raises(ValueError, match="want strings"):
        builds.is_version_greater_equal_than("2.0.0", 2)  # type: ignore[arg-type]  # what must not work
    with pytest.raises(ValueError, match=r"want major\.minor\.patch"):
        builds.is_version_greater_equal_than("2.0.0", "2.0")
    assert builds.get_extension_full_path("/a/__init__.py", "b", "lib").startswith("/a/b/lib.")


def test_a_version_that_does_not_fit() -> None:
    error = HorovodVersionMismatchError("torch", "2.0", "1.9")
    assert isinstance(error, ImportError)
    assert "torch is at version 2.0" in str(error)
    assert "built against 1.9" in str(error)


# -- threads


def test_a_thread_runs_the_function() -> None:
    seen: list[int] = []
    in_thread(seen.append, (3,)).join(240)
    assert seen == [3]
    with pytest.raises(ValueError, match=r"want a tuple, \(x,\)"):
        in_thread(seen.append, [3])  # type: ignore[arg-type]  # what must not work

    def fail() -> None:
        raise KeyError

    in_thread(fail, silent=True).join(240)  # a printed error would fail this test


def test_many_calls_a_few_at_a_time() -> None:
    running, most, lock = [0], [0], threading.Lock()

    def square(value: int) -> int:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        with lock:
            running[0] -= 1
        return value * value

    calls = [(value,) for value in range(20)]
    assert execute_function_multithreaded(square, calls, True, 3) == {n: n * n for n in range(20)}
    assert most[0] <= 3
    assert execute_function_multithreaded(square, [], True) == {}


def test_a_call_that_fails_is_the_cause() -> None:
    def inverse(value: int) -> float:
        return 1 / value

    with pytest.raises(RuntimeError, match="1 of 3 calls of inverse failed") as raised:
        execute_function_multithreaded(inverse, [(1,), (0,), (2,)])
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_nobody_waits_where_nobody_asked_to() -> None:
    done = threading.Event()
    assert execute_function_multithreaded(done.set, [()], block_until_all_done=False) is None
    assert done.wait(240)


def test_an_event_starts_a_function_unless_stopped() -> None:
    event, stop, seen = threading.Event(), threading.Event(), threading.Event()
    thread = on_event(event, seen.set, stop=stop, check_stop_interval_s=0.01)
    event.set()
    thread.join(240)
    assert seen.is_set()
    stopped = on_event(threading.Event(), pytest.fail, ("it was stopped",), stop=stop, check_stop_interval_s=0.01)
    stop.set()
    stopped.join(240)
    assert not stopped.is_alive()
    with pytest.raises(ValueError, match=r"want a threading\.Event"):
        on_event(None, seen.set)  # type: ignore[arg-type]  # what must not work
    with pytest.raises(ValueError, match="stop='x'"):
        on_event(event, seen.set, stop="x")  # type: ignore[arg-type]  # what must not work
