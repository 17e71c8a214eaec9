"""Flower's nodes in one process: a grid that passes each message, as bytes, to the ClientApp."""

from unittest import mock

from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.flower import client

SERVER, FIRST_NODE = 1, 100


class GridByHand:
    """A node for each node configuration; the nodes' ids count from 100.

    A node is built and compiled once; Flower's processes do so for each message.
    """

    def __init__(self, run_config, node_configs):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SERVER, 1
        self.contexts = {
            number: Context(1, number, dict(node), RecordDict(), dict(run_config))
            for number, node in enumerate(node_configs, start=FIRST_NODE)
        }
        self.lost = set()  # nodes that work, but whose answers do not arrive
        self.change = lambda node, kind, content: None  # changes a node's answer in place
        self._nodes = {}
        self.asked = []  # the node of each message
        self._answers = {}  # answers not yet fetched, by message id

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        for number, message in enumerate(messages, start=len(self.asked)):
            message.metadata.__dict__["_message_id"] = str(number)  # as Flower's grid does
            self._answers[str(number)] = self._answer(message)
            self.asked.append(message.metadata.dst_node_id)
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids):
        here = [one for one in message_ids if self._answers[one].metadata.src_node_id not in self.lost]
        return [self._answers.pop(one) for one in here]

    def send_and_receive(self, messages, *, timeout=None):
        del timeout
        return self.pull_messages(self.push_messages(messages))

    def _open_node(self, context, build=client.open_node):
        key = context.node_id, *map(str, context.run_config.items())
        if key not in self._nodes:
            self._nodes[key] = build(context)
        return self._nodes[key]

    def _answer(self, message):
        node = message.metadata.dst_node_id
        arrived = Message(through_bytes(message.content), metadata=message.metadata)
        try:
            with mock.patch.object(client, "open_node", self._open_node):
                answer = client.app(arrived, self.contexts[node])
        except UserError as error:
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message)
        self.change(node, message.metadata.message_type, answer.content)
        return Message(through_bytes(answer.content), metadata=answer.metadata)


def through_bytes(content):
    """Records as they arrive: arrays are made from the sent bytes."""
    arrived = RecordDict()
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            arrays = {key: Array(a.dtype, tuple(a.shape), a.stype, bytes(a.data)) for key, a in record.items()}
            record = ArrayRecord(arrays)
        arrived[name] = record
    return arrived
