"""Files and ports of a pool's nodes, as users of a `ComputePool` reach them."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..console.activity import Progress
from ..errors import UsageError
from .life import PoolLife
from .options import check_nodes

if TYPE_CHECKING:
    from .file_transfer import Transfer, Work
    from .forwarding import ForwardedPort


class NodeAccess:
    """Part of a pool that reaches its machines beside the calls. Thread-safe."""

    _life: PoolLife

    def upload(
        self,
        path: str | os.PathLike[str],
        remote: str | os.PathLike[str] | None = None,
        *,
        nodes: Sequence[int] | None = None,
    ) -> Transfer:
        """Copy files of this machine to the nodes, beside the calls that run there.

        Only files whose content differs are copied. A call that was interrupted continues where it stopped, also
        inside a large file. A file gets its name when it is complete; its permission bits are kept. Nothing is
        deleted. Symbolic links are refused. Files in the working folder end with the pool.

        On `sky.Local()` tasks see the files of this machine, so most uploads find nothing to copy.

        Args:
            path: A file, a folder with everything in it, or a pattern such as "data/*.csv" or "data/**/*.csv".
            remote: Path on the nodes, relative to the working folder of the tasks, absolute, or with ~. A folder is
                copied to exactly this path. A file gets this name, or goes into it if it is a folder or ends with "/".
                None: the same relative path as here; for files outside of this working folder, their last name.
            nodes: Numbers of the nodes; None for all that are there. Nodes that come later start without the files.

        Returns:
            Numbers of files and of bytes, over all nodes.

        Raises:
            UsageError: There is nothing at `path`, or a path is not acceptable.
            TransferFailed: A node could not store a file. Repeat the call to continue.

        Example:
            pool.upload("data/train.csv")  # tasks open "data/train.csv"
            pool.upload("~/corpora/wiki", "/mnt/scratch/wiki", nodes=[0])
        """
        from .file_transfer import check_remote, select_here, sending

        shown = os.fspath(path)
        selection, default = select_here(shown)
        into = default if remote is None else check_remote("remote", remote)
        chosen = self._numbers(nodes)
        if self._life.provider.shares_files:
            chosen = chosen[:1]  # the nodes would only write the same files over again
        size = sum(max(0, entry.size) for entry in selection.entries) * len(chosen)
        progress = Progress(f"upload {os.path.basename(os.path.normpath(shown))}", size, "bytes")
        work = dict.fromkeys(chosen, sending(selection, into, progress))
        return self._transfer("path", shown, work, [progress])

    def download(
        self, remote: str | os.PathLike[str], local: str | os.PathLike[str], *, nodes: int | Sequence[int] = 0
    ) -> Transfer:
        """Copy files of a node to this machine, beside the calls that run there: a checkpoint while training goes on.

        It copies as `upload` does: only what differs, continuing after an interruption, complete files only.

        Args:
            remote: A file, folder or pattern on the node, relative to the working folder of the tasks, absolute,
                or with ~.
            local: Path here. A folder is copied to exactly this path. A file gets this name, or goes into it if it is
                a folder or ends with "/".
            nodes: Number of the node. A list of numbers copies from each into its own folder, `local/node-0` and so on.

        Returns:
            Numbers of files and of bytes, over all nodes.

        Raises:
            UsageError: A path or a number is not acceptable.
            TransferFailed: There is nothing at `remote`, or a file could not be read there or written here.

        Example:
            pool.download("checkpoints", "checkpoints")
            pool.download("logs/*.txt", "logs", nodes=[0, 1])  # logs/node-0/..., logs/node-1/...
        """
        from .file_transfer import check_remote, fetching

        path, into = check_remote("remote", remote), os.fspath(local)
        if not into:
            raise UsageError("local='': is not a path; pass a name, or '.'", field="local", value=local)
        chosen = self._numbers([nodes] if isinstance(nodes, int) else nodes)
        name = os.path.basename(os.path.normpath(path))
        work: dict[int, Work] = {}
        bars = []
        for node in chosen:
            bars.append(Progress(f"download {name}" + (f" ({node})" if len(chosen) > 1 else ""), None, "bytes"))
            place = into if isinstance(nodes, int) else os.path.join(into, f"node-{node}", "")
            work[node] = fetching(path, place, bars[-1])
        return self._transfer("remote", path, work, bars)

    def forward(self, port: int, *, node: int = 0, local: int | None = None) -> ForwardedPort:
        """Make a port of a node available on this machine, for TensorBoard or Jupyter in a browser.

        A program on the node has to listen on its loopback, 127.0.0.1. Connections travel through the pool's SSH
        connection, so no port of the node needs to be open. The forwarded port ends with `close`, with its `with`
        block, or with the pool. It survives a lost connection and a replaced node; connections that are open then
        are closed. So is a connection while nobody listens on the node.

        Args:
            port: TCP port on the node, 1 to 65535.
            node: Number of the node.
            local: TCP port here; None for the same number, or for a free one where that is taken. `sky.Local()` always
                takes a free one, because its nodes have the same loopback.

        Returns:
            The forwarded port; its `url` and `port` say where it is here.

        Raises:
            UsageError: A number is not acceptable, or `local` is in use.
            PoolClosed: The pool is not open.

        Example:
            board = pool.forward(6006)
            print(board.url)  # open it in a browser

            with pool.forward(8888, node=1) as jupyter:
                input(f"{jupyter.url}; Enter to close")
        """
        from .forwarding import ForwardedPort, check_port

        remote = check_port("port", port)
        (chosen,) = self._numbers([node], "node")
        if local is not None:
            check_port("local", local)
        elif self._life.provider.shares_files:
            local = 0  # the node has this loopback, too: its program needs the number itself
        guests = self._life.guests

        def dial(remote: int) -> socket.socket:
            machine = self._life.machine(chosen)
            if machine.dial is None:
                raise ConnectionError(f"node {chosen}: its provider cannot connect to ports; use sky.SSH or AWS")
            return machine.dial(remote)

        forwarded = ForwardedPort(dial, remote, local, guests.remove)
        guests.add(forwarded)
        return forwarded

    def _numbers(self, nodes: Sequence[int] | None, field: str = "nodes") -> tuple[int, ...]:
        self._life.wake()
        return self._life.nodes() if nodes is None else check_nodes(field, nodes, self._life.spec.most_nodes)

    def _transfer(self, field: str, path: str, work: dict[int, Work], bars: Sequence[Progress]) -> Transfer:
        from .file_transfer import TransferRun

        life = self._life
        _, dispatch = life.running()
        for progress in bars:
            dispatch.board.begin(progress)
        run = TransferRun(life.machine, work, field=field, path=path)
        try:
            with life.guests.counted(run):
                return run.run()
        finally:
            for progress in bars:
                progress.end()
