"""Tasks that were sent in advance and are to come back, because slots of another node are idle."""

from __future__ import annotations

from collections.abc import Iterator

from .groups import Group, NodeEntry, TaskEntry
from .node_table import NodeTable


class Recalls:
    """Nodes with tasks to recall, by the group of nodes that those tasks may go to.

    A group is looked at only while it has a free slot. Each look either finds a task to recall or forgets a node, so it
    does not matter how many nodes there are.
    """

    def __init__(self, nodes: NodeTable, tasks: dict[int, TaskEntry]) -> None:
        self._nodes = nodes
        self._tasks = tasks
        self._overfull: dict[Group, dict[int, NodeEntry]] = {}

    def __bool__(self) -> bool:
        return bool(self._overfull)

    def sent_in_advance(self, task: TaskEntry, group: Group, node: NodeEntry) -> None:
        if not task.in_advance or (task.nodes is not None and len(task.nodes) == 1):
            return
        nodes = self._overfull.get(group)
        if nodes is None:
            self._nodes.hold(group)
            nodes = self._overfull[group] = {}
        nodes[node.id] = node

    def node_resumed(self, node: NodeEntry) -> None:
        """Take a node up again whose link was broken when its tasks were looked for."""
        if node.room < 0:
            for task_id in node.sent:
                task = self._tasks[task_id]
                self.sent_in_advance(task, self._nodes.group(task.nodes, task.need), node)

    def take(self) -> Iterator[TaskEntry]:
        """Iterate over tasks to recall, as many as there are idle slots for them, newest first."""
        for group, nodes in list(self._overfull.items()):
            places = group.free_places
            content = self._nodes.content if places else None
            while places and (node := next((node for node in nodes.values() if node is not content), None)) is not None:
                for task in self._waiting_on(node, group):
                    if not places:
                        break
                    places -= 1
                    yield task
                else:
                    del nodes[node.id]  # until it is sent more
            if not nodes:
                del self._overfull[group]
                self._nodes.let_go(group)

    def _waiting_on(self, node: NodeEntry, group: Group) -> Iterator[TaskEntry]:
        excess = -node.room if node.takes_more else 0
        for task_id in reversed(node.sent):
            if excess <= 0:
                return
            excess -= 1
            task = self._tasks[task_id]
            if task.in_advance and not task.is_recalled and task.nodes == group.numbers:
                yield task
