"""Every example runs and shows what it promises, and the guides show the examples unchanged."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.few_modules import LEAN

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("[0-9][0-9]_*.py"))
GUIDES = sorted((ROOT / "guides").glob("*.md"))

# Output that a reader is told to see, as regular expressions in their order.
SHOWS: dict[str, tuple[str, ...]] = {
    "01_hello": (
        r"<hello\('Ada'\), not run: send it with `>> pool`>",
        r"hello Ada, from node 0 of 2, process \d+",
        r"hello Grace, from node 0 of 2, process \d+\nhello Grace, from node 1 of 2, process \d+",
        r"22/7 = 3\.1429",
        r"divide\(1, 0\): ZeroDivisionError: division by zero\s+Remote traceback \(node \d, task 'divide'\):",
        r"01_hello\.py\", line \d+, in divide\n    return a / b",
        r"here, without a pool: 0\.25",
    ),
    "02_parallel": (
        r"a group: \(0\.4, 0\.3, 0\.2\) in \d",
        r"as they end: \[0\.1, 0\.3, 0\.6\]",
        r"pi is about 3\.1",
        r"map: 100,000 values, the last is 9,999,800,001",
        r"imap: \[0, 1, 4, 9, 16\]",
        r"executor: 285",
    ),
    "03_broadcast": (
        r"words on each node: \[14, 14, 14\]",
        r"most frequent: \[\('it', 7\)",
        r"mean 5\.002, standard deviation 2\.000, of 2,000,000 numbers",
        r"\['the head', 'another node', 'another node'\]",
    ),
    "04_sharding": (
        r"list: \[\['a', 'd', 'g'\], \['b', 'e'\], \['c', 'f'\]\]",
        r"arrays, shuffled: \[\(334, True\), \(333, True\), \(333, True\)\]",
        r"equal lengths: \[33, 33, 33\]",
        r"data frame: \[\['Oslo', 'Bonn'\], \['Lima'\], \['Pune'\]\]",
        r"on one node: \['a', 'b', 'c', 'd', 'e', 'f', 'g'\]",
        r"unequal lengths: .*list 3, list 2",
        r"without a pool: \['a', 'b', 'c', 'd', 'e', 'f', 'g'\]",
    ),
    "05_streaming": (
        r"\{'epoch': 0, 'loss': 0\.7\}\n.*\n.*\n\{'epoch': 3, 'loss': 0\.24\}",
        r"five of an endless stream: \[0, 1, 2, 3, 4\]\nand then: it stopped by itself",
        r"means: \[3\.0, 4\.0, 6\.0, 5\.0\]",
    ),
    "06_torch_ddp": (
        r"(?:\[node 0 rank 0\] epoch +\d+  loss \d\.\d+\n)+",
        r"trained on 2 ranks: test accuracy 0\.9[5-9]",
    ),
    "07_grid_search": (
        r"21 candidates x 5 folds on \d+ slots of 2 nodes",
        r"best_params_ equal: True",
        r"cv_results_ equal: True",
    ),
    "08_joblib_efficiency": (
        r"2000 tasks of 50 ms on 2 x 10 slots",
        r"efficiency = ideal / actual = \d\d\.\d%",
    ),
    "49_ray": (r"pi is about 3\.14, by Ray on 2 nodes",),
    "50_existing_ray": (r"node 0 of 2\nnode 1 of 2", r"sum: 328350"),
    "51_diloco": (r"node 0: 4 synchronisations, 0\.02\d MB sent, accuracy (0\.9\d\d)\nnode 1: .* accuracy \1\n",),
    "52_diloco_friends": (
        r"ada: 4 synchronisations of 0\.00\d+ MB, accuracy (0\.[6-9]\d)\ngrace: .*, accuracy \1\n",
        r"accepted tokens: \{'ada': False, 'grace': True\}",
    ),
    "09_jax": (
        r"(?:\[node 0 rank 0\] epoch +\d+  loss \d\.\d+\n)+",
        r"trained on 2 devices: test accuracy 0\.9[5-9]",
    ),
    "10_fsdp_lm": (
        r"loss on the new text: (?:3\.\d|2\.[6-9])\d -> (?:2\.[0-3]|1\.\d)\d",
        r"each rank held 50% of the parameters",
        r"gathered on the head: 118,528 parameters; elsewhere: 0",
    ),
    "11_processes_per_node": (
        r"1 node x 2 processes \(>>\)\n.*\n  rank 1 of 2: number 1 of 2 on node 0, met 2, threads \d+\n",
        r"2 nodes x 2 processes \(@\)\n(?:.*\n){2}  rank 2 of 4: number 0 of 2 on node 1, met 4",
        r"  rank 3 of 4: number 1 of 2 on node 1, met 4",
        r"2 nodes x 1 process \(@\)\n.*\n  rank 1 of 2: number 0 of 1 on node 1, met 2",
        r"2 nodes x \"auto\" \(@\)\n  rank 0 of \d+: number 0 of \d+ on node 0",
    ),
    "12_keras_digits": (
        r"(?:\[node 0 rank 0\] epoch +\d+  loss \d\.\d+\n)+",
        r"trained on 2 devices: test accuracy 0\.9[5-9]",
    ),
    "13_tensorflow": (
        r"(?:\[node 0 rank 0\] epoch +\d+  loss \d\.\d+\n)+",
        r"trained on 2 replicas: test accuracy 0\.9[4-9]",
    ),
    "14_huggingface": (
        r"2 ranks, evaluated on \d+ windows of 64 characters",
        r"loss per character: 4\.\d\d(?: \d\.\d\d){3} 2\.\d\d\n",
        r"saved: config\.json .*model\.safetensors",
    ),
    "15_lightning": (
        r"(?:\[node 0 rank 0\] epoch +\d+  loss \d\.\d+  accuracy \d\.\d+\n){12}",
        r"ranks: \[0, 1\] of 2",
        r"test accuracy 0\.9[3-9]",
    ),
    "16_accelerate": (
        r"(?:\[node 0 rank 0\] epoch +\d+  loss \d\.\d+\n){12}",
        r"trained by 2 processes: test accuracy 0\.9[3-9]\d? of 449 digits",
    ),
    "17_restart": (
        r"the last start began with epoch 5 and ended with a loss of 0\.\d+",
        r"rank-1\.log:\nepoch 0(?:.*\n)+epoch 4.*\nskyward: 'train' is restarted after.*SIGKILL",
        r"rank-1\.restart-1\.log:\nepoch 5(?:.*\n)+epoch 7",
        r"GangHung: 'evaluate': hangs, because rank 1 \(node 1\) is in no collective, but at 17_restart\.py:\d+ in",
        r"rank 0 \(node 0\) in all_reduce",
        r"in evaluate\n    time\.sleep\(600\)",
    ),
    "18_own_machines": (r"node 0 of 2 is .+\nnode 1 of 2 is .+", r"mean: 3\.0"),
    "19_rented": (
        r"2 x small: 0\.0\d+ USD per hour",
        r"a ten-minute run costs about 0\.0\d+ USD",
        r"it would ask for: Prepare Create",
        r"squares: \[0, 1, 4, 9, 16, 25, 36, 49\]",
        r"the whole run cost 0\.\d+ USD",
        r"refused: budget_usd=0\.01: 200 x small .* nothing was launched",
    ),
    "40_any_of": (
        r"small +north +spot +0\.012 USD per hour\nsmall +south +spot +0\.012",
        r"squares: \[0, 1, 4, 9, 16\]",
        r"the next pool tries first: south",
        r"any_of: no entry has a machine that fits; add .*:\n  fake: no machine type here has vcpus=1000",
    ),
    "20_watch": (
        r"ready\n",
        r"closed\n",
        r"the sum of 18 squares: 2028",
        r"calls: 18 done, 2 failed",
    ),
    "21_gpt_from_scratch": (
        r"60  eval_loss: 2\.[5-9]",
        r"written: checkpoint-30 checkpoint-60 logs profile tensorboard",
        r"resumed at step:   30",
        r"from the middle on, the same losses: True",
        r"logged at steps: 10 20 30 40 50 60",
    ),
    "43_actors": (
        r"one call: 6\.0",
        r"in order: \[2\.0, 5\.0, 5\.0\]",
        r"shared by two: \[10\.0, 20\.0, 30\.0\]",
        r"by name: 7\.0",
        r"lost: its process exited with code 1",
        r"after the restart: 1\.0",
    ),
    "37_shared_state": (
        r"tried by each worker: \[\d+, \d+, \d+, \d+\]\ntried in all: 8",
        r"best learning rate: 0\.03",
        r"data: \['prepared it', 'waited for it'\]",
        r"report: \['first, then the next', 'second, then the next'\] fencing numbers grow: True",
        r"places in three rounds: \[\[0, 1\], \[0, 1\], \[0, 1\]\]",
    ),
    "23_stop_a_run": (
        r"step \d+ of 1000000, on 2 ranks",
        r"saved at step \d+: executed",
        r"digits-\d+: running, step \d+ of 1000000, epoch \d+\.\d\d, 2 ranks\n  loss: \d\.\d+",
        r"digits-\d+: it is saved and has ended, at step \d+",
        r"rank 0 ended at step \d+, rank 1 at the same: True",
        r"2 checkpoints, the last of step \d+: True",
    ),
    "24_checkpoints": (
        r"the last start went on after step [46]; its last loss is the same: True",
        r"checkpoint-10, written by 2 ranks: \('model',\)",
    ),
    "25_evaluation_beside_training": (
        r"30 evaluations of 30 epochs, by \S+",
        r"the best, of step \d+: 0\.9\d\d; equal: True",
        r"timeline\.html: copies took \d\.\d\d s of \d+\.\d\d s",
    ),
    "31_hybrid_parallelism": (
        r"rank 3 died at step 45; all went on after step [234]0, with the same losses: True",
        r"each stage is written once:\n  model_state_group_\w+_rank_0\.pt\n  model_state_group_\w+_rank_1\.pt\n",
        r"a rank of the first stage held 4,160 of 8,970 parameters; test accuracy 0\.[89]\d",
    ),
    "32_evaluation_workers": (
        r"workers: node 1, node 2, subprocess",
        r"8 of 8 epochs scored, the last: 0\.[89]",
        r"lost their worker: 0",
        r"8 of 8 epochs scored, the last: 0\.[89]",
        r"lost their worker: [12]",
    ),
    "26_huggingface_evaluation": (
        r"evaluation of step 20, epoch 0\.\d+: loss \d\.\d+, perplexity \d+\.\d+ \(node 0, \d+\.\d\d s\)",
        r"4 evaluations, by node 0\nbest: step (\d+), loss (\d\.\d\d); step \1 is loaded\nscored here again: loss \2\n",
        r"copies took 0\.\d\d s of \d+\.\d s",
    ),
    "29_lightning_evaluation": (
        r"(?:validation of step \d+, epoch \d+: val_loss .*, val_accuracy 0\.\d+ \(subprocess, .* s\)\n){12}",
        r"12 validations, by subprocess\nbest val_loss: (0\.\d+), of epoch (\d+)\nscored here again: \1\n",
        r"checkpoint: epoch=\d+-val_accuracy=0\.\d+\.ckpt",
    ),
    "27_object_storage": (
        r"on 2 nodes: after step 0 to step 30, loss 0\.\d+",
        r"on 1 node: after step 30 to step 60, loss 0\.\d+",
        r"s3://team/run/checkpoint-50: 1 ranks, whole: True\ns3://team/run/checkpoint-60: 1 ranks, whole: True",
    ),
    "28_migrate_checkpoints": (
        r"by_hand: checkpoint-100, whole: True\nhugging_face: checkpoint-200, whole: True\n",
        r"dcp: checkpoint-300, whole: True",
        r"they differ in: \[\[\], \[\]\]",
        r"two ranks go on with the same loss: True",
        r"for others: \['model\.safetensors'\]",
    ),
    "30_keras_evaluation": tuple(
        rf"{backend}: best accuracy of 8 epochs 0\.9\d+, restored: True; copies took \d+\.\d ms each\n"
        r"  written: best\.weights\.h5 best\.weights\.h5\.json timeline\.html\n"
        for backend in ("torch", "jax", "tensorflow")
    ),
    "22_same_callbacks": (
        r"step \d+: \d\.\d\d\n(?:.*\n)*with_transformers: \d\.\d+ to \d\.\d+, saved checkpoint-\d+\n",
        r"step \d+: \d\.\d\d\n(?:.*\n)*with_lightning: \d\.\d+ to \d\.\d+, saved checkpoint-\d+\.ckpt\n",
        r"step \d+: \d\.\d\d\n(?:.*\n)*with_keras: \d\.\d+ to \d\.\d+, saved checkpoint-\d+\.weights\.h5\n",
    ),
    "33_hub": (
        r"rate 0\.5: loss 0\.009, 60 points\nrate 0\.1: loss 0\.060, 60 points\nbest: rate 0\.5, y = 3\.00 x \+ 0\.99",
    ),
    "34_hub_frameworks": (
        r"scikit-learn: completed, eval_accuracy\nHugging Face: completed, .*eval_loss",
        r"Lightning: completed, epoch.*\nKeras: completed, epoch, eval_loss",
    ),
    "35_hub_offline": (
        r"first time: 104 records sent, 0 left\nsecond time: 0 records sent, 0 left",
        r"night shift: completed, 100 points",
    ),
    "36_hub_access": (
        r"report-bot writes: role=viewer: may not write here.*\nrevoked: authorization: the token is wrong",
        r"audit: token\.revoke, token\.create, member\.set",
    ),
    "39_elastic_pool": (
        r"nodes: 1 -> \d\n(?:.*\n)*squares: \[0, 1, 4, 9, 16, 25, 36, 49, 64\]",
        r"nodes: \d -> 1\nnodes: 1 -> 2\n\['node 0 of 2', 'node 1 of 2'\]",
        r"first call: node 0 of 1\nresting with 0 nodes; the next call: \['node 0 of 2', 'node 1 of 2'\]",
    ),
    "47_sweep": (
        r"16 trials, completed\nsome were pruned: True",
        r"the best has a loss below 0\.2: True\nits run has its parameters",
    ),
    "48_making_way": (r"wants the machine", r"stopped, completed; .* once: True", r"equal"),
    "46_hub_jobs": (r"slope 3.0, attempts: \['completed'\]", r"ValueError\('rate=9", r"queued: is held"),
    "44_volumes": (r"first pool: made\nsecond pool: found \[5, 5\]",),
    "41_resources": (
        r"two nodes, any: \['lr=0\.3 on node 0', 'lr=0\.3 on node 1'\]",
        r"a training: \['lr=0\.01 on node 0', 'lr=0\.01 on node 1'\]",
        r"the second call waits for .* CPUs: .* free",
        r"the first call has ended and the second ran: lr=0\.03 on node 0",
        r"refused: 'train': no node can ever hold 64 GPUs and 0\.0996 GiB of memory; the nodes have 2 x",
    ),
    "42_gpu_sharing": (r"no GPU here: calls see none\nlr=0\.1: on the CPU\nlr=0\.01: on the CPU",),
    "38_files": (
        r"first: Transfer\(files=2, copied=2, bytes=\d+\)\nagain: Transfer\(files=2, copied=0, bytes=0\)",
        r"one changed: Transfer\(files=2, copied=1, bytes=28\)\nback here: 12 words in 2 texts",
    ),
}
# Warnings are errors in examples too, except these of frameworks.
FOREIGN_WARNINGS: dict[str, tuple[str, ...]] = {
    "15_lightning": (
        "ignore:`isinstance(treespec:FutureWarning",  # Lightning 2.6 calls deprecated functions
        "ignore:The 'train_dataloader' does not have many workers:UserWarning",  # on a machine with many cores
        "ignore:The 'val_dataloader' does not have many workers:UserWarning",
    ),
    "28_migrate_checkpoints": ("ignore:torch.distributed is disabled:UserWarning",),  # no_dist=True says so
    "29_lightning_evaluation": (
        "ignore:`isinstance(treespec:FutureWarning",
        "ignore:The 'train_dataloader' does not have many workers:UserWarning",
        "ignore:The 'val_dataloader' does not have many workers:UserWarning",
    ),
    "22_same_callbacks": (
        "ignore:`isinstance(treespec:FutureWarning",
        "ignore:The 'train_dataloader' does not have many workers:UserWarning",
        "ignore:The 'val_dataloader' does not have many workers:UserWarning",
        "ignore:__array__ implementation doesn:DeprecationWarning",  # Keras 3.15 passes numpy 2 deprecated arguments
    ),
    "30_keras_evaluation": ("ignore:__array__ implementation doesn:DeprecationWarning",),
    "34_hub_frameworks": (
        "ignore:`isinstance(treespec:FutureWarning",
        "ignore:The 'train_dataloader' does not have many workers:UserWarning",
        "ignore:__array__ implementation doesn:DeprecationWarning",
    ),
}
# A limit for one that hangs. An example that takes 20 s alone has taken 110 s on two cores with ten other processes.
pytestmark = pytest.mark.timeout(300)
# The frameworks of all other examples are those of `LEAN`, which import less.
WITH_ALL_INSTALLED = ("04_sharding", "07_grid_search", "22_same_callbacks", "34_hub_frameworks")
# Their ranks need much of what torch's compiler imports, and find it imported in the process that they are forked from.
WITH_COMPILER = ("10_fsdp_lm", "31_hybrid_parallelism")
DATA = tempfile.TemporaryDirectory(prefix="sky-data-")
"""Folder of the examples' volumes."""
SLOW = {
    "07_grid_search": "210 fits, half of them without skyward",
    "22_same_callbacks": "three frameworks, and TensorFlow, which Keras imports where it is",
    "34_hub_frameworks": "four frameworks in one process",
    "30_keras_evaluation": "three backends, each in a process of its own",
    "13_tensorflow": "four processes import TensorFlow; 12_keras_digits does so, too",
}


def examples() -> list[Any]:
    return [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else []) for path in EXAMPLES
    ]


@functools.cache
def run_example(path: Path) -> subprocess.CompletedProcess[str]:
    warnings = ",".join(("error", *FOREIGN_WARNINGS.get(path.stem, ())))
    folders = [ROOT / "tests" / "lines", *([] if path.stem in WITH_ALL_INSTALLED else [LEAN])]
    environment = {**os.environ, "PYTHONWARNINGS": warnings, "XDG_DATA_HOME": DATA.name}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    if path.stem in WITH_COMPILER:
        environment["REAL_COMPILER"] = "1"
    if path.stem in WITH_ALL_INSTALLED:
        environment.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
    return subprocess.run(
        [sys.executable, path], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.parametrize("path", examples())
def test_an_example_shows_what_it_promises(path: Path) -> None:
    done = run_example(path)
    assert done.returncode == 0, done.stdout + done.stderr
    position = 0
    for pattern in SHOWS.get(path.stem, (r"\S",)):
        found = re.compile(pattern).search(done.stdout, position)
        assert found, f"{pattern!r} is not in what {path.name} printed, or out of order:\n{done.stdout}{done.stderr}"
        position = found.end()


def test_output_of_a_broadcast_comes_from_the_head_only() -> None:
    printed = run_example(ROOT / "examples" / "03_broadcast.py").stdout
    assert re.findall(r"\[node (\d)\] my share", printed) == ["0"]


@pytest.mark.slow
def test_demo_succeeds_and_prints_what_the_tour_shows() -> None:
    done = run_example(ROOT / "examples" / "demo.py")
    assert done.returncode == 0, done.stdout + done.stderr
    tour = (ROOT / "docs" / "tour.md").read_text()
    shown = re.search(r"```text\n(1\. Hello.*?)```", tour, re.DOTALL)
    assert shown is not None
    assert shape(shown[1]) - {"      0"} <= shape(done.stdout)  # except for the line that stands for others
    assert f"skyward hub up --data {ROOT / '.make' / 'demo' / 'hub'}" in done.stdout


def shape(text: str) -> set[str]:
    """Return its lines without parts that differ from run to run: numbers, and the path of the checkout."""
    return {re.sub(r"[\d.]+", "0", line) for line in text.replace(f"{ROOT}/", "").splitlines()}


@pytest.mark.parametrize("path", examples())
def test_a_guide_shows_the_output_of_its_example(path: Path) -> None:
    after = f"```python\n{path.read_text()}```\n"
    shown = [
        found[1]
        for guide in GUIDES
        if after in guide.read_text()
        for found in [re.search(r"```text\n(.*?)```\n", guide.read_text().partition(after)[2], re.DOTALL)]
        if found is not None
    ]
    assert shown, f"no guide shows what {path.name} prints in a ```text block behind it"
    assert shape(shown[0]) <= shape(run_example(path).stdout)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_guide_contains_the_example_verbatim(path: Path) -> None:
    block = f"```python\n{path.read_text()}```\n"
    assert any(block in guide.read_text() for guide in GUIDES), (
        f"no guide contains {path.name} as it is: copy the whole file into the ```python block of its guide"
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_a_main_and_a_readable_length(path: Path) -> None:
    source = path.read_text()
    assert "\ndef main() -> None:\n" in source
    assert source.endswith('if __name__ == "__main__":\n    main()\n')
    assert len(source.splitlines()) <= 110
