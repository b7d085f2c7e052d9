"""Bring files to the nodes, and bring back what calls write there.

python examples/38_files.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import skyward as sky


@sky.compute
def summarize(data: str, out: str) -> None:
    texts = [path.read_text() for path in sorted(Path(data).glob("*.txt"))]
    Path(out).mkdir(exist_ok=True)
    (Path(out) / "words.txt").write_text(f"{sum(len(text.split()) for text in texts)} words in {len(texts)} texts")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        here, there = Path(folder, "here"), Path(folder, "there")  # on other machines: any path there, such as "data"
        here.mkdir()
        (here / "one.txt").write_text("the sky is the limit")
        (here / "two.txt").write_text("and the limit is the sky")
        with sky.ComputePool(sky.Local()) as pool:
            print("first:", pool.upload(here, there / "data"))
            print("again:", pool.upload(here, there / "data"))
            (here / "two.txt").write_text("and the sky is not the limit")
            print("one changed:", pool.upload(here / "*.txt", there / "data"))
            summarize(str(there / "data"), str(there / "out")) >> pool
            pool.download(there / "out", here / "results")
            print("back here:", (here / "results" / "words.txt").read_text())


if __name__ == "__main__":
    main()
