"""The pytest plugin as users meet it: in their own test run."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

HEAVY = (
    "cloudpickle",
    "numpy",
    "torch",
    "asyncio",
    "skyward.pool.pool",
    "skyward.engine",
    "skyward.node.agent",
    "xxhash",
)


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    script = (
        f"import pytest, sys; before = set(sys.modules); import skyward.testing.plugin; print(*[m for m in {HEAVY} "
    )
    script += "if m in set(sys.modules) - before])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_fixtures_of_a_users_test_run_work(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nsky_pool_concurrency = 2\n")
    pytester.makepyfile(
        test_mine="""
        import os
        import pytest
        import skyward as sky

        seen = []

        def test_default_pool(sky_pool):
            assert (sky_pool.nodes, sky_pool.concurrency) == (2, 2)
            assert sky.compute(abs)(-1) @ sky == [1, 1]
            seen.append(sky_pool)

        def test_the_pool_is_shared(sky_pool, sky_pools):
            assert sky_pool is seen[0] is sky_pools()

        @pytest.mark.sky_pool(nodes=1, concurrency=1)
        def test_options_by_marker(sky_pool):
            assert sky_pool is not seen[0]
            assert sky.compute(os.getpid)() >> sky_pool == sky.compute(os.getpid)() >> sky_pool

        @pytest.mark.sky_pool(nodes=1, concurrency=1)
        class TestFaults:
            def test_slot(self, sky_pool, sky_faults):
                before = sky.compute(os.getpid)() >> sky_pool
                assert sky_faults.kill_slot() == before
                assert sky.compute(os.getpid)() >> sky_pool != before

            def test_node(self, sky_pool, sky_faults):
                before = sky_faults.agent()
                assert sky_faults.kill_node() == before
                assert sky.compute(retries=1)(os.getppid)() >> sky_pool

            def test_the_pool_is_whole_again(self, sky_pool, sky_faults):
                assert sky_faults.is_whole()
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "error", "--strict-markers")
    result.assert_outcomes(passed=6)


def test_each_test_that_takes_a_hub_has_an_empty_one(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from skyward import hub

        @pytest.mark.parametrize("loss", [0.5, 0.25])
        def test_mine(sky_hub, loss):
            with hub.start_run(run_name="short"):
                hub.log_metric("loss", loss)
            (run,) = hub.runs()
            assert (run.status, run.metrics) == ("completed", {"loss": loss})
            hub.disconnect()
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "error")
    result.assert_outcomes(passed=2)


def test_a_run_that_requests_no_pool_opens_none(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\ndef test_nothing(): assert 'skyward.pool.pool' not in sys.modules\n")
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "error").assert_outcomes(passed=1)


def test_markers_and_options_are_documented(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--markers")
    result.stdout.fnmatch_lines(["*sky_pool(?*options): options of the ComputePool*"])
