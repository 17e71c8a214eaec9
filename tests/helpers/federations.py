"""Federations of a few images, on the device without a compiled program."""

import jax
import numpy as np

from fedjax_ssl.data import FederatedData


def put_federation(images, labels, clients, server=(), test_labels=(0, 1, 2, 0), seed=0, width=0):
    """A federation of rows of an image table.

    Args:
        images: uint8 [N, H, W, C], of which the first four are the test images, too.
        labels: of the images, -1 for a hidden one.
        clients: the rows of each client; tables of rows are padded with row 0, to at least `width`.
        server: the server's rows.
        test_labels: of the test images.
        seed: of the run.
    """
    labels, rows = np.asarray(labels, np.int32), [np.asarray(of_client, np.int32) for of_client in clients]
    index = np.zeros((len(rows), max(width, *map(len, rows))), np.int32)
    for client, of_client in enumerate(rows):
        index[client, : len(of_client)] = of_client
    return jax.device_put(
        FederatedData(
            inputs=images,
            visible_labels=labels,
            client_index=index,
            client_size=np.array([len(of_client) for of_client in rows], np.int32),
            largest_size=np.int32(max(map(len, rows))),
            labelled_size=np.array([np.sum(labels[of_client] >= 0) for of_client in rows], np.int32),
            server_index=np.asarray(server, np.int32),
            validation_index=np.zeros(0, np.int32),
            test_inputs=images[:4],
            test_labels=np.array(test_labels, np.int32),
            seed=np.int32(seed),
        )
    )


def one_after_the_other(clients, first):
    """The rows of clients, given the labels of each, from row `first` on."""
    ends = first + np.cumsum([len(labels) for labels in clients])
    return [np.arange(end - len(labels), end) for labels, end in zip(clients, ends)]
