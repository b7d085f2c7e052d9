"""scikit-learn's own tests of parallel code, with every such call on a pool."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import sklearn

HERE = Path(__file__).parent
THEIRS = Path(sklearn.__file__).parent

# Tests by name that cannot pass if fits run in other processes, or that take long, and why.
_IN_THIS_PROCESS = "looks at what an estimator, a scorer or a callback did in this process"
_WARNINGS = "catches warnings of fits and scorers, which are given where they run"
_FIRST = "expects the message of the first fold; here the fold that fails first gives it"
_FITS = "fits for seconds what other tests of the same function fit on less data"
NOT_OURS = {
    "score_score_func": _IN_THIS_PROCESS,
    "routing": _IN_THIS_PROCESS,
    "forwards_metadata": _IN_THIS_PROCESS,
    "receive_search_instance": _IN_THIS_PROCESS,
    "callbacks_with_partial_fit_failures": "its class is not an attribute of its module, and plain pickle sends it",
    "splits_consistency": "gives a generator, which cannot be pickled, in the place of a splitter",
    "failing_scorer": _WARNINGS,
    "invalid_scoring_param": _WARNINGS,
    "non_finite_score": _WARNINGS,
    "coo_matrix": _WARNINGS,
    "coo_array": _WARNINGS,
    "decision_function_shape": _FIRST,
    "learning_curve_params": _FIRST,
    "(predict_with_method and not multilabel and not rare_class)": _FITS,
    "predict_class_subset": _FITS,
    "multilabel_auto_predict": _FITS,
    "torch-cpu": "imports torch on each node, to search with its arrays",
}

# At least this many pass: a file that is skipped as a whole would show nothing.
FILES = {
    "model_selection/tests/test_search.py": 90,
    "model_selection/tests/test_validation.py": 70,
    "ensemble/tests/test_stacking.py": 60,
    "inspection/tests/test_permutation_importance.py": 30,
}


@pytest.mark.slow
@pytest.mark.sklearn_behaviours
@pytest.mark.timeout(600)
def test_scikit_learns_own_tests_pass_on_a_pool(tmp_path: Path) -> None:
    """All files share one pool, because its nodes import scikit-learn for longer than most tests take."""
    if not all((THEIRS / file).exists() for file in FILES):
        pytest.skip("this scikit-learn comes without its tests")
    settings = tmp_path / "pytest.ini"
    settings.write_text("[pytest]\nmarkers =\n    thread_unsafe\n    network\n    allow_unwritable\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-v", "-c", str(settings), "--rootdir", str(THEIRS)),
            *("-p", "no:cacheprovider", "-p", "everything_on_a_pool", "--timeout", "120"),
            *("-p", "no:schemathesis", "--assert=plain"),  # fewer imports, and no rewritten copies of large files
            *("-k", " and ".join(f"not {name}" for name in NOT_OURS), *(str(THEIRS / file) for file in FILES)),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent.parent)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = Counter(re.findall(r"/sklearn/(\S+\.py)::.* PASSED", done.stdout))
    assert all(passed[file] >= at_least for file, at_least in FILES.items()), done.stdout
