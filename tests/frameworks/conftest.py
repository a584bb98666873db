"""With MULTIRING_TEST_DEVICE=cuda, the tests of the torch adapter run with device tensors; see device_suite.py."""

import os

if os.environ.get("MULTIRING_TEST_DEVICE") == "cuda":
    from tests.support.device_suite import (
        pytest_collection_modifyitems,
        pytest_configure,
        pytest_ignore_collect,
        pytest_runtest_call,
        pytest_runtest_protocol,
        pytest_terminal_summary,
        pytest_testnodedown,
    )

    __all__ = [
        "pytest_collection_modifyitems",
        "pytest_configure",
        "pytest_ignore_collect",
        "pytest_runtest_call",
        "pytest_runtest_protocol",
        "pytest_terminal_summary",
        "pytest_testnodedown",
    ]
