"""Fields of the data: sources, who has labels, the division among clients."""

from fedjax_ssl.fields.section import Section, real, share, whole, word


def residence_fields() -> Section:
    """Where a federation lies; it changes no result. See docs/how_to/large_federations.md."""
    section = Section()
    # The images: on the device, all of them; or on the host, from where each round gets those of its clients. 'auto':
    # on the device if they take at most a quarter of it.
    section.data = word("auto", "device", "host")
    # What clients remember: on the device for all; on the host; or in a file of the workdir with 256 MiB of it on the
    # host. 'auto': the first with room.
    section.clients = word("auto", "device", "host", "disk")
    return section


def data_fields() -> Section:
    """Which images there are, who holds them, and who has their labels."""
    section = Section()
    # 'digits', 'npz', 'folder', 'csv', or from TensorFlow Datasets: cifar10, cifar100, svhn_cropped, mnist,
    # fashion_mnist, emnist/byclass; or of other packages, such as 'breast_cancer', 'reuters8', 'medmnist/bloodmnist'.
    # See docs/data.md.
    section.source = "cifar10"
    section.path = ""  # of the npz (x_train, y_train, x_test, y_test), csv, parquet or folder; see docs/data.md
    section.test_path = ""  # of a csv for the test; '': every fifth row of a class that has a label
    section.label_column = ""  # of a csv; a row with an empty label has none
    section.client_column = ""  # of a csv, for the partition 'natural': who holds a row
    section.ignore_columns = ""  # of a csv: the columns that are left out, with commas between their names
    section.text_column = ""  # of a csv: texts to be classified; '': rows of numbers and categories are
    section.text_versions = ""  # a second csv of as many rows: its columns are versions of the texts, back-translated
    section.text_length = whole(64, least=1)  # tokens of a text; what is longer is cut
    section.vocabulary = whole(5000, least=1)  # words at the most, the most frequent of the training texts
    section.weak_views = whole(1, least=1)  # of features or texts with V views: how many of the first are weak ones
    section.image_size = whole(0, least=0)  # for a folder: resizes all images to N x N pixels; 0: they have one size
    # How an image becomes square before it is resized: 'crop' cuts out the middle, 'stretch' resizes the whole image.
    section.fit = word("crop", "stretch")
    section.tfds_dir = ""  # data_dir of TensorFlow Datasets; '': its default, ~/tensorflow_datasets
    section.flip = False  # for an npz or a folder: whether a mirrored image still belongs to its class
    section.standardise = True  # subtract means, divide by deviations of channels; False: pixels are 0 to 1 (FedMatch)
    # By whose: their 'own'; or 'cifar10', by CIFAR-10's for every data set, as in FedLabel's code.
    section.normalisation = word("own", "cifar10")
    section.labels = word("server", "clients", "some_clients")  # who holds them; see docs/data.md
    # With 'clients': the share of each client's images that has labels.
    section.labelled_share = real(0.1, above=0, most=1)
    # With 'clients', instead of the share: labelled images per class and client.
    section.labels_per_class = whole(0, least=0)
    section.num_labelled = whole(0, least=0)  # with 'clients', instead: labelled images in all, balanced, divided apart
    section.labelled_clients = whole(1, least=1)  # with 'some_clients': how many have labels for all their images
    section.labelled_rule = word("random", "most_classes")  # which clients those are; see docs/data.md
    # A long tail: class c keeps floor(n_max IF^(-c / (C - 1))) training images, drawn by the seed.
    section.imbalance = real(1.0)  # IF, the largest class over the smallest; negative: reversed; 1: as the source
    section.largest_class = whole(0, least=0)  # n_max, images of the largest class; 0: the source's smallest class
    # The same for the labelled images alone, which are then drawn first (ACR): the server's, with 'clients' those of
    # num_labelled, with 'some_clients' those of the labelled clients; 0: labelled images follow the tail above.
    section.labelled_largest_class = whole(0, least=0)
    section.labelled_imbalance = real(1.0)  # the IF of that tail
    section.balanced_test = False  # cuts the test set to as many images per class as its smallest class has
    # Training images held out, equally many per class; they are measured each round instead of the test set.
    section.validation = whole(0, least=0)
    section.server_labels = whole(500, least=0)  # S, labelled images of the server, not of clients; of 'server' alone
    section.server_draw = word("balanced", "random")  # 'balanced': S / C of each class
    of_dirichlet = ("dirichlet_clients", "dirichlet_pairs", "dirichlet_classes")
    # How the clients' images are divided; see docs/data.md.
    section.partition = word("lda", "iid", "stratified", *of_dirichlet, "shards", "profiles", "main_class", "natural")
    # Of the Dirichlet partitions: lower is more heterogeneous. 'dirichlet_pairs' (SAGE) is far milder at the same
    # alpha, because two clients share each of its near-IID parts: do not compare its 0.1 with that of the others.
    section.alpha = real(0.1, above=0)
    section.classes_per_client = whole(2, least=1)  # of the 'shards' partition
    section.main_share = share(0.4)  # of 'main_class': the share of a client's images that are of its own class
    section.examples_per_client = whole(0, least=0)  # upper bound for each client; 0: none
    section.partition_file = ""  # reads this saved partition instead
    section.reveal_labels = False  # shows hidden labels to the method: for upper bounds; every table marks it
    section.centralised = False  # the server holds all images with labels: an upper bound; every table marks it
    return section
