"""Flower's nodes in one process: a grid that hands each message to the ClientApp itself, through its bytes."""

from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from fedjax_ssl.errors import UserError
from fedjax_ssl.flower import client

SERVER, FIRST_NODE = 1, 100


class GridByHand:
    """A node for each node configuration; the nodes' ids count from 100."""

    def __init__(self, run_config, node_configs):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SERVER, 1
        self.contexts = {
            number: Context(1, number, dict(node), RecordDict(), dict(run_config))
            for number, node in enumerate(node_configs, start=FIRST_NODE)
        }
        self.lost = set()  # nodes whose answers do not arrive, though they work

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, *, timeout=None):
        del timeout
        answers = []
        for message in messages:
            node = message.metadata.dst_node_id
            arrived = Message(through_bytes(message.content), metadata=message.metadata)
            try:
                answer = client.app(arrived, self.contexts[node])
            except UserError as error:
                answers.append(Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message))
                continue
            if node not in self.lost:
                answers.append(Message(through_bytes(answer.content), metadata=answer.metadata))
        return answers


def through_bytes(content):
    """Records as they arrive: arrays are made anew of the bytes that travelled."""
    arrived = RecordDict()
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            arrays = {key: Array(a.dtype, tuple(a.shape), a.stype, bytes(a.data)) for key, a in record.items()}
            record = ArrayRecord(arrays)
        arrived[name] = record
    return arrived
